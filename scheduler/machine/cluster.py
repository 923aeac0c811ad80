"""The scheduler's machine: every event that reaches a cluster, and its effects on the state.

A machine of its own decides about each part of the state: `membership`, `tables` (and the primaries
of their ranges), `configurations` (backups and failover), `changes` (of tables under training),
`checkpoints` and `data_shards`.

Rules:
    - Every event is a method: it takes the event and `now_s`, changes the state or raises, and
      returns a `Decision`. A method that raises has changed nothing.
    - A method with a `session` raises as `Cluster.caller`.
    - Each event changes the view number at most once, and only if the view changed.
    - A replacement worker, or a late joiner, joins each table by a change of its own, as a member.

Invariants:
    CL-1  Node ids, incarnations, table ids and ordinals are never given twice.
    CL-2  A range's assignment_epoch never goes back, and grows by one with each change of its
          primary or its backups; by two with a hand-over.
    CL-3  A range that holds blocks has a primary; another only if that one was its backup.
    CL-4  No two members have one rank; ranks are below max_workers.
    CL-5  The view fits a message (`scheduler.machine.view_size`).
    CL-6  A finished cluster stays finished: no node joins, and no table is created.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ps_core import rights
from ps_core.change import ChangeOutcome, Join, TableChange
from ps_core.cluster_view import BackupRequest, ClusterView, Node, NodeState, Role, Session
from ps_core.errors import InvalidConfig, NotPermitted, Overloaded, Recovering
from ps_core.keys import NodeId, RangeId, TableId
from ps_core.manifest import PartReport
from ps_core.runs import Run
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from scheduler.machine import admission, update_offers, view_size
from scheduler.machine.adaptation import CourseRecord
from scheduler.machine.changes import ChangeRequest, PendingProposal, TableChanges, check_workers
from scheduler.machine.checkpoint_state import CompleteCheckpoint, WorkerClocks
from scheduler.machine.checkpoints import CheckpointAttempts
from scheduler.machine.configurations import Configurations, HandOvers
from scheduler.machine.data_shards import DataSet, DataShards, ShardLease, ShardRequest
from scheduler.machine.departures import Departures
from scheduler.machine.membership import OPERATOR, Membership
from scheduler.machine.state import (
    ClusterSettings,
    ClusterState,
    JournaledCluster,
    NodeLeft,
    RangesFailedOver,
    RangesLost,
    Registration,
    Restored,
    RunRemoved,
    Transition,
    WorkerGone,
)
from scheduler.machine.tables import TableCatalogue

ReplyT = TypeVar("ReplyT")

STARTED_AGAIN = "the scheduler was restarted; ask again"  # reason of whatever a restart withdrew


@dataclass(frozen=True, slots=True)
class Decision(Generic[ReplyT]):
    """The reply to an event's sender, and the transitions of the event."""

    reply: ReplyT
    transitions: tuple[Transition, ...] = ()


@dataclass(frozen=True, slots=True)
class Created:
    """A table, and the first view that has it."""

    table: Table
    view_number: int


@dataclass(frozen=True, slots=True)
class Parked:
    """A creation that waits for `reason`."""

    reason: str


class Cluster:
    """The machine. Not thread-safe: one owner calls it, one event at a time.

    Attributes:
        members, changes, checkpoints: for questions; events are methods of the cluster.
    """

    def __init__(
        self, settings: ClusterSettings, now_s: float, state: ClusterState | None = None
    ) -> None:
        """A cluster without nodes, or with the state of a journal (`resumed`)."""
        self.settings = settings
        self._state = ClusterState.empty(settings) if state is None else state
        self.members = Membership(settings, self._state, now_s)
        describe = self.members.describe
        self.changes = TableChanges(self._state, describe, self._free_view_bytes)
        self._configurations = Configurations(self._state, settings.replica_count)
        self._departures = Departures(settings, self._state, self._configurations)
        self._hand_overs = HandOvers(self._state, self._configurations, settings.lease_s)
        self.checkpoints = CheckpointAttempts(settings, self._state, self.changes, describe)
        self._tables = TableCatalogue(settings, self._state, describe, self._configurations)
        members = self._state.members
        self._data_shards = DataShards(
            self._state.data_sets,
            lambda node_id, now_s: describe(members[node_id].node, now_s),
        )
        self._view: ClusterView | None = None

    @classmethod
    def resumed(cls, journaled: JournaledCluster, now_s: float) -> Decision[Cluster]:
        """The cluster of a journal, as its scheduler restarts. Undecided changes and an unfinished
        checkpoint are withdrawn. Decided changes end by the word of a table's first range, and a
        checkpoint without its manifest by what is in its directory.
        """
        cluster = cls(journaled.settings, now_s, journaled.state)
        cluster.members.resume(journaled.returning_s, now_s)
        transitions = cluster.checkpoints.give_up(STARTED_AGAIN)
        transitions += cluster.changes.resume(STARTED_AGAIN)
        return Decision(cluster, cluster._changed(*transitions))

    def journaled(self, now_s: float) -> JournaledCluster:
        """The journaled state, by reference: it changes with the cluster."""
        return JournaledCluster(self.settings, self._state, self.members.returning_s(now_s))

    @property
    def view(self) -> ClusterView:
        state = self._state
        if self._view is None or self._view.view_number != state.view_number:
            self._view = ClusterView(
                view_number=state.view_number,
                cluster_id=self.settings.cluster_id,
                worker_count=self.settings.worker_count,
                server_count=self.settings.server_count,
                nodes=tuple(member.node for member in state.members.values()),
                ranges=tuple(state.ranges),
                tables=tuple(state.tables.values()),
                finished=state.finished,
                checkpoint=self.checkpoints.under_way,
                restored_from="" if self.settings.restored is None else self.settings.restored.url,
                runs=tuple(state.runs.values()),
                next_table_id=state.next_table_id,
            )
        return self._view

    def in_new_timeline(
        self, restored: Restored | None, timeline: bytes, token_key: bytes
    ) -> ClusterSettings:
        """Settings of the cluster that replaces this one in a restore, from a checkpoint or empty:
        it has the same identity, and never gives a number that this one gave. With replicas it
        waits for no server that this one went on without.
        """
        own = self.settings
        lineage = () if own.restored is None else own.restored.lineage
        servers = own.servers_at_restore
        if self.settings.replica_count > 1 and self._state.has_formed:
            alive = (n.state is NodeState.ALIVE for n in self._state.nodes_of(Role.SERVER))
            servers = min(max(1, sum(alive)), self.settings.server_count)
        return replace(
            self.settings,
            servers_at_restore=servers,
            restored=restored,
            timeline=timeline,
            token_key=token_key,
            first_incarnation=self._state.next_incarnation,
            first_node_id=self._state.next_node_id,
            checkpoint_count=self._state.checkpoint_count,
            replaced_timelines=own.replaced_timelines | {own.timeline},
            left_timelines=own.left_timelines | {own.timeline, *lineage},
        )

    def finish(self) -> Decision[None]:
        """Finish the cluster, whose servers stop; no effect while a worker is a member."""
        return Decision(None, self._changed(*self.members.finish()))

    @property
    def servers_have_left(self) -> bool:
        """True if no server is left that a stop would cut off. A silent server of a replicated
        cluster that holds no range counts as dead.
        """
        is_replicated, holders = self.settings.replica_count > 1, self._state.holders
        return all(
            n.state is NodeState.LEFT
            or (is_replicated and n.state is NodeState.SILENT and n.node_id not in holders)
            for n in self._state.nodes_of(Role.SERVER)
        )

    def register(self, request: Registration, now_s: float) -> Decision[Session]:
        """Make the caller a node, or repeat the answer that it got before. An operator becomes no
        node: its session shows only its role. `scheduler.machine.admission` refuses.
        """
        known = self.members.registered(request)
        if request.role is Role.OPERATOR:
            return Decision(self.members.session(replace(OPERATOR, run=request.run)))
        if known is not None:
            heard = self.members.hear(known, now_s)
            return Decision(self.members.session(known), self._changed(*heard))
        node = self.members.candidate(request, now_s)
        run = admission.run_of(request, self._state, self.settings)
        is_late = node.role is Role.WORKER and (
            node.rank >= run.worker_count or node.rank in self._state.workers_by_rank(run.name)
        )
        needed_bytes = view_size.node_bytes(node)
        needed_bytes += view_size.run_bytes(run) if run.name not in self._state.runs else 0
        needed_bytes += self.changes.join_bytes(run.name, node.rank) if is_late else 0
        free_bytes = self._free_view_bytes()
        if needed_bytes > free_bytes:
            raise Overloaded(
                f"the cluster's view may grow by {free_bytes} bytes to "
                f"{view_size.MAX_VIEW_BYTES}; the node needs {needed_bytes}"
            )
        transitions = self.members.add(node, run, request, now_s)
        transitions += self._given_back(node, request)
        if node.role is Role.SERVER:  # its first view says where it starts catching up
            transitions += self.members.succeeded(node)
            transitions += self._configured()
        if is_late:
            self.changes.join(run.name, Join(node.rank, node.incarnation))
            transitions += self.changes.propose_joins(self.settings.lease_s, now_s)
        return Decision(self.members.session(node), self._changed(*transitions))

    def _given_back(self, node: Node, request: Registration) -> list[Transition]:
        """Adopt ranges from a registering server's update log; their former primary is dead."""
        claim = request.update_log
        if claim is None:
            return []
        transitions: list[Transition] = []
        if claim.timeline == self.settings.timeline:
            transitions += self._configurations.give_back(node, claim)
        transitions += self.members.replaced(node, request)
        return self._failed_over(transitions)

    def heartbeat(self, session: Session, now_s: float, view_number: int = 0) -> Decision[int]:
        """Note that the caller lives and acts on a view; reply with the newest view's number."""
        node = self.caller(session, "Heartbeat")
        self.members.check_view(node, view_number)
        if node.role is Role.SERVER:
            self._departures.heard(node.node_id, view_number)
        transitions = self._changed(*self.members.hear(node, now_s))
        return Decision(self._state.view_number, transitions)

    def deregister(
        self,
        session: Session,
        reason: str,
        now_s: float,
        *,
        loss_is_wanted: bool = False,
        unfinished: bool = False,
    ) -> Decision[None]:
        """End the caller's membership; no effect on a caller that has left. `loss_is_wanted` if a
        person stopped the server, and knows what is lost with it. A worker that ends `unfinished`
        is gone, and may be replaced.
        """
        transitions = self.members.deregister(session, reason, now_s, unfinished=unfinished)
        if transitions and session.role is Role.SERVER:
            transitions += self._configured()
        if loss_is_wanted:
            transitions = [
                replace(each, is_wanted=True) if isinstance(each, RangesLost) else each
                for each in transitions
            ]
        return Decision(None, self._changed(*transitions))

    def refusal_to_leave(self, session: Session, now_s: float) -> Decision[Recovering | None]:
        """The refusal of a server's leave, or None; see `Departures.refusal`."""
        refused, transitions = self._departures.refusal(self._stopping(session), now_s)
        return Decision(refused, self._changed(*transitions))

    def held_alone(self, session: Session) -> tuple[RangeId, ...]:
        """Ranges whose values would be lost if this server left now; none in a finished cluster."""
        return self._departures.held_alone(self._stopping(session))

    def runs_held_alone(self, session: Session) -> list[str]:
        """Runs with values in `held_alone`, the one without a name first."""
        return self._departures.runs_held_alone(self._stopping(session))

    def runs_in_log_alone(self, session: Session) -> list[str]:
        """See `Departures.runs_in_log_alone`."""
        return self._departures.runs_in_log_alone(self._stopping(session))

    def only_in_servers(self, session: Session, runs: Sequence[str]) -> Recovering:
        """See `Departures.only_in_servers`."""
        return self._departures.only_in_servers(session.node_id, runs)

    def _stopping(self, session: Session) -> NodeId:
        node = self.caller(session, "DeregisterNode")
        if node.role is not Role.SERVER:
            raise NotPermitted(
                f"only_if_kept is a server's right; the caller's role is {node.role.value}"
            )
        return node.node_id

    def process_ended(self, session: Session, launch_id: bytes) -> Decision[int]:
        """A process that an operator launched has ended; the reply counts its nodes."""
        node = self.caller(session, "DeregisterNode")
        if node.role is not Role.OPERATOR:
            raise NotPermitted(
                f"the end of another process is an operator's right to report; the role is "
                f"{node.role.value}"
            )
        expected = admission.LAUNCH_ID_BYTES
        if len(launch_id) != expected:
            raise InvalidConfig(f"launch_id has {len(launch_id)} bytes; expected {expected}")
        ended = self.members.process_ended(launch_id)
        count = sum(isinstance(each, NodeLeft | WorkerGone) for each in ended)
        return Decision(count, self._changed(*ended))

    def check_runs_are_over(self) -> None:
        """Raise InvalidConfig while a named run is trained: a restart would end its tables, too."""
        names = [name for name in self._state.runs if not self.members.is_over(name)]
        if names:
            raise InvalidConfig(
                f"a restore restarts the whole cluster, and run '{names[0]}' "
                f"{f'and {len(names) - 1} more are' if names[1:] else 'is'} not over: wait for its "
                f"workers, or end it (pushpull runs end {names[0]})"
            )

    def end_run(self, session: Session, name: str) -> Decision[int]:
        """End a run; the reply is the number of its workers that were members."""
        self.caller(session, "EndRun")
        if self._run(name).has_ended:
            return Decision(0)
        ended = self.members.end_run(name)
        return Decision(sum(isinstance(each, NodeLeft) for each in ended), self._changed(*ended))

    def remove_run(self, session: Session, name: str) -> Decision[RunRemoved]:
        self.caller(session, "RemoveRun")
        run = self._run(name)
        if run.is_removed:
            return Decision(RunRemoved(run, 0, 0))
        if not self.members.is_over(name):
            raise InvalidConfig(
                f"run '{name}' is not over: wait for its workers, or end it first (pushpull runs "
                f"end {name})"
            )
        tables = self._state.tables_of(name)
        byte_count = sum(self._tables.remove(table) for table in tables)
        self._data_shards.remove(name)
        left = self.members.remove_run(name)
        removed = RunRemoved(self._state.runs[name], len(tables), byte_count)
        return Decision(removed, self._changed(*left, removed))

    def _run(self, name: str) -> Run:
        run = self._state.runs.get(name)
        if run is None:
            known = ", ".join(f"'{each}'" for each in self._state.runs) or "none with a name"
            raise InvalidConfig(f"there is no run '{name[:100]}'; the runs of the cluster: {known}")
        return run

    def caller(self, session: Session, method: str) -> Node:
        """The caller's node, after a check of its right to call an RPC method.

        Raises:
            NotPermitted: the caller's role may not call it (`ps_core.rights`).
            Fenced: the caller is no member, or of another cluster.
            Unauthenticated: its token is wrong.
            InvalidJournal: it registered after this scheduler's journal was written.
        """
        node = self.members.member(session)
        rights.check(method, node.role)
        return node

    def create_table(
        self, session: Session, spec: TableSpec, now_s: float
    ) -> Decision[Created | Parked]:
        """Create a table, find the identical one, or park the creation until there are servers."""
        self.caller(session, "CreateTable")
        spec = self._tables.with_partitions(spec.validated(), session.run)
        spec = update_offers.completed(
            spec, self._state, lambda server: self.members.describe(server, now_s)
        )
        existing = self._tables.find(spec, session.run)
        if existing is not None:
            return Decision(Created(existing, self._state.view_number))
        self._tables.check_replicable(spec)
        view = self.view.of_run(session.run)
        joins = self.changes.joined_before(session.run, view.worker_count)
        check_workers(spec.name, spec.consistency, view.world_size)
        made, created = self._tables.create(spec, session.run, joins, now_s)
        transitions = self._changed(*created)
        if isinstance(made, str):
            return Decision(Parked(made))
        return Decision(Created(made, self._state.view_number), transitions)

    def set_consistency(
        self, session: Session, request: ChangeRequest, now_s: float
    ) -> Decision[TableChange | PendingProposal]:
        """Begin to change a table's consistency, or find the change made or running."""
        self.caller(session, "SetConsistency")
        world_size = self.view.of_run(session.run).world_size
        found, transitions = self.changes.request(
            replace(request, run=session.run), world_size, now_s
        )
        return Decision(found, self._changed(*transitions))

    def move_bound(self, request: ChangeRequest, now_s: float) -> Decision[None]:
        """Begin to move an adaptive bound, unless the table has a proposal."""
        return Decision(None, self._changed(*self.changes.move(request, now_s)))

    @property
    def courses(self) -> Mapping[TableId, CourseRecord]:
        """State of the adaptive bounds' rule, by table."""
        return self._state.courses

    def keep_courses(self, courses: dict[TableId, CourseRecord]) -> bool:
        """Store the state of the adaptive bounds' rule; False if it has not changed."""
        if courses == self._state.courses:
            return False
        self._state.courses = courses
        return True

    def prepare_change(
        self,
        session: Session,
        table_id: TableId,
        number: int,
        clock: int,
        outcome: ChangeOutcome | None = None,
        now_s: float = 0.0,
    ) -> Decision[None]:
        """A server is prepared for a change after `clock`, if it comes before the change's
        deadline; or reports the `outcome` of a decided one, which the table's first range took or
        gave up.
        """
        node = self.caller(session, "PromiseChange")
        transitions = self.changes.expire(now_s)
        if outcome is None:
            transitions += self.changes.prepare(node.node_id, table_id, number, clock)
        else:
            transitions += self.changes.end_decided(table_id, number, outcome)
        transitions += self.checkpoints.look()
        return Decision(None, self._changed(*transitions))

    # --- data sets

    @property
    def data_sets(self) -> Collection[DataSet]:
        return self._state.data_sets.values()

    def lease_data_shards(
        self, session: Session, request: ShardRequest, now_s: float
    ) -> Decision[ShardLease]:
        """A worker reports shards that are done, and leases others. It waits if the lease has
        `waits_for`: a view may bring shards, or another lease end the pass.
        """
        node = self.caller(session, "LeaseDataShards")
        return Decision(self._data_shards.lease(node, request, now_s))

    # --- checkpoints

    def begin_checkpoint(self, reason: str, now_s: float) -> Decision[PendingProposal]:
        """Begin a checkpoint, or find the proposed one; see `CheckpointAttempts.begin`."""
        pending, transitions = self.checkpoints.begin(reason, now_s)
        return Decision(pending, self._changed(*transitions))

    def join_checkpoint(
        self,
        session: Session,
        number: int,
        clocks: Mapping[TableId, int],
        has_state: bool,
        has_begun: bool = False,
    ) -> Decision[bool]:
        """A worker names its clocks; see `CheckpointAttempts.join`. The reply is True if another
        worker's script waits for the checkpoint.
        """
        node = self.caller(session, "JoinCheckpoint")
        place = WorkerClocks(node.rank, dict(clocks), has_state, has_begun)
        is_awaited = self.checkpoints.is_awaited(node, number)
        return Decision(is_awaited, self._changed(*self.checkpoints.join(node, number, place)))

    def stay_for_checkpoint(
        self,
        session: Session,
        number: int,
        clocks: Mapping[TableId, int],
        reached: Mapping[NodeId, Mapping[TableId, int]],
        now_s: float,
    ) -> Decision[bool]:
        """A worker's script waits; see `CheckpointAttempts.stay`. The reply is True if the worker
        must take another step first; see `CheckpointAttempts.must_step`.
        """
        node = self.caller(session, "JoinCheckpoint")
        must_step = self.checkpoints.must_step(node, number, clocks, reached)
        changed = self.checkpoints.stay(node, number, clocks, now_s)
        return Decision(must_step, self._changed(*changed))

    def report_part(self, session: Session, number: int, part: PartReport) -> Decision[None]:
        node = self.caller(session, "ReportCheckpointPart")
        return Decision(None, self._changed(*self.checkpoints.report(node, number, part)))

    def end_checkpoint(
        self, number: int, problem: str, made: CompleteCheckpoint | None = None
    ) -> Decision[None]:
        """The manifest is written; or it could not be, for `problem`."""
        return Decision(None, self._changed(*self.checkpoints.done(number, problem, made)))

    def give_up_checkpoint(self, reason: str) -> Decision[None]:
        return Decision(None, self._changed(*self.checkpoints.give_up(reason)))

    def set_backups(
        self, session: Session, backup_requests: Sequence[BackupRequest]
    ) -> Decision[tuple[RangeId, ...]]:
        """A primary requests backups of its ranges, hands ranges over, or reports some whose values
        it is missing. The reply is the ranges whose requests are void.
        """
        node = self.caller(session, "SetBackups")
        refused, transitions = self._configurations.set_backups(
            node.node_id, backup_requests, may_hand_over=not self._is_busy
        )
        return Decision(refused, self._changed(*self._failed_over(transitions)))

    def tick(self, now_s: float) -> Decision[None]:
        """Act on the time: silent and gone nodes, and deadlines; at least every half lease."""
        transitions = self.checkpoints.expire(now_s)
        transitions += self.changes.expire(now_s)
        transitions += self.changes.propose_joins(self.settings.lease_s, now_s)
        transitions += self.members.look(now_s)
        transitions += self._configured()
        if self.settings.replica_count > 1 and not self._state.finished:
            transitions += self._hand_overs.look(now_s, is_busy=self._is_busy)
        return Decision(None, self._changed(*transitions))

    @property
    def _is_busy(self) -> bool:
        """True while no range may be handed over: what is under way counts on its primary, or a
        server is stopping.
        """
        state = self._state
        return bool(state.proposals or state.checkpoint or self._departures.stopping)

    def _configured(self) -> list[Transition]:
        """Give ranges other primaries and backups where they need them."""
        return self._failed_over(self._configurations.look())

    def _failed_over(self, transitions: list[Transition]) -> list[Transition]:
        """The transitions, and those that follow from other primaries."""
        for transition in list(transitions):
            if isinstance(transition, RangesFailedOver):
                transitions += self.changes.failed_over(transition.range_ids)
        return transitions

    def _changed(self, *transitions: Transition) -> tuple[Transition, ...]:
        further: list[Transition] = []
        for transition in transitions:
            if isinstance(transition, NodeLeft | WorkerGone):
                self.changes.ended(transition.node)
                self._departures.ended(transition.node.node_id)
                further += self._data_shards.ended(transition.node)
                further += self.checkpoints.ended(transition.node)
            elif isinstance(transition, RangesFailedOver):
                # The blocks of the old primaries cannot be written.
                further += self.checkpoints.give_up("a server was lost while it was made")
        if transitions:
            self._state.view_number += 1
        return (*transitions, *further)

    def _free_view_bytes(self) -> int:
        return view_size.free_bytes(self.settings, self._state)
