"""A client's session with a cluster: joining, waiting, ending.

Rules:
    - One background thread per process carries all gRPC; the caller's thread hands over and waits.
      Every wait has a deadline, and Ctrl-C interrupts it.
    - A forked child cannot use its parent's client: calls there raise, closing does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from ps_core.cluster_view import ClusterView, Role
from ps_core.consistency import Mode
from ps_core.errors import InvalidConfig, NotPermitted, PushpullError, WaitExpired
from ps_core.keys import NodeId
from ps_core.tables.table import Table
from ps_runtime.system.clock import now_s
from ps_runtime.system.future_waits import result_of, wait_until_ended
from ps_worker.client.step_record import StepRecord
from ps_worker.steps.steps import PullTicket, PushTicket
from ps_worker.transport.config import WorkerConfig
from ps_worker.transport.engine import STOPPED_WITHIN_S, Engine
from ps_worker.transport.links import ServerLinks
from ps_worker.transport.loop import background
from ps_worker.transport.metrics import PORT
from pushpull.v1 import parameters_pb2

ResultT = TypeVar("ResultT")
Ticket = PushTicket | PullTicket[Any]

_EXPLAIN_DEADLINE_S = 2.0
GRACE_S = 5.0
"""An answer may come so much later than the deadline of its request."""


class ClientConnection:
    """A client's session. Any thread. Making one blocks and raises as `connect`.

    Attributes:
        waited_s: the seconds for which the script has waited for servers, the scheduler and other
            workers.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.is_closed = False
        self.waited_s = 0.0
        self.loop = background()
        self._pid = os.getpid()
        self.engine: Engine
        self._has_engine = False
        self._starting: asyncio.Task[Any] | None = None
        self.record = StepRecord("", 0, 0)
        try:
            self.asked(self._start(), config.connect_deadline_s)
            if config.record and not self.is_reader:
                rank, world_size = self.engine.session.rank, self.engine.world_size
                self.record = StepRecord(config.record, rank, world_size)
            self.http_address = PORT.open(config.http_listen) if config.http_listen else ""
        except BaseException as failure:
            # Others would wait for a worker that nobody can use, and its rank would be taken.
            with contextlib.suppress(OSError):  # TimeoutError is one
                result_of(self.loop.start(self._undo(type(failure).__name__)), STOPPED_WITHIN_S)
                self.record.close(0, 0)
            raise

    async def _start(self) -> None:
        self._starting = asyncio.current_task()
        self.engine = await Engine.start(self.config, self.loop.post)
        self._has_engine = True

    async def _undo(self, reason: str) -> None:
        """End the engine in the middle of the work; one that has not started ends by itself."""
        if self._has_engine:
            await (self.engine.stop if self.is_reader else self.engine.abandon)(reason)
        elif self._starting is not None:
            await asyncio.wait([self._starting])

    @property
    def is_reader(self) -> bool:
        return self.engine.session.role is not Role.WORKER

    @property
    def may_share_memory(self) -> bool:
        return self.config.lane != "grpc"

    @property
    def is_over(self) -> bool:
        """True if it is closed, or belongs to the parent of this forked process."""
        return self.is_closed or self._pid != os.getpid()

    def check_open(self) -> None:
        if self._pid != os.getpid():
            raise InvalidConfig(
                f"this client belongs to process {self._pid}; process {os.getpid()} was forked "
                "from it and cannot use it"
            )
        if self.is_closed:
            raise InvalidConfig("this client has been closed; connect again")

    def check_usable(self) -> None:
        self.check_open()
        self.check_thread()
        self.engine.check_alive()

    def check_may_push(self, verb: str) -> None:
        self.check_usable()
        if self.is_reader:
            role = self.engine.session.role.value
            raise NotPermitted(f"a {role} may not {verb}; connect with role='worker'")

    def check_may_open(self) -> None:
        """Refuse to open a table for an operator, with which no server has a session."""
        self.check_usable()
        if self.engine.session.role is Role.OPERATOR:
            raise NotPermitted(
                "an operator touches no values, so it opens no table; connect with role='reader', "
                "or give set_consistency the table's name"
            )

    def check_thread(self) -> None:
        if self.loop.is_current:
            raise InvalidConfig("the client's own thread would wait for itself")

    def deadline_s(self, timeout_s: float | None) -> float:
        """`timeout_s`, or the client's request_deadline_s; InvalidConfig if it is not above 0."""
        if timeout_s is None:
            return self.config.request_deadline_s
        if not timeout_s > 0:
            raise InvalidConfig(f"timeout_s is {timeout_s}; expected more than 0")
        return timeout_s

    def result(self, future: Future[ResultT], timeout_s: float) -> ResultT:
        """The future's result; a wait that expires or is interrupted cancels its work."""
        began_s = now_s()
        self.loop.hand_over()
        try:
            return result_of(future, timeout_s)
        except TimeoutError as late:
            raise WaitExpired(f"no answer after {timeout_s:g} s") from late
        finally:
            future.cancel()
            self.waited_s += now_s() - began_s

    def asked(self, work: Coroutine[Any, Any, ResultT], deadline_s: float) -> ResultT:
        """The result of a coroutine on the loop that ends by itself within `deadline_s`."""
        return self.result(self.loop.start(work), deadline_s + GRACE_S)

    def wait_for(self, waited: Sequence[Ticket], timeout_s: float | None) -> None:
        limit_s = self.deadline_s(timeout_s)
        # A pull that expires by itself has the better message: leave it time to arrive.
        grace_s = GRACE_S if PullTicket in map(type, waited) else 0.0
        began_s = now_s()
        try:
            wait_until_ended([ticket.future for ticket in waited], limit_s + grace_s)
        finally:
            self.waited_s += now_s() - began_s
        late: Ticket | None = None
        for ticket in waited:
            if ticket.future.done():
                ticket.future.result()
            else:
                late = late or ticket
        if late is not None:
            raise WaitExpired(self.why_open(late, limit_s))

    def why_open(self, ticket: Ticket, waited_s: float) -> str:
        """The reason why a ticket is not done, for a person; asks the servers, for a moment."""
        name, engine = ticket.table.spec.name, self.engine
        if isinstance(ticket, PullTicket):
            servers = ", ".join(map(str, engine.pulls.unanswered_by)) or "any server"
            answer = engine.counters.waiting_for or f"no answer yet of server {servers}"
            reason = "; ".join([answer, *engine.links.troubles()])
            return f"a pull of table '{name}' took longer than {waited_s:g} s: {reason}"
        try:
            table, rank = engine.view.table(ticket.table.table_id), engine.session.rank
            asking = _step_waits_for(engine.view, engine.links, table, ticket.clock, rank)
            reason = self.result(self.loop.start(asking), _EXPLAIN_DEADLINE_S)
        except PushpullError as error:
            reason = error.message
        return (
            f"step {ticket.clock} of table '{name}' is not committed after {waited_s:g} s: {reason}"
        )

    def end(self, stopping: Coroutine[Any, Any, None]) -> None:
        """End the session by the engine's `stop` or `abandon`, in `STOPPED_WITHIN_S` at most, also
        if the record or the port fails: that is raised afterwards.
        """
        self.is_closed = True
        counters = self.engine.counters
        with contextlib.ExitStack() as ends:
            ends.callback(lambda: self.result(self.loop.start(stopping), STOPPED_WITHIN_S))
            if self.http_address:
                ends.callback(PORT.close)
            self.record.close(counters.pushed_bytes, counters.pulled_bytes)


def lost_server(view: ClusterView, links: ServerLinks, patience_s: float) -> str:
    """The reason why a server is lost: it left, or was not reached for `patience_s`; or empty."""
    for server in _primaries(view):
        link = links.find(server)
        if link is None:
            return f"server {server} has left the cluster"
        if link.trouble.lasted_s > patience_s:
            return link.trouble.words
    return ""


async def _step_waits_for(
    view: ClusterView, links: ServerLinks, table: Table, clock: int, own_rank: int
) -> str:
    """The reasons, asked of the servers, why step `clock` of rank `own_rank` is not committed."""
    reasons = links.troubles()
    seen: dict[int, parameters_pb2.WorkerStats] = {}
    for server in _primaries(view):
        link = links.find(server)
        if link is None or link.trouble.words:
            continue
        try:
            stats = await link.range_stats(table.table_id)
        except PushpullError as error:
            reasons.append(f"server {server} does not answer: {error.message}")
            continue
        for worker in (worker for entry in stats.ranges for worker in entry.workers):
            slowest = seen.get(worker.rank)
            if slowest is None or worker.clock < slowest.clock:
                seen[worker.rank] = worker
    if table.consistency.mode is Mode.BSP:
        reasons += _absent_workers(seen, clock, view.awaited_ranks, own_rank)
    return "; ".join(reasons) or "the servers have not answered for all of it yet"


def _primaries(view: ClusterView) -> set[NodeId]:
    return {a.primary for a in view.ranges if a.primary is not None}


def _absent_workers(
    seen: dict[int, parameters_pb2.WorkerStats], clock: int, ranks: Sequence[int], own_rank: int
) -> list[str]:
    absent = []
    for rank in ranks:
        worker = seen.get(rank)
        if rank == own_rank or (worker is not None and (worker.left or worker.clock >= clock)):
            continue
        if worker is None:
            absent.append(f"worker {rank} has not been heard of")
        else:
            heard_s = worker.last_heard_ms / 1000
            absent.append(
                f"worker {rank} is at clock {worker.clock}, last heard {heard_s:.1f} s ago"
            )
    return [f"step {clock} waits: " + ", ".join(absent)] if absent else []
