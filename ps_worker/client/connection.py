"""A process's session with a cluster: joining it, waiting on it, ending it.

Rules:
    - One background thread per process carries everything gRPC; the caller's thread hands over and
      waits. Every wait has a deadline, and Ctrl-C interrupts it.
    - A forked child cannot use its parent's client: each call there raises, and closing does
      nothing.
"""

from __future__ import annotations

import os
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from ps_core.cluster_view import Role
from ps_core.errors import InvalidConfig, NotPermitted, PushpullError, WaitExpired
from ps_worker.client.step_record import StepRecord
from ps_worker.steps.steps import PullTicket, PushTicket, wait_until_ended
from ps_worker.transport.config import WorkerConfig
from ps_worker.transport.engine import STOPPED_WITHIN_S, Engine
from ps_worker.transport.loop import background
from ps_worker.transport.metrics import PORT
from ps_worker.transport.waits import reads_wait_for, step_waits_for

ResultT = TypeVar("ResultT")
Ticket = PushTicket | PullTicket[Any]

_EXPLAIN_DEADLINE_S = 2.0
GRACE_S = 5.0
"""After a request's own deadline its answer may take so much longer, before it is given up."""


class Connection:
    """A client's session. Any thread.

    Blocking, Raises (making one): as `ps_worker.client.client.connect`.

    Attributes:
        config: the client's settings.
        loop: the background thread.
        engine: what belongs to that thread.
        record: of the steps.
        http_address: where this process serves /metrics and /healthz; empty: nowhere.
        is_closed: it has ended.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.is_closed = False
        self.loop = background()
        self._pid = os.getpid()
        starting = self.loop.start(Engine.start(config, self.loop.post))
        self.engine = self.result(starting, config.connect_deadline_s + GRACE_S)
        directory = "" if self.is_reader else config.record
        self.record = StepRecord(directory, self.engine.session.rank, self.engine.world_size)
        self.http_address = PORT.open(config.http_listen) if config.http_listen else ""

    @property
    def is_reader(self) -> bool:
        """True for readers and operators."""
        return self.engine.session.role is not Role.WORKER

    @property
    def may_share_memory(self) -> bool:
        """True if the settings allow to share memory with servers on this host."""
        return self.config.lane != "grpc"

    @property
    def is_over(self) -> bool:
        """True if there is nothing to end: it has ended, or belongs to the parent of this fork."""
        return self.is_closed or self._pid != os.getpid()

    # --- what every call checks

    def check_usable(self) -> None:
        """Refuse a call on a client that is closed, was forked, or has lost its session.

        Raises:
            InvalidConfig: closed, or this is a forked child.
            PushpullError: what ended the session, such as Fenced.
        """
        if self._pid != os.getpid():
            raise InvalidConfig(
                f"this client belongs to process {self._pid}; process {os.getpid()} was forked "
                "from it and cannot use it"
            )
        if self.is_closed:
            raise InvalidConfig("this client has been closed; connect again")
        self.check_thread()
        self.engine.check_alive()

    def check_may_push(self, verb: str) -> None:
        """Refuse what only workers may do.

        Raises:
            NotPermitted: this is a reader or an operator.
        """
        self.check_usable()
        if self.is_reader:
            role = self.engine.session.role.value
            raise NotPermitted(f"a {role} may not {verb}; connect with role='worker'")

    def check_thread(self) -> None:
        """Refuse to wait on the background thread for itself."""
        if self.loop.is_current:
            raise InvalidConfig("the client's own thread would wait for itself")

    def deadline_s(self, timeout_s: float | None) -> float:
        """The seconds that a call may take: `timeout_s`, or the client's request_deadline_s.

        Raises:
            InvalidConfig: `timeout_s` is not above 0.
        """
        if timeout_s is None:
            return self.config.request_deadline_s
        if not timeout_s > 0:
            raise InvalidConfig(f"timeout_s is {timeout_s}; expected more than 0")
        return timeout_s

    # --- waiting

    def result(self, future: Future[ResultT], timeout_s: float) -> ResultT:
        """The future's result; its work is cancelled if it takes too long or Ctrl-C comes."""
        try:
            return future.result(timeout_s)
        except TimeoutError as late:
            raise WaitExpired(f"no answer after {timeout_s:g} s") from late
        finally:
            future.cancel()

    def asked(self, work: Coroutine[Any, Any, ResultT], deadline_s: float) -> ResultT:
        """Run a coroutine on the loop that ends by itself within `deadline_s`; its result."""
        return self.result(self.loop.start(work), deadline_s + GRACE_S)

    def wait_for(self, waited: Sequence[Ticket], timeout_s: float | None) -> None:
        """See `ps_worker.client.client.Client.wait_all`."""
        limit_s = self.deadline_s(timeout_s)
        # A pull's own deadline comes with a better message than ours: leave it time to arrive.
        grace_s = GRACE_S if any(isinstance(ticket, PullTicket) for ticket in waited) else 0.0
        wait_until_ended([ticket.future for ticket in waited], limit_s + grace_s)
        late: Ticket | None = None
        for ticket in waited:
            if ticket.done():
                ticket.future.result()
            else:
                late = late or ticket
        if late is not None:
            raise WaitExpired(self.why_open(late, limit_s))

    def why_open(self, ticket: Ticket, waited_s: float) -> str:
        """The reason why a ticket is not done, for a person.

        Blocking: up to two seconds, while servers are asked.
        """
        name, engine = ticket.table.spec.name, self.engine
        if isinstance(ticket, PullTicket):
            reason = reads_wait_for(engine.pulls.asked, engine.links, engine.counters.waiting_for)
            return f"a pull of table '{name}' took longer than {waited_s:g} s: {reason}"
        try:
            table, rank = engine.view.table(ticket.table.table_id), engine.session.rank
            asking = step_waits_for(engine.view, engine.links, table, ticket.clock, rank)
            reason = self.result(self.loop.start(asking), _EXPLAIN_DEADLINE_S)
        except PushpullError as error:
            reason = error.message
        return (
            f"step {ticket.clock} of table '{name}' is not committed after {waited_s:g} s: {reason}"
        )

    # --- the end

    def end(self, stopping: Coroutine[Any, Any, None]) -> None:
        """End the session by the engine's `stop` or `abandon`.

        Blocking: until it has ended, `STOPPED_WITHIN_S` at most.
        """
        self.is_closed = True
        self.record.close()
        if self.http_address:
            PORT.close()
        self.result(self.loop.start(stopping), STOPPED_WITHIN_S)
