"""A process's session with a cluster: joining it, waiting on it, moving blocks, leaving it.

Rules:
    - One background thread per process carries everything gRPC; the caller's thread hands over and
      waits. Every wait has a deadline, and Ctrl-C interrupts it.
    - A forked child cannot use its parent's client: each call there raises, and closing does
      nothing.
    - A normal end leaves: a seal marked `last` on every table, so that nobody waits for this worker
      any more. An end by an exception does not: the others must hear that a worker is missing.
"""

from __future__ import annotations

import os
from collections.abc import Container, Coroutine, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from ps_core.cluster_view import Role, Session
from ps_core.consistency import Consistency, parsed
from ps_core.errors import (
    InvalidConfig,
    InvalidKeys,
    NotPermitted,
    PushpullError,
    UpdateFailed,
    WaitExpired,
)
from ps_core.tables import InitializerKind, Table
from ps_runtime.system.clock import now_s
from ps_worker.client.open_clients import OPEN, has_worker
from ps_worker.client.step_record import StepRecord
from ps_worker.spec.cutting import Region, region_of
from ps_worker.spec.straggler import ComputeTime
from ps_worker.spec.values import Raw, element_bytes
from ps_worker.steps.steps import Step, TableSteps, left_out
from ps_worker.steps.table_handle import TableHandle, check_handle
from ps_worker.steps.tickets import Pulled, PullTicket, PushTicket, StepResult, wait_until_ended
from ps_worker.transport.config import WorkerConfig
from ps_worker.transport.consistent_pulls import Moment
from ps_worker.transport.engine import STOPPED_WITHIN_S, Engine
from ps_worker.transport.loop import CallbackThread, background
from ps_worker.transport.metrics import PORT
from ps_worker.transport.pulls import ReadOrder

ResultT = TypeVar("ResultT")
Ticket = PushTicket | PullTicket[Any]

_EXPLAIN_DEADLINE_S = 2.0
_LOOK_S = 0.5
GRACE_S = 5.0
"""How long after a request's own deadline its answer may take before the client gives it up."""


class Connection:
    """The lower half of `ps_worker.client.client.Client`."""

    def __init__(self, config: WorkerConfig) -> None:
        if config.identity and has_worker():
            config = replace(config, identity="")
        self._config = config
        self._pid = os.getpid()
        self._is_closed = False
        self._loop = background()
        self._callbacks = CallbackThread()
        self._handles: dict[int, TableHandle] = {}
        starting = self._loop.start(Engine.start(config, self._loop.post))
        self.engine = self._result(starting, config.connect_deadline_s + GRACE_S)
        directory = "" if self.is_reader else config.record
        self.record = StepRecord(directory, self.rank, self.world_size)
        self._http_address = PORT.open(config.http_listen) if config.http_listen else ""
        OPEN.add(self)

    # --- who and where

    @property
    def session(self) -> Session:
        """The identity that the scheduler gave this client."""
        return self.engine.session

    @property
    def rank(self) -> int:
        """This worker's rank, from 0; 0 for readers."""
        return self.engine.session.rank

    @property
    def world_size(self) -> int:
        """How many workers the cluster counted when this client connected: those that it was
        started for, present or not, and those that had come beyond these and were there.

        It stays what it was when others come or leave. Ranks are below it unless a worker that came
        beyond the first has left.
        """
        return self.engine.world_size

    @property
    def http_address(self) -> str:
        """Where this process serves /metrics and /healthz for this client, which asked for it
        (`http_listen`); empty where it did not, or the port could not be bound.
        """
        return self._http_address

    @property
    def is_successor(self) -> bool:
        """Whether this worker has a rank that another had before: mostly one that was declared
        gone. `is_newcomer` covers these too.
        """
        return self.engine.is_successor

    @property
    def is_newcomer(self) -> bool:
        """Whether this worker came to a cluster that had all its workers: it took the place of one
        that is gone, or came beyond the number that the cluster was started for.

        It begins where the others are: at `DistributedOptimizer.clock`, or at a table's `clock`
        after its first pull.
        """
        return self.engine.is_newcomer

    @property
    def is_reader(self) -> bool:
        """Whether this client is no worker: it reads, or, as an operator, only looks after the
        cluster.
        """
        return self.engine.session.role is not Role.WORKER

    @property
    def consistency(self) -> Consistency:
        """The consistency of tables that name none: the setting `consistency`, else BSP."""
        return parsed(self._config.consistency or "bsp")

    @property
    def compute_time(self) -> ComputeTime | None:
        """What computation is emulated: the setting `compute`; None if none is."""
        return ComputeTime.parsed(self._config.compute) if self._config.compute else None

    @property
    def is_closed(self) -> bool:
        """Whether the client has left or has been closed."""
        return self._is_closed

    # --- steps and blocks, without a copy

    def begin_step(self, table: TableHandle) -> Step:
        """The open step of this worker on `table`; begins one if there is none.

        Blocking: while MAX_UNCOMMITTED_STEP_COUNT steps of the table are on their way.

        Raises:
            NotPermitted: a reader has no steps.
            WaitExpired: the oldest step was not committed in time; the message says who is missing.
        """
        self.check_may_push("push")
        self._check_own(table)
        while table.steps.owed_count:
            table.steps.owed_count -= 1
            self._next_step(table).seal(skip=True)
        return self._next_step(table)

    def _next_step(self, table: TableHandle) -> Step:
        oldest = table.steps.oldest_of_too_many()
        # A step that failed is its own ticket's to tell; here only its room counts.
        limit_s = self._config.request_deadline_s
        if oldest is not None and not wait([oldest.future], limit_s).done:
            raise WaitExpired(self._why_open(oldest, limit_s))
        return table.steps.open_step()

    def catch_up(self, *tables: TableHandle) -> int:
        """With backup workers: go on where the others are, as the newest pulls have it. Where every
        one of these tables has updates that formed without this worker, their clocks are left out,
        on all of them the same number; each ends as if its worker had been too late with it.

        A worker that trains one table need not call it, nor does `DistributedOptimizer` have to be
        told, if it is all that its client trains. Else no clock is left out unless the script says
        so: call it between two steps, with all tables that it steps together, one step each. What
        is left out on one table and not on another would have workers wait for each other as soon
        as the backup workers are no more.

        A table that is made later is taken for one that is stepped with them if they are all that
        the client has: its first step passes as many clocks. Else it has nothing to do with them.

        Returns:
            How many clocks were left out; none while a step of any of them is open.

        Raises:
            InvalidConfig: a handle is another client's.
        """
        for table in tables:
            self._check_own(table)
        if any(table.steps.has_open_step for table in tables):
            return 0
        counts = left_out([table.steps.missed_count for table in tables])
        is_all = self.trains_only(tables)
        for table, count in zip(tables, counts, strict=True):
            table.steps.leave_out(count, is_owed=is_all)
        return max(counts, default=0)

    def trains_only(self, tables: Container[TableHandle]) -> bool:
        """Whether this client has no other tables than these."""
        return all(handle in tables for handle in list(self._handles.values()))

    def begin_assign(self, table: TableHandle) -> Step:
        """The step of clock 0, in which rank 0 gives a table its initial values.

        Blocking: no.

        Raises:
            NotPermitted: this is not rank 0.
            InvalidConfig: the table starts otherwise, or has been given its values.
        """
        self.check_may_push("assign")
        self._check_own(table)
        if self.rank != 0:
            raise NotPermitted(f"rank {self.rank} may not assign initial values; rank 0 does")
        kind = table.spec.initializer.kind
        if kind is not InitializerKind.FROM_RANK_ZERO:
            raise InvalidConfig(
                f"table '{table.name}' starts with {kind.value}; only one that starts FromRank0() "
                "is assigned"
            )
        return table.steps.assign_step()

    @property
    def may_share_memory(self) -> bool:
        """Whether the settings allow to share memory with servers on this host."""
        return self._config.lane != "grpc"

    def start_pull(
        self,
        table: TableHandle,
        raw: Raw,
        *,
        region: Region | None = None,
        consistent: bool = False,
        timeout_s: float | None = None,
        at: Moment | None = None,
    ) -> PullTicket[Pulled]:
        """Begin to pull `region` (None: all of the table) at this worker's clock into `raw`.

        With `consistent` a reader may name the clock, and the cut that holds it where there is one;
        the ticket ends with AlreadyPast where a range is further.

        Shapes:
            raw: 1-D uint8, writable; the region's elements in the table's dtype. It is written on
            the background thread until the ticket is done.

        Blocking: no.

        Raises:
            InvalidKeys: `raw` has another length than the region.
        """
        order = self.read_order(
            table, raw, region, consistent=consistent, timeout_s=timeout_s, at=at
        )
        return PullTicket(table.table, self._loop.start(self.engine.read(order)))

    def start_state_pull(self, table: TableHandle, raw: Raw, array: str) -> PullTicket[Pulled]:
        """Begin to pull an array of optimizer state of a table, at this worker's clock, into `raw`.

        Args:
            table: which table.
            raw: as below.
            array: the name of the state; `OptimizerSpec.has_array`.

        Shapes:
            raw: 1-D uint8, writable; all elements of the table in the dtype of its arithmetic.

        Blocking: no.

        Raises:
            InvalidKeys: `raw` has another length.
        """
        self.check_usable()
        self._check_own(table)
        region, codec = region_of(table.table, None), table.spec.arithmetic_codec
        expected_bytes = region.element_count * codec.element_bytes
        if raw.nbytes != expected_bytes:
            raise InvalidKeys(f"the memory has {raw.nbytes} bytes; expected {expected_bytes}")
        order = ReadOrder(
            table=table.table,
            region=region,
            raw=raw,
            clock=table.clock,
            consistent=False,
            is_reader=False,
            deadline_s=now_s() + self.deadline_s(None),
            steps=table.steps,
            array=array,
        )
        return PullTicket(table.table, self._loop.start(self.engine.read(order)))

    def read_order(
        self,
        table: TableHandle,
        raw: Raw,
        region: Region | None,
        *,
        consistent: bool,
        timeout_s: float | None,
        at: Moment | None = None,
    ) -> ReadOrder:
        """What `start_pull` would begin; arguments and errors as there."""
        self.check_usable()
        self._check_own(table)
        deadline_s = self.deadline_s(timeout_s)
        region = region or region_of(table.table, None)
        expected_bytes = region.element_count * element_bytes(table.dtype)
        if raw.nbytes != expected_bytes:
            raise InvalidKeys(f"the memory has {raw.nbytes} bytes; expected {expected_bytes}")
        return ReadOrder(
            table=table.table,
            region=region,
            raw=raw,
            clock=table.clock if at is None else at.clock,
            consistent=consistent,
            is_reader=self.is_reader and at is None,
            deadline_s=now_s() + deadline_s,
            steps=table.steps,
            cut=0 if at is None else at.cut,
        )

    # --- waiting

    @overload
    def wait(self, ticket: PushTicket, timeout_s: float | None = None) -> StepResult: ...

    @overload
    def wait(self, ticket: PullTicket[ResultT], timeout_s: float | None = None) -> ResultT: ...

    def wait(self, ticket: Ticket, timeout_s: float | None = None) -> Any:
        """Wait for a push to be committed, or for a pull's values.

        Args:
            ticket: what `push`, `seal`, `assign` or a pull with a callback gave.
            timeout_s: how long to wait; None means the client's request_deadline_s.

        Returns:
            For a push: how its step ended. For a pull: its values.

        Blocking: until the ticket is done; under BSP a step is committed when all workers have
        sealed theirs.

        Raises:
            InvalidConfig: the ticket's step has not been sealed, so it would never be done; or the
                workers disagree about the step's hyperparameters.
            InvalidTensor: a server refused a block (a gradient with NaNs); the step was skipped.
            WaitExpired: it took longer; the message says who is missing. Nothing else changed.
        """
        self.wait_all([ticket], timeout_s)
        return ticket.future.result()

    def wait_all(self, tickets: Iterable[Ticket], timeout_s: float | None = None) -> None:
        """Wait for several tickets; the first failure is raised at once.

        Blocking, Raises: as `wait`.
        """
        self.check_usable()
        waited = list(tickets)
        for ticket in waited:
            if isinstance(ticket, PushTicket):
                ticket.check_sealed()
        self._wait_for(waited, timeout_s)

    def _wait_for(self, waited: Sequence[Ticket], timeout_s: float | None) -> None:
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
            raise WaitExpired(self._why_open(late, limit_s))

    def _why_open(self, ticket: Ticket, waited_s: float) -> str:
        name = ticket.table.spec.name
        if isinstance(ticket, PullTicket):
            reason = self.engine.reads_wait_for
            return f"a pull of table '{name}' took longer than {waited_s:g} s: {reason}"
        asking = self._loop.start(self.engine.missing(ticket.table, ticket.clock))
        try:
            reason = self._result(asking, _EXPLAIN_DEADLINE_S)
        except PushpullError as error:
            reason = error.message
        return (
            f"step {ticket.clock} of table '{name}' is not committed after {waited_s:g} s: {reason}"
        )

    def _result(self, future: Future[ResultT], timeout_s: float) -> ResultT:
        """The future's result; its work is cancelled if it takes too long or Ctrl-C comes."""
        try:
            return future.result(timeout_s)
        except TimeoutError as late:
            raise WaitExpired(f"no answer after {timeout_s:g} s") from late
        finally:
            future.cancel()

    # --- leaving

    def leave(self, timeout_s: float | None = None) -> None:
        """End this worker's part: the others go on without it. Then close.

        Steps left open are dropped: their blocks take no part in an update. Idempotent.

        Args:
            timeout_s: how long the steps on their way, and the end itself, may take to be
                committed; None means the client's request_deadline_s.

        Blocking: until every server committed the end and the scheduler knows it.

        Raises:
            WaitExpired: the end was not committed in time, or cannot be because a server has gone;
                the message says who is missing.
            PushpullError: the step of a table was refused, so that it cannot end.
        """
        if self._is_closed or self._pid != os.getpid():
            return
        self._check_thread()
        has_left = False
        try:
            if not self.is_reader:
                self._end_steps(self.deadline_s(timeout_s))
            has_left = True
        finally:
            self._end("left" if has_left else "")

    def _end_steps(self, deadline_s: float) -> None:
        """Seal a last step on every table, and wait for all that is on its way."""
        self.engine.check_alive()
        limit_s = now_s() + deadline_s
        on_their_way = [
            ticket
            for handle in list(self._handles.values())
            if handle.table.table_id not in self.engine.refused
            for ticket in handle.steps.uncommitted()
        ]
        last = [
            self._opened(name).steps.open_step().seal(skip=True, last=True)
            for name in self.engine.tables_to_end()
        ]
        for ticket in last + on_their_way:
            while not wait([ticket.future], min(max(limit_s - now_s(), 0.0), _LOOK_S)).done:
                if now_s() >= limit_s:
                    raise WaitExpired(self._why_open(ticket, deadline_s))
                lost = self.engine.lost_server(GRACE_S)
                if lost:
                    raise WaitExpired(
                        f"table '{ticket.table.spec.name}' cannot be left in order: {lost}"
                    )
        failures = [ticket.future.exception() for ticket in last]
        for failure in (*failures, *self.engine.refused.values()):
            # Nobody waits for anybody on a table that has failed.
            if failure is not None and not isinstance(failure, UpdateFailed):
                raise failure

    def abandon(self, reason: str) -> None:
        """End the connection in the middle of the work. The scheduler is told: nobody waits for
        this worker, and another may take its rank. A reader leaves.

        In a forked child, and a second time, it does nothing.

        Args:
            reason: why, for the scheduler's log.

        Blocking: about a second at most, where no scheduler answers.
        """
        if self._is_closed or self._pid != os.getpid():
            return
        if self.is_reader:
            self._end(reason)
            return
        self._ended(self.engine.abandon(reason))

    def close(self, *, leave: bool = True) -> None:
        """Leave, and end the connection; with `leave` False only end it, as a crash would: the
        others wait for this worker until it has been silent for too long.

        In a forked child, and a second time, it does nothing.

        Blocking, Raises: as `leave`.
        """
        if leave:
            self.leave()
        elif not self._is_closed and self._pid == os.getpid():
            self._end("")

    def _end(self, reason: str) -> None:
        """Close everything; with a reason the scheduler is told that this node has left."""
        self._ended(self.engine.stop(reason))

    def _ended(self, stopping: Coroutine[Any, Any, None]) -> None:
        self._is_closed = True
        self.record.close()
        OPEN.discard(self)
        if self._http_address:
            PORT.close()
        self._result(self._loop.start(stopping), STOPPED_WITHIN_S)
        self._callbacks.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or self.is_reader:
            self.close()
        else:
            self.abandon(type(error).__name__)

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
        if self._is_closed:
            raise InvalidConfig("this client has been closed; connect again")
        self._check_thread()
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

    def _check_own(self, table: TableHandle) -> None:
        check_handle(table)
        if self._handles.get(table.table.table_id) is not table:
            raise InvalidConfig(f"the handle of table '{table.name}' belongs to another client")

    def _check_thread(self) -> None:
        if self._loop.is_current:
            raise InvalidConfig("the client's own thread would wait for itself")

    def deadline_s(self, timeout_s: float | None) -> float:
        """How long a call may take: `timeout_s`, or the client's request_deadline_s.

        Raises:
            InvalidConfig: `timeout_s` is not above 0.
        """
        if timeout_s is None:
            return self._config.request_deadline_s
        if not timeout_s > 0:
            raise InvalidConfig(f"timeout_s is {timeout_s}; expected more than 0")
        return timeout_s

    def _opened(self, name: str) -> TableHandle:
        limit_s = self._config.request_deadline_s
        opening = self._loop.start(self.engine.open_table(name, limit_s))
        return self.adopt(self._result(opening, limit_s + GRACE_S))

    def adopt(self, table: Table) -> TableHandle:
        """The handle of a table; the same for each call."""
        handle = self._handles.get(table.table_id)
        if handle is None:
            steps = TableSteps(
                table,
                self.engine,
                is_alone=lambda: len(self._handles) == 1,
                joins=self.engine.joins(table.table_id),
                owed_count=max((h.steps.left_out_count for h in self._handles.values()), default=0),
            )
            handle = TableHandle(table, steps)
            handle = self._handles.setdefault(table.table_id, handle)
        return handle
