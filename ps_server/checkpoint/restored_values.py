"""Loads the values of restored tables from a checkpoint to where they are served (G7).

    shard added -> its blocks read by threads, to where they will lie -> range without backups
                -> loaded: pulls are answered, and backups join

Rules:
    - Until a range is loaded it has no initial values: pulls and steps wait. Until its backups have
      joined anew, as `restored_ranges` says, it has one replica.
    - Every byte is checked against its checksum before the range counts as loaded. A block that
      cannot be read fails its table, with file and reason: nobody trains on half a checkpoint. The
      others are loaded. If the checkpoint cannot be opened, all its tables fail.
    - A cluster's checkpoint has the table's own blocks, with their state, version and steps. State
      that the installed custom update has no slot for is dropped, and a slot without state begins
      anew: both are told, once for a table. The means of delay compensation need no slot.
    - An imported checkpoint has tensors in blocks of its own, of which the table's blocks are put
      together, and its partitions too. They have taken no step, and their optimizer has no state.

Invariants:
    RB-1  Nothing but values is read of an imported checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from ps_core import limits
from ps_core.cluster_view import ClusterView
from ps_core.errors import PushpullError, UpdateFailed, check
from ps_core.keys import TableId
from ps_core.manifest import Imported
from ps_core.rows import Ids, mixed_ids, partitions_of, salt_of
from ps_core.tables.optimizers import DELAY_MEAN_SQUARE
from ps_core.tables.table import Table
from ps_core.tables.table_spec import RowsSpec
from ps_runtime.checkpoint.directory import CheckpointDirectory, locate
from ps_runtime.checkpoint.part_file import IDS, VALUES, StoredBlock
from ps_runtime.checkpoint.reader import CheckpointReader
from ps_runtime.observe import logs
from ps_runtime.system import clock
from ps_runtime.system.executors import in_daemon_thread
from ps_server.checkpoint.restored_ranges import Key, RestoredRanges, is_missing
from ps_server.ranges.range_machine import RangeMachine
from ps_server.service.node import ParameterNode
from ps_server.stores import Shards
from ps_server.values.store_copy import slot_of, tensor_of

_READ_BYTES = 4 << 20
"""Bytes of imported rows that are read at once."""

_THREAD_COUNT = min(4, os.cpu_count() or 1)
"""A thread reads, checks and finds new memory for about half a GB a second; a disk is faster."""


_in_thread = partial(in_daemon_thread, name="restored values")


class RestoredValues:
    """Loads the restored tables of one server. Belongs to its event loop."""

    def __init__(self, node: ParameterNode) -> None:
        self._node = node
        self._url = ""
        self._told: set[TableId] = set()  # whose state is told to differ
        self._ranges = RestoredRanges(node.machine.shards, node.replicas)
        self._tasks: set[asyncio.Task[None]] = set()

    def observe(self, view: ClusterView) -> None:
        """Take a newer view, which the node has observed."""
        self._url = view.restored_from
        self.look()

    def look(self) -> None:
        """Load the shards that wait for values; to be called now and then."""
        if not self._url:
            return
        self._hand_over()
        keys = self._ranges.look()
        if not keys:
            return
        task = asyncio.get_running_loop().create_task(self._load(self._url, keys))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, url: str, keys: list[Key]) -> None:
        begin_s = clock.now_s()
        with self._failing(keys):
            reader = await _in_thread(lambda: CheckpointReader(CheckpointDirectory(locate(url))))
            byte_counts = await self._load_ranges(reader, keys)
            if byte_counts:
                logs.info(
                    "restored", url=url, parts=len(byte_counts), bytes=sum(byte_counts),
                    took_s=round(clock.now_s() - begin_s, 3),
                )  # fmt: skip

    async def _load_ranges(self, reader: CheckpointReader, keys: Collection[Key]) -> list[int]:
        """Load all shards, several at once; what cannot be read fails its table. Returns the bytes
        of each of the others. All readers are closed when it ends.
        """
        rest, byte_counts = deque(keys), []
        readers = [reader, *(reader.twin() for _ in range(_THREAD_COUNT - 1))]

        async def load_next(own: CheckpointReader) -> None:
            restored = RestoredTables(own)
            try:
                while rest:
                    key = rest.popleft()
                    with self._failing([key]):
                        byte_count = await self._load_range(restored, key)
                        if byte_count is not None:
                            byte_counts.append(byte_count)
            finally:
                await _in_thread(own.close)

        for problem in await asyncio.gather(*map(load_next, readers), return_exceptions=True):
            if problem is not None:
                raise problem
        return byte_counts

    async def _load_range(self, restored: RestoredTables, key: Key) -> int | None:
        """Load one shard, unless it is gone, loaded already, or of a table that has failed. Returns
        its bytes.
        """
        shard = self._ranges.begin(key)
        if shard is None:
            return None
        try:
            return await self._load_blocks(restored, key, shard)
        finally:
            self._ranges.end_read(shard)

    async def _load_blocks(
        self, restored: RestoredTables, key: Key, shard: RangeMachine
    ) -> int | None:
        found = await _in_thread(partial(restored.blocks_of, shard.state.table))
        if self._node.machine.shards.get(key) is not shard or not is_missing(shard):
            return None  # gone meanwhile, or its table has failed
        store = self._node.shards.stores[key]
        tensors = _Tensors(shard.state.table, self._node.shards)
        versions: dict[int, int] = {}
        targets: dict[int, Callable[[str, int], memoryview]] = {}  # the memory of each tensor
        for block in shard.state.blocks:
            saved = found.stored(block)
            versions[block] = saved.version
            targets[block] = store.load(block, saved.version, saved.steps)

        def read() -> int:
            byte_count = 0
            for block, target_of in targets.items():
                for tensor in tensors.loaded_of(found.stored(block)):
                    target = target_of(tensor, found.byte_count(block, tensor))
                    found.read_into(block, tensor, target)
                    byte_count += target.nbytes
                store.end_load(block)
            return byte_count

        byte_count = await _in_thread(read)
        if tensors.differ and key[0] not in self._told:
            self._told.add(key[0])
            tensors.tell(self._url)

        def was_read() -> None:
            self._ranges.was_read(key, shard, versions)
            self._hand_over()

        await self._node.works.in_turn(was_read)
        return byte_count

    def _hand_over(self) -> None:
        """Serve loaded shards of whose range no other server has anything."""
        works = self._node.works
        works.finish()
        for key, versions in self._ranges.hand_over():
            self._node.loaded(key, versions)
            if works.jobs:  # the others when that is done
                works.between(self._hand_over)
                return

    @contextlib.contextmanager
    def _failing(self, keys: Collection[Key]) -> Iterator[None]:
        """Fail the tables of these shards if the body raises."""
        try:
            yield
        except PushpullError as error:
            self._fail(keys, error.message)
        except Exception as error:  # noqa: BLE001 - whatever it is, the tables have no values
            logs.exception("restore_failed", error, url=self._url)
            self._fail(keys, f"{self._url}: {type(error).__name__}: {error}")

    def _fail(self, keys: Collection[Key], reason: str) -> None:
        logs.error("restore_failed", reason=reason)
        for table_id in {table_id for table_id, _ in keys}:
            error = UpdateFailed(f"the checkpoint that it starts from cannot be loaded: {reason}")
            with contextlib.suppress(PushpullError):
                self._node.refuse_table(table_id, error)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Tensors:
    """The tensors of one table that are loaded: of a custom update, state that the installed one
    has. Another version may have made the checkpoint.
    """

    def __init__(self, table: Table, shards: Shards) -> None:
        self._spec = table.spec
        self._update = table.spec.optimizer.custom_update
        self._slots = set(map(tensor_of, shards.custom_state(self._update)))
        self._known = {VALUES, DELAY_MEAN_SQUARE, *self._slots}
        self._anew: set[str] = set()
        self._dropped: set[str] = set()

    def loaded_of(self, block: StoredBlock) -> Sequence[str]:
        """Those of a block."""
        if not self._update:
            return block.tensors
        if any(block.steps):
            self._anew |= self._slots - {*block.tensors}
        self._dropped |= {*block.tensors} - self._known
        return [tensor for tensor in block.tensors if tensor in self._known]

    @property
    def differ(self) -> bool:
        """True if another version of the custom update has made a block."""
        return bool(self._anew or self._dropped)

    def tell(self, url: str) -> None:
        logs.warning(
            "custom_state_differs",
            table=self._spec.name,
            update=self._update,
            begins_anew=",".join(map(slot_of, sorted(self._anew))),
            dropped=",".join(map(slot_of, sorted(self._dropped))),
            url=url,
            remedy="to go on with that state, install an update whose slots have those names",
        )


class RestoredTables:
    """Tables of a cluster in an open checkpoint, for one thread at a time."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._found: dict[str, _Saved | _Imported | _ImportedPartitions] = {}

    def blocks_of(self, table: Table) -> _Saved | _Imported | _ImportedPartitions:
        """The blocks of a table that is restored. Blocking: reads ids of imported rows.

        Raises:
            InvalidCheckpoint: the checkpoint has no such tensors.
        """
        name, reader = table.spec.name, self._reader
        if name not in self._found:
            if not reader.manifest.is_imported:
                self._found[name] = _Saved(reader, table)
            elif table.spec.rows is None:
                self._found[name] = _Imported(reader, table)
            else:
                self._found[name] = _ImportedPartitions(reader, table, table.spec.rows)
        return self._found[name]


class _Saved:
    def __init__(self, reader: CheckpointReader, table: Table) -> None:
        self._reader, self._name = reader, table.spec.name

    def stored(self, block: int) -> StoredBlock:
        return self._reader.block(self._name, block)

    def byte_count(self, block: int, tensor: str) -> int:
        """The bytes of a tensor of a block."""
        stored = self._reader.tensor(self._name, block, tensor)
        return 0 if stored is None else stored.byte_count

    def read_into(self, block: int, tensor: str, target: memoryview) -> None:
        """Read one tensor of a block into `target`, as many writable bytes ("B").

        Blocking: reads it.

        Raises:
            InvalidCheckpoint: it is damaged, or of another length.
        """
        self._reader.read_block_into(self._name, block, tensor, target)


class _Imported:
    """Blocks that are put together from a state dict's; as `_Saved`."""

    def __init__(self, reader: CheckpointReader, table: Table) -> None:
        self._elements, self._table = _Elements(reader), table
        self._places = self._elements.imported.places(table.spec)

    def stored(self, block: int) -> StoredBlock:
        self._table.block_length(block)  # refuses a block that the table does not have
        return StoredBlock(version=0, steps=(0,), crc32s={VALUES: 0})

    def byte_count(self, block: int, tensor: str) -> int:
        del tensor
        return self._table.block_length(block) * self._table.spec.accumulator_element_bytes

    def read_into(self, block: int, tensor: str, target: memoryview) -> None:
        spec = self._table.spec
        check(tensor == VALUES, "RB-1", f"'{tensor}' of a block of '{spec.name}'")
        width = spec.accumulator_element_bytes
        for segment in self._table.segments(block):
            placed = spec.tensors[segment.tensor]
            name, begin = self._places[placed.name]
            begin += block * spec.block_elements + segment.begin - placed.offset
            own = target[segment.begin * width : segment.end * width]
            self._elements.copy(name, begin * width, own)


class _ImportedPartitions:
    """Partitions of rows that are put together from a state dict's tensors; as `_Saved`. Each one
    takes a pass over all rows: they lie in the order of the file.
    """

    def __init__(self, reader: CheckpointReader, table: Table, rows: RowsSpec) -> None:
        self._elements, self._table = _Elements(reader), table
        imported = self._elements.imported
        found = imported.rows_of(table.spec)
        source, self._rows = imported.tensors[found.rows]
        self._source = source.name
        self._row_bytes = table.spec.element_count * source.accumulator_element_bytes
        self._ids: Ids = np.arange(self._rows.shape[0], dtype=np.uint64)
        if found.ids is not None:
            of_ids, ids = imported.tensors[found.ids]
            begin = ids.offset * limits.ROW_ID_BYTES
            self._elements.copy(of_ids.name, begin, self._ids.view(np.uint8).data)
        partitions = partitions_of(mixed_ids(self._ids, salt_of(rows.seed)), rows.partition_count)
        self._order = np.argsort(partitions, kind="stable")  # of a partition: as in the file
        counts = np.bincount(partitions, minlength=rows.partition_count)
        self._ends = np.concatenate(([0], np.cumsum(counts)))

    def _places(self, block: int) -> npt.NDArray[np.int64]:
        """The places in the file of a partition's rows, ascending."""
        return self._order[self._ends[block] : self._ends[block + 1]]

    def stored(self, block: int) -> StoredBlock:
        self._table.block_length(block)  # refuses a partition that the table does not have
        return StoredBlock(version=0, steps=(0,), crc32s={VALUES: 0, IDS: 0})

    def byte_count(self, block: int, tensor: str) -> int:
        width = limits.ROW_ID_BYTES if tensor == IDS else self._row_bytes
        return len(self._places(block)) * width

    def read_into(self, block: int, tensor: str, target: memoryview) -> None:
        check(tensor in (VALUES, IDS), "RB-1", f"'{tensor}' of a partition")
        places = self._places(block)
        if tensor == IDS:
            np.copyto(np.frombuffer(target, np.uint64), self._ids[places])
            return
        rows = np.frombuffer(target, np.uint8).reshape(len(places), self._row_bytes)
        begin_bytes = self._rows.offset * self._row_bytes // self._table.spec.element_count
        count = max(1, _READ_BYTES // self._row_bytes)
        for begin in range(0, len(self._ids), count):
            low, high = np.searchsorted(places, (begin, begin + count))
            if low < high:
                first, last = int(places[low]), int(places[high - 1])
                piece = np.empty((last - first + 1, self._row_bytes), np.uint8)
                at = begin_bytes + first * self._row_bytes
                self._elements.copy(self._source, at, piece.reshape(-1).data)
                rows[low:high] = piece[places[low:high] - first]


class _Elements:
    """The elements of an imported checkpoint's tables."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        specs = [each.spec for each in reader.tables.values()]
        self.imported = Imported.of(reader.directory.url, specs)
        self._last: tuple[str, int, bytearray] = ("", -1, bytearray())

    def copy(self, name: str, begin: int, target: memoryview) -> None:
        """Fill `target` with bytes of a table of the checkpoint, from `begin` on."""
        table = self._reader.tables[name]
        block_bytes = table.spec.block_elements * table.spec.accumulator_element_bytes
        filled = 0
        while filled < target.nbytes:
            block, first = divmod(begin + filled, block_bytes)
            piece = memoryview(self._block(name, block))[first:][: target.nbytes - filled]
            target[filled : filled + piece.nbytes] = piece
            filled += piece.nbytes

    def _block(self, name: str, block: int) -> bytearray:
        """Read a block, and cache it: small tensors follow each other."""
        if self._last[:2] != (name, block):
            self._last = name, block, self._reader.read(name, block)
        return self._last[2]
