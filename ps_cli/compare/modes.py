"""The settings that a comparison runs a script under.

bsp                 a consistency setting; payloads as the tables' dtypes
bsp+int8            beside it a codec of pushes; pulls travel in bf16
bsp+sign/none       with one of pulls, too
"""

from __future__ import annotations

from dataclasses import dataclass

from ps_core import consistency
from ps_core.codecs.choices import NONE, check_codec
from ps_core.consistency import Consistency, Mode
from ps_core.errors import InvalidConfig
from ps_core.tables.elements import Codec


@dataclass(frozen=True, slots=True)
class ComparedMode:
    """A consistency setting, and the codecs of pushes and pulls."""

    consistency: Consistency
    push_codec: str = NONE
    pull_codec: str = NONE

    @classmethod
    def parsed(cls, text: str) -> ComparedMode:
        """The inverse of `str`; InvalidConfig if `text` is no mode."""
        setting, plus, codecs = text.partition("+")
        asked = consistency.parsed(setting).as_requested
        if not plus:
            return cls(asked)
        push, slash, pull = codecs.strip().partition("/")
        pushed = check_codec("push_codec", push)
        if not slash:
            pull = Codec.BF16.value if pushed else NONE
        check_codec("pull_codec", pull)
        return cls(asked, NONE if pushed is None else str(pushed), pull)

    def __str__(self) -> str:
        if self.push_codec == self.pull_codec == NONE:
            return str(self.consistency)
        return f"{self.consistency}+{self.push_codec}/{self.pull_codec}"

    def check_fits(self, worker_count: int) -> None:
        """Raises InvalidConfig if an update would wait for none of so many workers."""
        backup_count = self.consistency.backup_workers
        if backup_count >= worker_count:
            raise InvalidConfig(
                f"'{self}' has {backup_count} backup workers of {worker_count} workers; "
                "expected fewer"
            )

    @property
    def environment(self) -> dict[str, str]:
        """The settings of a worker."""
        return {
            "PUSHPULL_CONSISTENCY": str(self.consistency),
            "PUSHPULL_PUSH_CODEC": self.push_codec,
            "PUSHPULL_PULL_CODEC": self.pull_codec,
        }


def modes_of(text: str) -> tuple[ComparedMode, ...]:
    """The modes of a list separated by commas.

    A mode itself may have commas (`bsp:backup=1,grace=5ms`): a word that does not begin with a
    mode's name belongs to the mode before it.

    Raises:
        InvalidConfig: one of them is no mode, or comes twice.
    """
    names = {mode.value for mode in Mode}
    words: list[str] = []
    for word in (word.strip() for word in text.split(",")):
        begin = word.partition("+")[0].lower()
        is_option = "=" in begin or begin == "adaptive"
        if words and is_option and begin.partition(":")[0] not in names:
            words[-1] += f",{word}"
        else:
            words.append(word)
    modes = tuple(map(ComparedMode.parsed, words))
    for mode in modes:
        if modes.count(mode) > 1:
            raise InvalidConfig(f"the modes {text} have '{mode}' twice; expected each once")
    return modes
