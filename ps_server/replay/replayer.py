"""Replays update logs: tables at any version, by the kernels that made them (S13).

    changes of the log --made, in order--> stores, as they were at a version

The command line knows this module of the servers only.

Invariants:
    RP-1  No change is made twice, or undone.
    RP-2  Rows are read of tables of rows only.
"""

from __future__ import annotations

import copy as copies
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ps_core.errors import InvalidUpdateLog, PushpullError, check
from ps_core.keys import RangeId, TableId
from ps_core.rows import Ids
from ps_core.sliced_work import at_once
from ps_core.tables.elements import NATIVE_CODEC
from ps_core.tables.optimizers import OptimizerKind
from ps_core.tables.table import Table
from ps_core.tables.table_spec import Reduction
from ps_server.lane.lane_socket import SharedLanes
from ps_server.ranges.server_machine import ShardAdded
from ps_server.replay.partitions import (
    RowDifference,
    are_same,
    differences,
    in_order,
    pieces_of_rows,
    square_sum_of_gradients,
    square_sum_of_rows,
)
from ps_server.replay.run_log import RunLog, read_run
from ps_server.replay.versions import (
    History,
    Origin,
    ReplayedChange,
    ShardKey,
    Version,
    VersionStep,
    arranged_by_clock,
    history_of,
    torn_at,
)
from ps_server.replication.messages import LogRecord, RangeCopy
from ps_server.stores import Shards
from ps_server.values import contributions
from ps_server.values.block_values import arithmetic_dtype
from ps_server.values.buffer_pool import BufferPool
from ps_server.values.kernel_fingerprint import kernel_fingerprint
from ps_server.values.mutations import Assigned, Dropped, KeptSum, Put, SentAccumulator
from ps_server.values.row_store import RowStore, Store
from ps_server.values.store_copy import SavedBlock, StoreCopy
from ps_server.wire.replication_reader import ReplicationReader

__all__ = [
    "History", "Replay", "RowDifference", "RunLog", "ShardKey", "Version", "differences",
    "has_parameters", "kernel_fingerprint", "read_run",
]  # fmt: skip


_TURN_LENGTH = 64
"""Changes after which a caller may look at its machine. One makes at most some MB of rows."""


def has_parameters(table: Table) -> bool:
    """False for an AGGREGATE table, which has sums of gradients only."""
    return table.spec.optimizer.kind is not OptimizerKind.AGGREGATE


class Replay:
    """Tables of a run, made anew, change by change.

    Args:
        tables: of the run, which are replayed together.
        by_clock: arrange the changes by their clocks, whatever the tables' consistency is.

    Raises:
        InvalidUpdateLog: the logs have nothing of the tables.

    Attributes:
        history: versions of the tables.
        made_count: changes that were made.
        checked_count: snapshots that were compared, and are equal.
    """

    def __init__(self, run: RunLog, tables: Sequence[Table], *, by_clock: bool = False) -> None:
        self.tables = tuple(tables)
        self.checked_count = 0
        self._tables = {table.table_id: table for table in tables}
        self._range_count = run.range_count
        self._reached = {k: each for k, each in run.reached.items() if k[0] in self._tables}
        if not self._reached:
            names = ", ".join(f"'{table.title}'" for table in tables)
            raise InvalidUpdateLog(
                f"the logs have no range of {names} from its beginning, or from a snapshot on: "
                "what they had went with the oldest updates"
            )
        changes = [change for change in run.changes if change.place[0] in self._tables]
        self.history = history_of(changes, self._reached)
        self._changes = arranged_by_clock(changes) if by_clock else self.history.changes
        self._raw_changes = changes
        self.made_count = 0
        self._pool = BufferPool()
        self._watched: dict[VersionStep, float] = {}  # sums of the squares of gradients, so far
        self._kept: dict[tuple[ShardKey, int], float] = {}
        self._blocks = {
            (table.table_id, range_id): blocks
            for table in tables
            for range_id, blocks in table.blocks_by_range(run.range_count).items()
        }

    @functools.cached_property
    def _shards(self) -> Shards:
        """The stores; they take memory once something is made or read."""
        shards = Shards(SharedLanes(), {})
        for (table_id, range_id), blocks in self._blocks.items():
            if (table_id, range_id) in self._reached:
                shards.add([ShardAdded(self._tables[table_id], range_id, blocks)])
        return shards

    # --- some of it

    def only(self, tables: Iterable[Table], range_id: RangeId | None = None) -> Replay:
        """A replay of some of the tables, or of one range of them, from its beginning: with the
        same versions at the same positions, and stores of its own.
        """
        found = copies.copy(self)
        found.tables = tuple(tables)
        found._tables = {table.table_id: table for table in found.tables}
        found._reached = {
            place: each
            for place, each in self._reached.items()
            if place[0] in found._tables and range_id in (None, place[1])
        }
        found._changes = [each for each in self._changes if each[1].place in found._reached]
        found.made_count = found.checked_count = 0
        found._watched, found._kept = {}, {}
        found.__dict__.pop("_shards", None)
        return found

    def by_range(self, table: Table) -> Iterator[Replay]:
        """A replay of each range of a table, which the logs must have.

        Raises:
            InvalidUpdateLog: the logs do not have all of a range.
        """
        changes: dict[ShardKey, list[tuple[int, ReplayedChange]]] = {}
        for each in self._changes:
            changes.setdefault(each[1].place, []).append(each)
        for range_id, blocks in table.blocks_by_range(self._range_count).items():
            place = table.table_id, range_id
            self._check_range(table, blocks[0])
            whole = copies.copy(self)
            whole._changes = changes.get(place, [])
            yield whole.only([table], range_id)

    # --- making

    @property
    def change_count(self) -> int:
        return len(self._changes)

    def watch(self, versions: Iterable[Version]) -> None:
        """Measure the gradients of these versions; to be called before they are made."""
        self._watched = {v.step: 0.0 for v in versions if v.step is not None}

    def go_to(self, position: int, most: int = sys.maxsize) -> bool:
        """Make the changes up to a position, at most `most` of them. True if that was all.

        Raises:
            InvalidUpdateLog: a change cannot be made, or a snapshot differs from the values here.
        """
        until = min(len(self._changes), self.made_count + most)
        while self.made_count < until and self._changes[self.made_count][0] <= position:
            self._make(self._changes[self.made_count][1])
            self.made_count += 1
        return self.made_count < until or self.made_count == len(self._changes)

    def go_to_versions(
        self,
        wanted: Mapping[tuple[TableId, int], int],
        is_found: Callable[[Table, int], bool] = lambda *_: True,
        turn: Callable[[], object] = lambda: None,
    ) -> list[str]:
        """Make the changes of each range until its blocks have had the wanted updates. Nothing can
        be made after that. Returns the problems with blocks that do not end there.

        A range always gets its initial values. An edit is no update: those behind the last update
        are made one by one, until every block of the range is found.

        Args:
            wanted: number of updates of each block, by table.
            is_found: True if a block has the values that are looked for.
            turn: called now and then; it may raise.
        """
        check(not self.made_count, "RP-1", f"{self.made_count} changes have been made already")
        self.made_count = len(self._changes)

        def is_short(place: ShardKey) -> bool:
            store = self._shards.stores[place]
            return any(store.version(b) < wanted[place[0], b] for b in self._blocks[place])

        def is_made(change: ReplayedChange) -> bool:
            place = change.place
            if _begins(change) or is_short(place):
                return True
            table = self._tables[place[0]]
            return _keeps_versions(change, wanted) and not all(
                is_found(table, block) for block in self._blocks[place]
            )

        lagging = set(self._reached)
        for index, (_, change) in enumerate(self._changes):
            if not index % _TURN_LENGTH:
                turn()
            if change.place in lagging and is_made(change):
                self._make(change)
            else:
                lagging.discard(change.place)
        problems = []
        for place in sorted(self._reached):
            noun = "block" if self._tables[place[0]].spec.rows is None else "partition"
            for block in self._blocks[place]:
                has, wants = self._shards.stores[place].version(block), wanted[place[0], block]
                if has != wants:
                    problems.append(
                        f"{noun} {block} has had {has} updates in range {place[1]}; expected "
                        f"{wants}"
                    )
        return problems

    def torn_at(self, clock: int) -> str:
        """Reason that these tables never were at a clock; empty if they were."""
        slow = [place for place, each in self._reached.items() if each.clock < clock]
        if slow:
            reached = min(self._reached[place].clock for place in slow)
            return f"range {slow[0][1]} is at clock {reached} at the end of its log"
        return torn_at(self._raw_changes, self._reached, clock)

    def _make(self, change: ReplayedChange) -> None:
        came = _read(change)
        try:
            if isinstance(came, LogRecord):
                self._make_record(change, came)
            elif isinstance(came, RangeCopy):
                self._take_snapshot(change, came)
        except PushpullError as error:
            raise InvalidUpdateLog(f"{change.where}: {error.message}") from error

    def _make_record(self, change: ReplayedChange, log_record: LogRecord) -> None:
        if self._watched:
            self._measure(change, log_record)
        for each in log_record.changes:
            failure = self._shards.make(each)
            if failure is not None:
                raise failure

    def _take_snapshot(self, change: ReplayedChange, copy: RangeCopy) -> None:
        table_id, range_id = change.place
        own = copy.stores.get(table_id)
        if own is None:
            return
        held = tuple(each for each in copy.snapshot.held if each.record.table_id == table_id)
        alone = RangeCopy(copy.snapshot._replace(held=held), {table_id: own})
        if change.origin is not Origin.SAME:
            self._shards.restore(alone)
            return
        beside = Shards(SharedLanes(), {})
        blocks = self._blocks[change.place]
        beside.add([ShardAdded(self._tables[table_id], range_id, blocks)])
        beside.restore(alone)
        made, said = self._shards.stores[change.place], beside.stores[change.place]
        if not _are_same(made, said):
            name = self._tables[table_id].spec.name
            raise InvalidUpdateLog(
                f"range {range_id} of table '{name}' is other than what its "
                "updates make of it here: other kernels made it, or the log is not whole"
            )
        self.checked_count += 1

    # --- the present version

    def block(self, table: Table, block: int) -> SavedBlock:
        """A block as it is now, as views that the next change alters; of rows: a copy.

        Raises:
            InvalidUpdateLog: the logs do not have all of its range.
        """
        return self._store(table, block).saved(block)

    def rows(self, table: Table, partition: int) -> Iterator[tuple[Ids, npt.NDArray[Any]]]:
        """Copies of the ids and rows of a partition as they are now, some at a time, in the order
        in which a server has them. Raises as `block`.
        """
        store = self._store(table, partition)
        check(isinstance(store, RowStore), "RP-2", f"rows of '{table.spec.name}' are read")
        return pieces_of_rows(cast(RowStore, store), partition)

    @property
    def blocks(self) -> list[int]:
        """The blocks, or partitions, that are replayed here of one table."""
        return [block for place in sorted(self._reached) for block in self._blocks[place]]

    @property
    def row_count(self) -> int | None:
        """The rows of all tables now; None if none is one of rows."""
        stores = [each for each in self._shards.stores.values() if isinstance(each, RowStore)]
        return sum(store.row_count for store in stores) if stores else None

    def _store(self, table: Table, block: int) -> Store:
        return self._shards.stores[self._check_range(table, block)]

    def _check_range(self, table: Table, block: int) -> ShardKey:
        range_id = table.range_of_block(block, self._range_count)
        place = table.table_id, range_id
        if place not in self._reached:
            noun = "block" if table.spec.rows is None else "partition"
            raise InvalidUpdateLog(
                f"the logs have not all of range {range_id}, which {noun} {block} of table "
                f"'{table.spec.name}' is in: give the directory that has the logs of all servers"
            )
        return place

    def tensors(self) -> dict[str, Tensor]:
        """Copies of the tables' tensors by name, in their own types; of a table of rows NAME/ids,
        as signed numbers of the same bits, and NAME/rows in their order.

        Raises:
            InvalidUpdateLog: as `block`; or two tables have a tensor of one name.
        """
        found: dict[str, Tensor] = {}
        for table in self.tables:
            if table.spec.rows is not None:
                _add_tensors(found, self._row_tensors(table))
                continue
            flat = torch.empty(table.spec.element_count, dtype=arithmetic_dtype(table))
            size = table.spec.block_elements
            for block in range(table.block_count):
                values = self.block(table, block).tensors[0][1]
                length = table.block_length(block)
                source = torch.frombuffer(bytearray(values), dtype=flat.dtype)
                flat[block * size : block * size + length] = source
            flat = flat.to(contributions.TORCH_DTYPE[NATIVE_CODEC[table.spec.dtype]])
            own = {
                tensor.name: flat[tensor.offset : tensor.offset + tensor.element_count]
                .reshape(tensor.shape)
                .clone()
                for tensor in table.spec.tensors
            }
            _add_tensors(found, own)
        return found

    def _row_tensors(self, table: Table) -> dict[str, Tensor]:
        name, length = table.spec.name, table.spec.element_count
        partitions = range(table.block_count)
        pieces = [piece for each in partitions for piece in self.rows(table, each)]
        ids = np.concatenate([np.empty(0, np.uint64), *(ids for ids, _ in pieces)])
        empty = np.empty((0, length), table.spec.dtype.value)
        rows = np.concatenate([empty, *(rows for _, rows in pieces)])
        return {
            f"{name}/ids": torch.from_numpy(ids.view(np.int64)),
            f"{name}/rows": torch.from_numpy(rows),
        }

    def parameter_norm(self) -> float:
        """Norm of all values, in float64."""
        total = 0.0
        for place in self._reached:
            store = self._shards.stores[place]
            if isinstance(store, RowStore):
                total += square_sum_of_rows(store)
                continue
            for block in self._blocks[place]:
                (_, values), *_ = store.saved(block).tensors
                dtype = arithmetic_dtype(self._tables[place[0]])
                elements = torch.frombuffer(values, dtype=dtype)
                total += float(torch.linalg.vector_norm(elements, dtype=torch.float64)) ** 2
        return math.sqrt(total)

    def gradient_norm(self, version: Version) -> float | None:
        """Norm of the gradient that the version's step gave its optimizer: averaged and scaled,
        without weight decay. None if it was not watched, or has none.
        """
        step = version.step
        if step is None or step not in self._watched or not step[0]:
            return None
        return math.sqrt(self._watched[step])

    def _measure(self, change: ReplayedChange, log_record: LogRecord) -> None:
        decided = iter(change.decisions)
        for each in log_record.changes:
            key = change.place, each.record.clock
            match each:
                case Put(record, accumulator):
                    step = next(decided).step
                    if step not in self._watched:
                        self._kept.pop(key, None)
                    elif accumulator is None:
                        self._watched[step] += self._kept.pop(key, 0.0) * record.update_scale**2
                    else:
                        scale = self._scale(change, accumulator, record.contributor_count)
                        found = self._square_sum(change.place, accumulator)
                        self._watched[step] += found * (scale * record.update_scale) ** 2
                case KeptSum(_, accumulator):
                    self._kept[key] = self._square_sum(change.place, accumulator)
                case Dropped():
                    self._kept.pop(key, None)
                case Assigned():
                    next(decided)

    def _scale(
        self, change: ReplayedChange, accumulator: SentAccumulator, contributor_count: int
    ) -> float:
        spec = self._tables[change.place[0]].spec
        is_mean = spec.reduction is Reduction.MEAN and not accumulator.is_reduced
        return 1.0 / contributor_count if is_mean and contributor_count else 1.0

    def _square_sum(self, place: ShardKey, accumulator: SentAccumulator) -> float:
        store = self._shards.stores[place]
        if isinstance(store, RowStore):
            return square_sum_of_gradients(at_once(store.receiving(accumulator)))
        received = at_once(store.receiving(accumulator))
        return sum(contributions.square_sum(part, self._pool) for part in received.parts.values())


def _read(change: ReplayedChange) -> object:
    """Its log record, or the copy of its snapshot."""
    try:
        reader = ReplicationReader(is_open=True)
        *_, came = map(reader.read, change.payloads)
    except PushpullError as error:
        raise InvalidUpdateLog(f"{change.where}: {error.message}") from error
    return came


def _begins(change: ReplayedChange) -> bool:
    """True if a change has the first values of its range: initial ones, or those of a snapshot."""
    return change.origin is Origin.BEGIN or any(not each.clock for each in change.decisions)


def _keeps_versions(change: ReplayedChange, wanted: Mapping[tuple[TableId, int], int]) -> bool:
    """True if blocks that have had the wanted updates have had no more after the change."""
    came = _read(change)
    if isinstance(came, LogRecord):
        puts = [each for each in came.changes if isinstance(each, Put)]
        return all(each.accumulator is not None and not each.accumulator.blocks for each in puts)
    table_id, _ = change.place
    if isinstance(came, RangeCopy) and table_id in came.stores:
        blocks = came.stores[table_id].blocks
        return all(each.version == wanted[table_id, each.block] for each in blocks)
    return True


def _add_tensors(found: dict[str, Tensor], own: Mapping[str, Tensor]) -> None:
    for name, tensor in own.items():
        if name in found:
            raise InvalidUpdateLog(
                f"tensor '{name}' is in two tables; choose those of one model with --table"
            )
        found[name] = tensor


def _are_same(made: Store, said: Store) -> bool:
    """True if two stores of one table shard go on alike."""
    if isinstance(made, RowStore) and isinstance(said, RowStore):
        return are_same(made, said)
    return _comparable(made.snapshot()) == _comparable(said.snapshot())


def _comparable(copy: StoreCopy) -> tuple[object, object]:
    return copy.blocks, in_order(copy.sums)
