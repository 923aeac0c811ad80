"""Elements of tables as values: dtypes, their encodings, first values, presence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ps_core.errors import InvalidKeys, InvalidTensor


class DType(Enum):
    """Element type of a table, as its workers see it."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"

    __hash__ = object.__hash__  # members are unique: Enum's own hash costs a Python call


class Codec(Enum):
    """Encoding of a payload's elements: raw little-endian arrays, scaled integers, some of the
    elements with their places, or two factors of their matrix.
    """

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP64 = "fp64"
    INT8 = "int8"
    SIGN = "sign"
    SPARSE = "sparse"
    LOW_RANK = "low_rank"

    __hash__ = object.__hash__

    @property
    def is_raw(self) -> bool:
        """True if a payload is an array of its elements."""
        return self in _RAW_BYTES

    @property
    def feature(self) -> str:
        """The word by which a server says that it has this codec; empty: every server does."""
        return "" if self.is_raw else f"codec-{self.value.replace('_', '-')}"

    @property
    def is_for_pushes_alone(self) -> bool:
        """True if a payload leaves out what later pushes bring: no codec of values."""
        return self in (Codec.SIGN, Codec.SPARSE, Codec.LOW_RANK)

    @property
    def element_bits(self) -> int:
        """Bits of one element; a scale that several share does not count. Neither of SPARSE nor of
        LOW_RANK.
        """
        return _SCALED_BITS.get(self) or 8 * _RAW_BYTES[self]

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of a raw array."""
        return _RAW_BYTES[self]

    def payload_bytes(self, element_count: int) -> int:
        """Bytes of a payload of so many elements; of SPARSE, of so many that are sent; of LOW_RANK,
        the most.
        """
        if self is Codec.SPARSE:
            return element_count * SPARSE_ELEMENT_BYTES
        if self is Codec.LOW_RANK:
            return Codec.FP32.payload_bytes(element_count)
        bits = _SCALED_BITS.get(self)
        if bits is None:
            return element_count * _RAW_BYTES[self]
        return 4 * -(-element_count // SCALED_GROUP_COUNT) + -(-element_count * bits // 8)


SCALED_GROUP_COUNT = 256
"""Elements of an INT8 or SIGN payload that share a scale; the last group may be shorter."""

SPARSE_ELEMENT_BYTES = 8
"""Bytes of an element of a SPARSE payload and its place."""

_LEAST_BYTES = {
    Codec.SPARSE: (SPARSE_ELEMENT_BYTES, SPARSE_ELEMENT_BYTES),
    Codec.LOW_RANK: (12 + 2 * 4, 4),
}
"""Codecs whose payloads have several lengths: the shortest one, and the unit of all."""

_RAW_BYTES = {Codec.FP32: 4, Codec.FP16: 2, Codec.BF16: 2, Codec.FP64: 8}
_SCALED_BITS = {Codec.INT8: 8, Codec.SIGN: 1}


NATIVE_CODEC = {
    DType.FLOAT32: Codec.FP32,
    DType.FLOAT16: Codec.FP16,
    DType.BFLOAT16: Codec.BF16,
    DType.FLOAT64: Codec.FP64,
}
"""The codec of a table's own dtype."""


def check_length(
    payload_bytes: int, codec: Codec, element_count: int, what: str = "payload"
) -> None:
    """Raise InvalidTensor unless a payload can have this length for `element_count` elements."""
    most = codec.payload_bytes(element_count)
    is_right, expected = payload_bytes == most, f"{most}"
    if codec in _LEAST_BYTES:
        least, unit = _LEAST_BYTES[codec]
        is_right = payload_bytes % unit == 0 and least <= payload_bytes <= most
        expected = f"a multiple of {unit}, from {least} to {most}"
    if is_right:
        return
    raise InvalidTensor(
        f"{what} has {payload_bytes} bytes; expected {expected} "
        f"({element_count} elements of {codec.value})"
    )


class InitializerKind(Enum):
    """Values of a table before its first update."""

    ZEROS = "zeros"
    CONSTANT = "constant"
    INLINE = "inline"
    FROM_RANK_ZERO = "from_rank_zero"
    UNIFORM = "uniform"
    NORMAL = "normal"


@dataclass(frozen=True, slots=True)
class Initializer:
    """First values of a table: `constant` for CONSTANT, `inline` bytes of its dtype for INLINE; of
    rows: UNIFORM is drawn from [-scale, scale), NORMAL has mean 0 and standard deviation `scale`.
    """

    kind: InitializerKind = InitializerKind.ZEROS
    constant: float = 0.0
    inline: bytes = b""
    scale: float = 0.0


def presence_bytes(segment_count: int) -> int:
    return (segment_count + 7) // 8


def pack_presence(present: tuple[bool, ...]) -> bytes:
    """The bitmap of `present`, lowest bit of the first byte first; empty if all are present."""
    if all(present):
        return b""
    bits = bytearray(presence_bytes(len(present)))
    for index, is_present in enumerate(present):
        if is_present:
            bits[index // 8] |= 1 << (index % 8)
    return bytes(bits)


def unpack_presence(bitmap: bytes, segment_count: int) -> tuple[bool, ...]:
    """The inverse of `pack_presence`; InvalidKeys if the segments need another length."""
    if not bitmap:
        return (True,) * segment_count
    expected = presence_bytes(segment_count)
    if len(bitmap) != expected:
        raise InvalidKeys(f"presence has {len(bitmap)} bytes; expected {expected}")
    return tuple(bool(bitmap[i // 8] >> (i % 8) & 1) for i in range(segment_count))
