"""A cluster's state as the records of its journal, each a key, a checksum and JSON; and back.

    format         the version of all that follows
    settings       `ClusterSettings`, its identity and its keys among them
    cluster        numbers that are given next, the view's number, what has ended
    member/N       a node and its registration        left_part/R    what a worker left behind
    table/N        a table without its description    spec/N         its description, written once
    range/N        a range's configuration         course/N       how a bound came to move
    data_set/N     a data set, and its present pass

Rules:
    - Fields that other records imply (`_DERIVED`) are not written. Nor is the state that ends with
      a scheduler: prepare answers to an undecided change, parts of an unfinished checkpoint,
      reasons of withdrawals. Every other field of `ClusterState` is, a field added later too.
    - A record is written when its value is another object than the one last written, so a value
      with a record of its own is immutable. `cluster` is written each time.
    - A moment of this machine's clock is written as the seconds left until then.
    - A record that fails its checksum, is missing or unknown makes the whole journal invalid.

Invariants:
    JR-1  A journal reads back as it was written, but for the state that ends with a scheduler.
"""

from __future__ import annotations

import dataclasses
import json
import typing
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ps_core.errors import InvalidJournal
from ps_core.keys import NodeId, TableId, key_ranges
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from scheduler.journal.record_values import from_json, to_json
from scheduler.machine import placement, server_memory, view_size
from scheduler.machine.adaptation import CourseRecord
from scheduler.machine.changes import joins_due_of
from scheduler.machine.checkpoint_state import Attempt, LeftPart
from scheduler.machine.data_shards import DataSet
from scheduler.machine.state import (
    ClusterSettings,
    ClusterState,
    JournaledCluster,
    Member,
    Proposal,
)

FORMAT = 1  # raised when older code would misread the records

_KEYED = frozenset({
    "members", "tables", "ranges", "left_parts", "change_counts", "courses", "data_sets",
})  # fmt: skip
_DERIVED = frozenset({
    "node_of_registration", "range_bytes", "range_memory_bytes", "proposals", "withdrawals",
    "joins_due", "counted_joins", "view_bytes", "checkpoint",
})  # fmt: skip
_ATTEMPT = ("number", "url", "reason", "base", "is_cut", "is_written")
"""The fields of a checkpoint attempt that a restarted scheduler needs to end it."""

_CRC_DIGITS = 8


@dataclass(frozen=True, slots=True)
class TableRecord:
    """A table without its spec, and the number of changes proposed for it."""

    table: Table
    change_count: int


@dataclass(frozen=True, slots=True)
class JournalDelta:
    """Changes since the last write: values to put by key, and keys to remove."""

    values: Mapping[str, Any]
    removed: tuple[str, ...] = ()

    def encoded(self) -> dict[str, bytes]:
        """Records as bytes. Every value is immutable, so any thread may call this."""
        return {key: _encoded(_body(value)) for key, value in self.values.items()}


class Differences:
    """Compares the state with the one last written."""

    def __init__(self) -> None:
        self._written: dict[str, dict[Any, Any]] = {}  # by kind and number

    def since(self, journaled: JournaledCluster) -> JournalDelta:
        """Changes since the last call; everything on the first."""
        state = journaled.state
        tables = {table.table_id: table for table in state.tables.values()}
        kinds: dict[str, Mapping[Any, Any]] = {
            "settings": {0: journaled.settings},
            "member": state.members,
            "spec": {table_id: table.spec for table_id, table in tables.items()},
            "table": tables,
            "range": dict(enumerate(state.ranges)),
            "left_part": state.left_parts,
            "course": state.courses,
            "data_set": dict(enumerate(state.data_sets.values())),
        }
        values: dict[str, Any] = {} if self._written else {"format": {"format": FORMAT}}
        removed: list[str] = []
        for kind, found in kinds.items():
            before = self._written.get(kind, {})
            for number, value in found.items():
                if before.get(number) is not value:
                    values[_key(kind, number)] = value
            if len(before) != len(found) or before.keys() != found.keys():
                removed += (_key(kind, number) for number in before if number not in found)
            self._written[kind] = dict(found)
        for key, value in values.items():
            if isinstance(value, Table):  # it is another one with each change that is proposed
                values[key] = TableRecord(value, state.change_counts.get(value.table_id, 0))
        values["cluster"] = _cluster_json(journaled)
        return JournalDelta(values, tuple(removed))


def _key(kind: str, number: int) -> str:
    return kind if kind == "settings" else f"{kind}/{number}"


def _cluster_json(journaled: JournaledCluster) -> dict[str, Any]:
    state = journaled.state
    found = {name: to_json(hint, getattr(state, name)) for name, hint in _scalar_fields().items()}
    attempt = state.checkpoint
    if attempt is not None:
        found["attempt"] = {name: getattr(attempt, name) for name in _ATTEMPT}
    found["returning_s"] = to_json(Mapping[NodeId, float], journaled.returning_s)
    return found


@cache
def _scalar_fields() -> dict[str, Any]:
    hints = typing.get_type_hints(ClusterState)
    return {name: hint for name, hint in hints.items() if name not in _KEYED | _DERIVED}


def _body(value: Any) -> Any:
    if isinstance(value, TableRecord):
        body = {
            each.name: to_json(_TABLE_HINTS[each.name], getattr(value.table, each.name))
            for each in dataclasses.fields(Table)
            if each.name != "spec"
        }
        return {"table": body, "change_count": value.change_count}
    return value if isinstance(value, dict) else to_json(type(value), value)


_TABLE_HINTS = typing.get_type_hints(Table)


def _encoded(body: Any) -> bytes:
    text = json.dumps(body, separators=(",", ":")).encode()
    return b"%08x" % zlib.crc32(text) + text


def _decoded(key: str, record: bytes) -> Any:
    text = record[_CRC_DIGITS:]
    if record[:_CRC_DIGITS] != b"%08x" % zlib.crc32(text):
        raise InvalidJournal(f"record '{key}' is damaged: its checksum fails")
    return json.loads(text)


def read(records: Mapping[str, bytes]) -> JournaledCluster | None:
    """Parse the records of a journal; None if it is new. Refuses damaged and missing records."""
    if not records:
        return None
    if "format" not in records:
        raise InvalidJournal("it has no record 'format'")
    found = _decoded("format", records["format"])["format"]
    if found != FORMAT:
        raise InvalidJournal(
            f"it is of format {found}, and this version of pushpull reads {FORMAT}: start the "
            "scheduler of the version that wrote it"
        )
    try:
        return _read(records)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidJournal(f"its records do not fit together: {error!r}") from error


def _read(records: Mapping[str, bytes]) -> JournaledCluster:
    bodies = {key: _decoded(key, record) for key, record in records.items()}
    settings = from_json(ClusterSettings, bodies["settings"])
    cluster = bodies["cluster"]
    returning_s = from_json(Mapping[NodeId, float], cluster.pop("returning_s"))
    attempt = cluster.pop("attempt", None)
    hints = _scalar_fields()
    unknown = cluster.keys() - hints.keys()
    if unknown:
        raise ValueError(f"'cluster' has an unknown field '{min(unknown)}'")
    scalars = {name: from_json(hints[name], value) for name, value in cluster.items()}
    scalars["ranges"] = []
    state = ClusterState(**scalars)
    if attempt is not None:  # no deadline counts any more
        kinds = typing.get_type_hints(Attempt)
        fields = {name: from_json(kinds[name], value) for name, value in attempt.items()}
        state.checkpoint = Attempt(**fields, cut_by_s=0.0, written_by_s=0.0)
    for node_id, body in _numbered(bodies, "member"):
        member = from_json(Member, body)
        state.members[NodeId(node_id)] = member
        state.node_of_registration[member.registration.registration_id] = NodeId(node_id)
    for rank, body in _numbered(bodies, "left_part"):
        state.left_parts[rank] = from_json(LeftPart, body)
    for table_id, body in _numbered(bodies, "course"):
        state.courses[TableId(table_id)] = from_json(CourseRecord, body)
    for _, body in _numbered(bodies, "data_set"):
        data_set = from_json(DataSet, body)
        state.data_sets[data_set.run, data_set.spec.name] = data_set
    _read_ranges(bodies, settings, state)
    _read_tables(bodies, state)
    _derive(state, settings)
    return JournaledCluster(settings, state, returning_s)


def _numbered(bodies: Mapping[str, Any], kind: str) -> list[tuple[int, Any]]:
    prefix = f"{kind}/"
    return sorted(
        (int(key.removeprefix(prefix)), body)
        for key, body in bodies.items()
        if key.startswith(prefix)
    )


def _read_ranges(bodies: Mapping[str, Any], settings: ClusterSettings, state: ClusterState) -> None:
    hint = typing.get_type_hints(ClusterState)["ranges"]
    found = _numbered(bodies, "range")
    if [range_id for range_id, _ in found] != list(range(settings.range_count)):
        raise ValueError(f"{len(found)} ranges came; expected {settings.range_count}")
    state.ranges = from_json(hint, [body for _, body in found])
    if [each.slots for each in state.ranges] != list(key_ranges(settings.range_count)):
        raise ValueError("its ranges are cut otherwise")


def _read_tables(bodies: Mapping[str, Any], state: ClusterState) -> None:
    specs = dict(_numbered(bodies, "spec"))
    for table_id, body in _numbered(bodies, "table"):
        fields = {name: from_json(_TABLE_HINTS[name], one) for name, one in body["table"].items()}
        table = Table(spec=from_json(TableSpec, specs[table_id]), **fields)
        state.tables[table.key] = table
        if body["change_count"]:
            state.change_counts[table.table_id] = body["change_count"]
        if table.proposed is not None:  # the journal has no hold points
            state.proposals[table.table_id] = Proposal(frozenset(), 0.0)


def _derive(state: ClusterState, settings: ClusterSettings) -> None:
    range_count = len(state.ranges)
    for table in state.tables.values():
        for range_id, size_bytes in placement.bytes_by_range(table, range_count).items():
            state.range_bytes[range_id] = state.range_bytes.get(range_id, 0) + size_bytes
        for range_id, needed in server_memory.needed_by_range(table, range_count).items():
            held = state.range_memory_bytes
            held[range_id] = held.get(range_id, 0) + needed.total
        due = joins_due_of(state, table, state.worker_count_of(table.run, settings))
        if due:
            state.joins_due[table.table_id] = due
        state.counted_joins |= {(table.table_id, each.rank) for each in (*table.joins, *due)}
    state.view_bytes = (
        sum(view_size.node_bytes(member.node) for member in state.members.values())
        + sum(view_size.table_bytes(table.spec) for table in state.tables.values())
        + sum(view_size.of_run_bytes(table.run) for table in state.tables.values())
        + sum(view_size.run_bytes(run) for run in state.runs.values())
        + view_size.JOIN_BYTES * len(state.counted_joins)
        + view_size.CHANGE_BYTES * len(state.change_counts)
    )
