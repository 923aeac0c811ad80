"""A node's link to the scheduler: registration, heartbeats, the view, tables.

The link survives a scheduler that is away: it tries all addresses in turn, and logs one line when
the scheduler goes and one when it is back. It ends when the scheduler says that this node has been
replaced (Fenced), or when it is closed.

A link belongs to the event loop that `connect` ran on.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from ps_core import limits
from ps_core.change import ChangeOutcome, TableChange
from ps_core.cluster_view import BackupRequest, ClusterView, Session
from ps_core.consistency import Consistency
from ps_core.errors import Fenced, Internal, InvalidConfig, PushpullError, WaitExpired
from ps_core.keys import RangeId, TableId
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_runtime.cluster import wire
from ps_runtime.cluster.registration import (
    LEAST_ATTEMPT_S,
    REGISTRATION_ID_BYTES,
    Addresses,
    answer_of,
    registered,
)
from ps_runtime.cluster.view_waits import ViewWaits
from ps_runtime.grpc.addresses import check_scheduler_address
from ps_runtime.grpc.errors import from_rpc_error, has_expired_unheard
from ps_runtime.grpc.retry import Backoff, is_retryable
from ps_runtime.observe import logs
from ps_runtime.system import clock
from ps_runtime.system.executors import in_thread
from pushpull.v1 import scheduler_pb2, types_pb2

FAREWELL_DEADLINE_S = 5.0
_HEARTBEAT_SHARE = 1 / 3
"""A heartbeat's deadline as a share of the lease: after a lost one, another comes in time."""


class SchedulerLink:
    """A registered node's link. Made by `connect`; `close` ends it.

    A call raises WaitExpired if no scheduler answers, or an awaited view does not come, within
    `deadline_s`; and Fenced if this node has been replaced, or the link has ended.

    Attributes:
        session: the identity for every request; `identity` is its message.
        replica_count: servers that hold each range, the primary included.
        min_in_sync: in-sync replicas below which a range takes no pushes.
        left_url: the place for the state of a worker that leaves; empty: none.
        checkpoint_url: servers: the place of checkpoints; empty: none.
        lease_s: a node without a heartbeat for so long counts as silent.
        heartbeat_interval_s: between two heartbeats.
        token_key: servers: the key that session tokens are checked with. Otherwise empty.
        view: the newest view, or None before the first.
        before_view: awaited with each newer view before it is taken; later views wait.
        on_view: called on the loop with each newer view, in order of addition; a callback is not
            called for views before its addition.
        on_fenced: called once on the loop when the link has ended: the scheduler said that this
            node has been replaced, or the link itself failed. The owner of the link then stops.
        fenced: set at that moment.
        fenced_by: the reason, or None.
        progress: returns the node's progress for each heartbeat.
        last_scheduler_contact_s: time of the scheduler's last answer, by `clock.now_s`.
        is_stopped_here: this process stops the cluster: a scheduler that is away is no news.
        is_leaving: this node was told to stop: that it is no member any more is no news, and may be
            heard before the answer to its farewell.
    """

    def __init__(self, addresses: Addresses, answer: scheduler_pb2.RegisterNodeResponse) -> None:
        self.session: Session = wire.session_from_proto(answer.session)
        self.worker_count: int = answer.worker_count
        self.replica_count: int = max(answer.replica_count, 1)
        self.min_in_sync: int = max(answer.min_in_sync, 1)
        self.range_count: int = answer.range_count
        self.left_url: str = answer.left_url
        self.checkpoint_url: str = answer.checkpoint_url
        self.lease_s: float = answer.lease_ms / 1000
        self.token_key: bytes = answer.token_key
        self.view: ClusterView | None = None
        self.before_view: Callable[[ClusterView], Awaitable[None]] | None = None
        self.on_view: list[Callable[[ClusterView], None]] = []
        self.on_fenced: list[Callable[[PushpullError], None]] = []
        self.fenced = asyncio.Event()
        self.fenced_by: PushpullError | None = None
        self.progress: Callable[[], scheduler_pb2.NodeProgress] = scheduler_pb2.NodeProgress
        self.last_scheduler_contact_s = clock.now_s()
        self.is_stopped_here = False
        self.is_leaving = False
        self.identity = answer.session
        self.heartbeat_interval_s: float = answer.heartbeat_interval_ms / 1000
        self._addresses = addresses
        self._is_away = False
        self._is_closed = False
        self._has_left = False
        self._waits = ViewWaits()
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    @classmethod
    async def connect(
        cls,
        addresses: Sequence[str],
        register: scheduler_pb2.RegisterNodeRequest,
        deadline_s: float,
    ) -> SchedulerLink:
        """Register with the scheduler, as soon as it answers, and start the heartbeats.

        One of the `addresses`, "host:port", answers. A missing registration_id is drawn. Blocking:
        up to `deadline_s`.

        Raises:
            InvalidConfig: there is no address, or an invalid one.
            WaitExpired: no scheduler answered; names the addresses and the last failure.
            PushpullError: a scheduler refused.
        """
        if not addresses:
            raise InvalidConfig("no scheduler address; give --scheduler or PUSHPULL_SCHEDULER")
        for address in addresses:
            check_scheduler_address(address)
        request = scheduler_pb2.RegisterNodeRequest()
        request.CopyFrom(register)
        request.registration_id = register.registration_id or os.urandom(REGISTRATION_ID_BYTES)
        book = Addresses(addresses)
        try:
            link = cls(book, await registered(book, request, deadline_s))
        except BaseException:
            await book.close()
            raise
        loop = asyncio.get_running_loop()
        link._tasks = (loop.create_task(link._beat()), loop.create_task(link._watch()))
        for task in link._tasks:
            task.add_done_callback(link._task_ended)
        return link

    async def view_at_least(self, number: int, deadline_s: float) -> ClusterView:
        """Wait for a view with at least that number. Blocking: up to `deadline_s`."""
        return await self.view_where(
            lambda view: view.view_number >= number, f"view {number} of the cluster", deadline_s
        )

    async def view_where(
        self, holds: Callable[[ClusterView], bool], what: str, deadline_s: float
    ) -> ClusterView:
        """Wait for a view for which `holds`; `what` names it in the error. Blocking: as above."""
        try:
            return await self._waits.wait(holds, deadline_s)
        except TimeoutError:
            raise WaitExpired(f"waited {deadline_s:.1f} s for {what}; {self._standing()}") from None

    async def create_table(self, spec: TableSpec, deadline_s: float) -> tuple[Table, int]:
        """Create a table, or find the identical one, and wait until the own view has it; returns
        the table, and the first view that has it.

        Blocking: up to `deadline_s`; the scheduler waits until enough servers have registered.

        Raises:
            TableExists: one of that name differs.
            InvalidConfig: the spec is wrong.
            WaitExpired: also if too few servers came in time.
        """
        end_s = clock.now_s() + deadline_s
        request = scheduler_pb2.CreateTableRequest(
            session=self.identity, spec=wire.spec_to_proto(spec)
        )
        what = f"table '{spec.name}' to be created"
        answer = await self.call("CreateTable", request, what, end_s)
        await self.view_at_least(answer.view_number, max(end_s - clock.now_s(), LEAST_ATTEMPT_S))
        return wire.table_from_proto(answer.table), answer.view_number

    async def set_consistency(
        self, table_name: str, consistency: Consistency, after_clock: int, deadline_s: float
    ) -> TableChange:
        """Change a table's consistency, and wait until the own view has the change; returns it,
        with the clock after which it takes effect.

        Blocking: up to `deadline_s`; the scheduler waits until every server has prepared it.

        Raises:
            TableNotFound: there is no such table.
            InvalidConfig: the table cannot have that setting.
            WaitExpired: also if a server has not prepared it in time, which its message names: then
                nothing has changed. Else the change may be made, and the message says so.
        """
        end_s = clock.now_s() + deadline_s
        request = scheduler_pb2.SetConsistencyRequest(
            session=self.identity,
            table_name=table_name,
            consistency=wire.consistency_to_proto(consistency),
            after_clock=after_clock,
        )
        what = f"table '{table_name}' to become {consistency} (the change may still be made)"
        answer = await self.call("SetConsistency", request, what, end_s)
        change = wire.change_from_proto(answer.change)
        left_s = max(end_s - clock.now_s(), LEAST_ATTEMPT_S)
        try:
            await self.view_at_least(answer.view_number, left_s)
        except WaitExpired as late:
            made = f"table '{table_name}' is {consistency} after clock {change.after_clock}"
            raise WaitExpired(f"{made}, and this node has not seen it: {late.message}") from late
        return change

    async def prepare_change(
        self, table_id: TableId, number: int, hold_point: int, outcome: ChangeOutcome | None = None
    ) -> None:
        """Servers: report that nothing of a table takes effect here beyond `hold_point` until the
        change of that number is decided; or report its outcome.

        Blocking: until a scheduler has answered.
        """
        request = scheduler_pb2.PromiseChangeRequest(
            session=self.identity,
            table_id=table_id,
            number=number,
            clock=hold_point,
            outcome=wire.change_outcome_to_proto(outcome),
        )
        await self.call("PromiseChange", request, "the scheduler to hear of a prepared change")

    async def set_backups(
        self, backup_requests: Sequence[BackupRequest], deadline_s: float
    ) -> list[RangeId]:
        """Servers: request other backups of ranges that this node is primary of.

        Returns the ranges whose requests were void, because another configuration came first; after
        a lost answer, it may be the requested one. A later view has the one in force.

        Blocking: up to `deadline_s`.

        Raises:
            InvalidConfig, InvalidKeys: a request is wrong in itself; nothing has changed.
            WaitExpired: any of the requests may have been granted.
        """
        request = scheduler_pb2.SetBackupsRequest(
            session=self.identity, requests=map(wire.backup_request_to_proto, backup_requests)
        )
        what = f"the scheduler to set the backups of {len(backup_requests)} ranges"
        answer = await self.call("SetBackups", request, what, clock.now_s() + deadline_s)
        return list(map(RangeId, answer.refused_range_ids))

    async def deregister(
        self,
        reason: str,
        deadline_s: float = FAREWELL_DEADLINE_S,
        *,
        loss_is_wanted: bool = False,
        unfinished: bool = False,
    ) -> bool:
        """Leave the cluster: a last heartbeat with the final progress, then the farewell, with the
        `reason` for the log. Returns True if the scheduler answered; otherwise it will count this
        node as silent. A node that has left already does nothing.

        Args:
            loss_is_wanted: servers: values that are lost by that cause no alarm.
            unfinished: workers: it ends in the middle of its work; another may take its rank.

        Blocking: up to `deadline_s`.
        """
        await self._end_tasks()
        if self._has_left:
            return True
        if self.fenced_by is not None or self._is_closed:
            return False
        end_s = clock.now_s() + deadline_s
        farewell = scheduler_pb2.DeregisterNodeRequest(
            session=self.identity,
            reason=reason,
            loss_is_wanted=loss_is_wanted,
            unfinished=unfinished,
        )
        what = "the scheduler to hear the farewell"
        try:
            await self.call("Heartbeat", self._heartbeat(), what, end_s)
            await self.call("DeregisterNode", farewell, what, end_s)
        except PushpullError as error:
            logs.warning("farewell_unheard", error=error.message)
            return False
        self._has_left = True
        logs.info("deregistered", reason=reason)
        return True

    async def deregister_if_kept(self, reason: str, timeout_s: float) -> None:
        """Servers: leave the cluster, if others keep all values of this server. One attempt.
        Blocking: up to `timeout_s`; while a checkpoint is made for it.

        Raises:
            Recovering: the scheduler names the nodes to wait for; the membership goes on.
            PushpullError: no scheduler answered, or another refusal.
        """
        farewell = scheduler_pb2.DeregisterNodeRequest(
            session=self.identity, reason=reason, only_if_kept=True
        )
        await answer_of(self._addresses.stub().DeregisterNode(farewell, timeout=timeout_s))
        self._has_left = True
        await self._end_tasks()
        logs.info("deregistered", reason=reason)

    async def close(self) -> None:
        """End the heartbeats and the connection without a farewell; waits for views end with
        Fenced. Idempotent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        await self._end_tasks()
        self._waits.end(_closed())
        await self._addresses.close()

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _beat(self) -> None:
        """Send a heartbeat each interval, whatever became of the last one."""
        while self.fenced_by is None:
            address = self._addresses.present
            request = self._heartbeat()
            try:
                timeout_s = self.lease_s * _HEARTBEAT_SHARE
                await answer_of(self._addresses.stub().Heartbeat(request, timeout=timeout_s))
                self._heard()
            except PushpullError as error:
                self._failed(address, error)
            await asyncio.sleep(self.heartbeat_interval_s)

    async def _watch(self) -> None:
        """Read the stream of views, and open it again whenever it ends."""
        backoff = Backoff(last_bound_s=max(self.heartbeat_interval_s, 0.1))
        request = scheduler_pb2.WatchClusterRequest(session=self.identity)
        while self.fenced_by is None:
            address = self._addresses.present
            ended_by = "the scheduler"
            try:
                async for response in self._addresses.stub().WatchCluster(request):
                    await self._take(await _read(response.view, self.view))
                    backoff.reset()
            except grpc.RpcError as failure:
                error = from_rpc_error(failure)
                if isinstance(error, Fenced):
                    self._fence(error)
                ended_by = error.message
            # No warning: if the scheduler is away, the next heartbeat logs it, once.
            logs.debug("stream_of_views_ended", address=address, by=ended_by)
            await asyncio.sleep(backoff.next_s())

    async def call(self, method: str, request: Message, what: str, end_s: float = math.inf) -> Any:
        """Call a method until a scheduler answers, or `end_s` has passed; without an end, an
        attempt takes up to a lease. `what` names the awaited event in WaitExpired. The scheduler's
        refusal is raised as it is.
        """
        backoff = Backoff()
        begun_s = clock.now_s()
        while True:
            self._check_open()
            left_s = self.lease_s if math.isinf(end_s) else end_s - clock.now_s()
            address, attempt = self._addresses.present, getattr(self._addresses.stub(), method)
            try:
                answer = await answer_of(attempt(request, timeout=max(left_s, LEAST_ATTEMPT_S)))
            except PushpullError as error:
                if not is_retryable(error):
                    raise self._named(error, what) from error
                self._failed(address, error)
                wait_s = backoff.next_s(error)
                if clock.now_s() + wait_s >= end_s:
                    waited_s = clock.now_s() - begun_s
                    raise WaitExpired(
                        f"waited {waited_s:.1f} s for {what}; {self._standing()}; "
                        f"last failure: {error.message}"
                    ) from error
                await asyncio.sleep(wait_s)
            else:
                self._heard()
                return answer

    def _named(self, error: PushpullError, what: str) -> PushpullError:
        """The error of an answered call; gRPC's own expiry gets the state of the cluster."""
        if has_expired_unheard(error):
            return WaitExpired(f"waited for {what}; {self._standing()}")
        if isinstance(error, Fenced):
            self._fence(error)
        return error

    async def _take(self, view: ClusterView) -> None:
        self._heard()
        if self.view is not None and view.view_number <= self.view.view_number:
            return
        if self.before_view is not None:
            await self.before_view(view)
        self.view = view
        self._waits.came(view)
        for callback in tuple(self.on_view):
            callback(view)

    def _heard(self) -> None:
        self.last_scheduler_contact_s = clock.now_s()
        if self._is_away:
            self._is_away = False
            logs.info("scheduler_is_back", address=self._addresses.present)

    def _failed(self, address: str, error: PushpullError) -> None:
        """Handle a failed call to `address`: be fenced, or log once that the scheduler is away."""
        if isinstance(error, Fenced):
            self._fence(error)
            return
        self._addresses.leave(address)
        if not self._is_away:
            self._is_away = True
            say = logs.info if self.is_stopped_here else logs.warning
            say("scheduler_is_away", address=address, error=error.message)

    def _fence(self, error: PushpullError) -> None:
        if self.fenced_by is not None:
            return
        self.fenced_by = error
        say = logs.info if self.is_leaving and isinstance(error, Fenced) else logs.error
        say("fenced", node_id=self.session.node_id, error=error.message)
        self.fenced.set()
        for callback in tuple(self.on_fenced):
            callback(error)
        self._waits.end(error)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """End the link if a task fails, which is a bug of ours, so that nothing waits for it."""
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            logs.exception("link_failed", failure)
            self._fence(Internal(f"the link to the scheduler failed: {failure!r}"))

    def _check_open(self) -> None:
        if self.fenced_by is not None:
            raise self.fenced_by
        if self._is_closed:
            raise _closed()

    def _heartbeat(self) -> scheduler_pb2.HeartbeatRequest:
        return scheduler_pb2.HeartbeatRequest(
            session=self.identity,
            progress=self.progress(),
            view_number=self.view.view_number if self.view else 0,
        )

    def _standing(self) -> str:
        """The known state of the cluster, for the message of a wait that expired."""
        silent_s = clock.now_s() - self.last_scheduler_contact_s
        heard = f"scheduler {self._addresses.present} last heard {silent_s:.1f} s ago"
        if self.view is None:
            return f"{heard}; no view has come yet"
        return (
            f"{heard}; the view is {self.view.view_number}, with {len(self.view.living_servers)} "
            f"of {self.view.server_count} servers"
        )


def _closed() -> Fenced:
    return Fenced("the link to the scheduler is closed; connect again")


async def _read(message: types_pb2.ClusterView, before: ClusterView | None) -> ClusterView:
    """The view of a message. A long one is parsed in a thread, because the loop has a lease."""

    def read() -> ClusterView:
        view = wire.view_from_proto(message)
        return view if before is None else view.reusing(before)

    if message.ByteSize() <= limits.MESSAGE_OVERHEAD_BYTES:
        return read()
    return await in_thread(read)
