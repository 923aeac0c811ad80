"""A server's part of a checkpoint: its blocks as of the cut, in one file (SEMANTICS S10).

    proposed -> the file is made
    cut      -> each range is read at its cut, as a consistent reader does -> captured
             -> copied, before it changes or in its turn -> written -> durable -> reported
             -> as it was in the base: referred to ----------------> durable -> reported

Rules:
    - Everything but the files belongs to the loop that owns the values. Threads write, from copies.
    - A range whose copies would not fit in memory is held at its cut until they do (`CopyQuota`):
      its steps wait, and the cause of the wait is told.
    - The part fails if its store takes nothing for a while when training waits for it. A server
      that ends waits for a store that does not answer no longer than that.
    - While updates come, blocks are written at a bounded rate, which leaves the processor to
      training. The writing threads give way to others.
    - Copies lie in memory of their own (`copy_memory`), which is touched when the checkpoint is
      proposed and kept for the next one: the step after the cut waits for the copies.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ps_core import limits
from ps_core.change import Checkpoint
from ps_core.cluster_view import ClusterView
from ps_core.errors import Internal, PushpullError
from ps_core.keys import TableId
from ps_core.manifest import PartReport, ReportedTable, place_in
from ps_core.sliced_work import Work
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import DELAY_MEAN_SQUARE, OptimizerKind
from ps_core.tables.table import Table
from ps_runtime.checkpoint.directory import CheckpointDirectory, locate
from ps_runtime.checkpoint.part_header import clear_by_entry
from ps_runtime.checkpoint.part_writer import PartWriter, PlannedTable, WrittenPart
from ps_runtime.observe import logs
from ps_runtime.system.background import give_way
from ps_runtime.system.disk import DISK, Disk
from ps_runtime.system.executors import DaemonThreads
from ps_runtime.system.waiting import driven
from ps_server.checkpoint.copy_memory import CopyMemory, MemorySpan
from ps_server.checkpoint.unchanged_blocks import (
    BlockKey,
    WrittenBlock,
    WrittenBlocks,
    unchanged,
)
from ps_server.ranges.events import AnswerPull, RefusePull
from ps_server.service.node import ParameterNode
from ps_server.values.copy_on_write import CopyQuota, Key, RangeSnapshots
from ps_server.values.row_pieces import row_tensor_dtypes
from ps_server.values.shard_store import ShardStore
from ps_server.values.store_copy import VALUES, SavedBlock, tensor_of

_THREAD_COUNT = 2
_BUSY_S = 0.5
"""After an update the server counts as busy for this time."""

_STATE_NAMES = {
    OptimizerKind.SGD: ("momentum_buffer",),
    OptimizerKind.ADAM: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    OptimizerKind.ADAMW: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    OptimizerKind.ADAGRAD: ("sum",),
    OptimizerKind.RMSPROP: ("square_avg", "grad_avg", "momentum_buffer"),
}

_Copied = tuple[TableId, SavedBlock, MemorySpan | None]

Report = Callable[[int, PartReport], Awaitable[None]]
"""Reports a part to the scheduler, by its checkpoint's number."""


class CheckpointParts:
    """The parts that one server writes, one at a time. Belongs to its event loop.

    Args:
        rate_bytes_s: bytes written in a second while updates come; 0: no bound.
        buffer_bytes: memory for copies that wait to be written.
        disk: writes local files.
        stall_s: a store may take nothing for this time while training waits for it.
    """

    def __init__(
        self,
        node: ParameterNode,
        report: Report,
        rate_bytes_s: int,
        buffer_bytes: int = limits.CHECKPOINT_BUFFER_BYTES,
        disk: Disk = DISK,
        stall_s: float = limits.CHECKPOINT_STALL_S,
    ) -> None:
        self._node = node
        self._report = report
        self._means = _Means(rate_bytes_s, CopyMemory(buffer_bytes), disk, stall_s)
        self._newest = 0
        self._part: _CheckpointPart | None = None
        self._written = WrittenBlocks()
        node.on_cut_answered = self._answered

    def observe(self, view: ClusterView) -> None:
        """Take a newer view, which the node has observed."""
        checkpoint, part = view.checkpoint, self._part
        if part is not None and (checkpoint is None or checkpoint.number != part.number):
            self._part = None
            part.abandon()
        if checkpoint is None:
            return
        if checkpoint.number > self._newest:
            self._newest = checkpoint.number
            how = self._written, self._report, self._means
            self._part = _CheckpointPart(self._node, checkpoint, self._planned(view), *how)
        if checkpoint.is_cut and self._part is not None:
            self._node.works.begin(self._part.cutting(view))

    def _planned(self, view: ClusterView) -> list[_Planned]:
        """All tables and blocks of ranges that this server serves by the view: some may be served a
        little later, when it has taken them over. Tables of named runs are in no checkpoint.
        """
        node_id = self._node.session.node_id
        own = [each.range_id for each in view.ranges if each.primary == node_id]
        planned, with_means = [], self._with_means()
        for table in view.tables:
            if not table.run:
                by_range = table.blocks_by_range(len(view.ranges))
                blocks: list[Sequence[int]] = [by_range[at] for at in own if at in by_range]
                has_means = table.consistency.adaptive or table.table_id in with_means
                names = self._state_names(table, has_means=has_means)
                planned.append(_Planned(table, (VALUES, *names), blocks))
        return [each for each in planned if each.blocks]

    def _state_names(self, table: Table, *, has_means: bool) -> tuple[str, ...]:
        optimizer = table.spec.optimizer
        if table.spec.rows is not None:
            return tuple(row_tensor_dtypes(table.spec, table.spec.rows))
        if optimizer.kind is OptimizerKind.CUSTOM:
            slots = self._node.shards.custom_state(optimizer.custom_update)
            names = tuple(map(tensor_of, slots))
        else:
            names = _STATE_NAMES.get(optimizer.kind, ())
        return (*names, DELAY_MEAN_SQUARE) if has_means else names

    def _with_means(self) -> set[TableId]:
        """Tables with a block that has the state of adaptive delay compensation, which it keeps
        under each later setting. Looks at each block.
        """
        stores = self._node.shards.stores.items()
        return {
            table_id
            for (table_id, _), store in stores
            if isinstance(store, ShardStore) and store.has_means
        }

    def _answered(self, effect: AnswerPull | RefusePull) -> None:
        if self._part is not None:
            self._part.answered(effect)

    async def close(self) -> None:
        """Give up the part that is being written."""
        part, self._part = self._part, None
        if part is not None:
            part.abandon()
            await part.ended()


class _Means(NamedTuple):
    rate_bytes_s: int
    copies: CopyMemory
    disk: Disk
    stall_s: float


class _Planned(NamedTuple):
    """A table of a part: the tensors of its blocks, and the blocks of each range."""

    table: Table
    tensors: tuple[str, ...]
    blocks: list[Sequence[int]]

    def counted(self) -> PlannedTable:
        """Counts of blocks and segments; takes a microsecond a block."""
        return PlannedTable(
            self.table.spec.name,
            sum(map(len, self.blocks)),
            self.tensors,
            sum(len(self.table.segments(block)) for some in self.blocks for block in some),
        )


class _CheckpointPart:
    def __init__(
        self,
        node: ParameterNode,
        checkpoint: Checkpoint,
        planned: list[_Planned],
        written: WrittenBlocks,
        report: Report,
        means: _Means,
    ) -> None:
        self.number = checkpoint.number
        self._node = node
        self._url = checkpoint.url
        self._report = report
        self._rate_bytes_s, self._copies, self._disk, self._stall_s = means
        self._loop = asyncio.get_running_loop()
        self._threads = DaemonThreads(_THREAD_COUNT, "checkpoint", give_way)
        self._snapshots = RangeSnapshots(self._about_to_change)
        self._memory = written
        self._base = written.base(checkpoint.base)
        self._referred: dict[BlockKey, WrittenBlock] = {}
        self._lineages: dict[BlockKey, object] = {}  # of blocks that are written
        self._byte_counts: dict[BlockKey, int] = {}  # as well
        self._waiters: dict[int, Key] = {}
        self._tables: dict[TableId, ReportedTable] = {}
        self._specs = {each.table.table_id: each.table for each in planned}
        self._is_cut = self._is_over = False
        self._problem = ""
        self._quota = CopyQuota(self._copies.byte_count)
        self._progress_s = 0.0  # when the store last took something, or training began to wait
        self._copied: deque[_Copied] = deque()
        self._writing_count = 0
        self._wake = asyncio.Event()
        session = node.session
        self._file = f"server-{session.node_id}-{session.incarnation}.safetensors"
        self._opening: Future[tuple[CheckpointDirectory, Path, PartWriter]]
        self._opening = self._start((0, None), self._open, planned)
        stores = self._node.shards.stores.items()
        may_be_copied = [store for (table_id, _), store in stores if table_id in self._specs]
        max_copy_bytes = sum(store.state_bytes for store in may_be_copied)
        self._threads.submit(self._copies.touch, max_copy_bytes)
        self._task = self._loop.create_task(self._run())

    def _has_ended(self) -> bool:
        return self._is_over

    def _open(self, planned: list[_Planned]) -> tuple[CheckpointDirectory, Path, PartWriter]:
        self._memory.end_forgotten()
        directory = CheckpointDirectory(locate(self._url), self._disk)
        directory.create()
        path = directory.begin(self._file)
        tables = [each.counted() for each in planned]
        return directory, path, PartWriter(path, tables, self._disk)

    def cutting(self, view: ClusterView) -> Work[None]:
        """Read each range at its cut, one after the other."""
        if self._is_cut or self._has_ended():
            return
        self._progress_s = self._loop.time()
        self._node.shards.snapshots = self._snapshots
        for key in list(self._node.machine.shards):
            yield
            if self._has_ended():  # meanwhile
                return
            cut = view.tables_by_id[key[0]].cut
            if cut is None or cut.checkpoint != self.number:
                continue
            if not self._quota.plan(key, self._node.shards.stores[key].copy_bytes):
                self._node.hold_copies(key, cut)
            waiter = self._node.next_number()
            self._waiters[waiter] = key
            self._tables.setdefault(key[0], ReportedTable(0, cut.after_clock))
            is_torn = yield from self._node.reading_at_cut(waiter, key, cut)
            self._tables[key[0]] = replace(self._tables[key[0]], is_torn=is_torn)
        self._is_cut = True
        self._wake.set()

    def answered(self, effect: AnswerPull | RefusePull) -> None:
        """A range has reached its cut, or cannot be read."""
        key = self._waiters.pop(effect.waiter, None)
        if key is None:
            return
        self._wake.set()
        if key in self._quota.held:  # from now on training waits for it
            self._progress_s = self._loop.time()
        if isinstance(effect, RefusePull):
            self._quota.captured(key, 0)
            self._problem = self._problem or effect.error.message
            return
        blocks = self._node.machine.shards[key].state.blocks
        store = self._node.shards.stores[key]
        same = unchanged(self._base, key[0], store, blocks)
        self._referred |= same
        if same:
            self._start((0, None), self._refer, same)
        changed = [block for block in blocks if (key[0], block) not in same]
        self._lineages.update(((key[0], block), store.lineage) for block in changed)
        unchanged_bytes = sum(each.byte_count for each in same.values())
        self._quota.captured(key, max(0, store.copy_bytes - unchanged_bytes) if changed else 0)
        if changed:
            self._snapshots.add(key, store, changed)
        table = self._tables[key[0]]
        self._tables[key[0]] = replace(table, block_count=table.block_count + len(blocks))

    # --- writing

    def _about_to_change(self, key: Key, block: SavedBlock) -> None:
        if self._problem:
            return
        try:
            self._take(key, block)
        except Exception as error:  # noqa: BLE001 - whatever it is, the update is made
            self._problem = _words(error)
        self._wake.set()

    def _take(self, key: Key, block: SavedBlock) -> None:
        """Copy a block, or some rows of one, to be written in its turn.

        A copy may not fit after all, since the free memory is in pieces, or since an update that
        was decided before the cut was held is applied. It then goes to other memory.
        """
        piece = self._copies.take(block.byte_count)
        view = memoryview(bytearray(block.byte_count)) if piece is None else piece.view
        self._quota.copied(key, block.byte_count, is_last=not self._snapshots.has(key))
        self._copied.append((key[0], block.copied_to(view), piece))
        written = key[0], block.block
        self._byte_counts[written] = self._byte_counts.get(written, 0) + block.byte_count

    def _start(
        self, copied: tuple[int, MemorySpan | None], work: Callable[..., Any], *told: Any
    ) -> Future[Any]:
        """Let a thread do the work, and then give back what was copied for it."""
        self._writing_count += 1
        writing = self._threads.submit(work, *told)

        def tell(done: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._written, done, copied)

        writing.add_done_callback(tell)
        return writing

    def _refer(self, blocks: dict[BlockKey, WrittenBlock]) -> None:
        _, _, writer = self._opening.result()
        for (table_id, block), written in blocks.items():
            writer.refer(self._specs[table_id].spec.name, block, written.stored)

    def _write(self, table_id: TableId, block: SavedBlock) -> None:
        _, _, writer = self._opening.result()
        spec = self._specs[table_id].spec
        own = "F64" if spec.dtype is DType.FLOAT64 else "F32"
        dtypes = {} if spec.rows is None else row_tensor_dtypes(spec, spec.rows)
        if block.rows is None or (not block.rows.begin and block.tensors[0][0] == VALUES):
            writer.note_block(spec.name, block.block, block.version, block.steps)
        for name, payload in block.tensors:
            place = block.place_of(payload)
            writer.append(spec.name, block.block, name, payload, dtypes.get(name, own), place)

    def _written(self, done: Future[Any], copied: tuple[int, MemorySpan | None]) -> None:
        byte_count, piece = copied
        self._quota.written(byte_count)
        if piece is not None:
            self._copies.give_back(piece)
        self._progress_s = self._loop.time()
        self._writing_count -= 1
        if not done.cancelled() and (error := done.exception()) is not None:
            self._problem = self._problem or _words(error)
        self._wake.set()

    async def _run(self) -> None:
        try:
            report = await self._whole()
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            report = PartReport(problem=_words(error))
        finally:
            self._release()
        if report.problem:
            logs.warning("checkpoint_part_failed", number=self.number, reason=report.problem)
            await asyncio.wrap_future(self._threads.submit(self._abort))
        else:
            logs.info(
                "checkpoint_part_written",
                number=self.number,
                bytes=report.byte_count,
                referred_bytes=report.referred_byte_count,
                referred_blocks=report.referred_block_count,
            )
        self._threads.shutdown(wait=False)
        with contextlib.suppress(PushpullError):
            await self._report(self.number, report)

    async def _whole(self) -> PartReport:
        """Write the part, until its file is durable under its own name."""
        while not self._is_done:
            self._check()
            for key in self._quota.opened():
                await self._node.works.in_turn(partial(self._node.copied, key, self.number))
            await self._write_next()
        self._check()
        if not self._specs:
            await asyncio.wrap_future(self._threads.submit(self._abort))
            return PartReport()
        report, blocks = await asyncio.wrap_future(self._threads.submit(self._finish))
        self._memory.wrote(self.number, blocks)
        return report

    def _blocks(self, written: WrittenPart) -> dict[BlockKey, WrittenBlock]:
        """Blocks that the next checkpoint may refer to, and their places."""
        found = dict(self._referred)
        tables = {table.spec.name: table for table in self._specs.values()}
        directory = self._url.rstrip("/").rsplit("/", 1)[-1]
        for (name, block), stored in written.blocks.items():
            if stored.place:
                continue
            key = tables[name].table_id, block
            placed = replace(stored, place=place_in(directory, self._file))
            found[key] = WrittenBlock(self._lineages[key], placed, self._byte_counts[key])
        return found

    def _check(self) -> None:
        if self._problem:
            raise Internal(self._problem)

    @property
    def _is_done(self) -> bool:
        is_captured = self._is_cut and not self._waiters and not self._snapshots.has_more
        is_written = not self._copied and not self._writing_count and self._opening.done()
        return is_captured and is_written

    async def _write_next(self) -> None:
        """Let a block be written: one that was copied before it changed, else one that has not
        changed, first of ranges for which training waits. Without a block, wait for one.
        """
        if not self._opening.done():
            await self._wait()
            return
        if not self._copied and self._quota.waiting_bytes <= self._copies.byte_count // 2:
            found = await driven(self._snapshots.taking(self._quota.turns))
            if found is not None:
                self._take(*found)
        if not self._copied or self._writing_count >= 2 * _THREAD_COUNT:
            await self._wait()
            return
        table_id, block, piece = self._copied.popleft()
        self._start((block.byte_count, piece), self._write, table_id, block)
        await self._pause(block)

    async def _wait(self) -> None:
        """Wait for news, at most for the stall time while training waits, too."""
        is_awaited = any(key not in self._waiters.values() for key in self._quota.held)
        until_s = self._progress_s + self._stall_s if is_awaited else None
        try:
            async with asyncio.timeout_at(until_s):
                await self._wake.wait()
        except TimeoutError:
            self._problem = self._problem or (
                f"{self._url} has taken nothing for {self._stall_s:g} s, while training waited for "
                f"memory for copies (checkpoint_buffer_mb is {self._copies.byte_count / 2**20:g}): "
                "the store is too slow, or gone"
            )
        self._wake.clear()

    async def _pause(self, block: SavedBlock) -> None:
        """Keep to the rate after a block, unless training waits."""
        is_training = not self._quota.held and self._node.since_update_s < _BUSY_S
        is_busy = self._rate_bytes_s and is_training
        await asyncio.sleep(block.byte_count / self._rate_bytes_s if is_busy else 0)

    def _finish(self) -> tuple[PartReport, dict[BlockKey, WrittenBlock]]:
        """Make the part durable. For a thread: it takes time for each block."""
        directory, path, writer = self._opening.result()
        written = writer.finish(self.number, self._node.session.cluster_id)
        directory.commit(self._file, path)
        report = PartReport(
            self._file,
            written.byte_count,
            written.header_sha256,
            self._tables,
            referred_block_count=len(self._referred),
            referred_byte_count=sum(each.byte_count for each in self._referred.values()),
            bases=tuple(sorted({each.directory for each in self._referred.values()})),
        )
        blocks = self._blocks(written)
        for of_all in (written.blocks, self._lineages, self._referred):
            clear_by_entry(of_all)
        return report, blocks

    def _abort(self) -> None:
        with contextlib.suppress(PushpullError):
            self._opening.result()[2].abort()

    # --- its end

    def abandon(self) -> None:
        self._problem = self._problem or "the checkpoint was given up"
        self._release()
        self._wake.set()

    async def ended(self) -> None:
        """Stop, and wait until no thread works any more, at most for the stall time; a file that
        is not finished is removed.
        """
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, PushpullError):
            await self._task
        with contextlib.suppress(RuntimeError):  # they were shut down, as at the end of the part
            self._threads.submit(self._abort)
        self._threads.shutdown(wait=False)
        ended = asyncio.wrap_future(self._threads.ended)
        if not (await asyncio.wait((ended,), timeout=self._stall_s))[0]:
            ended.cancel()  # its end finds no loop to tell
            reason = f"what writes to {self._url} has not ended within {self._stall_s:g} s"
            logs.warning("checkpoint_part_left", number=self.number, reason=reason)
            self._remove_spooled()

    def _remove_spooled(self) -> None:
        """Remove the file on this machine of a part that is put elsewhere: nobody else does."""
        if self._opening.done() and self._opening.exception() is None:
            directory, path, _ = self._opening.result()
            if not directory.location.is_local:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)

    def _release(self) -> None:
        self._is_over = True
        if self._node.shards.snapshots is self._snapshots:
            self._node.shards.snapshots = None
        for waiter in list(self._waiters):
            self._node.end_read(waiter)
        self._waiters.clear()
        self._snapshots.end()
        if self._copied:
            copied, self._copied = self._copied, deque()
            self._quota.written(sum(block.byte_count for _, block, _ in copied))
            self._threads.submit(self._give_back_all, copied)
        for key in self._quota.held:
            self._node.works.between(partial(self._let_change, key))

    def _give_back_all(self, copied: deque[_Copied]) -> None:
        """Give back copies that will not be written. For a thread: there may be many."""
        while copied:
            _, _, piece = copied.pop()
            if piece is not None:
                self._copies.give_back(piece)

    def _let_change(self, key: Key) -> None:
        with contextlib.suppress(PushpullError):  # the server has failed
            self._node.copied(key, self.number)


def _words(error: BaseException) -> str:
    return error.message if isinstance(error, PushpullError) else f"{type(error).__name__}: {error}"
