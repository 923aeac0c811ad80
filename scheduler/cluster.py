"""The scheduler's machine: who is in the cluster, which tables there are, who serves which range.

Rules:
    - Every event is a method: it takes the event and `now_s`, changes the state or raises, and
      returns a `Decision`: the reply and the transitions that happened. A method that raises has
      changed nothing.
    - Registration and heartbeats are signs of life, and nothing else is: a stream that stays open,
      or a request that was queued, proves nothing.
    - Each event changes the view number at most once, and only if the view changed.
    - Registration is idempotent by registration_id, table creation by specification, leaving by
      node.
    - A worker's rank is given once, neither silence nor leaving frees it; but one that was declared
      gone may be replaced: the new worker joins each table by a scheduled change.
    - A worker that is silent for longer than its timeout is declared gone, for good: its
      incarnation is fenced. Time in which the scheduler itself was paused does not count.

Invariants:
    CL-1  Node ids, incarnations, table ids and ordinals are never given twice.
    CL-2  A range's assignment_epoch grows by one with each change of its primary, and only then.
    CL-3  A range that holds blocks has a primary, and keeps it.
    CL-4  No two members have one rank; ranks are below worker_count.
    CL-5  The view fits a message (`scheduler.view_size`).
    CL-6  Once finished, always finished; nobody joins and no table comes to be.

What it deliberately does not do: keep a journal (a scheduler that starts again is a new cluster,
and tells old nodes so), wait (the edge retries a parked creation when the view changes), keep what
nodes say of their progress, move ranges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ps_core import limits
from ps_core.change import Change, Join
from ps_core.cluster_view import ClusterView, Node, NodeState, Role, Session
from ps_core.errors import (
    Fenced,
    InvalidConfig,
    NotPermitted,
    Overloaded,
    TableExists,
    Unauthenticated,
    check,
)
from ps_core.failure_detector import FailureDetector
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId
from ps_core.tables import Table, TableSpec
from scheduler import admission, placement, update_offers, view_size
from scheduler.changes import Changes, Outcome, Pending, Wish, check_workers
from scheduler.cluster_state import (
    ClusterFinished,
    ClusterSettings,
    ClusterState,
    Member,
    NodeHeardAgain,
    NodeLeft,
    NodeRegistered,
    NodeSilent,
    RangesPlaced,
    Registration,
    TableCreated,
    Transition,
    WorkerGone,
)
from scheduler.spec_difference import first_difference

READER_LEASES = 20
"""A reader silent for so many leases is taken to have left: nothing waits for it, and evaluators
that come and go must not fill the view."""

KEPT_READER_COUNT = 100
"""Readers that have left and are still shown."""

MAX_TABLE_BLOCK_COUNT = 4_194_304
"""Blocks of one table; 4 TiB of float32 at the default size."""

ReplyT = TypeVar("ReplyT")


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

    def __init__(self, settings: ClusterSettings, now_s: float) -> None:
        """A cluster that nobody has joined."""
        self.settings = settings
        self._state = ClusterState.empty(settings)
        self._detector = FailureDetector(settings.lease_s, now_s)
        self._changes = Changes(self._state, self._describe, self._room_bytes)
        self._view: ClusterView | None = None

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
            )
        return self._view

    @property
    def servers_have_left(self) -> bool:
        """Whether no server is left that a stop would cut off."""
        return all(n.state is NodeState.LEFT for n in self._state.nodes_of(Role.SERVER))

    def quiet_s(self, node_id: NodeId, now_s: float) -> float:
        """Seconds since a member was last heard; 0 for one that left."""
        return self._detector.quiet_s(node_id, now_s)

    def register(self, request: Registration, now_s: float) -> Decision[Session]:
        """Make the caller a node, or give it the answer that it got before.

        Raises:
            InvalidConfig: the request is wrong or contradicts the cluster; the message says how.
            Fenced: it means another cluster, or its node has left.
            Draining: the cluster is finished.
            Overloaded: the cluster is full.
        """
        state = self._state
        admission.check_request(request, self.settings)
        known = state.node_of_registration.get(request.registration_id)
        if known is not None:
            member = state.members[known]
            admission.check_repeated(request, member.registration, member.node)
            return Decision(self._session(member.node), self._hear(member.node, now_s))

        def describe(node: Node) -> str:
            return self._describe(node, now_s)

        admission.check_place(request, state, describe)
        rank = 0
        if request.role is Role.WORKER:
            rank = admission.choose_rank(request, self.settings, state, describe)
        node = Node(
            node_id=NodeId(state.next_node_id),
            incarnation=state.next_incarnation,
            role=request.role,
            rank=rank,
            address=request.address if request.role is Role.SERVER else "",
            state=NodeState.ALIVE,
        )
        room_bytes = self._room_bytes()
        is_replacement = request.role is Role.WORKER and rank in state.workers_by_rank()
        node_bytes = view_size.node_bytes(node)
        needed_bytes = node_bytes + (self._changes.join_bytes() if is_replacement else 0)
        if needed_bytes > room_bytes:
            raise Overloaded(
                f"the cluster's view has room for {room_bytes} more bytes of "
                f"{view_size.MAX_VIEW_BYTES}; the node needs {needed_bytes}"
            )
        state.next_node_id += 1
        state.next_incarnation = Incarnation(node.incarnation + 1)
        state.view_bytes += node_bytes
        state.members[node.node_id] = Member(node, request)
        state.node_of_registration[request.registration_id] = node.node_id
        self._detector.heard(node.node_id, now_s)
        transitions: list[Transition] = [NodeRegistered(node)]
        if is_replacement:
            self._changes.join(Join(rank, node.incarnation))
            transitions += self._changes.propose_joins(self.settings.lease_s, now_s)
        return Decision(self._session(node), self._changed(*transitions))

    def heartbeat(self, session: Session, now_s: float) -> Decision[int]:
        """Note that the caller lives; the reply is the number of the newest view.

        Raises:
            Fenced: the caller is no member, or of another cluster.
            Unauthenticated: its token is wrong.
        """
        transitions = self._hear(self.member(session), now_s)
        return Decision(self._state.view_number, transitions)

    def deregister(self, session: Session, reason: str, now_s: float) -> Decision[None]:
        """End the caller's membership; a caller that has left already changes nothing.

        Raises:
            Fenced: the caller is of another cluster.
            Unauthenticated: its token is wrong.
        """
        del now_s  # leaving does not depend on when
        self._check_genuine(session)
        member = self._state.members.get(session.node_id)
        if member is None or not member.node.state.is_member:
            return Decision(None)
        return Decision(None, self._changed(*self._leave(member.node, reason)))

    def member(self, session: Session) -> Node:
        """The caller's node.

        Raises:
            Fenced: the caller is no member, or of another cluster.
            Unauthenticated: its token is wrong.
        """
        self._check_genuine(session)
        member = self._state.members.get(session.node_id)
        if member is not None and member.node.state is NodeState.GONE:
            raise Fenced(member.node.fence_words)
        if member is None or member.node.state is NodeState.LEFT:
            raise Fenced(
                f"node {session.node_id} has left the cluster; register again to come back"
            )
        return member.node

    def create_table(self, session: Session, spec: TableSpec, now_s: float) -> Decision[Creation]:
        """Create a table, find the identical one, or say for whom the creation has to wait.

        Raises:
            InvalidConfig: the specification is wrong; the message names the field.
            TableExists: one of that name differs; the message names the first field that does.
            NotPermitted: the caller is no worker.
            Fenced: the caller is no member.
            Unauthenticated: its token is wrong.
        """
        node = self.member(session)
        if node.role is not Role.WORKER:
            raise NotPermitted(
                f"{self._describe(node, now_s)} asks for a table; only workers create tables"
            )
        spec = update_offers.completed(
            spec.validated(), self._state, lambda server: self._describe(server, now_s)
        )
        existing = self._state.tables.get(spec.name)
        if existing is not None:
            difference = first_difference(existing.spec, spec)
            if difference is not None:
                raise TableExists(f"table '{spec.name}' exists and differs: its {difference}")
            return Decision(Created(existing, self._state.view_number))
        check_workers(spec.name, spec.consistency, self.settings.worker_count)
        self._check_room(spec)
        state = self._state
        joins = self._changes.joined_before()
        table = Table(TableId(len(state.tables) + 1), state.next_ordinal, spec, joins=joins)
        added_bytes = placement.bytes_by_range(table, len(state.ranges))
        reason = self._missing_servers(added_bytes, now_s)
        if reason:
            return Decision(Parked(f"table '{spec.name}' waits for {reason}"))
        for range_id, size_bytes in added_bytes.items():
            state.range_bytes[range_id] = state.range_bytes.get(range_id, 0) + size_bytes
        state.tables[spec.name] = table
        state.view_bytes += view_size.table_bytes(spec) + view_size.JOIN_BYTES * len(joins)
        state.next_ordinal += table.block_count
        transitions = self._changed(TableCreated(table), *self._place(added_bytes))
        return Decision(Created(table, state.view_number), transitions)

    def set_consistency(
        self, session: Session, wish: Wish, now_s: float
    ) -> Decision[Change | Pending]:
        """Begin to change a table's consistency, or find the change made or under way.

        Raises:
            TableNotFound: there is no such table.
            InvalidConfig: the table cannot have that setting.
            Fenced: the caller is no member.
            Unauthenticated: its token is wrong.
        """
        self.member(session)
        found, transitions = self._changes.wish(wish, self.settings.worker_count, now_s)
        return Decision(found, self._changed(*transitions))

    def move_bound(self, wish: Wish, now_s: float) -> Decision[None]:
        """Begin to move the bound of a table whose bound moves, if nothing else is under way."""
        return Decision(None, self._changed(*self._changes.move(wish, now_s)))

    def change(self, table_name: str, number: int, now_s: float) -> Outcome:
        """What has become of a change that was proposed."""
        return self._changes.outcome(table_name, number, now_s)

    def promise_change(
        self, session: Session, table_id: TableId, number: int, clock: int
    ) -> Decision[None]:
        """A server holds what lies beyond `clock` of the table.

        Raises:
            NotPermitted: the caller is no server.
            TableNotFound, InvalidConfig: there is no such table, or the clock is too low.
            Fenced: the caller is no member.
            Unauthenticated: its token is wrong.
        """
        node = self.member(session)
        if node.role is not Role.SERVER:
            raise NotPermitted(f"a {node.role.value} promises a change; only servers do")
        transitions = self._changes.promise(node.node_id, table_id, number, clock)
        return Decision(None, self._changed(*transitions))

    def tick(self, now_s: float) -> Decision[None]:
        """Note who has fallen silent, who is gone and what was not promised in time; to be called
        at least every half lease.
        """
        transitions = self._changes.expire(now_s)
        transitions += self._changes.propose_joins(self.settings.lease_s, now_s)
        for node_id in self._detector.look(now_s):
            node = self._move(self._state.members[node_id].node, NodeState.SILENT)
            transitions.append(NodeSilent(node, self._detector.quiet_s(node_id, now_s)))
        for node in self._state.nodes_of(Role.READER):
            quiet_s = self._detector.quiet_s(node.node_id, now_s)
            if node.state is NodeState.SILENT and quiet_s > READER_LEASES * self.settings.lease_s:
                transitions.extend(self._leave(node, f"given up after {quiet_s:.1f} s of silence"))
        timeout_s = self.settings.worker_timeout_s
        for node in self._state.nodes_of(Role.WORKER) if timeout_s else ():
            silence_s = self._detector.silence_s(node.node_id, now_s)
            if node.state is NodeState.SILENT and silence_s > timeout_s:
                transitions.extend(self._declare_gone(node, silence_s))
        return Decision(None, self._changed(*transitions))

    def _changed(self, *transitions: Transition) -> tuple[Transition, ...]:
        if transitions:
            self._state.view_number += 1
        return transitions

    def _session(self, node: Node) -> Session:
        session = Session(
            cluster_id=self.settings.cluster_id,
            timeline=self.settings.timeline,
            node_id=node.node_id,
            incarnation=node.incarnation,
            role=node.role,
            rank=node.rank,
        )
        return replace(session, token=session.signed(self.settings.token_key))

    def _check_genuine(self, session: Session) -> None:
        ours = self.settings
        if session.cluster_id != ours.cluster_id:
            raise Fenced(
                f"the session is of cluster '{session.cluster_id[:100]}'; this is cluster "
                f"'{ours.cluster_id}'. A scheduler that was started again is a new cluster: its "
                f"nodes must be started again too"
            )
        if session.timeline != ours.timeline:
            raise Fenced(
                f"the session is of timeline {session.timeline[:16].hex() or 'none'}; this is "
                f"timeline {ours.timeline.hex()}: register again"
            )
        if not session.is_genuine(ours.token_key):
            raise Unauthenticated(
                f"the session token of node {session.node_id} ({session.role.value}, incarnation "
                f"{session.incarnation}) is {'wrong' if session.token else 'missing'}; send the "
                f"session as RegisterNode gave it"
            )

    def _describe(self, node: Node, now_s: float) -> str:
        rank = f", rank {node.rank}" if node.role is Role.WORKER else ""
        address = f" at {node.address}" if node.address else ""
        heard = ""
        if node.state.is_member:
            heard = f", last heard {self._detector.quiet_s(node.node_id, now_s):.1f} s ago"
        return f"{node.role.value} node {node.node_id}{address} ({node.state.value}{rank}{heard})"

    def _move(self, node: Node, state: NodeState) -> Node:
        members = self._state.members
        members[node.node_id] = replace(members[node.node_id], node=replace(node, state=state))
        return members[node.node_id].node

    def _hear(self, node: Node, now_s: float) -> tuple[Transition, ...]:
        if not self._detector.heard(node.node_id, now_s):
            return ()
        return self._changed(NodeHeardAgain(self._move(node, NodeState.ALIVE)))

    def _leave(self, node: Node, reason: str) -> list[Transition]:
        transitions: list[Transition] = [NodeLeft(self._move(node, NodeState.LEFT), reason)]
        if node.role is Role.READER:
            self._forget_readers()
        return transitions + self._ended(node)

    def _declare_gone(self, node: Node, silence_s: float) -> list[Transition]:
        told = replace(node, silence_ms=round(silence_s * 1000))
        return [WorkerGone(self._move(told, NodeState.GONE)), *self._ended(node)]

    def _ended(self, node: Node) -> list[Transition]:
        """What follows when a node's membership has ended."""
        self._detector.forget(node.node_id)
        workers = self._state.workers_by_rank().values()
        done = len(workers) == self.settings.worker_count and all(
            not worker.state.is_member for worker in workers
        )
        if self.settings.stop_when_done and done and not self._state.finished:
            self._state.finished = True
            return [ClusterFinished()]
        return []

    def _forget_readers(self) -> None:
        state = self._state
        gone = [n for n in state.nodes_of(Role.READER) if n.state is NodeState.LEFT]
        for node in gone[: max(0, len(gone) - KEPT_READER_COUNT)]:
            state.view_bytes -= view_size.node_bytes(node)
            member = state.members.pop(node.node_id)
            del state.node_of_registration[member.registration.registration_id]

    def _room_bytes(self) -> int:
        state = self._state
        fixed_bytes = view_size.fixed_bytes(self.settings.cluster_id, len(state.ranges))
        return view_size.MAX_VIEW_BYTES - fixed_bytes - state.view_bytes

    def _check_room(self, spec: TableSpec) -> None:
        table_count = len(self._state.tables)
        if table_count >= limits.MAX_TABLE_COUNT:
            raise InvalidConfig(
                f"table '{spec.name}' would be table number {table_count + 1} of the cluster; it "
                f"can have {limits.MAX_TABLE_COUNT}"
            )
        block_count = -(-spec.element_count // spec.block_elements)
        if block_count > MAX_TABLE_BLOCK_COUNT:
            raise InvalidConfig(
                f"table '{spec.name}': element_count {spec.element_count} makes {block_count} "
                f"blocks of {spec.block_elements}; expected at most {MAX_TABLE_BLOCK_COUNT}"
            )
        needed_bytes, room_bytes = view_size.table_bytes(spec), self._room_bytes()
        if needed_bytes > room_bytes:
            raise InvalidConfig(
                f"table '{spec.name}' takes up to {needed_bytes} bytes of the cluster's view "
                f"({len(spec.tensors)} tensors, {len(spec.initializer.inline)} bytes of inline "
                f"values), which has room for {room_bytes} more of {view_size.MAX_VIEW_BYTES}"
            )

    def _missing_servers(self, range_ids: Iterable[RangeId], now_s: float) -> str:
        """For whom a table in these ranges has to wait, in words; empty if for nobody."""
        servers = self._state.nodes_of(Role.SERVER)
        alive = [n for n in servers if n.state is NodeState.ALIVE]
        silent = [n for n in servers if n.state is NodeState.SILENT]
        expected = self.settings.server_count
        if len(alive) < expected:
            more = expected - len(alive)
            tail = "".join(f"; {self._describe(node, now_s)}" for node in silent)
            return (
                f"{more} more server{'s' if more > 1 else ''} ({len(alive)} of {expected} "
                f"registered{tail})"
            )
        alive_ids = {node.node_id for node in alive}
        lost = Counter(
            primary
            for range_id in range_ids
            if (primary := self._state.ranges[range_id].primary) is not None
            and primary not in alive_ids
        )
        return " and ".join(
            f"{self._describe(self._state.members[node_id].node, now_s)}, which has {count} of its "
            f"ranges"
            for node_id, count in sorted(lost.items())
        )

    def _place(self, range_ids: Iterable[RangeId]) -> list[Transition]:
        """Give those of the ranges a primary that have none."""
        ranges = self._state.ranges
        if all(ranges[range_id].primary is not None for range_id in range_ids):
            return []
        primaries = {r.range_id: r.primary for r in ranges if r.primary is not None}
        servers = [
            n.node_id for n in self._state.nodes_of(Role.SERVER) if n.state is NodeState.ALIVE
        ]
        placed = placement.place(primaries, self._state.range_bytes, servers)
        for range_id, node_id in placed.items():
            old = ranges[range_id]
            check(old.primary is None, "CL-3", f"range {range_id} holds blocks and would move")
            ranges[range_id] = replace(
                old, primary=node_id, assignment_epoch=AssignmentEpoch(old.assignment_epoch + 1)
            )
        return [RangesPlaced(tuple(sorted(Counter(placed.values()).items())))]
