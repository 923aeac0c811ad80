"""Links to the servers: a channel each, a session, and for workers one long-lived push stream.

Only the background loop calls this. A broken link comes back by itself, with full jitter; the push
window sends its entries again.

Rules:
    - A process that answers at a server's address is that server only once its OpenSession says so
      (`ps_runtime.cluster.node_identity`); until then the address is dead, whatever the answer.
    - A server's refusal that would end this client counts only after a new proof of its identity.
    - Pulls beyond those that a server takes at once wait here for a free one, in their order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ps_core.cluster_view import ClusterView, Node, NodeState, Role
from ps_core.envelope import split
from ps_core.errors import Internal, InvalidConfig, PushpullError, Recovering, WaitExpired
from ps_core.keys import NodeId
from ps_core.tables.table import Table
from ps_runtime.cluster.node_identity import AddressTaken, as_of_unknown, check_answers
from ps_runtime.grpc.channels import aio_channel
from ps_runtime.grpc.errors import from_rpc_error
from ps_runtime.grpc.retry import Backoff, is_curable, is_retryable
from ps_runtime.http2.channel import StreamChannel
from ps_runtime.http2.stream_port import GrpcioCall, ServerCall, StreamPort
from ps_runtime.observe import logs
from ps_runtime.system.clock import now_s
from ps_worker.transport.lane import SharedLane
from ps_worker.transport.metrics import MEASURES
from ps_worker.transport.push_pull_stream import PushPullStream, StreamEntry
from pushpull.v1 import parameters_pb2, parameters_pb2_grpc, types_pb2

Answer = tuple[parameters_pb2.BlockValue, memoryview] | parameters_pb2.PullResponse
"""A message of a pull's answer: a block without its payload and the payload, or any other."""

SESSION_DEADLINE_S = 10.0
STATS_DEADLINE_S = 5.0
SILENCE_S = 5.0
"""A call in which nothing comes for so much longer than its request may wait is given up: its
server may be paused."""
PULL_CALL_COUNT = 96
"""Calls of pulls that are open at once: a server takes 100 on a connection. The push stream is one
more."""
MAX_INTERNAL_COUNT = 5
"""A server that fails so often in a row, without an answer between, has failed for good."""

ResponseT = TypeVar("ResponseT")

_SERVICE = "/pushpull.v1.ParameterService/"
_GREETING_S = 5.0
"""A stream port must answer within this, once the gRPC port has answered."""

_PASSING = (ConnectionResetError, BrokenPipeError, BlockingIOError, WaitExpired)
"""Failures of a server's Unix socket that pass: the server ends, or has not accepted others yet."""

_BLOCK_FIELD = parameters_pb2.PullResponse.BLOCK_FIELD_NUMBER
_PAYLOAD_FIELD = parameters_pb2.BlockValue.PAYLOAD_FIELD_NUMBER


class StreamListener(Protocol):
    """The listener of push streams; called on the loop."""

    def stream_opened(self, server: NodeId) -> None: ...

    def stream_closed(self, server: NodeId) -> None: ...

    def replies(self, server: NodeId, response: parameters_pb2.PushResponse) -> None: ...


@dataclass(frozen=True, slots=True)
class LinkSetting:
    """The settings of all links; the loop calls `refused` when a server has refused for good.
    `is_stopped_here`: True once this process stops the cluster; then no link warns of its end.
    """

    identity: types_pb2.SessionIdentity
    lane: str
    refused: Callable[[PushpullError], None]
    is_stopped_here: Callable[[], bool] = lambda: False
    silence_s: float = SILENCE_S


class ServerCalls:
    """The calls to one server, by its stream port if that serves, else by its gRPC port."""

    def __init__(self, node: Node, channel: grpc.aio.Channel) -> None:
        self._stream_port = StreamPort(node)
        self._streams: StreamChannel | None = None
        self._port = 0
        self._using = asyncio.Lock()  # sessions that are opened at once share a connection
        self._is_closed = False
        # No serializers: the outbox writes messages around payloads, and pulls copy none.
        self._push_pull: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            f"{_SERVICE}PushPull", request_serializer=None, response_deserializer=None
        )
        self._pull: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
            f"{_SERVICE}Pull", request_serializer=None, response_deserializer=None
        )

    async def use_port(
        self,
        request: parameters_pb2.OpenSessionRequest,
        response: parameters_pb2.OpenSessionResponse,
        deadline_s: float,
    ) -> None:
        """Use the stream port in the response to an OpenSession, if it can be reached."""
        async with self._using:
            port = response.stream_port
            if self._streams is not None and self._streams.is_open and port == self._port:
                return
            self._drop_streams()
            if port and not self._is_closed:
                self._port = port
                await self._connect(request, response, deadline_s)

    async def _connect(
        self,
        request: parameters_pb2.OpenSessionRequest,
        response: parameters_pb2.OpenSessionResponse,
        deadline_s: float,
    ) -> None:
        port = response.stream_port
        streams = await self._stream_port.connect(port, deadline_s)
        if streams is None:
            return
        try:
            raw = await streams.unary(
                f"{_SERVICE}OpenSession", request.SerializeToString(), min(deadline_s, _GREETING_S)
            )
            there = parameters_pb2.OpenSessionResponse.FromString(cast(bytes, raw))
        except grpc.RpcError as error:
            details = cast(grpc.Call, error).details()
            self._stream_port.refuse(f"OpenSession failed there: {details}")
        except DecodeError:
            self._stream_port.refuse("the process that answers there is not a server")
        else:
            named = (there.cluster_id, there.node_id, there.incarnation)
            if named != (response.cluster_id, response.node_id, response.incarnation):
                self._stream_port.refuse(f"server {there.node_id} answers there")
            elif not self._is_closed:
                self._streams = streams
                self._stream_port.confirm()
        finally:  # also if this client is closed meanwhile
            if self._streams is not streams:
                streams.close()

    def push_pull(self) -> ServerCall:
        if self._streams is not None and self._streams.is_open:
            return self._streams.call(f"{_SERVICE}PushPull")
        return GrpcioCall(self._push_pull())

    async def pull(self, request: parameters_pb2.PullRequest, timeout_s: float) -> ServerCall:
        raw = request.SerializeToString()
        if self._streams is not None and self._streams.is_open:
            call = self._streams.call(f"{_SERVICE}Pull", timeout_s)
            try:
                await call.write((raw,))
            except BaseException:  # its caller does not have the call yet
                call.cancel()
                raise
            call.done_writing()
            return call
        return GrpcioCall(self._pull(raw, timeout=timeout_s))

    def close(self) -> None:
        """End the connection, and one that is being made."""
        self._is_closed = True
        self._drop_streams()

    def _drop_streams(self) -> None:
        if self._streams is not None:
            self._streams.close()
            self._streams = None


class Trouble:
    """The reason why a server cannot be reached, and since when; logs each transition."""

    def __init__(self, node: Node, is_stopped_here: Callable[[], bool]) -> None:
        self._node = node
        self._is_stopped_here = is_stopped_here
        self._reason = ""
        self._since_s = 0.0
        self._is_taken = False

    @property
    def words(self) -> str:
        if not self._reason:
            return ""
        return (
            f"server {self._node.node_id} at {self._node.address} cannot be reached for "
            f"{self.lasted_s:.1f} s: {self._reason}"
        )

    @property
    def lasted_s(self) -> float:
        return now_s() - self._since_s if self._reason else 0.0

    def note(self, error: PushpullError) -> None:
        is_taken = isinstance(error, AddressTaken)
        if not self._reason:
            self._since_s = now_s()
            # Only a server that answers gives a time to retry: it is starting.
            answered = isinstance(error, Recovering) and error.retry_after_ms > 0
            event = "server_not_ready" if answered else "server_unreachable"
            self._log(event, error, is_odd=not answered)
        elif is_taken and not self._is_taken:
            self._log("server_address_taken", error, is_odd=True)
        self._is_taken = is_taken
        self._reason = error.message

    def answered(self) -> None:
        """End the trouble: a call was answered. Where another process had the address, a session
        alone proves that the server is back.
        """
        if not self._is_taken:
            self.end()

    def end(self) -> None:
        if self._reason:
            self._reason = ""
            self._is_taken = False
            logs.info("server_reached", server=self._node.node_id, address=self._node.address)

    def _log(self, event: str, error: PushpullError, *, is_odd: bool) -> None:
        log = logs.warning if is_odd and not self._is_stopped_here() else logs.info
        log(event, server=self._node.node_id, address=self._node.address, error=error.message)


class ServerLink:
    """The link to one server (one incarnation of it)."""

    def __init__(self, node: Node, setting: LinkSetting) -> None:
        self.node = node
        self.features: frozenset[str] = frozenset()  # that the server named in its last session
        self.lane_name = ""
        self._setting = setting
        self._channel = aio_channel(node.address)
        self._stub = parameters_pb2_grpc.ParameterServiceStub(self._channel)
        self._calls = ServerCalls(node, self._channel)
        self._view_number = 0
        self._stream: PushPullStream | None = None
        self._offer: parameters_pb2.SameHostOffer | None = None
        self._lane: SharedLane | None = None
        self._unheard_count = 0
        self._lane_lock = asyncio.Lock()
        self._pull_calls = asyncio.Semaphore(PULL_CALL_COUNT)
        self._task: asyncio.Task[None] | None = None
        self.trouble = Trouble(node, setting.is_stopped_here)

    def start_stream(self, view_number: int, listener: StreamListener) -> None:
        """Keep a push stream open from now on. Idempotent."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep_stream(view_number, listener))

    def send(self, entry: StreamEntry, payload: memoryview | None = None) -> None:
        """Write an entry to the push stream, after all earlier ones; lost if there is none, or it
        breaks. A block leaves out its payload.
        """
        if self._stream is not None:
            self._stream.put((entry, payload))

    @property
    def unwritten_count(self) -> int:
        """Entries and pulls that were sent and wait for the push stream to take them."""
        return self._stream.unwritten_count if self._stream is not None else 0

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._drop_lane()
        self._chose("", "closed")
        self._calls.close()
        await self._channel.close()

    # --- calls

    async def ensure_session(
        self, view_number: int, deadline_s: float, is_wanted: Callable[[ServerLink], bool]
    ) -> None:
        """Wait until the server knows this client and has reached `view_number`, and a reader with
        setting 'shm' has its lane; or until the server cannot be reached and is not wanted any
        more: it has left, or others have its ranges.
        """
        end_s = now_s() + deadline_s
        backoff = Backoff()
        while self._view_number < view_number or self._needs_lane:
            left_s = max(end_s - now_s(), 0.0)
            try:
                await self._open_session(view_number, min(left_s, SESSION_DEADLINE_S))
                self.trouble.end()
                if self._task is None:
                    await self._keep_lane()
                return
            except PushpullError as error:
                if not (is_retryable(error) or isinstance(error, WaitExpired)):
                    raise
                self.trouble.note(error)
                wait_s = backoff.next_s(error)
                if now_s() + wait_s >= end_s:
                    raise WaitExpired(self.trouble.words or error.message) from error
                await asyncio.sleep(wait_s)
                if not is_wanted(self):
                    return

    async def _open_session(self, view_number: int, deadline_s: float) -> None:
        request = parameters_pb2.OpenSessionRequest(
            session=self._setting.identity,
            view_number=view_number,
            deadline_ms=max(int(deadline_s * 1000), 1),
        )
        try:
            with _translated():
                response = await self._stub.OpenSession(request, timeout=deadline_s + 1.0)
        except PushpullError as error:
            raise as_of_unknown(error) from error
        named = (
            (response.cluster_id, response.node_id, response.incarnation)
            if response is not None  # None: the answer does not parse
            else ("", 0, 0)
        )
        check_answers(self.node, self._setting.identity.cluster_id, named)
        await self._calls.use_port(request, response, deadline_s)
        self.features = frozenset(response.features)
        self._offer = response.same_host if response.HasField("same_host") else None
        self._view_number = max(self._view_number, view_number)

    async def pull(
        self,
        request: parameters_pb2.PullRequest,
        timeout_s: float,
        take: Callable[[Answer], None],
        *,
        is_small: bool,
    ) -> None:
        """Pull, and give `take` each message of the answer when it comes. A small answer comes on
        the push stream, if there is one, because opening a stream costs more than such an answer.
        WaitExpired after `timeout_s`, or if the server is silent.
        """
        silence_s = request.deadline_ms / 1000 + self._setting.silence_s
        end_s = now_s() + timeout_s
        stream = self._stream if is_small else None
        free = self._pull_calls if stream is None else stream.free_pulls
        await _acquired(free, timeout_s)
        try:
            left_s = max(end_s - now_s(), 0.001)
            if stream is not None:
                left_s = min(left_s, silence_s)
                await stream.pull(request, left_s, lambda answer: take(_small_answer(answer)))
                self.trouble.answered()
                return
            request.session.CopyFrom(self._setting.identity)
            async with self._by_server():
                await self._call_pull(request, left_s, silence_s, take)
        except Recovering as error:
            if stream is None:
                self.trouble.note(error)
            raise
        finally:
            free.release()

    async def _call_pull(
        self,
        request: parameters_pb2.PullRequest,
        timeout_s: float,
        silence_s: float,
        take: Callable[[Answer], None],
    ) -> None:
        """Pull by a call of its own, which may last while its answer comes."""
        call: ServerCall | None = None
        now = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(silence_s) as silence:
                call = await self._calls.pull(request, timeout_s)
                async for raw in call:
                    found = split(raw, _BLOCK_FIELD, _PAYLOAD_FIELD)
                    if found is None:
                        take(parameters_pb2.PullResponse.FromString(cast(bytes, raw)))
                    else:
                        take((parameters_pb2.BlockValue.FromString(found[0]), found[1]))
                    if not silence.expired():
                        silence.reschedule(now() + silence_s)
        except TimeoutError:
            raise WaitExpired(f"nothing of an answer came for {silence_s:.1f} s") from None
        finally:
            if call is not None:
                call.cancel()

    async def range_stats(self, table_id: int) -> parameters_pb2.GetRangeStatsResponse:
        request = parameters_pb2.GetRangeStatsRequest(table_id=table_id)
        return await self._asked(self._stub.GetRangeStats, request)

    async def enter_collective(
        self, request: parameters_pb2.EnterCollectiveRequest, timeout_s: float
    ) -> parameters_pb2.EnterCollectiveResponse:
        return await self._asked(self._stub.EnterCollective, request, timeout_s)

    async def begin_cut(self, table_id: int, cut: int, lasts_s: float) -> int:
        """Suspend updates beyond the returned clock, in the server's ranges of a table."""
        deadline_ms = max(int(lasts_s * 1000), 1)
        request = parameters_pb2.BeginCutRequest(
            table_id=table_id, cut=cut, deadline_ms=deadline_ms
        )
        response: parameters_pb2.BeginCutResponse = await self._asked(self._stub.BeginCut, request)
        return response.clock

    async def end_cut(self, table_id: int, cut: int) -> None:
        request = parameters_pb2.EndCutRequest(table_id=table_id, cut=cut)
        await self._asked(self._stub.EndCut, request)

    async def _asked(
        self,
        call: Callable[..., Awaitable[ResponseT]],
        request: Any,
        timeout_s: float = STATS_DEADLINE_S,
    ) -> ResponseT:
        """The response to `request`, which gets the session."""
        request.session.CopyFrom(self._setting.identity)
        async with self._by_server():
            return await call(request, timeout=timeout_s)

    @contextlib.asynccontextmanager
    async def _by_server(self) -> AsyncIterator[None]:
        """Turn gRPC's failures into the catalogue's. One that no retry cures counts only if the
        server proves its identity right after it; else this raises AddressTaken.
        """
        try:
            with _translated():
                yield
        except PushpullError as error:
            came_by_wire = isinstance(error.__cause__, grpc.RpcError | DecodeError)
            if came_by_wire and not is_curable(error):
                await self._open_session(self._view_number, STATS_DEADLINE_S)
            raise
        else:
            self.trouble.answered()

    # --- the push stream

    async def _keep_stream(self, view_number: int, listener: StreamListener) -> None:
        backoff = Backoff()
        internal_count = 0
        while True:
            try:
                await self._open_session(max(view_number, self._view_number), SESSION_DEADLINE_S)
                self.trouble.end()
                backoff.reset()
                async with self._by_server():
                    await self._run_stream(listener)
                error: PushpullError = Recovering("the server ended the stream")
            except PushpullError as failure:
                error = failure
            except Exception as bug:  # noqa: BLE001 - else every step would hang
                logs.exception("server_link_failed", bug, server=self.node.node_id)
                error = Internal(f"the link to server {self.node.node_id} failed: {bug!r}")
                internal_count = MAX_INTERNAL_COUNT
            internal_count = internal_count + 1 if isinstance(error, Internal) else 0
            if not (is_curable(error) or isinstance(error, Internal)) or (
                internal_count > MAX_INTERNAL_COUNT
            ):
                logs.error("server_refused_client", server=self.node.node_id, error=error.message)
                self._setting.refused(error)
                return
            self.trouble.note(error)
            await asyncio.sleep(backoff.next_s(error))

    async def _run_stream(self, listener: StreamListener) -> None:
        lane = await self._new_lane()
        server = self.node.node_id
        stream = PushPullStream(self._calls.push_pull(), lane)

        def opened() -> None:
            self._stream = stream
            listener.stream_opened(server)

        def replied(replies: parameters_pb2.PushResponse) -> None:
            self.trouble.answered()
            listener.replies(server, replies)

        try:
            await stream.run(
                parameters_pb2.StreamHeader(
                    session=self._setting.identity, receiver_node_id=server
                ),
                opened,
                replied,
            )
        finally:
            # The push window sends again what this stream had not delivered.
            self._stream = None
            listener.stream_closed(server)

    # --- the lane

    @property
    def lane(self) -> SharedLane | None:
        return self._lane if self._lane is not None and self._lane.is_open else None

    @property
    def _needs_lane(self) -> bool:
        """True if a client without a push stream must have a lane, and has none."""
        return self._task is None and self._setting.lane == "shm" and self.lane is None

    async def _keep_lane(self) -> None:
        """Open a lane for a client without a push stream, if it has none."""
        async with self._lane_lock:  # a server keeps one connection of a session
            if self.lane is None:
                await self._new_lane()

    async def _new_lane(self) -> SharedLane | None:
        """Share memory with the server, if the settings and both ends allow it; with setting 'shm'
        raise if they do not. Ends an older lane.
        """
        self._drop_lane()
        if self._setting.lane == "grpc":
            self._chose("grpc", "by setting")
            return None
        try:
            if self._offer is None:
                raise OSError("the server does not offer shared memory")
            lost = partial(self._chose, "grpc", "the server closed its Unix socket")
            self._lane = await SharedLane.open(self._offer, lost, pushes=self._task is not None)
        except (OSError, PushpullError) as reason:
            if self._setting.lane == "shm":
                words = (
                    f"lane is 'shm', and server {self.node.node_id} at {self.node.address} cannot "
                    f"share memory with this process: {reason}"
                )
                is_unheard = isinstance(reason, ConnectionRefusedError)
                self._unheard_count += is_unheard
                # The server may have died since its offer; a second offer proves that it lives.
                is_unheard_once = is_unheard and self._unheard_count == 1
                is_passing = isinstance(reason, _PASSING)
                if is_passing or is_unheard_once:
                    raise Recovering(words) from reason
                raise InvalidConfig(words) from reason
            # Refused: the server is on another host. Any other reason is worth a warning.
            is_odd = self._offer is not None and not isinstance(reason, ConnectionRefusedError)
            self._chose("grpc", str(reason), is_odd=is_odd)
            return None
        self._unheard_count = 0
        self._chose("shm", "same host")
        return self._lane

    def _drop_lane(self) -> None:
        if self._lane is not None:
            self._lane.close()
            self._lane = None

    def _chose(self, lane: str, reason: str, *, is_odd: bool = False) -> None:
        if lane == self.lane_name:
            return
        if self.lane_name:
            MEASURES.lanes.labels(lane=self.lane_name).dec()
        if lane:
            MEASURES.lanes.labels(lane=lane).inc()
            log = logs.warning if is_odd else logs.info
            log("lane_chosen", server=self.node.node_id, lane=lane, reason=reason)
        self.lane_name = lane


class ServerLinks:
    """The links to all servers of the newest view."""

    def __init__(self, setting: LinkSetting, view: ClusterView) -> None:
        self.view = view
        # A worker's, set before the first view: each link then keeps a push stream.
        self.listener: StreamListener | None = None
        self._setting = setting
        self._links: dict[NodeId, ServerLink] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def update(self, view: ClusterView) -> None:
        self.view = view
        present = {
            node.node_id: node
            for node in view.nodes
            if node.role is Role.SERVER and node.state is not NodeState.LEFT
        }
        for node_id in [node_id for node_id in self._links if node_id not in present]:
            closing = asyncio.create_task(self._links.pop(node_id).close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        for node_id, node in present.items():
            if node_id not in self._links:
                self._links[node_id] = ServerLink(node, self._setting)
                if self.listener is not None:
                    self._links[node_id].start_stream(view.view_number, self.listener)

    def find(self, server: NodeId | None) -> ServerLink | None:
        return None if server is None else self._links.get(server)

    async def meet(self, table: Table, end_s: float) -> None:
        """Open a session, at a view with the table, on each of its servers; if one dies meanwhile,
        on the server that takes its ranges.
        """
        view_number = self.view.view_number
        range_ids = list(table.blocks_by_range(len(self.view.ranges)))

        def wanted() -> dict[NodeId, ServerLink]:
            servers = {self.view.ranges[range_id].primary for range_id in range_ids}
            found = [self.find(server) for server in servers]
            return {link.node.node_id: link for link in found if link is not None}

        def is_wanted(link: ServerLink) -> bool:
            return wanted().get(link.node.node_id) is link

        met: set[NodeId] = set()
        while links := [link for server, link in wanted().items() if server not in met]:
            left_s = max(end_s - now_s(), 0.1)
            await asyncio.gather(
                *(link.ensure_session(view_number, left_s, is_wanted) for link in links)
            )
            met.update(link.node.node_id for link in links)

    def lacking(self, table: Table, feature: str) -> NodeId | None:
        """A server of a table that did not name this feature in its session; None: all have. Any
        thread.
        """
        ranges = self.view.ranges
        servers = {ranges[range_id].primary for range_id in table.blocks_by_range(len(ranges))}
        links = (self.find(server) for server in servers)
        lacking = (link.node.node_id for link in links if link and feature not in link.features)
        return next(lacking, None)

    def unwritten_counts(self) -> Mapping[NodeId, int]:
        """The number of the newest entries to each server that its stream has not taken."""
        return {server: link.unwritten_count for server, link in self._links.items()}

    @property
    def lane(self) -> str:
        """The lane of payloads: shm, grpc or mixed; empty before the first session. Any thread."""
        found = {link.lane_name for link in list(self._links.values()) if link.lane_name}
        return found.pop() if len(found) == 1 else "mixed" if found else ""

    def troubles(self) -> list[str]:
        return [words for link in list(self._links.values()) if (words := link.trouble.words)]

    async def close(self) -> None:
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links), *self._closing)


def _small_answer(response: parameters_pb2.PullResponse) -> Answer:
    if response.HasField("block"):
        return response.block, memoryview(response.block.payload)
    return response


async def _acquired(free: asyncio.Semaphore, timeout_s: float) -> None:
    """Wait for one that is free; WaitExpired if none is in time."""
    if not free.locked():
        await free.acquire()
        return
    try:
        async with asyncio.timeout(timeout_s):
            await free.acquire()
    except TimeoutError:
        words = f"earlier pulls of this process were not answered within {timeout_s:.1f} s"
        raise WaitExpired(words) from None


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as failure:
        raise from_rpc_error(failure) from failure
    except DecodeError as failure:
        raise Internal(f"an answer does not parse: {failure}") from failure
    except asyncio.CancelledError:
        # A channel that closes cancels its calls too; only a cancelled task passes it on.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Recovering("the connection was closed: the server has left the cluster") from None
