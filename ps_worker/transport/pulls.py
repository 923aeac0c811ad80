"""Pulls: one stream per server, blocks copied straight to where the caller wants them.

Rules:
    - What fails in a way that a later attempt may cure (another primary, a server that restarts, a
      wait that expired) is asked for again, until the read's own deadline.
    - A block of an older epoch than the view's is dropped and asked for again (S5).
    - Values that are read where they lie count range by range: all of a range, as they were when it
      was answered. If one of them has changed since, the range is asked for again, a few times so,
      then as bytes. A consistent read takes bytes at once: what it asks for may be past before it
      is copied.

Everything belongs to the background loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ps_core import limits
from ps_core.cluster_view import ClusterView
from ps_core.errors import (
    Internal,
    PushpullError,
    Recovering,
    StaleAssignment,
    ValuesLost,
    WaitExpired,
)
from ps_core.keys import NodeId, RangeId
from ps_core.tables import NATIVE_CODEC, Codec, DType, OptimizerKind, Table
from ps_runtime.cluster import wire
from ps_runtime.grpc.errors import error_from_proto
from ps_runtime.grpc.retry import Backoff, is_curable
from ps_runtime.system.clock import now_s
from ps_worker.spec.values import Raw, Region, blocks_of
from ps_worker.steps.counters import Counters
from ps_worker.steps.steps import Pulled, TableSteps
from ps_worker.transport.lane import SharedLane
from ps_worker.transport.links import Answer, ServerLink, ServerLinks
from ps_worker.transport.metrics import MEASURES
from pushpull.v1 import parameters_pb2

ATTEMPT_S = 10.0
"""How long one request waits at a server; then it says whom it waits for, and is sent again."""

_CALL_GRACE_S = 5.0
"""How much longer than its request's deadline a call may take: a paused server is noticed so."""

_LAST_GRACE_S = 1.0
"""How much longer than the caller's own deadline: time for the answer that says who is missing."""

_MAX_TORN_COUNT = 3
"""Answers whose values changed while they were copied; then a read goes on with bytes."""


_Value = parameters_pb2.BlockValue | parameters_pb2.SharedValue


@dataclass(frozen=True, slots=True, eq=False)
class ReadOrder:
    """A read as the caller gives it; `deadline_s` is a moment of `ps_runtime.system.clock`."""

    table: Table
    region: Region
    raw: Raw
    clock: int
    consistent: bool
    is_reader: bool
    deadline_s: float
    steps: TableSteps
    cut: int = 0
    """Its reader's number of the cut that it ends; 0: none."""
    array: str = ""
    """Of optimizer state, that is read; empty: the values."""

    @property
    def codec(self) -> Codec:
        """What the elements come as."""
        spec = self.table.spec
        return spec.arithmetic_codec if self.array else NATIVE_CODEC[spec.dtype]


@dataclass(slots=True, eq=False)
class _Reading:
    """A read on its way: what is still wanted, and what came."""

    order: ReadOrder
    clock: int
    deadline_s: float
    wanted: dict[RangeId, set[int]]
    whole_counts: dict[RangeId, int]
    versions: dict[int, int] = field(default_factory=dict)
    presence: dict[int, bytes] = field(default_factory=dict)
    lowest_clock: int | None = None
    torn_count: int = 0

    def pulled(self) -> Pulled:
        return Pulled(self.lowest_clock or 0, self.versions, self.presence)


@dataclass(slots=True, eq=False)
class _Asking:
    """One request to one server, and the values copied from its memory, range by range."""

    reading: _Reading
    view: ClusterView
    lane: SharedLane | None
    copied: dict[RangeId, dict[int, parameters_pb2.SharedValue]] = field(default_factory=dict)
    torn: set[RangeId] = field(default_factory=set)


class Puller:
    """The reads of one client."""

    def __init__(
        self, links: ServerLinks, counters: Counters, view: Callable[[], ClusterView]
    ) -> None:
        self._links = links
        self._counters = counters
        self._view = view
        self._asked: dict[asyncio.Timeout, tuple[NodeId | None, list[RangeId]]] = {}

    def take_view(self, view: ClusterView) -> None:
        """A newer view came: who waits for a server that ranges have moved from asks another one.
        A server that is paused or cut off says nothing, not even that it has gone.
        """
        for patience, (server, ranges) in list(self._asked.items()):
            if any(view.ranges[range_id].primary != server for range_id in ranges):
                del self._asked[patience]
                patience.reschedule(asyncio.get_running_loop().time())

    @property
    def asked(self) -> list[NodeId]:
        """The servers that have been asked and have not answered. Any thread."""
        return sorted({server for server, _ in list(self._asked.values()) if server is not None})

    async def read(self, order: ReadOrder) -> Pulled:
        """Read what `order` says into its memory.

        Raises:
            WaitExpired: not in time; the message says whom it waits for.
            PushpullError: a server refused for good.
        """
        began_s = now_s()
        try:
            return await self.read_at(order, order.clock, order.deadline_s)
        finally:
            self._counters.waits.pop(order, None)
            MEASURES.pull_duration_seconds.observe(now_s() - began_s)

    # --- reads

    async def read_at(self, order: ReadOrder, clock: int, deadline_s: float) -> Pulled:
        """Read at a clock, until a deadline; raises as `read`."""
        reading = self._begin(order, clock, deadline_s)
        backoff = Backoff()
        while True:
            torn_count = reading.torn_count
            errors = await self._ask_all(reading)
            if not reading.wanted:
                return reading.pulled()
            for error in errors:
                if not is_curable(error):
                    raise error
            if not errors and reading.torn_count > torn_count:
                continue  # there is nothing to wait for
            error = errors[0] if errors else Recovering("a server ended its answer early")
            self._counters.waits[order] = error.message
            await self.pause(order, backoff, error, deadline_s)

    async def pause(
        self,
        order: ReadOrder,
        backoff: Backoff,
        error: PushpullError,
        deadline_s: float | None = None,
    ) -> None:
        """Wait before the next attempt; raise if there is no time for one."""
        wait_s = backoff.next_s(error)
        if now_s() + wait_s < (order.deadline_s if deadline_s is None else deadline_s):
            await asyncio.sleep(wait_s)
            return
        if isinstance(error, WaitExpired):
            raise error
        name = order.table.spec.name
        raise WaitExpired(f"a pull of table '{name}' took too long: {error.message}") from error

    def _begin(self, order: ReadOrder, clock: int, deadline_s: float) -> _Reading:
        by_range = self.blocks_by_range(order.table)
        inside = blocks_of(order.table, order.region)
        wanted = {
            range_id: found
            for range_id, blocks in by_range.items()
            if (found := {block for block in blocks if block in inside})
        }
        counts = {range_id: len(blocks) for range_id, blocks in by_range.items()}
        return _Reading(order, clock, deadline_s, wanted, counts)

    def blocks_by_range(self, table: Table) -> Mapping[RangeId, tuple[int, ...]]:
        """The table's blocks by range."""
        return table.blocks_by_range(len(self._view().ranges))

    def links_of(self, table: Table) -> list[ServerLink]:
        """The servers that have a part of the table.

        Raises:
            Recovering: one is not there at present.
        """
        ranges = self._view().ranges
        servers = {ranges[range_id].primary for range_id in self.blocks_by_range(table)}
        return [self.link(server) for server in servers]

    def link(self, server: NodeId | None) -> ServerLink:
        """The link to a server.

        Raises:
            Recovering: there is none at present.
        """
        link = self._links.find(server)
        if link is None:
            raise Recovering(f"server {server} is not there" if server else "a range has no server")
        return link

    async def _ask_all(self, reading: _Reading) -> list[PushpullError]:
        """Ask every server for what is wanted of it; the errors, those that no retry cures first.

        When this returns, nothing writes to the caller's memory any more.
        """
        view = self._view()
        if any(view.ranges[range_id].is_lost for range_id in reading.wanted):
            return [ValuesLost(view.lost_words)]
        by_server: dict[NodeId | None, list[RangeId]] = {}
        for range_id in sorted(reading.wanted):
            by_server.setdefault(view.ranges[range_id].primary, []).append(range_id)
        if len(by_server) == 1:  # the common case of a small table, without a task
            ((server, ranges),) = by_server.items()
            return await self._ask(reading, view, server, ranges)
        pending = {
            asyncio.create_task(self._ask(reading, view, server, ranges))
            for server, ranges in by_server.items()
        }
        errors: list[PushpullError] = []
        try:
            while pending and all(is_curable(error) for error in errors):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    errors += task.result()
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        return sorted(errors, key=is_curable)

    async def _ask(
        self,
        reading: _Reading,
        view: ClusterView,
        server: NodeId | None,
        ranges: list[RangeId],
    ) -> list[PushpullError]:
        """Ask one server; the errors of the ranges that it could not read, or of the call."""
        left_s = max(reading.deadline_s - now_s(), 0.001)
        wait_s = min(left_s, ATTEMPT_S)
        call_s = min(wait_s + _CALL_GRACE_S, left_s + _LAST_GRACE_S)
        request = _request(reading, view, ranges, wait_s)
        errors: list[PushpullError] = []
        try:
            link = self.link(server)
            asking = _Asking(reading, view, self._lane(link, reading))
            request.shared = asking.lane is not None
            is_small = request.shared or reading.order.raw.nbytes <= limits.STREAM_READ_BYTES

            def take(answer: Answer) -> None:
                errors.extend(self._take(asking, answer))

            async with asyncio.timeout(None) as patience:
                self._asked[patience] = server, ranges
                try:
                    await link.pull(request, call_s, take, is_small=is_small)
                finally:
                    self._asked.pop(patience, None)
            reading.torn_count += bool(asking.torn)
        except TimeoutError:
            errors.append(
                StaleAssignment(f"ranges of server {server} have moved while it was read")
            )
        except PushpullError as error:
            errors.append(self._by_name(server, error))
        return errors

    def _by_name(self, server: NodeId | None, error: PushpullError) -> PushpullError:
        """What a wait may end with, with a word of which server the call was for."""
        link = self._links.find(server)
        if link is None or not isinstance(error, Recovering | WaitExpired):
            return error
        words = link.trouble or f"server {server} at {link.node.address}: {error.message}"
        return type(error)(words, retry_after_ms=error.retry_after_ms, clock=error.clock)

    def _take(self, asking: _Asking, answer: Answer) -> list[PushpullError]:
        """Copy what came to its place; what could not be had is an error."""
        reading, view = asking.reading, asking.view
        if isinstance(answer, tuple):
            value, payload = answer
            length = self._expected(reading, view, value, payload.nbytes)
            if length:
                target, skip_bytes = _target(reading.order, value.block, length)
                source = np.frombuffer(payload, np.uint8, target.nbytes, skip_bytes)
                np.copyto(target, source)
                self._note(reading, value)
                if value.presence:
                    reading.presence[value.block] = value.presence
            return []
        if asking.lane is None or not answer.HasField("shared"):
            return [error_from_proto(answer.error.error)]
        for lent in answer.shared.values:
            self._copy(asking, asking.lane, lent)
        return []

    def _copy(self, asking: _Asking, lane: SharedLane, value: parameters_pb2.SharedValue) -> None:
        """Copy a value from where it lies; its range counts when it is whole."""
        reading = asking.reading
        range_id = reading.order.table.range_of_block(value.block, len(asking.view.ranges))
        length = self._expected(reading, asking.view, value, value.byte_count)
        if not length or range_id in asking.torn:
            return
        target, skip_bytes = _target(reading.order, value.block, length)
        if not lane.copy(value, target, skip_bytes):
            asking.torn.add(range_id)
            return
        copied = asking.copied.setdefault(range_id, {})
        copied[value.block] = value
        if len(copied) < len(reading.wanted[range_id]):
            return
        for part in copied.values():
            self._note(reading, part)

    @staticmethod
    def _lane(link: ServerLink, reading: _Reading) -> SharedLane | None:
        """Where values may be read; None for tables that are not lent as they are here."""
        spec = reading.order.table.spec
        order = reading.order
        if order.consistent or order.array or reading.torn_count >= _MAX_TORN_COUNT:
            return None
        may_be_lent = spec.optimizer.kind is not OptimizerKind.AGGREGATE and spec.dtype in (
            DType.FLOAT32,
            DType.FLOAT64,
        )
        return link.lane if may_be_lent else None

    def _expected(
        self, reading: _Reading, view: ClusterView, value: _Value, byte_count: int
    ) -> int:
        """The elements of a block that came as it should; 0 if it came twice.

        Raises:
            StaleAssignment: its range has moved since it was asked for.
            Internal: it is not what was asked for.
        """
        table = reading.order.table
        range_id = table.range_of_block(value.block, len(view.ranges))
        if value.block not in reading.wanted.get(range_id, ()):
            return 0  # came twice, over an attempt that was thought lost
        if self._view().ranges[range_id].assignment_epoch != view.ranges[range_id].assignment_epoch:
            raise StaleAssignment(f"range {range_id} has moved while it was read")
        codec = reading.order.codec
        length = table.block_length(value.block)
        if value.codec != wire.codec_to_proto(codec) or byte_count != length * codec.element_bytes:
            raise Internal(
                f"block {value.block} of table '{table.spec.name}' came as {byte_count} bytes of "
                f"codec {value.codec}; expected {length} elements of {codec.value}"
            )
        return length

    def _note(self, reading: _Reading, value: _Value) -> None:
        """The block is in its place."""
        table = reading.order.table
        range_id = table.range_of_block(value.block, len(self._view().ranges))
        wanted = reading.wanted[range_id]
        wanted.discard(value.block)
        if not wanted:
            del reading.wanted[range_id]
        byte_count = table.block_length(value.block) * reading.order.codec.element_bytes
        self._counters.pulled_bytes += byte_count
        MEASURES.pulled_bytes.inc(byte_count)
        reading.versions[value.block] = value.version
        if not reading.order.array:  # else it has not seen the values that were there then
            reading.order.steps.saw(value.block, value.peer_version)
        if reading.lowest_clock is None or value.clock < reading.lowest_clock:
            reading.lowest_clock = value.clock


def _target(order: ReadOrder, block: int, length: int) -> tuple[Raw, int]:
    """Where a block's bytes go, and how many of its first bytes do not."""
    width = order.codec.element_bytes
    start = block * order.table.spec.block_elements
    low = max(order.region.begin, start)
    high = min(order.region.end, start + length)
    offset = (low - order.region.begin) * width
    return order.raw[offset : offset + (high - low) * width], (low - start) * width


def _request(
    reading: _Reading, view: ClusterView, ranges: list[RangeId], wait_s: float
) -> parameters_pb2.PullRequest:
    """What is still wanted of `ranges`; one that is wanted whole is named without its blocks, and
    so are those with the most, where the others have too many to name.
    """
    table = reading.order.table
    request = parameters_pb2.PullRequest(
        table_id=table.table_id,
        clock=reading.clock,
        deadline_ms=max(int(wait_s * 1000), 1),
        codec=wire.codec_to_proto(reading.order.codec),
        consistent=reading.order.consistent,
        cut=reading.order.cut,
        array=reading.order.array,
    )
    named = named_by_block(
        {range_id: len(reading.wanted[range_id]) for range_id in ranges}, reading.whole_counts
    )
    for range_id in ranges:
        request.ranges.add(
            range_id=range_id,
            assignment_epoch=view.ranges[range_id].assignment_epoch,
            blocks=sorted(reading.wanted[range_id]) if range_id in named else [],
        )
    return request


def named_by_block(
    counts: Mapping[RangeId, int], whole_counts: Mapping[RangeId, int]
) -> set[RangeId]:
    """The ranges whose blocks a request names one by one: those of which not all are wanted, the
    fewest first, as many as it has room for.

    Args:
        counts: blocks that are wanted, by range.
        whole_counts: blocks that there are.
    """
    room = limits.MAX_NAMED_BLOCK_COUNT
    named: set[RangeId] = set()
    for range_id, count in sorted(counts.items(), key=lambda item: item[1]):
        if count != whole_counts.get(range_id) and count <= room:
            named.add(range_id)
            room -= count
    return named
