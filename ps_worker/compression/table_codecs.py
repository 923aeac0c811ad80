"""A worker's choice of codecs for one table, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ps_core.codecs.choices import PushCodec, check_codec
from ps_core.errors import InvalidConfig
from ps_core.tables.elements import NATIVE_CODEC, Codec
from ps_core.tables.optimizers import OptimizerKind
from ps_core.tables.table_spec import TableSpec


@dataclass(frozen=True, slots=True)
class TableCodecs:
    """The codecs of a worker's pushes and pulls of a table; None: the table's own."""

    push: PushCodec | None = None
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
    push = _chosen("push_codec", spec, chosen.get("push_codec"), defaults[0])
    pull = _chosen("pull_codec", spec, chosen.get("pull_codec"), defaults[1])
    return TableCodecs(push, None if pull is None else pull.codec)


def _chosen(option: str, spec: TableSpec, name: object, default: str) -> PushCodec | None:
    codec = check_codec(option, default if name is None else name)
    if codec is None:
        return None
    reason = _why_not(spec, codec)
    if reason and name is not None:
        raise InvalidConfig(f"{option} of table '{spec.name}' is {codec}, but {reason}")
    return None if reason else codec


def _why_not(spec: TableSpec, codec: PushCodec) -> str:
    if spec.rows is not None:
        return "a table of rows has none; its `storage` takes fewer bits"
    if not codec.saves(NATIVE_CODEC[spec.dtype]):
        return f"the table's own {spec.dtype.value} takes no more bytes; expected none"
    if spec.optimizer.kind is OptimizerKind.ASSIGN:
        return "ASSIGN takes values, which nothing corrects later; expected none"
    return ""
