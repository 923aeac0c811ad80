"""A worker's choice of codecs for one table, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ps_core.errors import InvalidConfig
from ps_core.tables.elements import NATIVE_CODEC, Codec
from ps_core.tables.optimizers import OptimizerKind
from ps_core.tables.table_spec import TableSpec

NONE = "none"
"""No codec: payloads are of the table's own dtype."""

PULL_CHOICES = (NONE, *(codec.value for codec in (Codec.FP32, Codec.FP16, Codec.BF16, Codec.INT8)))
PUSH_CHOICES = (*PULL_CHOICES, Codec.SIGN.value)
"""A pull has no feedback, and signs without it are no values."""


@dataclass(frozen=True, slots=True)
class TableCodecs:
    """The codecs of a worker's pushes and pulls of a table; None: the table's own."""

    push: Codec | None = None
    pull: Codec | None = None


OWN_CODECS = TableCodecs()
"""Payloads of pushes and pulls are of the table's own dtype."""


def codecs_of(
    spec: TableSpec, chosen: Mapping[str, object], defaults: tuple[str, str]
) -> TableCodecs:
    """The codecs of a table. A default that would do nothing there, or that it cannot have, is
    left out; a choice is refused.

    Args:
        chosen: the script's options, perhaps with `push_codec` and `pull_codec`.
        defaults: the client's, of both.

    Raises:
        InvalidConfig: no such codec, or none for this table.
    """
    push, pull = defaults
    return TableCodecs(
        _chosen("push_codec", spec, chosen.get("push_codec"), push),
        _chosen("pull_codec", spec, chosen.get("pull_codec"), pull),
    )


def check_codec(option: str, name: object) -> None:
    """InvalidConfig unless there is a codec of this name, or it is "none"."""
    choices = PUSH_CHOICES if option == "push_codec" else PULL_CHOICES
    if name not in choices:
        raise InvalidConfig(f"{option} is {name!r}; expected one of {', '.join(choices)}")


def _chosen(option: str, spec: TableSpec, name: object, default: str) -> Codec | None:
    wanted = default if name is None else name
    check_codec(option, wanted)
    if wanted == NONE:
        return None
    codec = Codec(wanted)
    reason = _why_not(spec, codec)
    if reason and name is not None:
        raise InvalidConfig(f"{option} of table '{spec.name}' is {wanted}, but {reason}")
    return None if reason else codec


def _why_not(spec: TableSpec, codec: Codec) -> str:
    if spec.rows is not None:
        return "a table of rows has none; its `storage` takes fewer bits"
    if codec.element_bits >= NATIVE_CODEC[spec.dtype].element_bits:
        return f"the table's own {spec.dtype.value} takes no more bytes; expected none"
    if spec.optimizer.kind is OptimizerKind.ASSIGN:
        return "ASSIGN takes values, which nothing corrects later; expected none"
    return ""
