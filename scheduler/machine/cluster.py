"""The scheduler's machine: every event that reaches a cluster, and what it leads to.

What an event does to each part of the state is decided beside this file:
`scheduler.machine.membership` (who is in the cluster), `scheduler.machine.tables` (which tables
there are), `scheduler.machine.ownership` (who serves which range),
`scheduler.machine.configurations` (who backs it up, and takes its place),
`scheduler.machine.changes` (what is changed while tables are trained),
`scheduler.machine.checkpoints` (what is written down of them).

Rules:
    - Every event is a method: it takes the event and `now_s`, changes the state or raises, and
      returns a `Decision`: the reply and the transitions that happened. A method that raises has
      changed nothing.
    - Each event changes the view number at most once, and only if the view changed.
    - A worker that replaces one that is gone, or comes beyond the first, joins each table by a
      scheduled change; one whose membership has ended joins nothing any more.

Invariants:
    CL-1  Node ids, incarnations, table ids and ordinals are never given twice.
    CL-2  A range's assignment_epoch never goes back, and grows by one with each change of its
          primary or its backups.
    CL-3  A range that holds blocks has a primary; another only if that one was its backup.
    CL-4  No two members have one rank; ranks are below max_workers.
    CL-5  The view fits a message (`scheduler.machine.view_size`).
    CL-6  Once finished, always finished; nobody joins and no table comes to be.

What it deliberately does not do: write its journal (`scheduler.edge.publication` does, before
anybody is told), wait (the edge retries a parked creation when the view changes), keep what nodes
say of their progress, move ranges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ps_core import rights
from ps_core.change import Change, ChangeOutcome, Join
from ps_core.cluster_view import BackupRequest, ClusterView, Node, NodeState, Role, Session
from ps_core.errors import InvalidConfig, NotPermitted, Overloaded, Recovering
from ps_core.keys import NodeId, RangeId, TableId
from ps_core.manifest import PartReport
from ps_core.runs import Run
from ps_core.tables import Table, TableSpec
from scheduler.machine import admission, update_offers, view_size
from scheduler.machine.adaptation import KeptCourse
from scheduler.machine.admission import LAUNCH_ID_BYTES
from scheduler.machine.changes import ChangeRequest, Changes, Outcome, Pending, check_workers
from scheduler.machine.checkpoint_state import WorkerPlace
from scheduler.machine.checkpoints import Checkpoints
from scheduler.machine.configurations import Configurations
from scheduler.machine.departures import Departures
from scheduler.machine.membership import OPERATOR, Membership
from scheduler.machine.ownership import Ownership
from scheduler.machine.state import (
    ClusterSettings,
    ClusterState,
    Kept,
    NodeLeft,
    RangesFailedOver,
    RangesLost,
    Registration,
    Restored,
    RunRemoved,
    Transition,
    WorkerGone,
)
from scheduler.machine.tables import Tables

ReplyT = TypeVar("ReplyT")

STARTED_AGAIN = "the scheduler was started again; ask again"
"""Why nothing came of what was not settled then."""


@dataclass(frozen=True, slots=True)
class Decision(Generic[ReplyT]):
    """What an event led to: the reply to its sender, and what changed."""

    reply: ReplyT
    transitions: tuple[Transition, ...] = ()


@dataclass(frozen=True, slots=True)
class Created:
    """A table, and the first view that is sure to hold it."""

    table: Table
    view_number: int


@dataclass(frozen=True, slots=True)
class Parked:
    """A creation that has to wait; `reason` says for whom."""

    reason: str


Creation = Created | Parked
"""What became of a request for a table."""


class Cluster:
    """The machine. Not safe for threads: one owner calls it, one event at a time."""

    def __init__(
        self, settings: ClusterSettings, now_s: float, state: ClusterState | None = None
    ) -> None:
        """A cluster that nobody has joined; or one that goes on from this state: see `resumed`."""
        self.settings = settings
        self._state = ClusterState.empty(settings) if state is None else state
        self._members = Membership(settings, self._state, now_s)
        describe = self._members.describe
        self._changes = Changes(self._state, describe, self._room_bytes)
        self._configurations = Configurations(self._state, settings.replica_count)
        self._departures = Departures(settings, self._state, self._configurations)
        self._checkpoints = Checkpoints(settings, self._state, self._changes, describe)
        ownership = Ownership(self._state, settings, describe, self._configurations)
        self._tables = Tables(settings, self._state, ownership)
        self._view: ClusterView | None = None

    @classmethod
    def resumed(cls, kept: Kept, now_s: float) -> Decision[Cluster]:
        """The cluster that a journal has, as its scheduler is started again. What was not settled
        is withdrawn, but for what a table's first range decides, and for a checkpoint that only
        lacks its manifest: whoever has the files says what became of it.
        """
        cluster = cls(kept.settings, now_s, kept.state)
        cluster._members.resume(kept.returning_s, now_s)
        transitions = cluster._checkpoints.give_up(STARTED_AGAIN)
        transitions += cluster._changes.resume(STARTED_AGAIN)
        return Decision(cluster, cluster._changed(*transitions))

    def kept(self, now_s: float) -> Kept:
        """What a journal keeps of it, by reference: it is changed with the cluster."""
        return Kept(self.settings, self._state, self._members.returning_s(now_s))

    @property
    def view(self) -> ClusterView:
        """The cluster as it is."""
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
                checkpoint=self._checkpoints.under_way,
                restored_from="" if self.settings.restored is None else self.settings.restored.url,
                runs=tuple(state.runs.values()),
                next_table_id=state.next_table_id,
            )
        return self._view

    def in_new_timeline(
        self, restored: Restored | None, timeline: bytes, token_key: bytes
    ) -> ClusterSettings:
        """The settings of the cluster that takes this one's place: it has its name, gives none of
        its numbers again, and starts from a checkpoint, or with nothing.
        """
        return replace(
            self.settings,
            restored=restored,
            timeline=timeline,
            token_key=token_key,
            first_incarnation=self._state.next_incarnation,
            first_node_id=self._state.next_node_id,
            checkpoint_count=self._state.checkpoint_count,
            replaced_timelines=self.settings.replaced_timelines | {self.settings.timeline},
        )

    @property
    def workers_are_done(self) -> bool:
        """Whether all workers have come, and none is left."""
        return self._members.workers_are_done

    def finish(self) -> Decision[None]:
        """Nobody joins any more, and servers stop; it changes nothing while there are workers."""
        return Decision(None, self._changed(*self._members.finish()))

    @property
    def servers_have_left(self) -> bool:
        """Whether no server is left that a stop would cut off. One that is silent and holds nothing
        any more is dead.
        """
        is_replicated, holders = self.settings.replica_count > 1, self._state.holders
        return all(
            n.state is NodeState.LEFT
            or (is_replicated and n.state is NodeState.SILENT and n.node_id not in holders)
            for n in self._state.nodes_of(Role.SERVER)
        )

    def quiet_s(self, node_id: NodeId, now_s: float) -> float:
        """Seconds since a member was last heard; 0 for one that left."""
        return self._members.quiet_s(node_id, now_s)

    def register(self, request: Registration, now_s: float) -> Decision[Session]:
        """Make the caller a node, or give it the answer that it got before. An operator becomes
        none: its session says no more than that it may do what operators may.

        Raises:
            InvalidConfig: the request is wrong or contradicts the cluster, or that is finished; the
                message says how.
            Fenced: it means another cluster, or its node has left.
            Overloaded: the cluster is full.
            Recovering: another has its place, which may be dead, and it waits.
        """
        known = self._members.registered(request)
        if request.role is Role.OPERATOR:
            return Decision(self._members.session(replace(OPERATOR, run=request.run)))
        if known is not None:
            heard = self._members.hear(known, now_s)
            return Decision(self._members.session(known), self._changed(*heard))
        node = self._members.candidate(request, now_s)
        run = admission.run_of(request, self._state, self.settings)
        is_late = node.role is Role.WORKER and (
            node.rank >= run.worker_count or node.rank in self._state.workers_by_rank(run.name)
        )
        needed_bytes = view_size.node_bytes(node)
        needed_bytes += view_size.run_bytes(run) if run.name not in self._state.runs else 0
        needed_bytes += self._changes.join_bytes(run.name, node.rank) if is_late else 0
        room_bytes = self._room_bytes()
        if needed_bytes > room_bytes:
            raise Overloaded(
                f"the cluster's view has room for {room_bytes} more bytes of "
                f"{view_size.MAX_VIEW_BYTES}; the node needs {needed_bytes}"
            )
        transitions = self._members.add(node, request, now_s)
        transitions += self._given_back(node, request)
        if node.role is Role.SERVER:  # its first view says which ranges it is to be brought
            transitions += self._members.succeeded(node)
            transitions += self._configured()
        if is_late:
            self._changes.join(run.name, Join(node.rank, node.incarnation))
            transitions += self._changes.propose_joins(self.settings.lease_s, now_s)
        return Decision(self._members.session(node), self._changed(*transitions))

    def _given_back(self, node: Node, request: Registration) -> list[Transition]:
        """What a server is given that came with an update log, and who is dead for that."""
        claim = request.update_log
        if claim is None:
            return []
        transitions: list[Transition] = []
        if claim.timeline == self.settings.timeline:
            transitions += self._configurations.give_back(node, claim)
        transitions += self._members.replaced(node, request)
        return self._failed_over(transitions)

    def check_heard(self, now_s: float) -> None:
        """Tell nobody anything before the servers have said which views they act on (JR-4).

        Raises:
            Recovering: the scheduler was started again within a lease, and waits for one.
        """
        self._members.check_heard(now_s)

    def heartbeat(self, session: Session, now_s: float, view_number: int = 0) -> Decision[int]:
        """Note that the caller lives, and acts on that view; the reply is the number of the newest.

        Raises:
            Fenced: the caller is no member, or of another cluster.
            Unauthenticated: its token is wrong.
            InvalidJournal: the journal that this scheduler goes on from is an older copy.
        """
        node = self.caller(session, "Heartbeat")
        self._members.check_view(node, view_number)
        if node.role is Role.SERVER:
            self._departures.heard(node.node_id, view_number)
        transitions = self._changed(*self._members.hear(node, now_s))
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
        """End the caller's membership; a caller that has left already changes nothing.

        Args:
            session: the caller's.
            reason: why, for the log.
            now_s: when.
            loss_is_wanted: what is lost by that is no news to who stopped the server.
            unfinished: a worker ends in the middle: it is gone, and another may take its rank.

        Raises:
            Fenced: the caller is of another cluster.
            Unauthenticated: its token is wrong.
        """
        transitions = self._members.deregister(session, reason, now_s, unfinished=unfinished)
        if transitions and session.role is Role.SERVER:
            transitions += self._configured()
        if loss_is_wanted:
            transitions = [
                replace(each, is_wanted=True) if isinstance(each, RangesLost) else each
                for each in transitions
            ]
        return Decision(None, self._changed(*transitions))

    def refusal_to_leave(self, session: Session, now_s: float) -> Decision[Recovering | None]:
        """Why a server may not leave yet, if it would take the only copy of a range along where
        another server can have it, or relies on one that may be dead: `Departures`.

        Raises:
            PushpullError: as `held_alone`.
        """
        refused, transitions = self._departures.refusal(self._stopping(session), now_s)
        return Decision(refused, self._changed(*transitions))

    def held_alone(self, session: Session) -> tuple[RangeId, ...]:
        """The ranges that would be lost if this server left now; none once the work is done.

        Raises:
            NotPermitted: the caller is no server.
            Fenced: the caller is no member, or of another cluster.
            Unauthenticated: its token is wrong.
        """
        return self._departures.held_alone(self._stopping(session))

    def _stopping(self, session: Session) -> NodeId:
        node = self.caller(session, "DeregisterNode")
        if node.role is not Role.SERVER:
            raise NotPermitted(
                f"only_if_kept is a server's to ask; the caller's role is {node.role.value}"
            )
        return node.node_id

    def process_ended(self, session: Session, launch_id: bytes) -> Decision[int]:
        """An operator says that the process has ended which it started with this id; the reply is
        how many nodes that had not left are gone for it.

        Raises:
            NotPermitted: the caller is no operator.
            InvalidConfig: it is no launch_id.
            Fenced: the caller is of another cluster.
            Unauthenticated: its token is wrong.
        """
        node = self.caller(session, "DeregisterNode")
        if node.role is not Role.OPERATOR:
            raise NotPermitted(
                f"the end of another process is an operator's to tell; the caller's role is "
                f"{node.role.value}"
            )
        if len(launch_id) != LAUNCH_ID_BYTES:
            raise InvalidConfig(f"launch_id has {len(launch_id)} bytes; expected {LAUNCH_ID_BYTES}")
        ended = self._members.process_ended(launch_id)
        count = sum(isinstance(each, NodeLeft | WorkerGone) for each in ended)
        return Decision(count, self._changed(*ended))

    def check_runs_are_over(self) -> None:
        """Refuse to begin anew while a run that has a name is trained: its tables would go, too.

        Raises:
            InvalidConfig: naming the runs.
        """
        names = [name for name in self._state.runs if not self._members.is_over(name)]
        if names:
            raise InvalidConfig(
                f"a restore begins the whole cluster anew, and run '{names[0]}' "
                f"{f'and {len(names) - 1} more are' if names[1:] else 'is'} not over: wait for its "
                f"workers, or end it (pushpull runs end {names[0]})"
            )

    def end_run(self, session: Session, name: str) -> Decision[int]:
        """End a run; the reply is how many workers were members of it.

        Raises:
            InvalidConfig: there is no run of that name.
            NotPermitted: the caller is no operator.
            Fenced: the caller is of another cluster.
            Unauthenticated: its token is wrong.
        """
        self.caller(session, "EndRun")
        if self._run(name).has_ended:
            return Decision(0)
        ended = self._members.end_run(name)
        return Decision(sum(isinstance(each, NodeLeft) for each in ended), self._changed(*ended))

    def remove_run(self, session: Session, name: str) -> Decision[RunRemoved]:
        """Remove a run that is over, with its tables; the reply says what it had.

        Raises:
            InvalidConfig: there is no run of that name, or it is not over.
            NotPermitted: the caller is no operator.
            Fenced: the caller is of another cluster.
            Unauthenticated: its token is wrong.
        """
        self.caller(session, "RemoveRun")
        run = self._run(name)
        if run.is_removed:
            return Decision(RunRemoved(run, 0, 0))
        if not self._members.is_over(name):
            raise InvalidConfig(
                f"run '{name}' is not over: wait for its workers, or end it first (pushpull runs "
                f"end {name})"
            )
        tables = self._state.tables_of(name)
        byte_count = sum(self._tables.remove(table) for table in tables)
        left = self._members.remove_run(name)
        removed = RunRemoved(self._state.runs[name], len(tables), byte_count)
        return Decision(removed, self._changed(*left, removed))

    def _run(self, name: str) -> Run:
        run = self._state.runs.get(name)
        if run is None:
            known = ", ".join(f"'{each}'" for each in self._state.runs) or "none that has a name"
            raise InvalidConfig(f"there is no run '{name[:100]}'; the runs of the cluster: {known}")
        return run

    def caller(self, session: Session, method: str) -> Node:
        """Who calls a method of the contract, which it may.

        Raises:
            NotPermitted: the caller's role may not (`ps_core.rights`).
            Fenced: the caller is no member, or of another cluster.
            Unauthenticated: its token is wrong.
        """
        node = self._members.member(session)
        rights.check(method, node.role)
        return node

    def has(self, session: Session) -> bool:
        """Whether the caller, who was one, is a member still."""
        return self._members.has(session)

    def create_table(self, session: Session, spec: TableSpec, now_s: float) -> Decision[Creation]:
        """Create a table, find the identical one, or say for whom the creation has to wait.

        Raises:
            InvalidConfig: the specification is wrong; the message names the field.
            TableExists: one of that name differs; the message names the first field that does.
            NotPermitted: the caller is no worker.
            Fenced: the caller is no member.
            Unauthenticated: its token is wrong.
        """
        self.caller(session, "CreateTable")
        spec = update_offers.completed(
            spec.validated(), self._state, lambda server: self._members.describe(server, now_s)
        )
        existing = self._tables.find(spec, session.run)
        if existing is not None:
            return Decision(Created(existing, self._state.view_number))
        self._tables.check_replicable(spec)
        view = self.view.of_run(session.run)
        joins = self._changes.joined_before(session.run, view.worker_count)
        check_workers(spec.name, spec.consistency, view.world_size)
        made, created = self._tables.create(spec, session.run, joins, now_s)
        transitions = self._changed(*created)
        if isinstance(made, str):
            return Decision(Parked(made))
        return Decision(Created(made, self._state.view_number), transitions)

    def set_consistency(
        self, session: Session, request: ChangeRequest, now_s: float
    ) -> Decision[Change | Pending]:
        """Begin to change a table's consistency, or find the change made or under way.

        Raises:
            TableNotFound: there is no such table.
            InvalidConfig: the table cannot have that setting.
            NotPermitted: the caller is no worker and no operator.
            Fenced: the caller is no member.
            Unauthenticated: its token is wrong.
        """
        self.caller(session, "SetConsistency")
        world_size = self.view.of_run(session.run).world_size
        found, transitions = self._changes.request(
            replace(request, run=session.run), world_size, now_s
        )
        return Decision(found, self._changed(*transitions))

    def move_bound(self, request: ChangeRequest, now_s: float) -> Decision[None]:
        """Begin to move the bound of a table whose bound moves, if nothing else is under way."""
        return Decision(None, self._changed(*self._changes.move(request, now_s)))

    @property
    def courses(self) -> Mapping[TableId, KeptCourse]:
        """What is remembered of tables whose bound moves."""
        return self._state.courses

    def keep_courses(self, courses: dict[TableId, KeptCourse]) -> bool:
        """Remember this of them from now on; whether it is anything else than before."""
        if courses == self._state.courses:
            return False
        self._state.courses = courses
        return True

    def change(self, table_name: str, number: int, now_s: float, run: str = "") -> Outcome:
        """What has become of a change of a run's table that was proposed."""
        return self._changes.outcome(table_name, number, now_s, run)

    def promise_change(
        self,
        session: Session,
        table_id: TableId,
        number: int,
        clock: int,
        outcome: ChangeOutcome | None = None,
    ) -> Decision[None]:
        """A server holds what lies beyond `clock` of the table; or tells what became of a change,
        which the table's first range decides.

        Raises:
            NotPermitted: the caller is no server.
            TableNotFound, InvalidConfig: there is no such table, or the clock is too low.
            Fenced: the caller is no member.
            Unauthenticated: its token is wrong.
        """
        node = self.caller(session, "PromiseChange")
        if outcome is None:
            transitions = self._changes.promise(node.node_id, table_id, number, clock)
        else:
            transitions = self._changes.settled(table_id, number, outcome)
        transitions += self._checkpoints.look()
        return Decision(None, self._changed(*transitions))

    # --- checkpoints

    def begin_checkpoint(self, reason: str, now_s: float) -> Decision[Pending]:
        """Begin to make a checkpoint, or find the one that is proposed; see `Checkpoints.begin`."""
        pending, transitions = self._checkpoints.begin(reason, now_s)
        return Decision(pending, self._changed(*transitions))

    def join_checkpoint(
        self, session: Session, number: int, clocks: Mapping[TableId, int], has_state: bool
    ) -> Decision[bool]:
        """A worker says where it is; see `Checkpoints.join`. The reply: another waits for it.

        Raises: as `stay_for_checkpoint`.
        """
        node = self.caller(session, "JoinCheckpoint")
        place = WorkerPlace(node.rank, dict(clocks), has_state)
        is_awaited = self._checkpoints.is_awaited(node, number)
        return Decision(is_awaited, self._changed(*self._checkpoints.join(node, number, place)))

    def stay_for_checkpoint(
        self,
        session: Session,
        number: int,
        clocks: Mapping[TableId, int],
        reached: Mapping[NodeId, Mapping[TableId, int]],
        now_s: float,
    ) -> Decision[bool]:
        """A worker says that its script waits; see `Checkpoints.stay`. The reply: it waits for a
        step that it has to take first; see `Checkpoints.must_step`.

        Raises:
            NotPermitted: the caller is no worker.
            Fenced: the caller is no member.
            Unauthenticated: its token is wrong.
        """
        node = self.caller(session, "JoinCheckpoint")
        must_step = self._checkpoints.must_step(node, number, clocks, reached)
        changed = self._checkpoints.stay(node, number, clocks, now_s)
        return Decision(must_step, self._changed(*changed))

    def report_part(self, session: Session, number: int, part: PartReport) -> Decision[None]:
        """A node has written its part; see `Checkpoints.report`.

        Raises:
            NotPermitted: the caller is no server and no worker.
            InvalidConfig: it has no part in it.
            Fenced: the caller is no member.
            Unauthenticated: its token is wrong.
        """
        node = self.caller(session, "ReportCheckpointPart")
        return Decision(None, self._changed(*self._checkpoints.report(node, number, part)))

    def end_checkpoint(self, number: int, problem: str) -> Decision[None]:
        """The manifest is written; or it could not be, with a problem."""
        return Decision(None, self._changed(*self._checkpoints.done(number, problem)))

    def give_up_checkpoint(self, reason: str) -> Decision[None]:
        """Nobody goes on with the one that is made; see `Checkpoints.give_up`."""
        return Decision(None, self._changed(*self._checkpoints.give_up(reason)))

    def checkpoint_problem(self, number: int) -> str | None:
        """How a checkpoint ended: empty if it is complete; None while it is made."""
        return self._checkpoints.problem_of(number)

    def checkpoint_again(self, number: int) -> int:
        """The number that a checkpoint has now: its own, unless it was begun again."""
        return self._checkpoints.newest_of(number)

    def checkpoint_reason(self, now_s: float) -> str:
        """What the checkpoint that is made waits for."""
        return self._checkpoints.reason(now_s)

    def set_backups(
        self, session: Session, backup_requests: Sequence[BackupRequest]
    ) -> Decision[tuple[RangeId, ...]]:
        """A server wishes for backups of ranges that it is primary of, or says what of them it has
        nothing of; the reply is the ranges whose wishes are void.

        Raises:
            NotPermitted: the caller is no server.
            InvalidKeys, InvalidConfig: a wish is wrong in itself.
            Fenced: the caller is no member.
            Unauthenticated: its token is wrong.
        """
        node = self.caller(session, "SetBackups")
        refused, transitions = self._configurations.set_backups(node.node_id, backup_requests)
        return Decision(refused, self._changed(*self._failed_over(transitions)))

    def tick(self, now_s: float) -> Decision[None]:
        """Note who has fallen silent, who is gone and what was not promised in time; to be called
        at least every half lease.
        """
        transitions = self._checkpoints.expire(now_s)
        transitions += self._changes.expire(now_s)
        transitions += self._changes.propose_joins(self.settings.lease_s, now_s)
        transitions += self._members.look(now_s)
        transitions += self._configured()
        return Decision(None, self._changed(*transitions))

    def _configured(self) -> list[Transition]:
        """Ranges have other primaries or joiners, where they need them."""
        return self._failed_over(self._configurations.look())

    def _failed_over(self, transitions: list[Transition]) -> list[Transition]:
        """The same, and what follows where ranges have other primaries."""
        for transition in list(transitions):
            if isinstance(transition, RangesFailedOver):
                transitions += self._changes.failed_over(transition.range_ids)
        return transitions

    def _changed(self, *transitions: Transition) -> tuple[Transition, ...]:
        further: list[Transition] = []
        for transition in transitions:
            if isinstance(transition, NodeLeft | WorkerGone):
                self._changes.ended(transition.node)
                self._departures.ended(transition.node.node_id)
                further += self._checkpoints.ended(transition.node)
            elif isinstance(transition, RangesFailedOver):
                further += self._checkpoints.moved()
        if transitions:
            self._state.view_number += 1
        return (*transitions, *further)

    def _room_bytes(self) -> int:
        return view_size.room_bytes(self.settings, self._state)
