"""One table's rows in one range: ids, values, optimizer state, accumulators (SEMANTICS S11).

A store as `ShardStore`, for tables of rows: a block is a partition, and an update of it changes the
rows that have a gradient.

Rules:
    - A row is made by the update that admits it, the first one unless the table says otherwise;
      until then it reads as its first values (`ps_core.rows.first_values`), and a pull makes none.
    - After it has changed its rows, an update evicts those that `row_retention` names.
    - Every call checks before it changes anything.

Invariants:
    RS-1  A row that is here lives in its partition.
    RS-2  Rows have no delay compensation, and nothing is assigned to them.
    RS-3  A sum has contributors.
    RS-4  A position in use of the table's file has the record of one row.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_core import limits
from ps_core.errors import InvalidConfig, InvalidKeys, InvalidTensor, check
from ps_core.keys import Incarnation
from ps_core.rows import Ids, partition_of, salt_of
from ps_core.sliced_work import PIECE_COUNT, Waiting, Work, at_once
from ps_core.tables.elements import Codec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import Reduction
from ps_server.ranges.events import Compensation
from ps_server.rows import row_kernels
from ps_server.rows.row_arrays import MemoryUse, Place, RowArrays, Rows
from ps_server.rows.row_candidates import COLUMNS, Candidates
from ps_server.rows.row_heat import RowHeat
from ps_server.rows.row_kernels import Numbers
from ps_server.rows.row_memory import RowMemory
from ps_server.rows.row_partition import RowPartition
from ps_server.rows.row_retention import COUNT, MOST, TALLY, UPDATED
from ps_server.rows.tiered_arrays import TieredArrays
from ps_server.values.mutations import SentAccumulator
from ps_server.values.row_gradients import (
    RowAccumulator,
    RowGradients,
    RowSum,
    check_count,
    check_length,
    parsed,
    payload_of,
    slices_of,
)
from ps_server.values.row_layout import RowLayout
from ps_server.values.row_pieces import (
    CANDIDATE_BYTES,
    CANDIDATE_COLUMNS,
    CANDIDATE_COPY_BYTES,
    PartitionSnapshot,
    RowPiece,
    begins_of,
    piece_at,
    prefixed,
)
from ps_server.values.shard_store import NOBODY_LOOKS, ChangeHooks, ShardStore
from ps_server.values.store_copy import (
    CANDIDATES,
    IDS,
    VALUES,
    BlockCopy,
    RowSpan,
    SavedBlock,
    StoreCopy,
    SumCopy,
)
from ps_server.values.update_arithmetic import Accumulator, Terms

_PIECE_COUNT, _PIECE_BYTES = 8192, 1 << 20
"""Most rows of a partition, and bytes of them, that are updated in one turn of the loop."""

_BRIEF_BYTES = 2 << 20
"""Most bytes of the gradients of an update that is made at once."""


class RowStore:
    """The partitions `blocks` of `table`, empty at first; new rows need space in `memory`.

    Attributes:
        lineage: as of `ShardStore`.
        memory: where its rows find space.
        pulled, pushed: ids that came.
        found_count: of those that were pulled, how many had a row.

    Raises:
        InvalidKeys: the table has no such partition.
    """

    def __init__(
        self, table: Table, blocks: Iterable[int], memory: RowMemory | None = None
    ) -> None:
        self.table, spec = table, table.spec
        self._layout = RowLayout(spec)
        self.lineage = object()
        self.memory = memory or RowMemory()
        self._name = spec.name
        self._rows = self._layout.rows
        self._length = spec.element_count
        self._dtype: np.dtype[Any] = np.dtype(spec.dtype.value)
        self._row_bytes = self._length * self._dtype.itemsize
        self._most_pulled = limits.most_pulled_rows(self._row_bytes)
        self._codec = spec.arithmetic_codec
        self._salt = salt_of(self._rows.seed)
        self._is_mean = spec.reduction is Reduction.MEAN
        self._storage, self._retention = self._layout.storage, self._layout.retention
        self._made_bytes = self._layout.made_bytes(self.memory)
        self._file = self._layout.file(self.memory)
        self._partitions: dict[int, RowPartition] = {}
        self._candidates: dict[int, Candidates] = {}  # empty if each row is made at once
        for block in sorted(blocks):
            table.block_length(block)  # refuses one that the table does not have
            self._begin(block)
        self._accumulators: defaultdict[int, RowAccumulator] = defaultdict(RowAccumulator)
        self._loaded: dict[int, dict[str, bytearray]] = {}
        self.pulled, self.pushed, self.found_count = RowHeat(), RowHeat(), 0

    def _begin(self, block: int) -> RowPartition:
        """A partition without rows."""
        if self._rows.admit_after > 1:
            own = RowArrays(COLUMNS, prefault=self.memory.prefault)
            known = RowPartition(self._salt, own, self.memory.prefault)
            self._candidates[block] = Candidates(known, self._retention, self._rows.admit_after)
        arrays = self._layout.arrays(self.memory, self._file)
        made = RowPartition(self._salt, arrays, self.memory.prefault)
        self._partitions[block] = made
        return made

    @property
    def state_bytes(self) -> int:
        """Bytes of rows, optimizer state, candidates and their index, as stored; without sums."""
        return sum(each.byte_count for each in (*self._partitions.values(), *self._known))

    @property
    def copy_bytes(self) -> int:
        """As `ShardStore.copy_bytes`: rows that are stored in fewer bits have all of them there."""
        known_count = sum(each.index.count for each in self._known)
        return self.row_count * self._layout.copy_bytes + known_count * CANDIDATE_COPY_BYTES

    @property
    def memory_use(self) -> MemoryUse:
        parts = (each.memory_use for each in (*self._partitions.values(), *self._known))
        return functools.reduce(MemoryUse.plus, parts, MemoryUse())

    @property
    def _known(self) -> Iterable[RowPartition]:
        return (each.known for each in self._candidates.values())

    @property
    def row_count(self) -> int:
        return sum(partition.index.count for partition in self._partitions.values())

    @property
    def candidate_count(self) -> int:
        return sum(each.count for each in self._candidates.values())

    @property
    def blocks(self) -> Collection[int]:
        return self._partitions.keys()

    def version(self, block: int) -> int:
        """Updates that have touched the partition."""
        return self._partition(block).version

    # --- what comes

    def decode(
        self,
        block: int,
        codec: Codec,
        payload: bytes | memoryview,
        presence: bytes,
        *,
        is_shared: bool = False,
    ) -> RowGradients:
        """The payload as gradients of rows, checked. Changes nothing; arguments as of `ShardStore`.

        Raises:
            InvalidKeys: the partition is not here, an id is of another one, or there are presence
                bits.
            InvalidTensor: another codec than the table's, a length that is none of whole rows, or a
                value that is not finite (unless the table allows it).
        """
        what = self._named(block)
        if codec is not self._codec:
            raise InvalidTensor(f"{what}: codec {codec.value}; expected {self._codec.value}")
        view = memoryview(payload).cast("B")
        check_count(what, view.nbytes, self._row_bytes)
        copies = is_shared or not view.readonly  # what is checked must not change any more
        found = self._parsed(block, view, presence, copies=copies)
        if not self.table.spec.allow_non_finite:
            self._check_finite(what, found)
        self.pushed.note(found.ids)
        self.want(block, found.ids)  # before the update that needs them
        return found

    def _named(self, block: int) -> str:
        return f"partition {block} of table '{self._name}'"

    def _parsed(
        self, block: int, view: memoryview, presence: bytes, *, copies: bool
    ) -> RowGradients:
        """The gradients in a payload, which is of whole rows of the partition."""
        self._partition(block)
        what = self._named(block)
        if presence:
            raise InvalidKeys(f"{what}: {len(presence)} bytes of presence bits; expected none")
        check_length(what, view.nbytes, self._row_bytes)
        found = parsed(block, view, self._length, self._dtype, copies=copies)
        self._check_ids(block, found.ids)
        return found

    def check_space(self, found: RowGradients) -> None:
        """TableFull if there is no memory for the rows that a push makes."""
        block, ids = found.block, found.ids
        if self._loaded or self.memory.has_space(len(ids) * self._made_bytes):
            return
        missing = ids[self._partitions[block].index.find(ids) < 0]
        if block in self._candidates:
            candidates = self._candidates[block]
            new = missing[candidates.known.index.find(missing) < 0]
            self.memory.check(self._name, len(new), CANDIDATE_BYTES)
            missing = missing[candidates.admits(missing)]
        self.memory.check(self._name, len(missing), self._made_bytes)

    def try_disk(self) -> bool:
        """Write some rows to a disk that took none, which may have space again: new rows are
        refused until it takes some. False if nothing is written.
        """
        if self._file is None or self._loaded:
            return False
        arrays = (each.arrays for each in self._partitions.values())
        return any(isinstance(each, TieredArrays) and each.try_disk() for each in arrays)

    def _check_ids(self, block: int, ids: Ids) -> None:
        """Check that they live in this partition."""
        at = row_kernels.elsewhere(ids, self._salt, self._rows.partition_count, block)
        if at >= 0:
            raise InvalidKeys(
                f"id {ids[at]} of table '{self._name}' lives in partition "
                f"{partition_of(int(ids[at]), self._rows)}; it came for partition {block}"
            )

    def _check_finite(self, what: str, found: RowGradients) -> None:
        if len(found.ids) and not is_finite_array(found.values):
            at = int(np.flatnonzero(~np.isfinite(found.values).all(axis=1))[0])
            raise InvalidTensor(
                f"{what}: the gradient of id {found.ids[at]} is not finite; expected finite values"
            )

    def keep(self, reader: Incarnation, block: int) -> None:
        """Nothing is kept for readers: a table of rows has no delay compensation."""

    def forget(self, reader: Incarnation) -> None:
        """As `keep`."""

    # --- sums

    def accumulate(
        self,
        clock: int,
        parts: Sequence[tuple[int, RowGradients]],
        scale: float,
        compensation: Compensation | None = None,
    ) -> None:
        """As `ShardStore.accumulate`; there is no compensation."""
        check(compensation is None, "RS-2", "rows have no delay compensation")
        if not 0.0 < scale < math.inf:
            raise InvalidConfig(f"contribution scale is {scale}; expected finite and above 0")
        for block, _ in parts:
            self._partition(block)
        accumulator = self._accumulators[clock]
        for _, part in parts:
            if scale != 1.0:
                part = part._replace(values=part.values * self._dtype.type(scale))
            accumulator.add_rows(part)

    def reducing(self, clock: int, contributor_count: int) -> Work[tuple[float, ...]]:
        """As `ShardStore.reducing`."""
        accumulator = self._accumulators[clock]
        squares = []
        for block in self._partitions:
            total = accumulator.sums.get(block)
            if total is None:
                squares.append(0.0)
                continue
            yield from self._averaging(total, contributor_count)
            _, values = yield from total.totalling()
            square = 0.0
            for some in slices_of(values):
                square += float(np.square(values[some], dtype=np.float64).sum())
                yield
            squares.append(square)
        accumulator.is_reduced = True
        return tuple(squares)

    def _averaging(self, total: RowSum, contributor_count: int) -> Work[None]:
        check(contributor_count >= 1, "RS-3", "a sum without contributors")
        if self._is_mean and contributor_count > 1:
            yield from total.scaling(1.0 / contributor_count)

    def take(self, clock: int) -> RowAccumulator:
        return self._accumulators.pop(clock, None) or RowAccumulator()

    def kept_accumulator(self, clock: int) -> RowAccumulator:
        return self._accumulators[clock]

    def put_accumulator(self, clock: int, accumulator: Accumulator) -> None:
        self._accumulators[clock] = RowAccumulator.of(accumulator)

    def drop(self, clock: int) -> None:
        self._accumulators.pop(clock, None)

    def abandon(self, *, keeps_reduced: bool = False) -> None:
        kept = self._accumulators.items() if keeps_reduced else ()
        self._accumulators = defaultdict(RowAccumulator, {c: a for c, a in kept if a.is_reduced})

    def receiving(self, sent: SentAccumulator) -> Work[RowAccumulator]:
        """As `ShardStore.receiving`; a partition may come in several payloads. They are no pushes:
        merged, they may have more rows, and be infinite where all gradients were finite.
        """
        if sent.means:
            raise InvalidKeys(f"a sum of table '{self._name}' has running means; rows have none")
        found = RowAccumulator(is_reduced=sent.is_reduced)
        for block, presence, payload in sent.blocks:
            part = self._parsed(block, memoryview(bytes(payload)), presence, copies=False)
            self.want(block, part.ids)
            found.add_rows(part)
            yield
        return found

    # --- updates

    def is_brief(self, clock: int, block_count: int) -> bool:
        """As `ShardStore.is_brief`: few rows, and none that needs a larger index."""
        sums = self._accumulators[clock].sums if clock in self._accumulators else {}
        counts = {block: total.row_count for block, total in sums.items()}
        return (
            block_count <= PIECE_COUNT
            and sum(counts.values()) <= min(_PIECE_COUNT, _BRIEF_BYTES // self._layout.work_bytes)
            and all(self._has_space(block, count) for block, count in counts.items())
        )

    @property
    def has_space(self) -> bool:
        """True if the next update enlarges no index and evicts nothing, unless it is large."""
        return all(self._has_space(block, _PIECE_COUNT) for block in self._partitions)

    def _has_space(self, block: int, count: int) -> bool:
        """True if an update of so many rows enlarges no index, and evicts nothing."""
        partition, candidates = self._partitions[block], self._candidates.get(block)
        version = partition.version + 1
        return (
            partition.has_space(count)
            and not self._retention.may_leave(partition.index.count + count, version)
            and (
                candidates is None
                or (candidates.known.has_space(count) and not candidates.may_leave(count, version))
            )
        )

    def apply_brief(self, accumulator: Accumulator, terms: Terms, changes: ChangeHooks) -> None:
        """As `applying`, at once."""
        at_once(self.applying(accumulator, terms, changes))

    def applying(
        self, accumulator: Accumulator, terms: Terms, changes: ChangeHooks = NOBODY_LOOKS
    ) -> Work[tuple[int, ...]]:
        """As `ShardStore.applying`."""
        accumulator = RowAccumulator.of(accumulator)
        merged = dict(self.table.step_hyperparameters.merged(terms.hyperparameters))
        blocks = tuple(accumulator.blocks)
        check(terms.contributor_count >= 1 or not blocks, "RS-3", "a sum without contributors")
        for block in blocks:
            total = accumulator.sums.pop(block)
            if not accumulator.is_reduced:
                yield from self._averaging(total, terms.contributor_count)
            yield from total.scaling(terms.update_scale)
            ids, gradients = yield from total.totalling()
            changes.begin((block,))
            self._partitions[block].version += 1
            yield from self._updating(block, ids, gradients, merged)
            yield from self._evicting(block)
            changes.end((block,))
            yield
        accumulator.is_reduced = True
        return blocks

    def _updating(
        self, block: int, ids: Ids, gradients: Rows, merged: Mapping[str, float]
    ) -> Work[None]:
        partition = self._partitions[block]
        count = max(1, min(_PIECE_COUNT, _PIECE_BYTES // self._layout.work_bytes))
        for begin in range(0, len(ids), count):
            some = slice(begin, begin + count)
            here, steps = ids[some], gradients[some]
            numbers = yield from self._here(block, here)
            if block in self._candidates and numbers.min() < 0:  # those that were not admitted
                is_row = numbers >= 0
                here, steps, numbers = here[is_row], steps[is_row], numbers[is_row]
            arrays = partition.arrays
            yield from arrays.fetching(numbers)
            if partition.snapshot is not None:
                partition.snapshot.keep(numbers)
            places = arrays.places(numbers)
            found = RowGradients(block, here, steps)
            self._layout.update(arrays, places, found, merged, partition.version)
            self._tally(partition, places, len(numbers))
            yield

    def _tally(self, partition: RowPartition, places: Sequence[Place], count: int) -> None:
        """Note that the newest update had gradients of these rows."""
        arrays = partition.arrays
        if UPDATED in arrays.names:
            arrays.put(UPDATED, places, np.full((count, 1), partition.version & MOST, TALLY))
        if COUNT in arrays.names:
            counts = arrays.get(COUNT, places, count)
            counts += counts < MOST
            arrays.put(COUNT, places, counts)

    def _here(self, block: int, ids: Ids) -> Work[Numbers]:
        """The numbers of rows, which are made if they are missing; -1 for one that is not admitted
        yet.
        """
        partition, candidates = self._partitions[block], self._candidates.get(block)
        numbers = partition.index.find(ids)
        missing = np.flatnonzero(numbers < 0)
        if len(missing) and candidates is not None:
            known_count = candidates.known.index.count
            is_admitted = yield from candidates.admitting(ids[missing], partition.version)
            missing = missing[is_admitted]
            self.memory.made((candidates.known.index.count - known_count) * CANDIDATE_BYTES)
        if len(missing):
            new = ids[missing]
            first = self._layout.as_stored(self._layout.first_arrays(new))
            numbers[missing] = yield from partition.adding(new, first)
            self.memory.made(len(new) * self._made_bytes)
        return numbers

    def _stored_values(
        self, partition: RowPartition, numbers: Numbers, out: Rows | None = None
    ) -> Rows:
        """A copy of the values of these rows, in `out`."""
        arrays, count = partition.arrays, len(numbers)
        if not self._storage.is_packed:
            return arrays.get(VALUES, arrays.places(numbers), count, out)
        found = self._storage.unpacked(arrays.get(VALUES, arrays.places(numbers), count))
        if out is None:
            return found
        out[...] = found
        return out

    def _evicting(self, block: int) -> Work[None]:
        """Remove the rows, and the candidates, that leave after the newest update."""
        partition, candidates = self._partitions[block], self._candidates.get(block)
        count = partition.index.count
        if self._retention.may_leave(count, partition.version):
            leaves = yield from self._retention.leaving(
                partition, partition.version, np.zeros(count, bool)
            )
            if leaves.any():
                yield from partition.removing(leaves)
                gone_count = count - partition.index.count
                self.memory.evicted(gone_count, gone_count * self._made_bytes)
        if candidates is not None:
            yield from candidates.evicting(partition.version)

    def assign(
        self, parts: Sequence[tuple[int, object]], array: str = "", edit: bytes = b""
    ) -> None:
        """Never called: the machine refuses edits of rows, and their initial values are given."""
        check(not (parts or array or edit), "RS-2", f"rows of table '{self._name}' are assigned")

    # --- reads

    def rows_byte_count(self, block: int, ids: bytes | memoryview) -> int:
        """The bytes of the rows of these ids; InvalidKeys if there are more than fit a message."""
        count, rest = divmod(len(ids), limits.ROW_ID_BYTES)
        most = self._most_pulled
        if rest or count > most:
            raise InvalidKeys(
                f"a pull of partition {block} of table '{self._name}' has {len(ids)} bytes of ids; "
                f"expected {limits.ROW_ID_BYTES} for each of at most {most}"
            )
        return count * self._row_bytes

    def read_rows_into(
        self, memory: npt.NDArray[np.uint8], block: int, ids: bytes | memoryview
    ) -> None:
        """The rows of these ids, in this order, into memory of `rows_byte_count`; an id may come
        twice. InvalidKeys: the partition is not here, or an id is of another one.
        """
        rows = memory.view(self._dtype).reshape(-1, self._length)
        self.rows(block, np.frombuffer(ids, "<u8"), rows)

    def want(self, block: int, ids: Ids) -> list[Sequence[Waiting]]:
        """Begin to fetch the rows of these ids that are on disk; returns what to wait for. While
        the thread of a load has the arrays, nothing is fetched: a pull waits for the load anyway.
        """
        partition = self._partitions.get(block)
        if partition is None or self._file is None or self._loaded:
            return []
        numbers = partition.index.find(ids)
        return partition.arrays.want(numbers[numbers >= 0])

    def want_all(self, ids: Mapping[int, bytes]) -> list[Waiting]:
        """As `want`, of several partitions; nothing for what no read may have."""
        if self._file is None or self._loaded:
            return []
        coming, size = [], limits.ROW_ID_BYTES
        with self._file.together():
            for block, own in ids.items():
                if len(own) % size == 0 and len(own) <= size * self._most_pulled:
                    coming += self.want(block, np.frombuffer(own, "<u8"))
        return list(itertools.chain(*coming))

    def rows(self, block: int, ids: Ids, out: Rows | None = None) -> Rows:
        """A copy of the rows of these ids of a partition, in `out`; InvalidKeys if one is of
        another.
        """
        partition = self._partition(block)
        self._check_ids(block, ids)
        rows = np.empty((len(ids), self._length), self._dtype) if out is None else out
        numbers = partition.index.find(ids)
        missing = np.flatnonzero(numbers < 0)
        self.pulled.note(ids)
        self.found_count += len(ids) - len(missing)
        if not len(missing):
            return self._stored_values(partition, numbers, rows)
        here = np.flatnonzero(numbers >= 0)
        if len(here):
            rows[here] = self._stored_values(partition, numbers[here])
        rows[missing] = self._layout.first_values(ids[missing])
        return rows

    def listing(self, block: int, first: int) -> Work[bytes]:
        """The ids of rows from number `first` on, and behind them the rows, as a payload: as many
        as fit a message. InvalidKeys: the partition is not here.
        """
        return payload_of(*(yield from self.listed(block, first, self._most_pulled)))

    def listed(self, block: int, first: int, most: int) -> Work[tuple[Ids, Rows]]:
        """Copies of at most so many rows of a partition and of their ids, in the order of their
        numbers, from number `first` on: an order that stays while the partition's version does.
        """
        partition = self._partition(block)
        count = partition.index.count
        numbers = np.arange(min(first, count), min(first + most, count))
        found = yield from partition.arrays.reading(numbers)
        return partition.index.ids[numbers], self._storage.unpacked(found[VALUES])

    def read(
        self, block: int, codec: Codec | None, clock: int | None
    ) -> tuple[bytes | memoryview, bytes]:
        """Refuse a pull of blocks as a whole."""
        del codec, clock
        raise InvalidKeys(
            f"table '{self._name}' is one of rows; expected the ids to read of partition {block}"
        )

    def read_array(self, block: int, array: str) -> bytes:
        """Refuse a pull of optimizer state."""
        raise InvalidKeys(
            f"partition {block} of table '{self._name}': optimizer state '{array[:64]}' of rows "
            "cannot be pulled; a checkpoint has it"
        )

    # --- copies

    def snapshot(self) -> StoreCopy:
        """`copying`, at once."""
        return at_once(self.copying())

    def copying(self) -> Work[StoreCopy]:
        """Copy the store's lasting state, sums that wait for their scale too. A partition is copied
        in pieces, one at least.
        """
        blocks = []
        for block, partition in self._partitions.items():
            for begin in begins_of(partition):
                ids, arrays = yield from piece_at(partition, begin)
                values = self._storage.unpacked(arrays.pop(VALUES)).tobytes()
                slots = ((IDS, ids), *((name, each.tobytes()) for name, each in arrays.items()))
                blocks.append(BlockCopy(block, partition.version, (0,), values, slots))
                yield
            if block in self._candidates:
                known = self._candidates[block].known
                for begin in begins_of(known):
                    ids, arrays = yield from piece_at(known, begin)
                    named = ((prefixed(name), each.tobytes()) for name, each in arrays.items())
                    slots = ((CANDIDATES, ids), *named)
                    blocks.append(BlockCopy(block, partition.version, (0,), b"", slots))
                    yield
        return StoreCopy(tuple(blocks), self.kept_sums())

    def kept_sums(self) -> tuple[SumCopy, ...]:
        """Views of the sums that wait for their scale."""
        kept = ((clock, each) for clock, each in self._accumulators.items() if each.is_reduced)
        return tuple(SumCopy(clock, True, each.sent()) for clock, each in kept)

    def checking(self, copy: StoreCopy) -> Work[None]:
        """As `ShardStore.checking`."""
        blocks = list(dict.fromkeys(each.block for each in copy.blocks))
        if sorted(blocks) != list(self._partitions):
            raise InvalidKeys(
                f"a copy of table '{self._name}' has {len(blocks)} partitions, the first "
                f"{blocks[:3]}; expected the {len(self._partitions)} of its range"
            )
        for each in copy.blocks:
            self._piece_of(each)
            yield
        for kept in copy.sums:
            yield from self.receiving(kept.accumulator)

    def _piece_of(self, copy: BlockCopy) -> RowPiece:
        """The rows, or candidates, of a piece of a copy, checked."""
        what = f"a copy of partition {copy.block} of table '{self._name}'"
        given = dict(copy.slots)
        are_rows = IDS in given
        columns, ids_name = self._layout.columns, IDS
        if are_rows:
            given[VALUES] = copy.values
        elif self._candidates:
            columns, ids_name = CANDIDATE_COLUMNS, CANDIDATES
        if set(given) != {ids_name, *columns} or len(given) != len(copy.slots) + are_rows:
            names = [name for name, _ in copy.slots]
            raise InvalidTensor(f"{what} has {', '.join(names) or 'no arrays'} beside its values")
        ids: Ids = np.frombuffer(given[ids_name], "<u8")
        arrays = {}
        for name, column in columns.items():
            expected = len(ids) * column.row_bytes
            if len(given[name]) != expected:
                raise InvalidTensor(
                    f"{what}: {name} has {len(given[name])} bytes; expected {expected}"
                )
            arrays[name] = np.frombuffer(given[name], column.dtype).reshape(-1, column.width)
        self._check_ids(copy.block, ids)
        return RowPiece(ids, arrays, are_rows)

    def _adding(self, block: int, piece: RowPiece) -> Work[None]:
        if piece.are_rows:
            arrays = self._layout.as_stored(piece.arrays)
            yield from self._partitions[block].adding(piece.ids, arrays)
        else:
            own = {name: piece.arrays[prefixed(name)] for name in COLUMNS}
            yield from self._candidates[block].adding(piece.ids, own)

    def restoring(self, copy: StoreCopy, changes: ChangeHooks = NOBODY_LOOKS) -> Work[None]:
        """As `ShardStore.restoring`."""
        yield from self.checking(copy)
        self.abandon()
        self.lineage = object()
        changes.begin(tuple(self._partitions))
        self._file = self._layout.file(self.memory)
        for block in self._partitions:
            self._begin(block)
        for each in copy.blocks:
            self._partitions[each.block].version = each.version
            yield from self._adding(each.block, self._piece_of(each))
            yield
        changes.end(tuple(self._partitions))
        for kept in copy.sums:
            self._accumulators[kept.clock] = yield from self.receiving(kept.accumulator)

    def capture(self, block: int) -> PartitionSnapshot:
        """Capture a partition for a checkpoint; it may go on changing."""
        candidates = self._candidates.get(block)
        return PartitionSnapshot(
            self._partition(block).capture(),
            None if candidates is None else candidates.known.capture(),
        )

    def saving_rows(self, block: int, snapshot: PartitionSnapshot) -> Work[SavedBlock]:
        """The next rows of a captured partition, or its next candidates."""
        rows = snapshot.rows
        if not rows.is_done or snapshot.candidates is None:
            piece, total = (yield from rows.taking()), rows.count
            arrays = dict(piece.arrays)
            values = self._storage.unpacked(arrays.pop(VALUES))
            ordered = {VALUES: values, IDS: piece.ids, **arrays}
        else:
            piece, total = snapshot.candidates.next(), snapshot.candidates.count
            own = {prefixed(name): array for name, array in piece.arrays.items()}
            ordered = {CANDIDATES: piece.ids, **own}
        tensors = tuple((n, memoryview(each.tobytes())) for n, each in ordered.items())
        return SavedBlock(block, rows.version, (0,), tensors, RowSpan(piece.begin, total))

    def saved(self, block: int) -> SavedBlock:
        """All rows and candidates of a partition, at once."""
        snapshot = self.capture(block)
        whole: defaultdict[str, bytes] = defaultdict(bytes)
        while not snapshot.is_done:
            for name, payload in at_once(self.saving_rows(block, snapshot)).tensors:
                whole[name] += payload
        tensors = tuple((name, memoryview(payload)) for name, payload in whole.items())
        return SavedBlock(block, snapshot.rows.version, (0,), tensors)

    def load(
        self, block: int, version: int, steps: Sequence[int]
    ) -> Callable[[str, int], memoryview]:
        """As `ShardStore.load`; `end_load` follows."""
        del steps
        self._partition(block)
        self.lineage = object()
        self._begin(block).version = version
        arrays: dict[str, bytearray] = {}
        self._loaded[block] = arrays

        def buffer(name: str, byte_count: int) -> memoryview:
            arrays[name] = bytearray(byte_count)
            return memoryview(arrays[name])

        return buffer

    def end_load(self, block: int) -> None:
        """Put in place what was written to the memory that `load` gave.

        Raises:
            InvalidTensor: an array is missing, or has another length than the others.
            InvalidKeys: an id is of another partition, or comes twice.
        """
        arrays = {name: memoryview(found) for name, found in self._loaded[block].items()}
        version = self._partition(block).version
        candidates = {n: arrays.pop(n) for n in (CANDIDATES, *CANDIDATE_COLUMNS) if n in arrays}
        values = arrays.pop(VALUES, memoryview(b""))
        if not version and arrays.keys() == {IDS}:  # imported rows: everything else begins anew
            first = self._layout.first_arrays(np.frombuffer(arrays[IDS], "<u8"))
            anew = self._layout.columns.keys() - {VALUES}
            arrays |= {name: memoryview(first[name].tobytes()) for name in anew}
            candidates = dict.fromkeys((CANDIDATES, *CANDIDATE_COLUMNS), memoryview(b""))
        found = [BlockCopy(block, version, (0,), values, tuple(arrays.items()))]
        if self._candidates:
            found.append(BlockCopy(block, version, (0,), b"", tuple(candidates.items())))
        for each in found:
            self._put_in_place(block, self._piece_of(each))
        del self._loaded[block]

    def _put_in_place(self, block: int, piece: RowPiece) -> None:
        partition = self._partitions[block] if piece.are_rows else self._candidates[block].known
        for begin in range(0, len(piece.ids), _PIECE_COUNT):  # short calls: the loop has its turns
            some = slice(begin, begin + _PIECE_COUNT)
            new = np.unique(piece.ids[some])
            if len(new) != len(piece.ids[some]) or bool((partition.index.find(new) >= 0).any()):
                raise InvalidKeys(f"partition {block} of table '{self._name}' has an id twice")
            part = {name: rows[some] for name, rows in piece.arrays.items()}
            at_once(self._adding(block, RowPiece(piece.ids[some], part, piece.are_rows)))

    def _partition(self, block: int) -> RowPartition:
        found = self._partitions.get(block)
        if found is None:
            raise InvalidKeys(
                f"partition {block} of table '{self._name}' is not in this range; it holds "
                f"{len(self._partitions)} of the table's {self.table.block_count}"
            )
        return found


Store = ShardStore | RowStore


def is_finite_array(values: npt.NDArray[Any]) -> bool:
    """As `contributions.is_finite`."""
    return math.isfinite(float(values.sum())) or bool(np.isfinite(values).all())
