"""One client on the background thread: links to scheduler and servers, pushes, pulls.

Rules:
    - Only the background loop calls this, except the methods marked for any thread.
    - An error that ends the session (Fenced, a server that refuses this client) fails every open
      request and every later call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, TypeVar

from ps_core.cluster_view import ClusterView, Role, Session
from ps_core.collective_calls import Round, Share, joined_after
from ps_core.errors import Fenced, PushpullError, ValuesLost
from ps_core.keys import TableId
from ps_core.tables.elements import InitializerKind
from ps_core.tables.table import Table
from ps_runtime.cluster import wire
from ps_runtime.cluster.scheduler_link import FAREWELL_DEADLINE_S, SchedulerLink
from ps_runtime.settings.job_place import identity_of
from ps_runtime.system.clock import now_s
from ps_worker.spec.loop_places import TrainingLoop
from ps_worker.steps.counters import Counters
from ps_worker.steps.steps import Pulled, PushBody, StepFuture, StepResult
from ps_worker.transport.checkpoint_link import CheckpointLink
from ps_worker.transport.collective_link import CollectiveLink
from ps_worker.transport.config import WorkerConfig
from ps_worker.transport.links import LinkSetting, ServerLinks
from ps_worker.transport.loop_reports import loop_to_proto
from ps_worker.transport.metrics import MEASURES
from ps_worker.transport.pulls import ConsistentPuller, Puller, PullOrder
from ps_worker.transport.push_driver import PushDriver
from ps_worker.window.push_window import PushWindow, StepTerms
from pushpull.v1 import scheduler_pb2

ResultT = TypeVar("ResultT")

PROTOCOL_VERSION = 1
FEATURES = ("bytes-lane", "inline-seal", "presence", "batch", "same-host-lane", "checkpoints")
_HEARD_WITHIN_S = 2.0
_ABANDONED_WITHIN_S = 1.0
_CLOSED_WITHIN_S = 5.0
STOPPED_WITHIN_S = _HEARD_WITHIN_S + FAREWELL_DEADLINE_S + _CLOSED_WITHIN_S
"""The longest that `Engine.stop` takes, if the scheduler does not answer."""


class StepSender:
    """Hands steps from any thread to the push driver on the loop, and knows the newest clocks.

    A `ps_worker.steps.steps.StepSink`; `post` calls a function on the loop, in order.
    """

    def __init__(self, post: Callable[..., None], driver: PushDriver) -> None:
        self.clocks: dict[TableId, int] = {}  # the newest that this worker has sealed
        self.begun: dict[TableId, int] = {}  # of a step whose gradients workers reduce; the owner's
        self.inner_count = 0  # inner steps, which have no clock
        self.has_gradient = False  # of torch, which no step has taken
        self.assigned: set[TableId] = set()  # tables to which it has given initial values
        self.loop = TrainingLoop()
        self._post = post
        self._driver = driver
        self._began_s: dict[TableId, tuple[int, float]] = {}
        self._measured: dict[TableId, int] = {}  # the clock of the newest step; the loop's own

    def open_step(self, table: Table, clock: int, future: Future[StepResult]) -> None:
        self._began_s[table.table_id] = (clock, now_s())
        self._post(self._driver.open_step, table, clock, future)

    def submit(self, table: Table, clock: int, bodies: Sequence[PushBody]) -> None:
        self._post(self._driver.submit, table, clock, bodies)

    def withdraw(self, table: Table, clock: int, but: Collection[int]) -> None:
        self._post(self._driver.withdraw, table, clock, but)

    def together(self, steps: Sequence[tuple[Table, int]]) -> None:
        self._post(self._driver.together, steps)

    def seal(self, table: Table, clock: int, terms: StepTerms) -> None:
        is_step = not terms.last and terms.update_scale is None  # a final seal is not the script's
        if clock and is_step:
            self.clocks[table.table_id] = clock
            self.has_gradient = False
        elif not clock:
            self.assigned.add(table.table_id)
        self._post(self._driver.seal, table, clock, terms)

    def pass_clock(self, table: Table, clock: int) -> None:
        """End a step with nothing, before the script takes its first. Only the loop calls this."""
        self._driver.open_step(table, clock, StepFuture())
        self._driver.seal(table, clock, StepTerms(skip=True))

    @property
    def reached(self) -> dict[TableId, int]:
        """The newest clock on each table, with that of a step in which this worker waits for others
        before it seals it.
        """
        sealed, begun = self.clocks.copy(), self.begun
        return sealed | {each: max(clock, sealed.get(each, 0)) for each, clock in begun.items()}

    @property
    def newest_clock(self) -> int:
        return max(list(self.clocks.values()), default=0)

    @property
    def mark(self) -> tuple[int, int]:
        """Another one after each step of the script, on whichever table."""
        return sum(list(self.clocks.values())), self.inner_count

    def observe_pull(self, table_id: TableId, clock: int) -> None:
        """Measure the step of this clock, from its first push to this pull, if it is the newest,
        and this the first pull of it.
        """
        newest, began_s = self._began_s.get(table_id, (-1, 0.0))
        if newest == clock and self._measured.get(table_id) != clock:
            self._measured[table_id] = clock
            MEASURES.step_duration_seconds.observe(now_s() - began_s)


class Engine:
    """The loop's side of a client. Made by `start`, ended by `stop`. `consistent` pulls one clock
    of a whole table, for readers; `world_size` was counted when this client connected.
    """

    def __init__(
        self,
        config: WorkerConfig,
        link: SchedulerLink,
        view: ClusterView,
        post: Callable[..., None],
    ) -> None:
        self.session: Session = link.session
        self.world_size = view.world_size
        self.counters = Counters()
        self.scheduler = link
        self._found_tables = frozenset(view.tables_by_id)
        self._post = post
        self._failure: PushpullError | None = None
        self._in_flight: set[asyncio.Task[Any]] = set()
        identity = wire.session_to_proto(link.session)
        setting = LinkSetting(identity, config.lane, self._fail, lambda: link.is_stopped_here)
        self.links = ServerLinks(setting, view)
        self.pushes = PushDriver(
            PushWindow(config.window_bytes), view, self.links, self.counters, self._fail
        )
        self.steps = StepSender(post, self.pushes)
        if link.session.role is Role.WORKER:
            self.links.listener = self.pushes
        self.pulls = Puller(self.links, self.counters)
        self.consistent = ConsistentPuller(self.pulls)
        self.collectives = CollectiveLink(
            link.session,
            self.links,
            self.counters.waits,
            is_late_joiner=self.is_late_joiner,
        )
        self._take_view(view)
        self.checkpoints = CheckpointLink(link, post)
        link.progress = self._progress
        link.on_view.append(self._take_view)
        link.on_fenced.append(self._fail)

    @classmethod
    async def start(cls, config: WorkerConfig, post: Callable[..., None]) -> Engine:
        """Register with the scheduler and take its first view, in `config.connect_deadline_s`."""
        end_s = now_s() + config.connect_deadline_s
        request = scheduler_pb2.RegisterNodeRequest(
            role=wire.role_to_proto(Role(config.role)),
            requested_rank=config.rank,
            protocol_version=PROTOCOL_VERSION,
            features=FEATURES,
            cluster_id=config.cluster_id,
            launch_id=bytes.fromhex(config.launch_id),
            world_size=config.world_size,
            run=config.run,
            identity=identity_of(config.identity) if config.role == Role.WORKER.value else "",
        )
        link = await SchedulerLink.connect(config.scheduler, request, config.connect_deadline_s)
        try:
            view = await link.view_at_least(0, max(end_s - now_s(), 1.0))
        except BaseException as failure:
            # It has a rank by now, and nobody would have its place before it counts as gone.
            await link.deregister(type(failure).__name__, _ABANDONED_WITHIN_S, unfinished=True)
            await link.close()
            raise
        return cls(config, link, view, post)

    async def abandon(self, reason: str) -> None:
        """End everything, and tell the scheduler that this worker is gone with steps unfinished."""
        self._fail(Fenced("this client has been closed; connect again"))
        await self.links.close()  # first: a worker that is gone must send nothing again
        await self.scheduler.deregister(reason, _ABANDONED_WITHIN_S, unfinished=True)
        await self.stop("")

    async def stop(self, reason: str) -> None:
        """End everything; with a reason, tell the scheduler that this node has left."""
        if reason:
            await self.checkpoints.all_answered(_HEARD_WITHIN_S)
            await self.scheduler.deregister(reason)
        await self.scheduler.close()
        self._fail(Fenced("this client has been closed; connect again"))
        await self.links.close()
        self.pulls.close()

    # --- any thread

    @property
    def view(self) -> ClusterView:
        return self.links.view

    @property
    def contact_age_s(self) -> float:
        return now_s() - self.scheduler.last_scheduler_contact_s

    @property
    def is_alive(self) -> bool:
        return self._failure is None

    def check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure

    def tables_to_end(self) -> list[str]:
        """The tables on which another worker may wait for this one's final seal: not one that
        starts from rank 0's values and never got them.
        """
        return [
            table.spec.name
            for table in self.view.tables
            if table.table_id not in self.pushes.refused
            and (
                table.spec.initializer.kind is not InitializerKind.FROM_RANK_ZERO
                or self.session.rank != 0
                or table.table_id in self.steps.assigned
            )
        ]

    @property
    def is_replacement(self) -> bool:
        me = self.session
        return me.role is Role.WORKER and any(
            node.role is Role.WORKER and node.rank == me.rank and node.incarnation < me.incarnation
            for node in self.view.nodes
        )

    @property
    def is_late_joiner(self) -> bool:
        """True if this worker joins tables that others train already."""
        return self.is_replacement or self.session.rank >= self.view.worker_count

    @property
    def is_before_first_step(self) -> bool:
        """True if this worker joins others that train, and has taken no step with them."""
        if not self.is_late_joiner:
            return False
        joined = joined_after(self.view, self.session.incarnation)
        return joined is None or self.steps.newest_clock <= joined

    def joins(self, table_id: TableId) -> bool:
        return self.is_late_joiner and table_id in self._found_tables

    def watch(
        self, take_view: Callable[[ClusterView], None], end: Callable[[PushpullError], None]
    ) -> None:
        """Call `take_view` on the loop with this view and each newer one; `end` after the last."""
        self.scheduler.on_view.append(take_view)
        self.scheduler.on_fenced.append(end)
        self._post(lambda: take_view(self.view))

    # --- the loop

    async def pull(self, order: PullOrder) -> Pulled:
        """Carry out a pull, until it ends, or an error ends the session."""
        self.check_alive()
        puller = self.consistent if order.consistent and order.is_reader else self.pulls
        pulled = await self._until_failure(puller.pull(order))
        if order.array:
            return pulled
        # The whole table is at this clock or later, with backup workers perhaps without this
        # worker; a slice would say nothing about the rest.
        if len(pulled.versions) == order.table.block_count:
            order.steps.reached(pulled.clock)
        self.steps.observe_pull(order.table.table_id, order.clock)
        return pulled

    async def meet(self, table: Table, end_s: float) -> None:
        """As `ServerLinks.meet`, or until an error ends the session."""
        self.check_alive()
        await self._until_failure(self.links.meet(table, end_s))

    async def enter(self, share: Share, deadline_s: float) -> Round:
        """Take part in a collective call, as `CollectiveLink.enter`."""
        self.check_alive()
        return await self._until_failure(self.collectives.enter(share, deadline_s))

    async def _until_failure(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        task: Any = asyncio.current_task()
        self._in_flight.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if self._failure is not None:
                raise self._failure from None
            raise
        finally:
            self._in_flight.discard(task)

    def _take_view(self, view: ClusterView) -> None:
        if view.lost_ranges and self.session.role is Role.WORKER:
            self._fail(ValuesLost(view.lost_words))  # no step can be complete again
        self.links.update(view)
        self.pushes.take_view(view)
        self.pulls.take_view(view)
        if self.session.role is Role.WORKER:
            self.collectives.take_view(view)

    def _fail(self, error: PushpullError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        self.pushes.fail(error)
        self.collectives.stop()
        for task in self._in_flight:
            task.cancel()

    def _progress(self) -> scheduler_pb2.NodeProgress:
        counters, reached = self.counters, self.steps.reached  # before the loop's place
        return scheduler_pb2.NodeProgress(
            tables=[
                scheduler_pb2.TableProgress(table_id=table_id, clock=clock)
                for table_id, clock in reached.items()
            ],
            pushed_bytes=counters.pushed_bytes,
            pulled_bytes=counters.pulled_bytes,
            step_count=counters.step_count,
            loss=counters.loss,
            staleness=counters.staleness,
            waiting_for=counters.waiting_for,
            planned_step_count=counters.planned_step_count,
            lane=self.links.lane,
            losses=scheduler_pb2.LossTotals(**asdict(counters.losses)),
            loop=loop_to_proto(self.steps.loop, reached),
        )
