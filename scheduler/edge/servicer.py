"""The scheduler's gRPC service: parse a request, ask the machine, carry out its decision, reply.

Everything runs on one event loop and the machine never waits, so no lock is needed. A caller that
waits (a watcher of the view, a parked creation) waits for the next view and asks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio

from ps_core import limits
from ps_core.change import TableChange
from ps_core.cluster_view import ClusterView, NodeState, Role, Session
from ps_core.errors import (
    Draining,
    InvalidConfig,
    InvalidJournal,
    NotPermitted,
    PushpullError,
    Recovering,
    WaitExpired,
)
from ps_core.keys import NodeId, TableId
from ps_core.rights import CHALLENGE_BYTES
from ps_runtime.cluster import wire
from ps_runtime.cluster.join_secret import joiner
from ps_runtime.grpc.errors import translated
from ps_runtime.grpc.requests import RequestReader
from ps_runtime.observe import logs
from ps_runtime.observe.metrics import SchedulerMetrics
from ps_runtime.system import clock
from pushpull.v1 import scheduler_pb2 as pb
from pushpull.v1 import scheduler_pb2_grpc, types_pb2
from scheduler.edge.adaptive_tables import AdaptiveTables
from scheduler.edge.checkpointing import Checkpointing, part_from_proto
from scheduler.edge.publication import JournalWriter, Publication, nothing
from scheduler.edge.requests import (
    data_set_to_proto,
    registration_of,
    session_of,
    shard_request_of,
    spec_of,
    table_request_of,
    table_request_reader,
)
from scheduler.edge.transition_lines import count_transition, log_transition
from scheduler.machine.changes import ChangeRequest, Outcome, Withdrawn
from scheduler.machine.checkpoint_schedule import CheckpointPolicy
from scheduler.machine.checkpoints import UNNAMED
from scheduler.machine.cluster import Cluster, Created, Decision
from scheduler.machine.data_shards import ShardLease, ShardRequest
from scheduler.machine.kept_values import KeptElsewhere, KeptValues
from scheduler.machine.state import TIMELINE_BYTES, Transition

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["SchedulerService"].full_name

MAX_PROGRESS_BYTES = 256 * 1024
"""Bound of a node's progress; a worker's clocks on `limits.MAX_TABLE_COUNT` tables fit."""

DEFAULT_CREATE_DEADLINE_S = limits.DEFAULT_PULL_DEADLINE_S
"""Wait of a parked creation whose caller gave no deadline, in seconds."""

_MAX_ANSWER_MARGIN_S = 0.2
_NO_CHECKPOINTS = CheckpointPolicy()
_STOPPING = "the scheduler is stopping"

ReplyT = TypeVar("ReplyT")
Context = grpc.aio.ServicerContext[Any, Any]


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Serves one cluster. Made and used on one event loop. Calls `on_health_change` when
    `degraded_words` may have changed.

    Args:
        begun: the machine, and the transitions of its start.
        metrics: the scheduler's.
        secret: the join secret; every registration proves to know it.
        policy: the rules of automatic checkpoints.
        roots: places that a restore may read.
        journal: None if nothing outlives this process.
    """

    def __init__(
        self,
        begun: Decision[Cluster],
        metrics: SchedulerMetrics,
        secret: bytes,
        policy: CheckpointPolicy = _NO_CHECKPOINTS,
        roots: Sequence[str] = (),
        journal: JournalWriter | None = None,
    ) -> None:
        self._metrics = metrics
        self._secret = secret
        self._roots = roots
        self._policy = policy
        self._changed = asyncio.Event()
        self._is_closed = False
        self.on_health_change: Callable[[], None] = nothing
        self._publication = Publication(lambda: self._cluster, self._publish, journal)
        self._publication.on_problem = lambda: self.on_health_change()
        metrics.journal_not_written.set_function(lambda: self._publication.problem is not None)
        self._begin(begun)

    def _begin(self, begun: Decision[Cluster], given_up: Sequence[str] = ()) -> None:
        """Serve this cluster from now on; calls that wait in an earlier one fail. `given_up` are
        directories of checkpoints of that one.
        """
        cluster = self._cluster = begun.reply
        self._challenge = secrets.token_bytes(CHALLENGE_BYTES)
        self.checkpointing = Checkpointing(
            cluster, self._policy, self._carry_out, self._metrics, given_up
        )
        self._last_said: dict[NodeId, pb.HeartbeatRequest] = {}
        self._stays_with_runs: set[NodeId] = set()  # servers that were refused after a checkpoint
        self._kept = KeptElsewhere(cluster.settings.lease_s)
        interval_s = cluster.settings.adaptation_interval_s
        self._adaptive = AdaptiveTables(interval_s, self._metrics, cluster.courses)
        self._publication.decided(begun.transitions)
        self.checkpointing.resume()

    async def flushed(self) -> None:
        """Wait until all earlier decisions are durable and published; raise why they cannot be."""
        await self._publication.flushed()

    async def until_journal_failed(self) -> None:
        """Wait until the journal can never be written again, and raise the reason."""
        await self._publication.failed.wait()
        if self._publication.problem is not None:
            raise self._publication.problem

    async def watch_for_silence(self) -> None:
        """Tick the machine eight times a lease, until cancelled."""
        while True:
            self._carry_out(self._cluster.tick(clock.now_s()))
            self.move_bounds()
            self.checkpointing.look(clock.now_s())
            await asyncio.sleep(self._cluster.settings.lease_s / 8)

    def move_bounds(self) -> None:
        """Move the bounds that the loss asks to move; their courses go to the journal."""
        requests = self._adaptive.requests(clock.now_s())
        if self._cluster.keep_courses(self._adaptive.courses):
            self._publication.decided((), is_news=False)
        for request in requests:
            self._carry_out(self._cluster.move_bound(request, clock.now_s()))

    @property
    def degraded_words(self) -> str:
        """The reason of a degraded cluster; else empty."""
        problem = self._publication.problem
        return self._view.lost_words or ("" if problem is None else problem.message)

    @property
    def has_finished(self) -> bool:
        return self._view.finished

    @property
    def has_tables(self) -> bool:
        """True if the run that checkpoints cover has a table."""
        return bool(self._view.of_run(UNNAMED).tables)

    async def until_finished(self) -> None:
        """Wait until all workers have left, if the cluster ends then; else for ever."""
        await self._until(lambda: self._view.finished)

    async def until_workers_are_done(self) -> None:
        """Wait until no worker is left, and none may return: time alone may bring that about."""
        while not self._cluster.members.workers_are_done:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._cluster.settings.lease_s / 8):
                    await self._changed.wait()

    @property
    def may_be_saved_later(self) -> bool:
        """True while no worker is left, and nothing is lost that a checkpoint would have, values or
        parameters that only workers had: another scheduler, with the journal, can make the last.
        """
        checkpoints = self._cluster.checkpoints
        is_lost = bool(checkpoints.lost_words) or checkpoints.parameters_are_lost
        return self._cluster.members.workers_are_done and not is_lost

    def finish(self) -> bool:
        """End the cluster, unless a worker has joined meanwhile; returns True if it has ended."""
        self._carry_out(self._cluster.finish())
        return self._cluster.view.finished

    async def until_servers_have_left(self, within_s: float) -> bool:
        """Wait at most so long until no server is left; False if one is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._until(lambda: self._cluster.servers_have_left)
        return self._cluster.servers_have_left

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    def close(self) -> None:
        """End the view streams after their newest view, and parked creations with Draining."""
        self._is_closed = True
        self._wake()

    async def close_journal(self, *, has_ended: bool) -> None:
        """Close the journal for the next scheduler; delete its records if the cluster has ended."""
        await self._publication.close(has_ended=has_ended)

    @translated
    async def GetJoinChallenge(
        self, request: pb.GetJoinChallengeRequest, context: Context
    ) -> pb.GetJoinChallengeResponse:
        return pb.GetJoinChallengeResponse(challenge=self._challenge)

    @translated
    async def RegisterNode(
        self, request: pb.RegisterNodeRequest, context: Context
    ) -> pb.RegisterNodeResponse:
        async with self._answered():
            joiner(request).check(request.join_proof, self._secret, self._challenge)
            registration = registration_of(request, self._cluster.settings.timeline)
            registered = self._cluster.register(registration, clock.now_s())
            session = self._carry_out(registered)
        settings = self._cluster.settings
        return pb.RegisterNodeResponse(
            session=wire.session_to_proto(session),
            worker_count=self._cluster.view.worker_count_of(session.run),
            heartbeat_interval_ms=round(settings.heartbeat_interval_s * 1000),
            lease_ms=round(settings.lease_s * 1000),
            token_key=settings.token_key if session.role is Role.SERVER else b"",
            features=settings.features,
            replica_count=settings.replica_count,
            min_in_sync=settings.min_in_sync,
            range_count=settings.range_count,
            left_url="" if session.run else self.checkpointing.left_url,
            checkpoint_url=settings.checkpoint_url if session.role is Role.SERVER else "",
        )

    @translated
    async def Heartbeat(
        self, request: pb.HeartbeatRequest, context: Context
    ) -> pb.HeartbeatResponse:
        async with self._answering(request.session, "Heartbeat") as session:
            cluster = self._cluster
            size_bytes = request.progress.ByteSize()
            if size_bytes > MAX_PROGRESS_BYTES:
                raise InvalidConfig(
                    f"progress has {size_bytes} bytes; expected at most {MAX_PROGRESS_BYTES}"
                )
            beat = cluster.heartbeat(session, clock.now_s(), request.view_number)
            number = self._carry_out(beat)
        # An operator is no node, and a node of a cluster that was restored meanwhile none any more.
        if session.role is not Role.OPERATOR and cluster is self._cluster:
            self._adaptive.heard(session.node_id, request.progress, clock.now_s())
            if not session.run:
                self.checkpointing.heard(session.node_id, request.progress)
            self._last_said[session.node_id] = request
        self._metrics.heartbeats.labels(role=session.role.value).inc()
        return pb.HeartbeatResponse(view_number=number)

    @translated
    async def DeregisterNode(
        self, request: pb.DeregisterNodeRequest, context: Context
    ) -> pb.DeregisterNodeResponse:
        """End the caller's membership; or an operator reports that a process has ended."""
        ended_count = 0
        async with self._answered():
            session = session_of(request.session)
            if request.launch_id:
                ended = self._cluster.process_ended(session, request.launch_id)
                ended_count = self._carry_out(ended)
            else:
                if request.only_if_kept:
                    await self._check_copies(session, context)
                left = self._cluster.deregister(
                    session,
                    request.reason or "no reason given",
                    clock.now_s(),
                    loss_is_wanted=request.loss_is_wanted,
                    unfinished=request.unfinished,
                )
                self._carry_out(left)
        return pb.DeregisterNodeResponse(ended_count=ended_count)

    async def _check_copies(self, session: Session, context: Context) -> None:
        """Refuse a server that has the only copy of values which another server could take; where
        none can, make a checkpoint first, if the cluster has a place for one, and none of its
        values is lost. It has nothing of runs with a name, so a server that has values of them
        alone is refused after one checkpoint.
        """
        cluster = self._cluster
        if cluster.settings.checkpoint_url and UNNAMED in cluster.runs_in_log_alone(session):
            deadline_s = _deadline_s(context.time_remaining())
            await self.checkpointing.create_beside_log(session.node_id, deadline_s)
            cluster = self._cluster
        refused = self._carry_out(cluster.refusal_to_leave(session, clock.now_s()))
        if refused is not None:
            raise refused
        runs = cluster.runs_held_alone(session)
        if not cluster.settings.checkpoint_url:
            return
        stays, can_be_made = self._stays_with_runs, not cluster.checkpoints.lost_words
        is_due = session.node_id not in stays or runs == [UNNAMED]
        if UNNAMED in runs and can_be_made and is_due:
            wanted = pb.CreateCheckpointRequest(reason=f"server {session.node_id} leaves")
            await self.checkpointing.create(wanted, _deadline_s(context.time_remaining()))
        named = [run for run in cluster.runs_held_alone(session) if run != UNNAMED]
        if named:
            stays.add(session.node_id)
            raise cluster.only_in_servers(session, named)

    @translated
    async def WatchCluster(
        self, request: pb.WatchClusterRequest, context: Context
    ) -> AsyncIterator[pb.WatchClusterResponse]:
        """Stream the view and its changes, until the caller has left or the scheduler stops."""
        async with self._answering(request.session, "WatchCluster") as session:
            pass
        cluster, sent_number = self._served, 0
        while True:
            changed = self._changed
            if self._served is not cluster:
                self._served.caller(session, "WatchCluster")  # fails: it is no member there
            if self._view.view_number > sent_number:
                sent_number = self._view.view_number
                yield pb.WatchClusterResponse(view=self._view_for(session))
                continue  # the view may have changed while this one was written
            if self._is_closed or not self._has(session):
                return
            await changed.wait()

    @translated
    async def CreateTable(
        self, request: pb.CreateTableRequest | bytes, context: Context
    ) -> pb.CreateTableResponse:
        """Create a table or find the identical one; park until there are servers for it."""
        deadline_s = _deadline_s(context.time_remaining())
        async with self._answered():
            created = await self._created(await table_request_of(request), deadline_s)
        return pb.CreateTableResponse(
            table=wire.table_to_proto(created.table), view_number=created.view_number
        )

    @translated
    async def SetConsistency(
        self, request: pb.SetConsistencyRequest, context: Context
    ) -> pb.SetConsistencyResponse:
        """Change a table's consistency; park until all servers are prepared."""
        deadline_s = _deadline_s(context.time_remaining())
        async with self._answering(request.session, "SetConsistency") as session:
            change = await self._committed(session, request, deadline_s)
        return pb.SetConsistencyResponse(
            change=wire.change_to_proto(change), view_number=self._view.view_number
        )

    @translated
    async def PromiseChange(
        self, request: pb.PromiseChangeRequest, context: Context
    ) -> pb.PromiseChangeResponse:
        """Note that a server is prepared for a change, or the outcome of one."""
        async with self._answering(request.session, "PromiseChange") as session:
            outcome = wire.change_outcome_from_proto(request.outcome)
            prepared = TableId(request.table_id), request.number, request.clock, outcome
            self._carry_out(self._cluster.prepare_change(session, *prepared, clock.now_s()))
        return pb.PromiseChangeResponse()

    @translated
    async def SetBackups(
        self, request: pb.SetBackupsRequest, context: Context
    ) -> pb.SetBackupsResponse:
        async with self._answering(request.session, "SetBackups") as session:
            wanted = [wire.backup_request_from_proto(each) for each in request.requests]
            refused = self._carry_out(self._cluster.set_backups(session, wanted))
        return pb.SetBackupsResponse(refused_range_ids=refused, view_number=self._view.view_number)

    @translated
    async def CreateCheckpoint(
        self, request: pb.CreateCheckpointRequest, context: Context
    ) -> pb.CreateCheckpointResponse:
        """Make a checkpoint; park until it is complete."""
        deadline_s = _deadline_s(context.time_remaining())
        async with self._answering(request.session, "CreateCheckpoint") as session:
            _check_unnamed(session, "a checkpoint")
            return await self.checkpointing.create(request, deadline_s, session.node_id)

    @translated
    async def RestoreCheckpoint(
        self, request: pb.RestoreCheckpointRequest, context: Context
    ) -> pb.RestoreCheckpointResponse:
        """Restart from a checkpoint, or empty: a new cluster takes the place of this one."""
        async with self._answering(request.session, "RestoreCheckpoint") as session:
            cluster = self._cluster
            if request.empty and session.role is not Role.OPERATOR:
                raise NotPermitted(
                    f"to restart empty is an operator's right; the caller's role is "
                    f"{session.role.value}"
                )
            _check_unnamed(session, "a restore")
            cluster.check_runs_are_over()
            restored = None
            async with self.checkpointing.pruning:  # what is chosen stays
                if not request.empty:
                    self._caller(request.session, "RestoreCheckpoint")
                    restored = await self.checkpointing.restored_from(request.url, self._roots)
                cluster = self._cluster
                self._caller(request.session, "RestoreCheckpoint")  # no other restore was faster
                cluster.check_runs_are_over()
                clock_before = self.checkpointing.schedule.clock
                timeline, key = secrets.token_bytes(TIMELINE_BYTES), secrets.token_bytes(32)
                settings = cluster.in_new_timeline(restored, timeline, key)
                self._publication.cluster_replaced()
                self._last_said.clear()  # of other workers, under the same numbers
                given_up = self.checkpointing.end()
                self._begin(Decision(Cluster(settings, clock.now_s())), given_up)
            checkpointing = self.checkpointing
            await self._publication.flushed()
            await checkpointing.until_recorded()
        if restored is None:
            logs.warning("cluster_begun_anew", clock_before=clock_before)
            return pb.RestoreCheckpointResponse()
        reached = max((table.clock for table in restored.tables.values()), default=0)
        logs.warning("cluster_restored", url=restored.url, clock=reached, clock_before=clock_before)
        return pb.RestoreCheckpointResponse(url=restored.url, clock=reached)

    @translated
    async def JoinCheckpoint(
        self, request: pb.JoinCheckpointRequest, context: Context
    ) -> pb.JoinCheckpointResponse:
        async with self._answering(request.session, "JoinCheckpoint") as session:
            clocks = {TableId(table.table_id): table.clock for table in request.tables}
            place = session, request.number, clocks
            joined = self._cluster.join_checkpoint(*place, request.has_state, request.has_begun)
            is_awaited = self._carry_out(joined)
            must_step = False
            if request.stays:
                reached = self.checkpointing.schedule.reached
                stayed = self._cluster.stay_for_checkpoint(*place, reached, clock.now_s())
                must_step = self._carry_out(stayed)
                must_step &= self.checkpointing.is_waited_for(request.number, session.node_id)
        return pb.JoinCheckpointResponse(must_step=must_step, is_awaited=is_awaited)

    @translated
    async def ReportCheckpointPart(
        self, request: pb.ReportCheckpointPartRequest, context: Context
    ) -> pb.ReportCheckpointPartResponse:
        async with self._answering(request.session, "ReportCheckpointPart") as session:
            part = part_from_proto(request)
            self.checkpointing.report(session, request.number, part)
            self._publication.decided((), is_news=False)
        return pb.ReportCheckpointPartResponse()

    @translated
    async def GetClusterStatus(
        self, request: pb.GetClusterStatusRequest, context: Context
    ) -> pb.GetClusterStatusResponse:
        """Return the view, the progress of each node, and the checkpoint history."""
        async with self._answering(request.session, "GetClusterStatus"):
            pass
        now_s = clock.now_s()
        response = pb.GetClusterStatusResponse(
            view=self._view_message,
            replica_count=self._cluster.settings.replica_count,
            min_in_sync=self._cluster.settings.min_in_sync,
            checkpoints=self.checkpointing.history(now_s),
            data_sets=map(data_set_to_proto, self._cluster.data_sets),
        )
        for _, (kept, heard_s) in self._kept.at(now_s):
            response.kept_values.add(
                address=kept.address,
                cluster_id=kept.cluster_id,
                file=kept.file,
                last_heard_ms=round((now_s - heard_s) * 1000),
            )
        for node in self._view.nodes:
            said = self._last_said.get(node.node_id, pb.HeartbeatRequest())
            response.nodes.add(
                node=wire.node_to_proto(node),
                progress=said.progress,
                last_heard_ms=round(self._cluster.members.quiet_s(node.node_id, now_s) * 1000),
                view_number=said.view_number,
            )
        return fitted(response)

    @translated
    async def ReportKeptValues(
        self, request: pb.ReportKeptValuesRequest, context: Context
    ) -> pb.ReportKeptValuesResponse:
        async with self._answering(request.session, "ReportKeptValues"):
            said = request.kept_values
            kept = KeptValues(said.address, said.cluster_id, said.file)
            is_news = self._kept.said(kept, clock.now_s())
        if is_news:
            logs.warning(
                "values_kept_elsewhere",
                address=kept.address,
                cluster_id=kept.cluster_id,
                file=kept.file or "none",
            )
        lease_ms = round(self._cluster.settings.lease_s * 1000)
        return pb.ReportKeptValuesResponse(again_ms=lease_ms)

    @translated
    async def EndRun(self, request: pb.EndRunRequest, context: Context) -> pb.EndRunResponse:
        async with self._answering(request.session, "EndRun") as session:
            ended_count = self._carry_out(self._cluster.end_run(session, request.run))
        return pb.EndRunResponse(ended_count=ended_count)

    @translated
    async def RemoveRun(
        self, request: pb.RemoveRunRequest, context: Context
    ) -> pb.RemoveRunResponse:
        async with self._answering(request.session, "RemoveRun") as session:
            had = self._carry_out(self._cluster.remove_run(session, request.run))
        return pb.RemoveRunResponse(table_count=had.table_count, byte_count=had.byte_count)

    @translated
    async def LeaseDataShards(
        self, request: pb.LeaseDataShardsRequest, context: Context
    ) -> pb.LeaseDataShardsResponse:
        """Take a report and lease shards; park while others have all that are left."""
        deadline_s = _deadline_s(context.time_remaining())
        async with self._answering(request.session, "LeaseDataShards") as session:
            lease = await self._leased(session, shard_request_of(request), deadline_s)
        return pb.LeaseDataShardsResponse(
            pass_number=lease.pass_number, shards=lease.shards, view_number=self._view.view_number
        )

    async def _leased(
        self, session: Session, request: ShardRequest, deadline_s: float
    ) -> ShardLease:
        """The lease that a worker need not wait for, by `deadline_s` of the clock at the latest."""
        is_late = False
        while True:
            changed = self._changed
            lease = self._cluster.lease_data_shards(session, request, clock.now_s()).reply
            self._publication.decided((), is_news=False)
            if lease.ends_pass:
                self._wake()  # those who wait for its last shards
            self._metrics.data_shards.labels(event="done").inc(lease.reported_count)
            self._metrics.data_shards.labels(event="issued").inc(lease.issued_count)
            if not lease.waits_for:
                return lease
            if is_late:
                raise WaitExpired(lease.waits_for)
            is_late = not await self._changes_by(changed, deadline_s, lease.waits_for)

    async def _changes_by(self, changed: asyncio.Event, deadline_s: float, reason: str) -> bool:
        """Wait for the next view, for `reason`; False if `deadline_s` comes first. Draining if the
        scheduler stops.
        """
        if self._is_closed:
            raise Draining(f"{_STOPPING}; {reason}")
        try:
            async with asyncio.timeout(deadline_s - clock.now_s()):
                await changed.wait()
        except TimeoutError:
            return False
        return True

    async def _created(self, request: pb.CreateTableRequest, deadline_s: float) -> Created:
        """The created table, by `deadline_s` of the clock at the latest."""
        session = self._caller(request.session, "CreateTable")
        spec = await spec_of(request.spec, self._cluster.view.of_run(session.run).tables)
        is_told = is_late = False
        while True:
            changed = self._changed
            outcome = self._carry_out(self._cluster.create_table(session, spec, clock.now_s()))
            if isinstance(outcome, Created):
                return outcome
            if is_late:
                raise WaitExpired(outcome.reason)
            if not is_told:
                logs.info(
                    "table_waits", table=spec.name, node_id=session.node_id, reason=outcome.reason
                )
                is_told = True
            # The last answer says when the missing servers were last heard.
            is_late = not await self._changes_by(changed, deadline_s, outcome.reason)

    async def _committed(
        self, session: Session, request: pb.SetConsistencyRequest, deadline_s: float
    ) -> TableChange:
        """The requested change, once committed. It is proposed again if it is withdrawn before
        `deadline_s`, as when a server is lost that had to prepare it. After that its proposal is
        withdrawn, unless it is decided, or another caller's that may wait longer.
        """
        wanted = ChangeRequest(
            request.table_name,
            wire.consistency_from_proto(request.consistency),
            request.after_clock,
            deadline_s,
        )
        number, is_late = 0, False
        while True:
            changed = self._changed
            self._cluster.caller(session, "SetConsistency")  # a restore may have replaced it
            found: Outcome = (
                self._cluster.changes.outcome(wanted.table_name, number, clock.now_s(), session.run)
                if number
                else self._carry_out(self._cluster.set_consistency(session, wanted, clock.now_s()))
            )
            if isinstance(found, TableChange):
                return found
            if isinstance(found, Withdrawn):
                if clock.now_s() >= deadline_s:
                    raise WaitExpired(found.reason)
                number = 0
                continue
            if self._is_closed:
                raise Draining(f"{_STOPPING}; {found.reason}")
            number = found.number
            left_s = deadline_s - clock.now_s()
            if is_late:  # and it was not withdrawn
                raise WaitExpired(f"{found.reason}; the change may still be made")
            if left_s <= 0 and not number:
                raise WaitExpired(found.reason)
            try:
                async with asyncio.timeout(left_s):
                    await changed.wait()
            except TimeoutError:
                now_s = clock.now_s()  # one time for both: what is late has been withdrawn
                if now_s >= deadline_s and not number:  # another proposal is under way: make none
                    raise WaitExpired(found.reason) from None
                self._carry_out(self._cluster.tick(now_s))
                is_late = now_s >= deadline_s

    def _caller(self, message: types_pb2.SessionIdentity, method: str) -> Session:
        """Parse the caller's session, and check first of all that it may call `method`."""
        session = session_of(message)
        self._cluster.caller(session, method)
        return session

    def _carry_out(self, decision: Decision[ReplyT]) -> ReplyT:
        """Log and publish the transitions once they are durable; return the reply."""
        if decision.transitions:
            self._publication.decided(decision.transitions)
        return decision.reply

    def _publish(
        self, cluster: Cluster, view: ClusterView, transitions: tuple[Transition, ...]
    ) -> None:
        if cluster is not self._cluster:  # it was replaced; the new one is published next
            return
        self._served, self._view = cluster, view
        self.checkpointing.served()
        for transition in transitions:
            log_transition(transition)
            count_transition(transition, self._metrics)
            self.checkpointing.published(transition, clock.now_s())
        self._view_message = wire.view_to_proto(view)
        self._run_messages: dict[str, types_pb2.ClusterView] = {}
        self._adaptive.observe(view)
        for node_id in self._last_said.keys() - view.nodes_by_id.keys():
            del self._last_said[node_id]
        self._measure()
        self._wake()

    def _view_for(self, session: Session) -> types_pb2.ClusterView:
        """The newest view of the caller's run; a server sees all runs."""
        if session.role is Role.SERVER or self._view.of_run(session.run) is self._view:
            return self._view_message
        if session.run not in self._run_messages:
            view = self._view.of_run(session.run)
            self._run_messages[session.run] = wire.view_to_proto(view)
        return self._run_messages[session.run]

    def _has(self, session: Session) -> bool:
        """True while the published view has the caller as a member."""
        node = self._view.nodes_by_id.get(session.node_id)
        return session.role is Role.OPERATOR or (node is not None and node.state.is_member)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _measure(self) -> None:
        view = self._view
        counts = Counter((node.role, node.state) for node in view.nodes)
        for role in Role:
            for state in NodeState:
                gauge = self._metrics.nodes.labels(role=role.value, state=state.value)
                gauge.set(counts[role, state])
        replica_count = self._cluster.settings.replica_count
        missing = Counter(
            max(0, replica_count - view.in_sync_count(assignment))
            for assignment in view.ranges
            if assignment.primary is not None
        )
        for count in range(replica_count + 1):
            self._metrics.ranges.labels(missing_replicas=str(count)).set(missing[count])
        self._metrics.lost_ranges.set(len(view.lost_ranges))
        self._metrics.view_number.set(view.view_number)
        self.on_health_change()
        self._metrics.tables.set(len(view.tables))

    @contextlib.asynccontextmanager
    async def _answering(
        self, message: types_pb2.SessionIdentity, method: str
    ) -> AsyncIterator[Session]:
        """Answer a caller that has this session, and the right to call `method`."""
        async with self._answered(is_sign_of_life=method == "Heartbeat"):
            yield self._caller(message, method)

    @contextlib.asynccontextmanager
    async def _answered(self, *, is_sign_of_life: bool = False) -> AsyncIterator[None]:
        """Answer or refuse a call after everything decided so far is durable. A scheduler that has
        just resumed from a journal answers only signs of life until it has heard the servers. A
        journal that turns out to be an older copy ends the scheduler, not the caller.
        """
        try:
            try:
                if not is_sign_of_life:
                    self._cluster.members.check_heard(clock.now_s())
                yield
            except InvalidJournal:
                raise
            except PushpullError:
                await self._publication.flushed()
                raise
            await self._publication.flushed()
        except InvalidJournal as error:
            self._publication.fail(error)
            self._metrics.refusals.labels(code=Recovering.code).inc()
            raise Recovering(f"the scheduler ends: {error.message}") from error
        except PushpullError as error:
            self._metrics.refusals.labels(code=error.code).inc()
            raise


def _check_unnamed(session: Session, what: str) -> None:
    if session.run:
        raise InvalidConfig(
            f"{what} belongs to the run without a name, and the caller is of run '{session.run}'; "
            "save its parameters with ps.pull_model, or train it without a run's name"
        )


def _deadline_s(remaining_s: float | None) -> float:
    """Moment of the clock until which a call may wait so that its answer still arrives in time."""
    if remaining_s is None:
        return clock.now_s() + DEFAULT_CREATE_DEADLINE_S
    waits_s = remaining_s - min(_MAX_ANSWER_MARGIN_S, remaining_s / 4)
    return clock.now_s() + min(max(0.0, waits_s), limits.MAX_DEADLINE_S)


def fitted(response: pb.GetClusterStatusResponse) -> pb.GetClusterStatusResponse:
    """Cut the response to the message size that any client accepts: inline values always, then, as
    needed, the tensor layouts, the nodes' loops, and their clocks.
    """
    for table in response.view.tables:
        if table.spec.initializer.WhichOneof("kind") == "inline":
            table.spec.initializer.inline.CopyFrom(types_pb2.InlineInitializer())
    if response.ByteSize() > limits.FOREIGN_MAX_MESSAGE_BYTES:
        for table in response.view.tables:
            table.spec.ClearField("tensors")
    if response.ByteSize() > limits.FOREIGN_MAX_MESSAGE_BYTES:
        for node in response.nodes:
            node.progress.ClearField("loop")
    if response.ByteSize() > limits.FOREIGN_MAX_MESSAGE_BYTES:
        for node in response.nodes:
            node.progress.ClearField("tables")
            node.progress.ClearField("waiting_for")
    return response


_MOST_BYTES = limits.MAX_ENTRY_BYTES + limits.MESSAGE_OVERHEAD_BYTES  # bound of all other requests


def handlers_of(servicer: SchedulerServicer) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """The service's methods by short name; a request over its bound is not parsed."""
    handlers = {}
    for method in pb.DESCRIPTOR.services_by_name["SchedulerService"].methods:
        make = grpc.unary_unary_rpc_method_handler
        if method.server_streaming:
            make = grpc.unary_stream_rpc_method_handler
        read: Any = RequestReader(getattr(pb, method.input_type.name), _MOST_BYTES)
        if method.name == "CreateTable":
            read = table_request_reader
        write = getattr(pb, method.output_type.name).SerializeToString
        handlers[method.name] = make(getattr(servicer, method.name), read, write)
    return handlers


def add_to_server(servicer: SchedulerServicer, server: grpc.aio.Server) -> None:
    """Like the generated function of that name."""
    handlers = handlers_of(servicer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))
