"""What runs on the background thread for one client: scheduler link, server links, pushes, pulls.

Rules:
    - Everything belongs to the background loop, except what says that any thread may call it.
    - What ends the session (Fenced, a server that refuses this client) fails every open request and
      every later call with that error.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any, cast

from ps_core.change import Change
from ps_core.cluster_view import ClusterView, Role, Session
from ps_core.collective import joined_after
from ps_core.consistency import Consistency, Mode
from ps_core.errors import (
    Fenced,
    PushpullError,
    StaleAssignment,
    TableNotFound,
    ValuesLost,
    WaitExpired,
)
from ps_core.keys import NodeId, TableId
from ps_core.tables import InitializerKind, Table, TableSpec
from ps_runtime.checkpoint.calls import MadeCheckpoint, create_checkpoint, restore_checkpoint
from ps_runtime.cluster import wire
from ps_runtime.cluster.scheduler_link import FAREWELL_DEADLINE_S, SchedulerLink
from ps_runtime.observe import logs
from ps_runtime.settings.job_place import identity_of
from ps_runtime.system.clock import now_s
from ps_worker.steps.counters import Counters
from ps_worker.steps.steps import PushBody
from ps_worker.steps.tickets import Pulled, StepResult
from ps_worker.transport.checkpoint_link import CheckpointLink
from ps_worker.transport.collective_link import CollectiveLink
from ps_worker.transport.config import WorkerConfig
from ps_worker.transport.consistent_pulls import ConsistentPuller
from ps_worker.transport.links import LinkSetting, ServerLink, ServerLinks
from ps_worker.transport.metrics import MEASURES
from ps_worker.transport.pulls import Puller, ReadOrder
from ps_worker.transport.pushes import PushDriver
from ps_worker.window.push_entries import SealTerms
from pushpull.v1 import parameters_pb2, scheduler_pb2

PROTOCOL_VERSION = 1
FEATURES = ("bytes-lane", "inline-seal", "presence", "batch", "same-host-lane", "checkpoints")
_HEARD_WITHIN_S = 2.0
_ABANDONED_WITHIN_S = 1.0
_CLOSED_WITHIN_S = 5.0
STOPPED_WITHIN_S = _HEARD_WITHIN_S + FAREWELL_DEADLINE_S + _CLOSED_WITHIN_S
"""What `Engine.stop` takes at most, where the scheduler answers nothing."""

_NAMED_TABLE_COUNT = 8


class Engine:
    """The loop's side of a client. Made by `start`, ended by `stop`."""

    def __init__(
        self,
        config: WorkerConfig,
        link: SchedulerLink,
        view: ClusterView,
        post: Callable[..., None],
    ) -> None:
        self.session: Session = link.session
        self.world_size = view.world_size
        self._found_tables = frozenset(view.tables_by_id)
        self.counters = Counters()
        self._scheduler = link
        self._view = view
        self._post = post
        self._failure: PushpullError | None = None
        self._reads: set[asyncio.Task[Any]] = set()
        self._clocks: dict[TableId, int] = {}
        self._began_s: dict[TableId, tuple[int, float]] = {}
        self._assigned: set[TableId] = set()
        setting = LinkSetting(link.session.role is Role.WORKER, config.lane)
        self._links = ServerLinks(wire.session_to_proto(link.session), self, setting)
        self.refused: dict[TableId, PushpullError] = {}
        self._pushes = PushDriver(config.window_bytes, view, self._links, self.counters, self)
        self._puller = Puller(self._links, self.counters, lambda: self._view)
        self._consistent = ConsistentPuller(self._puller, lambda: self._view)
        self.collectives = CollectiveLink(
            link.session,
            self._links,
            lambda: self._view,
            self.counters.waits,
            is_newcomer=self.is_newcomer,
        )
        self._take_view(view)
        self.checkpoints = CheckpointLink(link, post)
        link.progress = self._progress
        link.on_view.append(self._take_view)
        link.on_fenced.append(self._fail)

    @classmethod
    async def start(cls, config: WorkerConfig, post: Callable[..., None]) -> Engine:
        """Register with the scheduler and take its first view.

        Args:
            config: the client's settings.
            post: calls a function on this loop, from any thread, in order.

        Blocking: up to `config.connect_deadline_s`.

        Raises:
            WaitExpired: no scheduler answered in time.
            PushpullError: it refused this client.
        """
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
        except BaseException:
            await link.close()
            raise
        return cls(config, link, view, post)

    async def abandon(self, reason: str) -> None:
        """End everything in the middle of the work, and tell the scheduler so: it waits no more."""
        self._fail(Fenced("this client has been closed; connect again"))
        await self._links.close()  # first: who is gone sends nothing again
        await self._scheduler.deregister(reason, _ABANDONED_WITHIN_S, unfinished=True)
        await self.stop("")

    async def stop(self, reason: str) -> None:
        """End everything; with a reason, tell the scheduler that this node has left."""
        if reason:
            await self.checkpoints.settled(_HEARD_WITHIN_S)
            await self._scheduler.deregister(reason)
        await self._scheduler.close()
        self._fail(Fenced("this client has been closed; connect again"))
        await self._links.close()

    # --- any thread

    @property
    def left_url(self) -> str:
        """Where a worker that leaves puts its own state; empty: nowhere."""
        return self._scheduler.left_url

    @property
    def in_flight_bytes(self) -> int:
        """Payload bytes sent and not yet received by a server. Any thread."""
        return self._pushes.in_flight_bytes

    @property
    def lane(self) -> str:
        """How payloads travel: shm, grpc, or mixed; empty before any server was met. Any thread."""
        return self._links.lane

    @property
    def view_number(self) -> int:
        """The newest view that came. Any thread."""
        return self._view.view_number

    @property
    def contact_age_s(self) -> float:
        """Seconds since the scheduler last answered. Any thread."""
        return now_s() - self._scheduler.last_scheduler_contact_s

    @property
    def is_alive(self) -> bool:
        """Whether the session has not ended. Any thread."""
        return self._failure is None

    def check_alive(self) -> None:
        """Raise what ended the session, if anything did. Any thread."""
        if self._failure is not None:
            raise self._failure

    def open_step(self, table: Table, clock: int, future: Future[StepResult]) -> None:
        """See `ps_worker.steps.steps.StepSink`. Any thread."""
        self._began_s[table.table_id] = (clock, now_s())
        self._post(self._pushes.open_step, table, clock, future)

    def submit(self, table: Table, clock: int, bodies: Sequence[PushBody], priority: int) -> None:
        """See `ps_worker.steps.steps.StepSink`. Any thread."""
        self._post(self._pushes.submit, table, clock, bodies, priority)

    def withdraw(self, table: Table, clock: int, but: Collection[int]) -> None:
        """See `ps_worker.steps.steps.StepSink`. Any thread."""
        self._post(self._pushes.withdraw, table, clock, but)

    def seal(self, table: Table, clock: int, terms: SealTerms) -> None:
        """See `ps_worker.steps.steps.StepSink`. Any thread."""
        is_step = not terms.last and terms.update_scale is None  # a goodbye is none of the script's
        if clock and is_step:
            self._clocks[table.table_id] = clock
        elif not clock:
            self._assigned.add(table.table_id)
        self._post(self._pushes.seal, table, clock, terms)

    def tables_to_end(self) -> list[str]:
        """The tables on which somebody may wait for this worker, and it can end. Any thread.

        One that starts from rank 0's values and never got them is of no use to anybody.
        """
        return [
            table.spec.name
            for table in self._view.tables
            if table.table_id not in self.refused
            and (
                table.spec.initializer.kind is not InitializerKind.FROM_RANK_ZERO
                or self.session.rank != 0
                or table.table_id in self._assigned
            )
        ]

    @property
    def newest_clock(self) -> int:
        """The newest clock that this worker has sealed on any table. Any thread."""
        return max(list(self._clocks.values()), default=0)

    @property
    def is_before_first_step(self) -> bool:
        """Whether this worker joins others that train, and has taken no step with them. Any
        thread.
        """
        if not self.is_newcomer:
            return False
        joined = joined_after(self._view, self.session.incarnation)
        return joined is None or self.newest_clock <= joined

    # --- tables

    async def create_table(self, spec: TableSpec, deadline_s: float) -> Table:
        """Create a table, or find the identical one; its servers know this client then."""
        end_s = now_s() + deadline_s
        table, _ = await self._scheduler.create_table(spec, deadline_s)
        await self._meet_servers(table, end_s)
        return table

    async def open_table(self, name: str, deadline_s: float) -> Table:
        """Wait for the table of that name; its servers know this client then."""
        end_s = now_s() + deadline_s
        try:
            view = await self._scheduler.view_where(
                lambda view: name in view.tables_by_name, f"table '{name}'", deadline_s
            )
        except WaitExpired as late:
            names = [f"'{table.spec.name}'" for table in self._view.tables]
            there = ", ".join(names[:_NAMED_TABLE_COUNT]) or "no table"
            raise TableNotFound(
                f"table '{name}' was not created within {deadline_s:g} s; the cluster has {there}"
                + (
                    f" and {len(names) - _NAMED_TABLE_COUNT} more"
                    * (len(names) > _NAMED_TABLE_COUNT)
                )
            ) from late
        table = view.tables_by_name[name]
        await self._meet_servers(table, end_s)
        return table

    async def set_consistency(
        self, name: str, consistency: Consistency, after_clock: int, deadline_s: float
    ) -> Change:
        """Change a table's consistency."""
        return await self._scheduler.set_consistency(name, consistency, after_clock, deadline_s)

    async def create_checkpoint(
        self, reason: str, deadline_s: float, covered_by: Callable[[], tuple[int, int]]
    ) -> MadeCheckpoint:
        """Make a checkpoint.

        Args:
            reason: for its manifest.
            deadline_s: from now.
            covered_by: says which one will do, and by which view; see `SavePoints.asks`. It is
                asked again when there is a view in which one was cut.
        """
        end_s = now_s() + deadline_s
        while True:
            number, view_number = covered_by()
            left_s = max(end_s - now_s(), 0.0)
            try:
                return await create_checkpoint(self._scheduler, reason, left_s, number, view_number)
            except StaleAssignment:
                await self._scheduler.view_at_least(view_number + 1, max(end_s - now_s(), 0.0))

    async def restore_checkpoint(self, url: str, deadline_s: float) -> str:
        """Take the cluster back to a checkpoint, which ends this session; its directory."""
        return await restore_checkpoint(self._scheduler, url, deadline_s)

    def watch(
        self, take_view: Callable[[ClusterView], None], end: Callable[[PushpullError], None]
    ) -> None:
        """Call `take_view` with this view and each newer one, and `end` when there will be no more,
        on the loop. Any thread.
        """
        self._scheduler.on_view.append(take_view)
        self._scheduler.on_fenced.append(end)
        self._post(lambda: take_view(self._view))

    @property
    def view(self) -> ClusterView:
        """The newest view."""
        return self._view

    @property
    def is_successor(self) -> bool:
        """Whether another worker had this rank, and is gone."""
        me = self.session
        return me.role is Role.WORKER and any(
            node.role is Role.WORKER and node.rank == me.rank and node.incarnation < me.incarnation
            for node in self._view.nodes
        )

    @property
    def worker_count(self) -> int:
        """How many workers the cluster was started for. Any thread."""
        return self._view.worker_count

    @property
    def is_newcomer(self) -> bool:
        """Whether this worker joins tables that others train already."""
        return self.is_successor or self.session.rank >= self._view.worker_count

    def joins(self, table_id: TableId) -> bool:
        """Whether this worker joins that table, which others had before it came. What is made after
        that has it from the start, as any other worker.
        """
        return self.is_newcomer and table_id in self._found_tables

    async def joined_after(
        self, table_ids: Collection[TableId], deadline_s: float
    ) -> dict[TableId, int]:
        """After which clock this worker has joined each of these tables, once it has."""
        own = self.session.incarnation

        def found(view: ClusterView) -> dict[TableId, int]:
            return {
                table.table_id: join.after_clock
                for table in view.tables
                for join in table.joins
                if table.table_id in table_ids and join.incarnation == own
            }

        view = await self._scheduler.view_where(
            lambda view: len(found(view)) == len(table_ids),
            f"worker {self.session.rank} to join {len(table_ids)} tables",
            deadline_s,
        )
        return found(view)

    async def view_where(
        self, holds: Callable[[ClusterView], bool], what: str, deadline_s: float
    ) -> ClusterView:
        """As the scheduler link's."""
        return await self._scheduler.view_where(holds, what, deadline_s)

    def table(self, table_id: TableId) -> Table:
        """A table as the newest view has it.

        Raises:
            TableNotFound: an operator has removed it.
        """
        return self._view.table(table_id)

    async def open_tables(
        self, prefix: str, is_complete: Callable[[list[TableSpec]], bool], deadline_s: float
    ) -> list[Table]:
        """The tables whose names begin with `prefix`, once they are complete or time is up."""

        def found(view: ClusterView) -> list[Table]:
            return [table for table in view.tables if table.spec.name.startswith(prefix)]

        end_s = now_s() + deadline_s
        with contextlib.suppress(WaitExpired):
            await self._scheduler.view_where(
                lambda view: is_complete([table.spec for table in found(view)]),
                f"tables '{prefix}*'",
                deadline_s,
            )
        tables = found(self._view)
        for table in tables:
            await self._meet_servers(table, end_s)
        return tables

    async def _meet_servers(self, table: Table, end_s: float) -> None:
        """Open a session, at a view with the table, on each server that holds a part of it; where
        one dies and another takes its part meanwhile, on that one.
        """
        view_number = self._view.view_number
        range_ids = list(table.blocks_by_range(len(self._view.ranges)))

        def wanted() -> dict[NodeId, ServerLink]:
            servers = {self._view.ranges[range_id].primary for range_id in range_ids}
            found = [self._links.find(server) for server in servers]
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

    # --- reads

    async def read(self, order: ReadOrder) -> Pulled:
        """Read what `order` says; fails at once with whatever ends the session."""
        self.check_alive()
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._reads.add(task)
        try:
            puller = self._consistent if order.consistent and order.is_reader else self._puller
            pulled = await puller.read(order)
        except asyncio.CancelledError:
            if self._failure is not None:
                raise self._failure from None
            raise
        finally:
            self._reads.discard(task)
        if order.array:
            return pulled
        # All of the table is at this clock or further, with backup workers perhaps without this
        # worker; a part of it would say nothing of the rest.
        if len(pulled.versions) == order.table.block_count:
            order.steps.reached(pulled.clock)
        clock, began_s = self._began_s.get(order.table.table_id, (-1, 0.0))
        if clock == order.clock:
            MEASURES.step_duration_seconds.observe(now_s() - began_s)
        return pulled

    async def begin_cut(
        self, cut: int, tables: Sequence[Table], lasts_s: float
    ) -> dict[TableId, int]:
        """Hold tables so that one clock of all can be read: see `ConsistentPuller.begin_cut`."""
        self.check_alive()
        return await self._consistent.begin_cut(cut, tables, lasts_s)

    async def end_cut(self, cut: int, tables: Sequence[Table]) -> None:
        """Let go what `begin_cut` holds."""
        await self._consistent.end_cut(cut, tables)

    def lost_server(self, patience_s: float) -> str:
        """A server with a part of a table that has left, or was away for so long; empty if none."""
        for server in {a.primary for a in self._view.ranges if a.primary is not None}:
            link = self._links.find(server)
            if link is None:
                return f"server {server} has left the cluster"
            if link.trouble_s > patience_s:
                return link.trouble
        return ""

    @property
    def reads_wait_for(self) -> str:
        """What the reads on their way wait for, for a person. Any thread."""
        asked = ", ".join(map(str, self._puller.asked)) or "any server"
        reasons = [self.counters.waiting_for or f"no answer yet of server {asked}"]
        return "; ".join([*reasons, *self._links.troubles()])

    async def missing(self, table: Table, clock: int) -> str:
        """Who keeps step `clock` of a table from being committed, for a person."""
        reasons = self._links.troubles()
        seen: dict[int, parameters_pb2.WorkerStats] = {}
        for server in {a.primary for a in self._view.ranges if a.primary is not None}:
            link = self._links.find(server)
            if link is None or link.trouble:
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
        if self.table(table.table_id).consistency.mode is Mode.BSP:
            reasons += _absent_workers(seen, clock, self._view.awaited_ranks, self.session.rank)
        return "; ".join(reasons) or "the servers have not answered for all of it yet"

    # --- what the links say

    def stream_opened(self, server: NodeId) -> None:
        """See `ps_worker.transport.links.LinkListener`."""
        self._pushes.stream_opened(server)

    def stream_closed(self, server: NodeId) -> None:
        """See `ps_worker.transport.links.LinkListener`."""
        self._pushes.stream_closed(server)

    def replies(self, server: NodeId, response: parameters_pb2.PushResponse) -> None:
        """See `ps_worker.transport.links.LinkListener`."""
        self._pushes.replies(server, response)

    def link_failed(self, server: NodeId, error: PushpullError) -> None:
        """See `ps_worker.transport.links.LinkListener`."""
        logs.error("server_refused_client", server=server, error=error.message)
        self._fail(error)

    # --- what the push driver says

    def session_ended(self, error: PushpullError) -> None:
        """See `ps_worker.transport.pushes.PushListener`."""
        self._fail(error)

    def step_refused(self, table_id: TableId, error: PushpullError) -> None:
        """See `ps_worker.transport.pushes.PushListener`."""
        self.refused.setdefault(table_id, error)

    def _take_view(self, view: ClusterView) -> None:
        self._view = view
        if view.lost_ranges and self.session.role is Role.WORKER:
            self._fail(ValuesLost(view.lost_words))  # no step can have all of its parts again
        self._links.update(view)
        self._pushes.take_view(view)
        self._puller.take_view(view)
        if self.session.role is Role.WORKER:
            self.collectives.take_view(view)

    def _fail(self, error: PushpullError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        self._pushes.fail(error)
        self.collectives.fail(error)
        for task in self._reads:
            task.cancel()

    def _progress(self) -> scheduler_pb2.NodeProgress:
        counters, losses = self.counters, self.counters.losses
        return scheduler_pb2.NodeProgress(
            tables=[
                scheduler_pb2.TableProgress(table_id=table_id, clock=clock)
                for table_id, clock in list(self._clocks.items())
            ],
            pushed_bytes=counters.pushed_bytes,
            pulled_bytes=counters.pulled_bytes,
            step_count=counters.step_count,
            loss=counters.loss,
            staleness=counters.staleness,
            waiting_for=counters.waiting_for,
            planned_step_count=counters.planned_step_count,
            lane=self._links.lane,
            losses=scheduler_pb2.LossTotals(
                count=losses.count,
                total=losses.total,
                square_total=losses.square_total,
                non_finite_count=losses.non_finite_count,
            ),
        )


def _absent_workers(
    seen: dict[int, parameters_pb2.WorkerStats], clock: int, ranks: Sequence[int], own_rank: int
) -> list[str]:
    """The workers whose step is missing somewhere, each with what is known of it."""
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
