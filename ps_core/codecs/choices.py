"""Codecs as a script or a user chooses them: "int8", "topk:0.01", "lowrank:4", "none"."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from ps_core import limits
from ps_core.codecs.low_rank import BlockMatrix
from ps_core.errors import InvalidConfig
from ps_core.tables.elements import Codec

_Number = TypeVar("_Number", int, float)

NONE = "none"
"""No codec: payloads are of the table's own dtype."""

TOP_K, RANDOM_K = "topk", "randomk"
"""Names of the two ways to pick the elements of a SPARSE payload."""

LOW_RANK = "lowrank"
"""The name of `Codec.LOW_RANK`, before the rank."""

PULL_CHOICES = (NONE, *(codec.value for codec in (Codec.FP32, Codec.FP16, Codec.BF16, Codec.INT8)))
"""A pull has no feedback, and without it signs and a few elements are no values."""

PUSH_CHOICES = (*PULL_CHOICES, Codec.SIGN.value, TOP_K, RANDOM_K, LOW_RANK)

DEFAULT_SHARE, MOST_SHARE = 0.01, 0.5
"""Shares of a block's elements; to send half of them with their places saves nothing."""

DEFAULT_RANK, MOST_RANK = 4, 64
"""With a higher one, a block of the default length takes as many bytes as INT8."""

_FIRST_SHARE = 0.25
"""The share of a warm-up's first step."""


@dataclass(frozen=True, slots=True)
class PushCodec:
    """The way that gradients travel.

    Attributes:
        codec: on the wire.
        share: SPARSE: of a block's elements, those that a step sends; at least one is.
        is_random: SPARSE: they are drawn; False: they are the largest.
        warm_up_count: SPARSE: steps of a table in which the share falls from a quarter, by the same
            factor in each (Lin et al., Deep Gradient Compression, 2018).
        matrix_rank: LOW_RANK: of each block's factors.
    """

    codec: Codec
    share: float = 0.0
    is_random: bool = False
    warm_up_count: int = 0
    matrix_rank: int = 0

    @classmethod
    def parsed(cls, text: str) -> PushCodec:
        """The codec of a choice other than "none", such as "int8", "topk:0.01", "topk:0.01:500" or
        "lowrank:4".

        Raises:
            InvalidConfig: there is no such codec, or a number is wrong.
        """
        name, *numbers = text.split(":")
        if name == LOW_RANK:
            rank = _number(int, numbers[0], text) if numbers else DEFAULT_RANK
            if len(numbers) > 1 or not 1 <= rank <= MOST_RANK:
                raise _wrong(text)
            return cls(Codec.LOW_RANK, matrix_rank=rank)
        if name not in (TOP_K, RANDOM_K):
            if text not in PUSH_CHOICES:
                raise InvalidConfig(
                    f"push_codec is {text!r}; expected one of {', '.join(PUSH_CHOICES)}"
                )
            return cls(Codec(text))
        share, warm_up = [*numbers, *("", "")][:2]
        found = cls(
            Codec.SPARSE,
            _number(float, share, text) if share else DEFAULT_SHARE,
            name == RANDOM_K,
            _number(int, warm_up, text) if warm_up else 0,
        )
        if len(numbers) > 2 or not 0 < found.share < MOST_SHARE or found.warm_up_count < 0:
            raise _wrong(text)
        return found

    def __str__(self) -> str:
        if self.codec is Codec.LOW_RANK:
            return f"{LOW_RANK}:{self.matrix_rank}"
        if self.codec is not Codec.SPARSE:
            return str(self.codec.value)
        name = RANDOM_K if self.is_random else TOP_K
        warm_up = f":{self.warm_up_count}" if self.warm_up_count else ""
        return f"{name}:{self.share:g}{warm_up}"

    def payload_bytes(self, element_count: int, clock: int) -> int:
        """Bytes of the payload of so many elements in the step of that clock; of LOW_RANK, in
        blocks of the default length that are square matrices.
        """
        if self.codec is Codec.LOW_RANK:
            size = limits.DEFAULT_BLOCK_ELEMENTS
            return sum(
                self._square_bytes(min(size, element_count - begin))
                for begin in range(0, element_count, size)
            )
        if self.codec is Codec.SPARSE:
            element_count = max(1, round(self._share_at(clock) * element_count))
        return self.codec.payload_bytes(element_count)

    def _square_bytes(self, element_count: int) -> int:
        matrix = BlockMatrix.square(element_count, self.matrix_rank)
        return min(matrix.payload_bytes, Codec.INT8.payload_bytes(element_count))

    def _share_at(self, clock: int) -> float:
        if clock > self.warm_up_count or self.share > _FIRST_SHARE:
            return self.share
        done = (clock - 1) / self.warm_up_count
        return _FIRST_SHARE * math.pow(self.share / _FIRST_SHARE, done)

    @property
    def residual_limit(self) -> float:
        """The length of what pushes leave out, over that of gradients, which it stays below while
        these change little. LOW_RANK has none: it takes what is largest, so the rest stays in
        proportion though a run diverges.
        """
        if self.codec is Codec.SPARSE:
            return 2 / self.share
        return 16.0 if self.codec is Codec.SIGN else math.inf

    def saves(self, native: Codec) -> bool:
        """True if payloads have fewer bytes than those of a table's own codec."""
        if self.codec is Codec.SPARSE:
            return self.share * Codec.SPARSE.payload_bytes(1) < native.element_bytes
        if self.codec is Codec.LOW_RANK:
            return True  # a block for which they have not is pushed in INT8
        return self.codec.element_bits < native.element_bits


def _number(kind: type[_Number], digits: str, text: str) -> _Number:
    try:
        return kind(digits)
    except ValueError:
        raise _wrong(text) from None


def _wrong(text: str) -> InvalidConfig:
    if text.startswith(LOW_RANK):
        return InvalidConfig(
            f"push_codec is {text!r}; expected {LOW_RANK}:RANK, with a rank of 1 to "
            f"{MOST_RANK}, such as {LOW_RANK}:{DEFAULT_RANK}"
        )
    return InvalidConfig(
        f"push_codec is {text!r}; expected NAME:SHARE or NAME:SHARE:STEPS, with a share above 0 "
        f"and below {MOST_SHARE}, and the steps of a warm-up, such as {TOP_K}:{DEFAULT_SHARE}:500"
    )


def name_of(codec: PushCodec | Codec | None) -> str:
    """The choice of a push's or a pull's codec, as a script writes it."""
    if codec is None:
        return NONE
    return codec.value if isinstance(codec, Codec) else str(codec)


def check_codec(option: str, name: object) -> PushCodec | None:
    """The codec of this name, None for "none"; InvalidConfig if there is none for the option."""
    if option == "pull_codec" and name not in PULL_CHOICES:
        raise InvalidConfig(f"{option} is {name!r}; expected one of {', '.join(PULL_CHOICES)}")
    return None if name == NONE else PushCodec.parsed(str(name))
