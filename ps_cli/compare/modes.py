"""The settings that a comparison runs a script under.

bsp                 a consistency setting; payloads as the tables' dtypes
bsp+int8            beside it a codec of pushes; pulls travel in bf16
bsp+sign/none       with one of pulls, too
bsp+outer:50        at the end, after the codecs if there are any: the steps of an outer step
"""

from __future__ import annotations

from dataclasses import dataclass

from ps_core import consistency, limits
from ps_core.codecs.choices import NONE, check_codec
from ps_core.consistency import Consistency, Mode, StalePolicy
from ps_core.errors import InvalidConfig
from ps_core.tables.elements import Codec


@dataclass(frozen=True, slots=True)
class ComparedMode:
    """A consistency setting, the codecs of pushes and pulls, and the steps that a worker takes by
    itself in each outer step; 0: no outer steps.
    """

    consistency: Consistency
    push_codec: str = NONE
    pull_codec: str = NONE
    outer_steps: int = 0

    @classmethod
    def parsed(cls, text: str) -> ComparedMode:
        """The inverse of `str`; InvalidConfig if `text` is no mode."""
        before, _, last = text.rpartition("+")
        name, _, count = last.strip().partition(":")
        outer_steps = 0
        if before and name == "outer":
            text, outer_steps = before, _outer_steps(count)
        setting, plus, codecs = text.partition("+")
        asked = consistency.parsed(setting).as_requested
        if not plus:
            return cls(asked, outer_steps=outer_steps)
        push, slash, pull = codecs.strip().partition("/")
        pushed = check_codec("push_codec", push)
        if not slash:
            pull = Codec.BF16.value if pushed else NONE
        check_codec("pull_codec", pull)
        return cls(asked, NONE if pushed is None else str(pushed), pull, outer_steps)

    def __str__(self) -> str:
        has_codec = not self.push_codec == self.pull_codec == NONE
        codecs = f"+{self.push_codec}/{self.pull_codec}" if has_codec else ""
        outer = f"+outer:{self.outer_steps}" if self.outer_steps else ""
        return f"{self.consistency}{codecs}{outer}"

    def check_fits(self, worker_count: int) -> None:
        """Raises InvalidConfig if an update would wait for none of so many workers, or outer steps
        are compensated, whose pushes are no gradients.
        """
        backup_count = self.consistency.backup_workers
        if backup_count >= worker_count:
            raise InvalidConfig(
                f"'{self}' has {backup_count} backup workers of {worker_count} workers; "
                "expected fewer"
            )
        if self.outer_steps and self.consistency.policy is StalePolicy.COMPENSATE:
            raise InvalidConfig(f"'{self}' has outer steps; expected no compensation with them")

    @property
    def environment(self) -> dict[str, str]:
        """The settings of a worker."""
        return {
            "PUSHPULL_CONSISTENCY": str(self.consistency),
            "PUSHPULL_PUSH_CODEC": self.push_codec,
            "PUSHPULL_PULL_CODEC": self.pull_codec,
            "PUSHPULL_OUTER_STEPS": str(self.outer_steps),
        }


def _outer_steps(count: str) -> int:
    most = limits.MAX_INNER_STEP_COUNT
    if not count.isdecimal() or not 1 <= int(count) <= most:
        raise InvalidConfig(f"outer steps are 'outer:{count}'; expected outer:1 to outer:{most}")
    return int(count)


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
