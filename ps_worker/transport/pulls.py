"""Pulls: one request per server, blocks copied straight into the caller's memory.

Rules:
    - A request whose failure is curable (another primary, a server that restarts, a wait that
      expired) is repeated until the pull's deadline, while the values of other servers travel. One
      that may not be repeated ends the pull.
    - A block of an older epoch than the view's is dropped and pulled again (S5).
    - A pull into memory that holds values says their versions; what is unchanged does not come.
    - Values in shared memory count range by range: all of a range, as they were when the server
      answered. If one of them has changed since, the range is pulled again: a few times from shared
      memory, then as bytes. A consistent pull takes bytes at once, because its clock may be past
      before the copy is made.

Rules of a reader's consistent pull, which gives one state of a whole table while it is trained:
    - Under BSP a pull names one clock for every range, the newest that any reports. If a range is
      past it already, the pull asks further ahead, by a margin that grows. No worker waits.
    - Under SSP it begins a cut first: every range suspends updates beyond the clock that it has
      reached. Then the pull names the highest of these clocks. A cut is always ended; servers end
      it soon if this process cannot.
    - Under ASP there is no clock that all ranges have: each is pulled as it is between two updates.
    - The view has the newest setting, which may hold from a later clock on. Until then the pull is
      by a cut, which gives one state under every setting.
    - A range that moves or answers WaitExpired has let go of its cut. The pull then ends at once,
      and the reader cuts again.
    - Servers wait for the clock for the time of an attempt. Values that they have decided on travel
      for as long as the caller waits.

Only the background loop calls this, except methods marked for any thread.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import deque
from collections.abc import Callable, Container, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from ps_core import limits, sequence_locks
from ps_core.cluster_view import ClusterView
from ps_core.consistency import Mode
from ps_core.errors import (
    AlreadyPast,
    Internal,
    InvalidConfig,
    NotOwner,
    PushpullError,
    Recovering,
    StaleAssignment,
    ValuesLost,
    WaitExpired,
)
from ps_core.keys import AssignmentEpoch, NodeId, RangeId, TableId
from ps_core.sequence_locks import Shared
from ps_core.tables.elements import NATIVE_CODEC, Codec, DType
from ps_core.tables.optimizers import OptimizerKind
from ps_core.tables.table import Table
from ps_runtime.cluster import wire
from ps_runtime.grpc.errors import error_from_proto
from ps_runtime.grpc.retry import Backoff, is_curable
from ps_runtime.observe import logs
from ps_runtime.system.clock import now_s
from ps_worker.compression.push_encoder import decode_into
from ps_worker.embedding.rows import RowPiece
from ps_worker.spec.values import Raw, Region, blocks_of
from ps_worker.steps.counters import Counters
from ps_worker.steps.held_values import HeldValue, HeldValues
from ps_worker.steps.steps import Pulled, TableSteps
from ps_worker.transport.lane import Copiers, SharedLane
from ps_worker.transport.links import Answer, ServerLink, ServerLinks
from ps_worker.transport.loop import ended_together
from ps_worker.transport.metrics import MEASURES
from pushpull.v1 import parameters_pb2

ATTEMPT_S = 10.0
"""The longest that one request waits at a server, which then answers whom it waits for."""

_LAST_GRACE_S = 1.0
"""A call ends at most so much after the caller's deadline: its last answer says who is missing."""

_MAX_TORN_COUNT = 3
"""After so many answers whose values changed while they were copied, a pull takes bytes."""


_Value = parameters_pb2.BlockValue | parameters_pb2.SharedValue
_Placed = tuple[RangeId, parameters_pb2.SharedValue]


@dataclass(slots=True, eq=False)
class PullOrder:
    """A pull as its caller wants it; `deadline_s` is a moment of `ps_runtime.system.clock`."""

    table: Table
    region: Region
    raw: Raw
    clock: int
    consistent: bool
    is_reader: bool
    deadline_s: float
    steps: TableSteps
    attempt_end_s: float = math.inf
    """The end of this attempt at the clock: servers wait no longer, and nothing is asked again."""
    cut: int = 0
    """The reader's number of the cut that holds the clock; 0: none."""
    array: str = ""
    """The array of optimizer state to pull; empty: the values."""
    ids: RowPiece | None = None
    """The ids to pull of a table of rows; `raw` has their rows in this order."""
    encoding: Codec | None = None
    """The codec of the answers; None: that of `raw`."""
    blocks: Container[int] | None = None
    """The blocks to pull, of those in the region; None: all."""
    held: HeldValues | None = None
    """The values that `raw` holds, and afterwards those that came; `region` has whole blocks."""

    def length_of(self, block: int) -> int:
        """The elements that the answer has of a block."""
        if self.ids is None:
            return self.table.block_length(block)
        begin, end = self.ids.spans[block]
        return (end - begin) * self.table.spec.element_count

    @property
    def codec(self) -> Codec:
        """The codec of `raw`."""
        spec = self.table.spec
        return spec.arithmetic_codec if self.array else NATIVE_CODEC[spec.dtype]

    @property
    def sent_codec(self) -> Codec:
        return self.codec if self.encoding is None else self.encoding


@dataclass(slots=True, eq=False)
class _PullProgress:
    """A pull in flight: the blocks still wanted, and the metadata of those that came."""

    order: PullOrder
    wanted: dict[RangeId, set[int]]
    whole_counts: dict[RangeId, int]
    versions: dict[int, int] = field(default_factory=dict)
    presence: dict[int, bytes] = field(default_factory=dict)
    lowest_clock: int | None = None
    torn_count: int = 0

    def pulled(self) -> Pulled:
        return Pulled(self.lowest_clock or 0, self.versions, self.presence)


@dataclass(slots=True, eq=False)
class _ServerRequest:
    """One request to one server, and the values copied from its memory, range by range."""

    progress: _PullProgress
    view: ClusterView
    lane: SharedLane | None
    copying: deque[tuple[Future[list[bool]], list[_Placed]]] = field(default_factory=deque)
    copied: dict[RangeId, dict[int, parameters_pb2.SharedValue]] = field(default_factory=dict)
    torn: set[RangeId] = field(default_factory=set)


class Puller:
    """The pulls of one client."""

    def __init__(
        self, links: ServerLinks, counters: Counters, copiers: Copiers | None = None
    ) -> None:
        self.links = links
        self._counters = counters
        self._copiers = copiers or Copiers()
        self._unanswered: dict[asyncio.Timeout, tuple[NodeId | None, list[RangeId]]] = {}

    def take_view(self, view: ClusterView) -> None:
        """Expire requests to servers that ranges have moved from. Such a server, paused or cut off,
        may not even answer that it has lost them.
        """
        for patience, (server, ranges) in list(self._unanswered.items()):
            if any(view.ranges[range_id].primary != server for range_id in ranges):
                del self._unanswered[patience]
                patience.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """End its threads."""
        self._copiers.close()

    @property
    def unanswered_by(self) -> list[NodeId]:
        """The servers with unanswered requests. Any thread."""
        servers = {server for server, _ in list(self._unanswered.values())}
        return sorted(server for server in servers if server is not None)

    async def pull(self, order: PullOrder) -> Pulled:
        """Pull into the memory of `order`; WaitExpired says whom it waits for."""
        began_s = now_s()
        try:
            return await self.pull_at(order)
        finally:
            MEASURES.pull_duration_seconds.observe(now_s() - began_s)

    async def pull_at(self, order: PullOrder) -> Pulled:
        progress = self._begin(order)
        await self._pull_ranges(progress, list(progress.wanted))
        return progress.pulled()

    async def _pull_ranges(self, progress: _PullProgress, ranges: Sequence[RangeId]) -> None:
        """Pull what is wanted of these ranges from whichever servers have them; each server is
        asked again while the values of others travel. When this ends or raises, nothing writes to
        the caller's memory any more.
        """
        order, backoff = progress.order, Backoff()
        try:
            while wanted := sorted(progress.wanted.keys() & ranges):
                view, torn_count = self.links.view, progress.torn_count
                by_server = _by_server(view, wanted)
                if len(by_server) > 1:
                    self._counters.waits.pop(backoff, None)  # each share has its own words
                    await _all(partial(self._pull_ranges, progress), list(by_server.values()))
                    return
                # The common case of a small table, without a task.
                ((server, asked),) = by_server.items()
                errors = await self._ask(progress, view, server, asked)
                if not progress.wanted.keys() & asked:
                    return
                for error in sorted(errors, key=is_curable):
                    if not _may_be_cured(order, error):
                        raise WaitExpired(error.message) if is_curable(error) else error
                if not errors and progress.torn_count > torn_count:
                    continue  # there is nothing to wait for
                error = errors[0] if errors else Recovering("a server ended its answer early")
                self._counters.waits[backoff] = error.message
                await self.pause(order, backoff, error)
        finally:
            self._counters.waits.pop(backoff, None)

    async def pause(self, order: PullOrder, backoff: Backoff, error: PushpullError) -> None:
        """Wait before the next request; raise if there is no time for one."""
        wait_s = backoff.next_s(error)
        if now_s() + wait_s < min(order.deadline_s, order.attempt_end_s):
            await asyncio.sleep(wait_s)
            return
        if isinstance(error, WaitExpired):
            raise error
        name = order.table.spec.name
        raise WaitExpired(f"a pull of table '{name}' took too long: {error.message}") from error

    def _begin(self, order: PullOrder) -> _PullProgress:
        by_range = self.blocks_by_range(order.table)
        inside: Container[int]
        inside = blocks_of(order.table, order.region) if order.ids is None else order.ids.spans
        chosen = inside if order.blocks is None else order.blocks
        wanted = {
            range_id: found
            for range_id, blocks in by_range.items()
            if (found := {block for block in blocks if block in inside and block in chosen})
        }
        counts = {range_id: len(blocks) for range_id, blocks in by_range.items()}
        return _PullProgress(order, wanted, counts)

    def blocks_by_range(self, table: Table) -> Mapping[RangeId, tuple[int, ...]]:
        return table.blocks_by_range(len(self.links.view.ranges))

    def links_of(self, table: Table) -> list[ServerLink]:
        ranges = self.links.view.ranges
        servers = {ranges[range_id].primary for range_id in self.blocks_by_range(table)}
        return [self.link(server) for server in servers]

    def link(self, server: NodeId | None) -> ServerLink:
        link = self.links.find(server)
        if link is None:
            raise Recovering(f"server {server} is not there" if server else "a range has no server")
        return link

    async def _ask(
        self,
        progress: _PullProgress,
        view: ClusterView,
        server: NodeId | None,
        ranges: list[RangeId],
    ) -> list[PushpullError]:
        order = progress.order
        left_s = max(order.deadline_s - now_s(), 0.001)
        wait_s = max(min(left_s, order.attempt_end_s - now_s(), ATTEMPT_S), 0.001)
        request = _request(progress, view, ranges, wait_s)
        errors: list[PushpullError] = []
        try:
            link = self.link(server)
            row_bytes = _row_bytes(order, ranges, progress.wanted)
            asked = _ServerRequest(progress, view, self._lane(link, progress, row_bytes))
            request.shared = asked.lane is not None
            is_small = request.shared or order.raw.nbytes <= limits.STREAM_READ_BYTES

            def take(answer: Answer) -> None:
                for error in self._take(asked, answer):
                    if not _may_be_cured(order, error):
                        raise error  # the rest of the answer is for nothing
                    errors.append(error)

            async with asyncio.timeout(None) as patience:
                self._unanswered[patience] = server, ranges
                if asked.lane is not None and row_bytes:
                    asked.lane.row_bytes += row_bytes
                try:
                    await link.pull(request, left_s + _LAST_GRACE_S, take, is_small=is_small)
                    await self._end_copying(asked)
                finally:
                    if asked.copying:  # they write into `raw`
                        wait([copying for copying, _ in asked.copying])
                    self._unanswered.pop(patience, None)
                    if asked.lane is not None and row_bytes:
                        asked.lane.row_bytes -= row_bytes
            progress.torn_count += bool(asked.torn)
        except TimeoutError:
            errors.append(StaleAssignment(f"ranges of server {server} have moved during the pull"))
        except PushpullError as error:
            errors.append(self._naming(server, error))
        return errors

    def _naming(self, server: NodeId | None, error: PushpullError) -> PushpullError:
        """The error of a call; one that may end a wait names the server."""
        link = self.links.find(server)
        if link is None or not isinstance(error, Recovering | WaitExpired):
            return error
        words = link.trouble.words or f"server {server} at {link.node.address}: {error.message}"
        return type(error)(words, retry_after_ms=error.retry_after_ms, clock=error.clock)

    def _take(self, asked: _ServerRequest, answer: Answer) -> list[PushpullError]:
        progress = asked.progress
        if isinstance(answer, tuple):
            value, payload = answer
            range_id = progress.order.table.range_of_block(value.block, len(asked.view.ranges))
            length = self._expected(asked, range_id, value, payload.nbytes)
            if length:
                _write(progress.order, value.block, length, payload)
                self._arrived(asked, range_id, value, payload.nbytes)
                if value.presence:
                    progress.presence[value.block] = value.presence
                if asked.copied:
                    self._end_range(asked, range_id)
            return []
        if answer.HasField("unchanged"):
            self._take_unchanged(asked, answer.unchanged)
            return []
        if asked.lane is None or not answer.HasField("shared"):
            return [error_from_proto(answer.error.error)]
        self._copy(asked, asked.lane, answer.shared.values)
        return []

    def _take_unchanged(
        self, asked: _ServerRequest, unchanged: parameters_pb2.UnchangedBlocks
    ) -> None:
        """Blocks that the caller has. Beside values in shared memory they count with these, range
        by range.
        """
        order, held = asked.progress.order, asked.progress.order.held
        found: list[_Placed] = []
        for block in unchanged.blocks:
            range_id = order.table.range_of_block(block, len(asked.view.ranges))
            if not self._is_wanted(asked, range_id, block):
                continue
            assignment_epoch = asked.view.ranges[range_id].assignment_epoch
            value = None if held is None else held.find(block, assignment_epoch)
            if value is None:
                raise Internal(
                    f"block {block} of table '{order.table.spec.name}' came as unchanged; expected "
                    "its values, of which this pull holds none"
                )
            said = parameters_pb2.SharedValue(
                block=block,
                version=value.version,
                peer_version=value.peer_version,
                clock=unchanged.clock,
                edit_count=value.edit_count,
                byte_count=order.sent_codec.payload_bytes(order.length_of(block)),
            )
            found.append((range_id, said))
        if asked.lane is not None:
            self._count(asked, found, [True] * len(found))
            return
        for range_id, said in found:
            self._arrived(asked, range_id, said, said.byte_count)

    def _copy(
        self,
        asked: _ServerRequest,
        lane: SharedLane,
        values: Iterable[parameters_pb2.SharedValue],
    ) -> None:
        """Copy values out of shared memory; a range counts when all its values are copied."""
        progress = asked.progress
        found: list[_Placed] = []
        shared: list[Shared] = []
        for value in values:
            range_id = progress.order.table.range_of_block(value.block, len(asked.view.ranges))
            length = self._expected(asked, range_id, value, value.byte_count)
            if not length or range_id in asked.torn:
                continue
            place = lane.shared(value, *_target(progress.order, value.block, length))
            if place is None:
                asked.torn.add(range_id)
            else:
                found.append((range_id, value))
                shared.append(place)
        # Rows lie in a ring, which the server takes for free when the pull has ended.
        copying = self._copiers.begin(shared) if progress.order.ids is None else None
        if copying is None:
            self._count(asked, found, sequence_locks.copied(shared))
        else:
            asked.copying.append((copying, found))

    async def _end_copying(self, asked: _ServerRequest) -> None:
        """Wait for the copies that threads make, and count them."""
        while asked.copying:
            copying, found = asked.copying[0]
            counts = await asyncio.wrap_future(copying)
            asked.copying.popleft()
            self._count(asked, found, counts)

    def _count(self, asked: _ServerRequest, values: Iterable[_Placed], counts: list[bool]) -> None:
        """Values were copied: those of whole ranges have arrived, if each copy counts."""
        for (range_id, value), count in zip(values, counts, strict=True):
            if not count or range_id in asked.torn:
                asked.torn.add(range_id)
                continue
            asked.copied.setdefault(range_id, {})[value.block] = value
            self._end_range(asked, range_id)

    def _end_range(self, asked: _ServerRequest, range_id: RangeId) -> None:
        """The copied values of a range have arrived, if nothing else of it is wanted."""
        copied = asked.copied.get(range_id)
        if copied and len(copied) == len(asked.progress.wanted.get(range_id, ())):
            del asked.copied[range_id]
            for each in copied.values():
                self._arrived(asked, range_id, each, each.byte_count)

    @staticmethod
    def _lane(link: ServerLink, progress: _PullProgress, row_bytes: int) -> SharedLane | None:
        """The lane to copy from; None if the server cannot share these values as they are."""
        order = progress.order
        spec = order.table.spec
        if order.consistent or order.array or progress.torn_count >= _MAX_TORN_COUNT:
            return None
        if order.encoding is not None:
            return None
        if order.ids is not None:
            has_space = link.lane is not None and link.lane.has_row_space(row_bytes)
            return link.lane if has_space else None
        is_shareable = spec.optimizer.kind is not OptimizerKind.AGGREGATE and spec.dtype in (
            DType.FLOAT32,
            DType.FLOAT64,
        )
        return link.lane if is_shareable else None

    def _expected(
        self, asked: _ServerRequest, range_id: RangeId, value: _Value, byte_count: int
    ) -> int:
        """The element count of a wanted block, if it is as requested; 0 if it came twice."""
        if not self._is_wanted(asked, range_id, value.block):
            return 0
        order = asked.progress.order
        codec = order.sent_codec
        length = order.length_of(value.block)
        expected_bytes = codec.payload_bytes(length)
        if value.codec != wire.codec_to_proto(codec) or byte_count != expected_bytes:
            raise Internal(
                f"block {value.block} of table '{order.table.spec.name}' came as {byte_count} "
                f"bytes of codec {value.codec}; expected {length} elements of {codec.value}"
            )
        return length

    def _is_wanted(self, asked: _ServerRequest, range_id: RangeId, block: int) -> bool:
        """False if a block came twice, by an earlier attempt that was thought lost."""
        if block not in asked.progress.wanted.get(range_id, ()):
            return False
        newest = self.links.view.ranges[range_id]
        if newest.assignment_epoch != asked.view.ranges[range_id].assignment_epoch:
            raise StaleAssignment(f"range {range_id} has moved during the pull")
        return True

    def _arrived(
        self, asked: _ServerRequest, range_id: RangeId, value: _Value, byte_count: int
    ) -> None:
        progress, order = asked.progress, asked.progress.order
        wanted = progress.wanted[range_id]
        wanted.discard(value.block)
        if not wanted:
            del progress.wanted[range_id]
        if order.held is None or order.held.take(
            value.block,
            HeldValue(
                asked.view.ranges[range_id].assignment_epoch,
                value.edit_count,
                value.version,
                value.peer_version,
            ),
        ):
            self._counters.pulled_bytes += byte_count
            MEASURES.pulled_bytes.inc(byte_count)
        else:
            self._counters.unchanged_bytes += byte_count
            MEASURES.unchanged_bytes.inc(byte_count)
        progress.versions[value.block] = value.version
        if not progress.order.array:  # optimizer state: the worker has not seen these values
            progress.order.steps.peer_versions[value.block] = value.peer_version
        if progress.lowest_clock is None or value.clock < progress.lowest_clock:
            progress.lowest_clock = value.clock


def _by_server(
    view: ClusterView, ranges: Iterable[RangeId]
) -> Mapping[NodeId | None, list[RangeId]]:
    """The ranges of each server; ValuesLost if those of one are lost."""
    found: dict[NodeId | None, list[RangeId]] = {}
    for range_id in ranges:
        if view.ranges[range_id].is_lost:
            raise ValuesLost(view.lost_words)
        found.setdefault(view.ranges[range_id].primary, []).append(range_id)
    return found


async def _all(
    pull: Callable[[Sequence[RangeId]], Coroutine[Any, Any, None]],
    shares: Sequence[Sequence[RangeId]],
) -> None:
    """Pull these shares of ranges at once; the first failure ends the others."""
    ends = await ended_together(pull, shares)
    failures = [end for end in ends if isinstance(end, Exception)]
    if failures:
        raise min(failures, key=lambda failure: isinstance(failure, WaitExpired))


def _may_be_cured(order: PullOrder, error: PushpullError) -> bool:
    """True if the same request may succeed later. A cut is no longer held after these errors."""
    if order.cut and isinstance(error, WaitExpired | StaleAssignment | NotOwner):
        return False
    return is_curable(error)


def _row_bytes(
    order: PullOrder, ranges: Iterable[RangeId], wanted: Mapping[RangeId, Iterable[int]]
) -> int:
    """The bytes of all rows that are wanted of these ranges; 0 if it is no pull of rows."""
    if order.ids is None:
        return 0
    count = sum(order.length_of(block) for range_id in ranges for block in wanted[range_id])
    return count * order.codec.element_bytes


def _target(order: PullOrder, block: int, length: int) -> tuple[Raw, int]:
    """The memory of a block, which is about to be written, and the number of its first bytes that
    are outside the region.
    """
    if order.held is not None:
        order.held.drop(block)
    width = order.codec.element_bytes
    if order.ids is not None:
        begin = order.ids.spans[block][0] * order.table.spec.element_count * width
        return order.raw[begin : begin + length * width], 0
    start = block * order.table.spec.block_elements
    low = max(order.region.begin, start)
    high = min(order.region.end, start + length)
    offset = (low - order.region.begin) * width
    return order.raw[offset : offset + (high - low) * width], (low - start) * width


def _write(order: PullOrder, block: int, length: int, payload: memoryview) -> None:
    """Write the elements of a block to its place in the caller's memory, as far as it has one."""
    target, skip_bytes = _target(order, block, length)
    whole_bytes = length * order.codec.element_bytes
    if order.encoding is not None:
        if target.nbytes == whole_bytes:
            decode_into(payload, order.encoding, target, order.codec)
            return
        whole = np.empty(whole_bytes, np.uint8)
        decode_into(payload, order.encoding, whole, order.codec)
        payload = whole.data
    np.copyto(target, np.frombuffer(payload, np.uint8, target.nbytes, skip_bytes))


def _request(
    progress: _PullProgress, view: ClusterView, ranges: list[RangeId], wait_s: float
) -> parameters_pb2.PullRequest:
    """A request for the wanted blocks of `ranges`; those not `named_by_block` are asked whole."""
    table = progress.order.table
    request = parameters_pb2.PullRequest(
        table_id=table.table_id,
        clock=progress.order.clock,
        deadline_ms=max(int(wait_s * 1000), 1),
        codec=wire.codec_to_proto(progress.order.sent_codec),
        consistent=progress.order.consistent,
        cut=progress.order.cut,
        array=progress.order.array,
    )
    named = named_by_block(
        {range_id: len(progress.wanted[range_id]) for range_id in ranges}, progress.whole_counts
    )
    pulled = progress.order.ids
    claim_count = sum(len(progress.wanted[range_id]) for range_id in named)
    for range_id in ranges:
        is_named = range_id in named or pulled is not None
        blocks = sorted(progress.wanted[range_id]) if is_named else []
        part = request.ranges.add(
            range_id=range_id,
            assignment_epoch=view.ranges[range_id].assignment_epoch,
            blocks=blocks,
            ids=None if pulled is None else [pulled.bytes_of(block) for block in blocks],
        )
        if progress.order.held is not None:
            asked_blocks = blocks or table.blocks_by_range(len(view.ranges))[range_id]
            claim_count += len(asked_blocks)
            if claim_count <= limits.MAX_NAMED_BLOCK_COUNT:
                _claim(part, progress.order.held, asked_blocks)
    return request


def _claim(part: parameters_pb2.RangePull, held: HeldValues, blocks: Sequence[int]) -> None:
    """Say which values the caller has of a range's blocks."""
    edit_count, versions = held.claims(blocks, AssignmentEpoch(part.assignment_epoch))
    if any(version is not None for version in versions):
        part.held_edit_count = edit_count
        part.held_versions.extend(0 if version is None else version + 1 for version in versions)


def named_by_block(
    counts: Mapping[RangeId, int], whole_counts: Mapping[RangeId, int]
) -> set[RangeId]:
    """The ranges whose blocks a request names one by one: those of which not all are wanted, the
    fewest first, up to MAX_NAMED_BLOCK_COUNT.
    """
    left_count = limits.MAX_NAMED_BLOCK_COUNT
    named: set[RangeId] = set()
    for range_id, count in sorted(counts.items(), key=itemgetter(1)):
        if count != whole_counts.get(range_id) and count <= left_count:
            named.add(range_id)
            left_count -= count
    return named


class Moment(NamedTuple):
    """The moment of a consistent pull: a clock, the end of the attempt at it, and the cut that
    holds it, or 0.
    """

    clock: int
    attempt_end_s: float = math.inf
    cut: int = 0


class ConsistentPuller:
    """The consistent pulls of one reader."""

    def __init__(self, puller: Puller) -> None:
        self._puller = puller

    async def pull(self, order: PullOrder) -> Pulled:
        mode = self._newest(order).consistency.mode
        if mode is Mode.BSP:
            with suppress(InvalidConfig):  # another setting holds at the clock
                return await self._pull_ahead(order)
        if mode is Mode.ASP:
            pulled = await self._pull_as_it_is(order)
            if self._newest(order).is_asp(pulled.clock):
                return pulled
        pulled_by_cut = await self._pull_by_cut(order)
        return await self._pull_as_it_is(order) if pulled_by_cut is None else pulled_by_cut

    def _newest(self, order: PullOrder) -> Table:
        return self._puller.links.view.table(order.table.table_id)

    async def _pull_as_it_is(self, order: PullOrder) -> Pulled:
        return await self._puller.pull(replace(order, consistent=False))

    async def _pull_ahead(self, order: PullOrder) -> Pulled:
        margin = 0
        clock = await self._newest_clock(order)
        while True:
            attempt_end_s = now_s() + ATTEMPT_S
            try:
                return await self._puller.pull_at(
                    replace(order, clock=clock, attempt_end_s=attempt_end_s)
                )
            except AlreadyPast as past:
                margin = max(1, 2 * margin)
                clock = past.clock + margin
                if now_s() >= order.deadline_s:
                    raise WaitExpired(
                        f"no clock of table '{order.table.spec.name}' could be pulled before the "
                        f"servers had passed it: {past.message}"
                    ) from past
            except WaitExpired:
                if now_s() >= order.deadline_s:
                    raise
                margin = 0
                clock = await self._newest_clock(order)

    async def _newest_clock(self, order: PullOrder) -> int:
        backoff = Backoff()
        while True:
            try:
                links = self._puller.links_of(order.table)
                found = await asyncio.gather(
                    *(link.range_stats(order.table.table_id) for link in links)
                )
                return max((stats.clock for answer in found for stats in answer.ranges), default=0)
            except PushpullError as error:
                if not is_curable(error):
                    raise
                await self._puller.pause(order, backoff, error)

    async def _pull_by_cut(self, order: PullOrder) -> Pulled | None:
        """Cut until a pull succeeds; None if the table is ASP at the clock that it has reached."""
        backoff = Backoff()
        while True:
            try:
                return await self._pull_by_one_cut(order)
            except PushpullError as error:  # a server or a worker took too long
                if not (is_curable(error) or isinstance(error, AlreadyPast)):
                    raise
                await self._puller.pause(order, backoff, WaitExpired(error.message))

    async def _pull_by_one_cut(self, order: PullOrder) -> Pulled | None:
        lasts_s = min(limits.DEFAULT_CUT_S, max(order.deadline_s - now_s(), 0.001))
        cut = new_cut()
        try:
            clocks = await self.begin_cut(cut, [order.table], lasts_s)
            (clock,) = clocks.values()
            if self._newest(order).is_asp(clock):
                return None
            end_s = now_s() + lasts_s
            at = replace(order, clock=clock, cut=cut, attempt_end_s=end_s)
            return await self._puller.pull_at(at)
        finally:
            await self.end_cut(cut, [order.table])

    async def begin_cut(
        self, cut: int, tables: Sequence[Table], lasts_s: float
    ) -> dict[TableId, int]:
        """Suspend updates of tables beyond their clocks, `lasts_s` at most; gives the lowest clock
        to pull of each. If a server is not reached, the others keep the cut until `end_cut`.
        """
        asked = [(each.table_id, link) for each in tables for link in self._puller.links_of(each)]
        found = await asyncio.gather(
            *(link.begin_cut(table_id, cut, lasts_s) for table_id, link in asked)
        )
        clocks: dict[TableId, int] = {}
        for (table_id, _), clock in zip(asked, found, strict=True):
            clocks[table_id] = max(clock, clocks.get(table_id, 0))
        return clocks

    async def end_cut(self, cut: int, tables: Sequence[Table]) -> None:
        """End a cut on all servers. Never raises, because servers end it by themselves soon."""

        async def end(table: Table) -> None:
            try:
                links = self._puller.links_of(table)
                await asyncio.gather(*(link.end_cut(table.table_id, cut) for link in links))
            except PushpullError as error:
                logs.debug("cut_not_ended", table=table.spec.name, error=error.message)

        await asyncio.gather(*map(end, tables))


def new_cut() -> int:
    """A random number for a cut, unique in the session."""
    return int.from_bytes(os.urandom(7), "big") + 1
