"""Who is in the cluster: who came, who was heard, who fell silent, left or is gone.

Rules:
    - Registration and heartbeats are signs of life, and nothing else is: a stream that stays open,
      or a request that was queued, proves nothing.
    - Registration is idempotent by registration_id, leaving by node.
    - A worker's rank is given once, neither silence nor leaving frees it; but one that was declared
      gone may be replaced, and more workers may come, up to max_workers, whose ranks are free again
      when they have left.
    - A worker that is silent for longer than its timeout is declared gone, for good: its
      incarnation is fenced. Time in which the scheduler itself was paused does not count. One
      whose process has ended is gone at once, when who started that process says so: it alone
      knows the process's launch_id. So is one whose identity a worker comes with: that one has its
      rank.
    - A scheduler that goes on from its journal has heard nobody: each member has a lease from then
      on, a silent one its whole silence again, and until it was heard it may be dead.
    - The servers know whether that journal is the newest (JR-4): until each that lives was heard,
      or a lease has passed, nobody is told anything. A server that acts on a newer view, and a
      session that this cluster signed with a node id that was not given yet, say that it is an
      older copy.
    - A reader that is silent for long has left: nobody waits for it. So has a server, where ranges
      have replicas, that holds nothing of any range any more.

Invariants: CL-1 for nodes, CL-4 and CL-6 of `scheduler.machine.cluster`, the last of them in what
may join (`scheduler.machine.admission`).

What it deliberately does not do: number the views, know tables or ranges, or look at how much of
the view a node takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ps_core.cluster_view import Node, NodeState, Role, Session
from ps_core.errors import (
    Fenced,
    ForeignCluster,
    InvalidConfig,
    InvalidJournal,
    Recovering,
    Unauthenticated,
)
from ps_core.failure_detector import FailureDetector
from ps_core.keys import Incarnation, NodeId
from ps_core.runs import words
from scheduler.machine import admission, view_size
from scheduler.machine.state import (
    ClusterFinished,
    ClusterSettings,
    ClusterState,
    Member,
    NodeHeardAgain,
    NodeLeft,
    NodeRegistered,
    NodeSilent,
    Registration,
    RunBegun,
    RunEnded,
    Transition,
    WorkerGone,
)

GIVEN_UP_LEASES = 20
"""Whom nothing waits for has left when it was silent for so many leases: evaluators that come and
go, and servers that die and are started again, must not fill the view."""

REGISTER_AGAIN_MS = 100
"""A session of another timeline has not done anything wrong: who registers again is welcome."""

ASK_AGAIN_MS = 50
"""While the scheduler waits to hear the servers, which takes a heartbeat."""

_OLDER_COPY = (
    "it is an older copy. Put the newest one in its place, and start the scheduler again; the "
    "nodes go on meanwhile. If there is none, end the nodes, give another directory, and begin "
    "anew from a checkpoint"
)

OPERATOR = Node(NodeId(0), Incarnation(0), Role.OPERATOR, 0, "", NodeState.ALIVE)
"""What stands for every operator: it is in no view, is not watched, and never leaves."""

KEPT_COUNT = 100
"""Readers, and servers, that have left and are still shown."""


class Membership:
    """The nodes of a cluster, and when each was last heard.

    Args:
        settings: the cluster's.
        state: the cluster's, changed in place.
        now_s: when the cluster came to be.
    """

    def __init__(self, settings: ClusterSettings, state: ClusterState, now_s: float) -> None:
        self._settings = settings
        self._state = state
        self._detector = FailureDetector(settings.lease_s, now_s)
        self._may_return: dict[NodeId, float] = {}  # who ended in the middle, and until when
        self._unheard: set[NodeId] = set()  # whom only the scheduler before this one has heard
        self._resumed_s: float | None = None  # None: this scheduler began the cluster

    def resume(self, returning_s: Mapping[NodeId, float], now_s: float) -> None:
        """Go on from a journal; `returning_s` is what `returning_s` was then."""
        self._resumed_s = now_s
        self._may_return = {node_id: now_s + left_s for node_id, left_s in returning_s.items()}
        for member in self._state.members.values():
            node = member.node
            if node.state.is_member:
                is_silent = node.state is NodeState.SILENT
                self._detector.expect(node.node_id, now_s, is_silent=is_silent)
                self._unheard.add(node.node_id)

    def check_heard(self, now_s: float) -> None:
        """Refuse who asks before the servers have said which views they act on.

        Raises:
            Recovering: the scheduler was started again within a lease, and waits for one.
        """
        if self._resumed_s is None or now_s - self._resumed_s > self._settings.lease_s:
            return
        for node in self._state.nodes_of(Role.SERVER):
            if node.state is NodeState.ALIVE and node.node_id in self._unheard:
                raise Recovering(
                    "the scheduler was started again, and first waits for a lease to hear which "
                    f"view {self.describe(node, now_s)} acts on: its journal might be an older "
                    "copy. Ask again",
                    retry_after_ms=ASK_AGAIN_MS,
                )

    def check_view(self, node: Node, view_number: int) -> None:
        """Compare the journal with the view that a node acts on. Servers alone are believed: others
        may be clients in any language.

        Raises:
            InvalidJournal: the journal is older.
        """
        ours = self._state.view_number
        if self._resumed_s is None or node.role is not Role.SERVER or view_number <= ours:
            return
        raise InvalidJournal(
            f"the journal has view {ours}, and server node {node.node_id} acts on view "
            f"{view_number}: {_OLDER_COPY}"
        )

    def returning_s(self, now_s: float) -> dict[NodeId, float]:
        """Who ended in the middle, and for how long each may be followed by another."""
        return {node_id: until_s - now_s for node_id, until_s in self._may_return.items()}

    def quiet_s(self, node_id: NodeId, now_s: float) -> float:
        """Seconds since a member was last heard; 0 for one that left."""
        return self._detector.quiet_s(node_id, now_s)

    def describe(self, node: Node, now_s: float) -> str:
        """Who a node is and when it was last heard."""
        rank = f", rank {node.rank}" if node.role is Role.WORKER else ""
        rank += f" of run '{node.run}'" if node.run else ""
        address = f" at {node.address}" if node.address else ""
        heard = ""
        quiet_s = self._detector.quiet_s(node.node_id, now_s)
        if node.node_id in self._unheard:
            heard = f", not heard in the {quiet_s:.1f} s since the scheduler was started again"
        elif node.state.is_member:
            heard = f", last heard {quiet_s:.1f} s ago"
        return f"{node.role.value} node {node.node_id}{address} ({node.state.value}{rank}{heard})"

    # --- sessions

    def session(self, node: Node) -> Session:
        """What the node shows with each of its requests."""
        session = Session(
            cluster_id=self._settings.cluster_id,
            timeline=self._settings.timeline,
            node_id=node.node_id,
            incarnation=node.incarnation,
            role=node.role,
            rank=node.rank,
            run=node.run,
        )
        return replace(session, token=session.signed(self._settings.token_key))

    def member(self, session: Session) -> Node:
        """The caller's node.

        Raises:
            Fenced: the caller is no member, or of another cluster.
            Unauthenticated: its token is wrong.
            InvalidJournal: it joined after what the journal has.
        """
        self._check_genuine(session)
        if session.role is Role.OPERATOR:
            return OPERATOR
        member = self._state.members.get(session.node_id)
        if member is None and session.node_id >= self._state.next_node_id:
            raise InvalidJournal(
                f"the journal has given {self._state.next_node_id - 1} node ids, and this "
                f"cluster's {session.role.value} node {session.node_id} calls: {_OLDER_COPY}"
            )
        if member is None:  # it has left, and is forgotten
            raise Fenced(
                f"node {session.node_id} has left the cluster; register again to come back"
            )
        node = member.node
        run = self._state.runs.get(node.run)
        if node.state is NodeState.LEFT and run is not None and run.has_ended:
            what = "removed" if run.is_removed else "ended"
            raise Fenced(
                f"{words(run.name)} was {what} by an operator, and node {node.node_id} with it: "
                "end this process"
            )
        if not node.state.is_member:
            raise Fenced(self._taken_over_words(member) or node.fence_words)
        return node

    def _taken_over_words(self, member: Member) -> str:
        """What a worker is told whose identity another came with; nothing if none did."""
        node, identity = member.node, member.registration.identity
        newest = self._state.workers_by_rank(node.run).get(node.rank) if identity else None
        if newest is None or newest.node_id == node.node_id:
            return ""
        if self._state.members[newest.node_id].registration.identity != identity:
            return ""
        return (
            f"another process came with the identity '{identity}' of this worker, and has its rank "
            f"{node.rank} (node {newest.node_id}): end this process. If both are to train, give "
            "each an identity of its own (--identity, PUSHPULL_IDENTITY), or none"
        )

    def has(self, session: Session) -> bool:
        """Whether a caller that was a member is one still."""
        if session.role is Role.OPERATOR:
            return True
        member = self._state.members.get(session.node_id)
        return member is not None and member.node.state.is_member

    def _check_genuine(self, session: Session) -> None:
        ours = self._settings
        if session.cluster_id != ours.cluster_id:
            raise ForeignCluster(
                "the session is of another cluster than this scheduler's. A scheduler that was "
                "started again without its journal is a new cluster: its nodes must be started "
                "again too"
            )
        if session.timeline in ours.replaced_timelines:
            raise Fenced(
                "the session is of another timeline than the cluster's, which was restored from a "
                "checkpoint: register again",
                retry_after_ms=REGISTER_AGAIN_MS,
            )
        if session.timeline != ours.timeline:
            raise ForeignCluster(
                "the session is of another timeline than the cluster's, which was not restored in "
                "its place. A scheduler that was started again without its journal is a new "
                "cluster: its nodes must be started again too"
            )
        if not session.is_genuine(ours.token_key):
            raise Unauthenticated(
                f"the session token of node {session.node_id} is "
                f"{'wrong' if session.token else 'missing'}; send the session as RegisterNode "
                "gave it"
            )

    # --- who comes

    def registered(self, request: Registration) -> Node | None:
        """The node that this registration made, if it came before.

        Raises:
            InvalidConfig: the request is wrong in itself, or another had its registration_id.
            Fenced: it means another cluster, or its node has left.
        """
        admission.check_request(request, self._settings)
        known = self._state.node_of_registration.get(request.registration_id)
        if known is None:
            return None
        member = self._state.members[known]
        admission.check_repeated(request, member.registration, member.node)
        return member.node

    def candidate(self, request: Registration, now_s: float) -> Node:
        """The node that a new registration would make; it is none until it is added.

        Raises:
            InvalidConfig: the request contradicts the cluster, or that is finished; the message
                says how.
            Overloaded: the cluster is full.
            Recovering: another has its place, which may be dead, and it waits.
        """
        state = self._state
        heard = admission.Heard(
            describe=lambda node: self.describe(node, now_s),
            quiet_s=lambda node_id: (
                math.inf if node_id in self._unheard else self._detector.quiet_s(node_id, now_s)
            ),
            interval_s=self._settings.heartbeat_interval_s,
        )
        admission.check_place(request, state, heard)
        admission.check_run(request, state)
        rank = 0
        if request.role is Role.WORKER:
            if request.run and self.is_over(request.run):
                raise InvalidConfig(admission.over_words(request.run, "all its workers have left"))
            rank = admission.choose_rank(request, self._settings, state, heard)
        return Node(
            node_id=NodeId(state.next_node_id),
            incarnation=state.next_incarnation,
            role=request.role,
            rank=rank,
            address=request.address if request.role is Role.SERVER else "",
            state=NodeState.ALIVE,
            run=request.run,
        )

    def add(self, node: Node, request: Registration, now_s: float) -> list[Transition]:
        """The candidate becomes a node; who had its identity before is gone."""
        state, predecessor = self._state, self._state.predecessor_of(request)
        state.next_node_id += 1
        state.next_incarnation = Incarnation(node.incarnation + 1)
        state.view_bytes += view_size.node_bytes(node)
        state.members[node.node_id] = Member(node, request)
        state.node_of_registration[request.registration_id] = node.node_id
        self._detector.heard(node.node_id, now_s)
        alive = [n for n in state.nodes_of(Role.SERVER) if n.state is NodeState.ALIVE]
        state.has_formed |= len(alive) >= self._settings.server_count
        came = [*self._begin_run(node, request), NodeRegistered(node)]
        if predecessor is None or not predecessor.state.is_member:
            return came
        return self._declare_gone(predecessor, 0.0) + came

    def _begin_run(self, node: Node, request: Registration) -> list[Transition]:
        """The first worker of a name begins its run."""
        if node.role is not Role.WORKER or not node.run or node.run in self._state.runs:
            return []
        run = admission.run_of(request, self._state, self._settings)
        self._state.runs[run.name] = run
        self._state.view_bytes += view_size.run_bytes(run)
        return [RunBegun(run)]

    def end_run(self, name: str) -> list[Transition]:
        """An operator ends a run: its workers are members no more, and nobody joins it."""
        run = replace(self._state.runs[name], has_ended=True)
        self._state.runs[name] = run
        transitions: list[Transition] = [RunEnded(run)]
        for node in self._state.workers_of(name):
            self._may_return.pop(node.node_id, None)
            if node.state.is_member:
                transitions += self._leave(node, f"run '{name}' was ended")
        return transitions

    def remove_run(self, name: str) -> list[Transition]:
        """An operator removes a run that is over: who reads it is a member no more."""
        self._state.runs[name] = replace(self._state.runs[name], has_ended=True, is_removed=True)
        transitions: list[Transition] = []
        for node in self._state.nodes_of(Role.READER):
            if node.run == name and node.state.is_member:
                transitions += self._leave(node, f"run '{name}' was removed")
        return transitions

    def hear(self, node: Node, now_s: float) -> list[Transition]:
        """A member has given a sign of life."""
        if node is OPERATOR:
            return []
        self._unheard.discard(node.node_id)
        if not self._detector.heard(node.node_id, now_s):
            return []
        return [NodeHeardAgain(self._move(node, NodeState.ALIVE))]

    # --- who goes

    def replaced(self, node: Node, request: Registration) -> list[Transition]:
        """A server came with the update log of others: they are dead."""
        reason = f"server node {node.node_id} came with its update log"
        transitions: list[Transition] = []
        for member in list(self._state.members.values()):
            other = member.node
            is_other = other.node_id != node.node_id and other.state.is_member
            if is_other and request.shares_log(member.registration):
                transitions += self._leave(other, reason)
        return transitions

    def succeeded(self, node: Node) -> list[Transition]:
        """A server came to the address of one that is silent: nobody reaches that one there any
        more, and what it alone had is lost, unless it kept an update log.
        """
        reason = f"server node {node.node_id} came to its address, with nothing of it"
        transitions: list[Transition] = []
        for other in self._state.nodes_of(Role.SERVER):
            is_before = other.node_id != node.node_id and other.address == node.address
            if is_before and other.state is NodeState.SILENT:
                transitions += self._leave(other, reason)
        return transitions

    def deregister(
        self, session: Session, reason: str, now_s: float, *, unfinished: bool = False
    ) -> list[Transition]:
        """End the caller's membership; a caller that has left already changes nothing. A worker
        that is `unfinished` is gone: another may take its place, and the work is not done for that.

        Raises:
            Fenced: the caller is of another cluster.
            Unauthenticated: its token is wrong.
        """
        self._check_genuine(session)
        member = self._state.members.get(session.node_id)
        if member is None or not member.node.state.is_member:
            return []
        if unfinished and member.node.role is Role.WORKER:
            timeout_s = self._settings.worker_timeout_s or math.inf
            self._may_return[session.node_id] = now_s + timeout_s
            return self._declare_gone(member.node, 0.0)
        return self._leave(member.node, reason)

    def process_ended(self, launch_id: bytes) -> list[Transition]:
        """The process that was started with this id has ended, says who started it: its workers are
        gone, its readers have left.
        """
        transitions: list[Transition] = []
        for member in list(self._state.members.values()):
            node = member.node
            is_its = bool(launch_id) and member.registration.launch_id == launch_id
            if not is_its or not node.state.is_member:
                continue
            if node.role is Role.WORKER:
                transitions += self._declare_gone(node, 0.0)
            elif node.role is Role.READER:
                transitions += self._leave(node, "its process has ended")
        return transitions

    def look(self, now_s: float) -> list[Transition]:
        """Note who has fallen silent, who is given up and which workers are gone."""
        transitions: list[Transition] = []
        for node_id in self._detector.look(now_s):
            node = self._move(self._state.members[node_id].node, NodeState.SILENT)
            transitions.append(NodeSilent(node, self._detector.quiet_s(node_id, now_s)))
        for node in self._unneeded():
            silence_s = self._detector.silence_s(node.node_id, now_s)
            if silence_s > GIVEN_UP_LEASES * self._settings.lease_s:
                told = replace(node, silence_ms=round(silence_s * 1000))
                transitions += self._leave(told, f"given up after {silence_s:.1f} s of silence")
        late = [node_id for node_id, until_s in self._may_return.items() if now_s >= until_s]
        for node_id in late:
            del self._may_return[node_id]
        if late and self._settings.stop_when_done:
            transitions += self.finish()
        timeout_s = self._settings.worker_timeout_s
        for node in self._state.nodes_of(Role.WORKER) if timeout_s else ():
            silence_s = self._detector.silence_s(node.node_id, now_s)
            if node.state is NodeState.SILENT and silence_s > timeout_s:
                transitions.extend(self._declare_gone(node, silence_s))
        return transitions

    def _unneeded(self) -> list[Node]:
        """Silent nodes that nothing waits for."""
        readers, servers = self._state.nodes_of(Role.READER), self._state.nodes_of(Role.SERVER)
        if self._settings.replica_count == 1:
            servers = []  # what a silent server holds, it alone has: it is waited for
        found = [node for node in (*readers, *servers) if node.state is NodeState.SILENT]
        holders = self._state.holders if found else frozenset()
        return [node for node in found if node.node_id not in holders]

    def _move(self, node: Node, state: NodeState) -> Node:
        members = self._state.members
        members[node.node_id] = replace(members[node.node_id], node=replace(node, state=state))
        return members[node.node_id].node

    def _leave(self, node: Node, reason: str) -> list[Transition]:
        transitions: list[Transition] = [NodeLeft(self._move(node, NodeState.LEFT), reason)]
        if node.role is not Role.WORKER:
            self._forget(node.role)
        return transitions + self._ended(node)

    def _declare_gone(self, node: Node, silence_s: float) -> list[Transition]:
        told = replace(node, silence_ms=round(silence_s * 1000))
        return [WorkerGone(self._move(told, NodeState.GONE)), *self._ended(node)]

    def _ended(self, node: Node) -> list[Transition]:
        """What follows when a node's membership has ended."""
        self._detector.forget(node.node_id)
        self._unheard.discard(node.node_id)
        return self.finish() if self._settings.stop_when_done else []

    @property
    def workers_are_done(self) -> bool:
        """Whether all workers of all runs have come, and none is left. The run without a name
        counts where there is no other, or once somebody has come to it.
        """
        runs = list(self._state.runs)
        if not runs or self._state.workers_of(""):
            runs.append("")
        return all(self.are_done(name) for name in runs)

    def is_over(self, run: str) -> bool:
        """Whether nobody joins a run any more: all its workers have come and left, or it was ended.
        One that is gone may be replaced, even if it was the last.
        """
        known = self._state.runs.get(run)
        if known is None or known.has_ended:
            return known is not None
        workers = self._state.workers_by_rank(run)
        have_come = all(rank in workers for rank in range(known.worker_count))
        return have_come and all(each.state is NodeState.LEFT for each in workers.values())

    def are_done(self, run: str) -> bool:
        """Whether all workers of a run have come, and none is left; who ended in the middle may be
        followed by another for as long as a silent one is waited for.
        """
        known, workers = self._state.runs.get(run), self._state.workers_by_rank(run)
        if run and known is None:
            return False
        count = self._state.worker_count_of(run, self._settings)
        have_come = all(rank in workers for rank in range(count))
        return (have_come or (known is not None and known.has_ended)) and not any(
            worker.state.is_member or worker.node_id in self._may_return
            for worker in workers.values()
        )

    def finish(self) -> list[Transition]:
        """The work is done, if it is."""
        if self._state.finished or not self.workers_are_done:
            return []
        self._state.finished = True
        return [ClusterFinished()]

    def _forget(self, role: Role) -> None:
        """Of those that have left, keep the newest, and who is named by anything else."""
        state = self._state
        left = [n for n in state.nodes_of(role) if n.state is NodeState.LEFT]
        named = state.holders.union(*(p.servers for p in state.proposals.values()))
        for node in left[: max(0, len(left) - KEPT_COUNT)]:
            if node.node_id in named:
                continue
            state.view_bytes -= view_size.node_bytes(node)
            member = state.members.pop(node.node_id)
            del state.node_of_registration[member.registration.registration_id]
