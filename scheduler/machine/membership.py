"""Members of the cluster: registered, heard, silent, left or gone.

Rules:
    - Only registration and heartbeats are signs of life: an open stream or a queued request proves
      nothing.
    - Registration is idempotent by registration_id, leaving by node.
    - A worker's rank is given once, and neither silence nor leaving frees it. But a gone worker may
      be replaced, and late joiners may come, up to max_workers, whose ranks are free again when
      they have left.
    - A worker that is silent for longer than its timeout is declared gone, for good. Time in which
      the scheduler itself was paused does not count, nor does time in which it is cut off: all
      nodes are silent, a server among them, and nobody registers; up to `CUT_OFF_S`. A worker is
      gone at once if its launcher, which alone knows the launch_id, reports the end of its process,
      or if another registers with its identity and takes its rank.
    - A scheduler that resumes from its journal has heard no node: each member has a lease from then
      on, a silent one its whole silence again, and until it is heard it may be dead.
    - The servers know whether the journal is the newest (JR-4): until each alive one is heard, or a
      lease has passed, no call is answered. The journal is an older copy if a server acts on a
      newer view, or if a session has a genuine token for a node id that was not given yet.

Invariants: CL-1 for nodes, CL-4 and CL-6 (by `admission`) of `scheduler.machine.cluster`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

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
from ps_core.runs import Run, words
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
"""Leases of silence after which an unneeded node has left, because evaluators that come and go, and
restarted servers, must not fill the view."""

CUT_OFF_S = 600.0
"""The longest time in which a scheduler that hears nobody takes itself for cut off: perhaps nobody
is left who could be heard. Who comes for a moment meanwhile, such as an evaluator, does not make it
longer."""

REGISTER_AGAIN_MS = 100  # wait before a node of an earlier timeline registers again
ASK_AGAIN_MS = 50  # wait while the scheduler hears the servers, which takes a heartbeat

_OLDER_COPY = (
    "it is an older copy. Put the newest one in its place, and restart the scheduler; the nodes go "
    "on meanwhile. If there is none, end the nodes, give another directory, and restore a "
    "checkpoint"
)

OPERATOR = Node(NodeId(0), Incarnation(0), Role.OPERATOR, 0, "", NodeState.ALIVE)
"""The node of every operator: it is in no view, sends no heartbeats, and never leaves."""

KEPT_COUNT = 100
"""Readers that have left and stay in the view; as many servers, and workers of removed runs."""


@dataclass(slots=True)
class _Cut:
    """A time in which none of the nodes was heard that were there when it began.

    Attributes:
        next_node_id: of those who come later.
        ended_s: since when somebody is heard, or wants to register; None: nobody.
    """

    begun_s: float
    next_node_id: int
    ended_s: float | None = None


class Membership:
    """The nodes of a cluster, and when each was last heard."""

    def __init__(self, settings: ClusterSettings, state: ClusterState, now_s: float) -> None:
        self._settings = settings
        self._state = state
        self._detector = FailureDetector(settings.lease_s, now_s)
        self._may_return: dict[NodeId, float] = {}  # deadline for a replacement, by worker
        self._unheard: set[NodeId] = set()  # not heard since the journal was resumed
        self._cut: _Cut | None = None
        self._reached_s = -math.inf  # when somebody last wanted to register
        self._resumed_s: float | None = None  # None: a new cluster

    def resume(self, returning_s: Mapping[NodeId, float], now_s: float) -> None:
        """Resume from a journal, with the `returning_s` in it."""
        self._resumed_s = now_s
        self._may_return = {node_id: now_s + left_s for node_id, left_s in returning_s.items()}
        for member in self._state.members.values():
            node = member.node
            if node.state.is_member:
                is_silent = node.state is NodeState.SILENT
                self._detector.expect(node.node_id, now_s, is_silent=is_silent)
                self._unheard.add(node.node_id)

    def check_heard(self, now_s: float) -> None:
        """Refuse a call before the servers have reported the views that they act on (JR-4)."""
        if self._resumed_s is None or now_s - self._resumed_s > self._settings.lease_s:
            return
        for node in self._state.nodes_of(Role.SERVER):
            if node.state is NodeState.ALIVE and node.node_id in self._unheard:
                raise Recovering(
                    "the scheduler was restarted, and waits at most a lease to hear which view "
                    f"{self.describe(node, now_s)} acts on, because its journal might be an older "
                    "copy. Ask again",
                    retry_after_ms=ASK_AGAIN_MS,
                )

    def check_view(self, node: Node, view_number: int) -> None:
        """Raise InvalidJournal if a node acts on a view that the journal does not have yet. Only
        servers are believed, because other nodes may be clients in any language.
        """
        ours, is_believed = self._state.view_number, node.role is Role.SERVER
        if self._resumed_s is not None and is_believed and view_number > ours:
            raise InvalidJournal(
                f"the journal has view {ours}, and server node {node.node_id} acts on view "
                f"{view_number}: {_OLDER_COPY}"
            )

    def returning_s(self, now_s: float) -> dict[NodeId, float]:
        """Workers that ended unfinished, with the seconds left for a replacement of each."""
        return {node_id: until_s - now_s for node_id, until_s in self._may_return.items()}

    def quiet_s(self, node_id: NodeId, now_s: float) -> float:
        """Seconds since a member was last heard; 0 for one that left."""
        return self._detector.quiet_s(node_id, now_s)

    def describe(self, node: Node, now_s: float) -> str:
        """Words on a node and when it was last heard."""
        rank = f", rank {node.rank}" if node.role is Role.WORKER else ""
        rank += f" of run '{node.run}'" if node.run else ""
        address = f" at {node.address}" if node.address else ""
        heard = ""
        quiet_s = self._detector.quiet_s(node.node_id, now_s)
        if node.node_id in self._unheard:
            heard = f", not heard in the {quiet_s:.1f} s since the scheduler was restarted"
        elif node.state.is_member:
            heard = f", last heard {quiet_s:.1f} s ago"
        return f"{node.role.value} node {node.node_id}{address} ({node.state.value}{rank}{heard})"

    # --- sessions

    def session(self, node: Node) -> Session:
        """The session that a node sends with each request."""
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
        """The caller's node, if the session is genuine and it is a member."""
        self._check_genuine(session)
        if session.role is Role.OPERATOR:
            return OPERATOR
        member = self._state.members.get(session.node_id)
        if member is None and session.node_id >= self._state.next_node_id:
            raise InvalidJournal(
                f"the journal has given {self._state.next_node_id - 1} node ids, and this "
                f"cluster's {session.role.value} node {session.node_id} calls: {_OLDER_COPY}"
            )
        run = self._state.runs.get(session.run)
        has_left = member is None or member.node.state is NodeState.LEFT
        if has_left and run is not None and run.has_ended:
            what = "removed" if run.is_removed else "ended"
            raise Fenced(
                f"{words(run.name)} was {what} by an operator, and node {session.node_id} with "
                "it: end this process"
            )
        if member is None:  # it left, and was removed from the view
            raise Fenced(
                f"node {session.node_id} has left the cluster; register again to come back"
            )
        node = member.node
        if not node.state.is_member:
            raise Fenced(self._taken_over_words(member) or node.fence_words)
        return node

    def _taken_over_words(self, member: Member) -> str:
        """Message for a worker whose identity another process registered with; else empty."""
        node, identity = member.node, member.registration.identity
        newest = self._state.workers_by_rank(node.run).get(node.rank) if identity else None
        if newest is None or newest.node_id == node.node_id:
            return ""
        if self._state.members[newest.node_id].registration.identity != identity:
            return ""
        return (
            f"another process registered with the identity '{identity}' of this worker, and has "
            f"its rank {node.rank} (node {newest.node_id}): end this process. If both shall train, "
            "give each an identity of its own (--identity, PUSHPULL_IDENTITY), or none"
        )

    def _check_genuine(self, session: Session) -> None:
        ours = self._settings
        if session.cluster_id != ours.cluster_id:
            raise ForeignCluster(
                "the session is of another cluster than this scheduler's. A scheduler that is "
                "restarted without its journal has a new cluster, and its nodes must be restarted "
                "too"
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
                "its place. A scheduler that is restarted without its journal has a new cluster, "
                "and its nodes must be restarted too"
            )
        if not session.is_genuine(ours.token_key):
            raise Unauthenticated(
                f"the session token of node {session.node_id} is "
                f"{'wrong' if session.token else 'missing'}; send the session as RegisterNode "
                "gave it"
            )

    # --- who comes

    def registered(self, request: Registration) -> Node | None:
        admission.check_request(request, self._settings)
        known = self._state.node_of_registration.get(request.registration_id)
        if known is None:
            return None
        member = self._state.members[known]
        admission.check_repeated(request, member.registration, member.node)
        return member.node

    def candidate(self, request: Registration, now_s: float) -> Node:
        """The node of a new registration, not added yet; `scheduler.machine.admission` refuses."""
        state, self._reached_s = self._state, now_s
        heard = admission.Heard(
            describe=lambda node: self.describe(node, now_s),
            quiet_s=lambda node_id: (
                math.inf if node_id in self._unheard else self._detector.quiet_s(node_id, now_s)
            ),
            interval_s=self._settings.heartbeat_interval_s,
        )
        admission.check_place(request, self._settings, state, heard)
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

    def add(self, node: Node, run: Run, request: Registration, now_s: float) -> list[Transition]:
        """Add the candidate, and the run that it begins; a worker that had its identity is gone."""
        state, predecessor = self._state, self._state.predecessor_of(request)
        state.next_node_id += 1
        state.next_incarnation = Incarnation(node.incarnation + 1)
        state.view_bytes += view_size.node_bytes(node)
        state.members[node.node_id] = Member(node, request)
        state.node_of_registration[request.registration_id] = node.node_id
        self._detector.heard(node.node_id, now_s)
        alive = [n for n in state.nodes_of(Role.SERVER) if n.state is NodeState.ALIVE]
        state.has_formed |= len(alive) >= self._settings.servers_to_form
        came: list[Transition] = [NodeRegistered(node)]
        if node.role is Role.WORKER and node.run and node.run not in state.runs:
            state.runs[run.name] = run
            state.view_bytes += view_size.run_bytes(run)
            came = [RunBegun(run), *came]
        if predecessor is None or not predecessor.state.is_member:
            return came
        return self._declare_gone(predecessor, 0.0) + came

    def end_run(self, name: str) -> list[Transition]:
        """End a run: its workers leave, and no other joins."""
        run = self._state.runs[name] = replace(self._state.runs[name], has_ended=True)
        transitions: list[Transition] = [RunEnded(run)]
        for node in self._state.workers_of(name):
            self._may_return.pop(node.node_id, None)
            if node.state.is_member:
                transitions += self._leave(node, f"run '{name}' was ended")
        return transitions

    def remove_run(self, name: str) -> list[Transition]:
        """Remove a run that is over: its readers leave, and nobody refers to its workers."""
        runs = self._state.runs
        runs[name] = replace(runs[name], has_ended=True, is_removed=True)
        removed = {run.name for run in runs.values() if run.is_removed}
        self._forget([n for n in self._state.nodes_of(Role.WORKER) if n.run in removed])
        transitions: list[Transition] = []
        for node in self._state.nodes_of(Role.READER):
            if node.run == name and node.state.is_member:
                transitions += self._leave(node, f"run '{name}' was removed")
        return transitions

    def hear(self, node: Node, now_s: float) -> list[Transition]:
        if node is OPERATOR:
            return []
        self._unheard.discard(node.node_id)
        if not self._detector.heard(node.node_id, now_s):
            return []
        return [NodeHeardAgain(self._move(node, NodeState.ALIVE))]

    # --- who goes

    def replaced(self, node: Node, request: Registration) -> list[Transition]:
        """Servers whose update log a registering one has, or has another in place of, are dead, and
        leave. They count as servers without a log from then on, if the log was replaced, or was
        claimed: what it did not bring back is ended in it.
        """
        claim = request.update_log
        is_claimed = claim is not None and claim.timeline == self._settings.timeline
        reason = f"server node {node.node_id} came with its update log"
        transitions: list[Transition] = []
        for member in list(self._state.members.values()):
            other = member.node
            if other.node_id == node.node_id or not request.shares_log(member.registration):
                continue
            if other.state.is_member:
                transitions += self._leave(other, reason)
            if is_claimed or request.replaces_log(member.registration):
                left = self._state.members[other.node_id]
                registration = replace(left.registration, update_log=None)
                self._state.members[other.node_id] = replace(left, registration=registration)
        return transitions

    def succeeded(self, node: Node) -> list[Transition]:
        """A silent server whose address a registering one has leaves, because it cannot be reached.
        Values that it alone had are lost, unless it kept an update log.
        """
        reason = f"server node {node.node_id} came to its address, without its values"
        transitions: list[Transition] = []
        for other in self._state.nodes_of(Role.SERVER):
            is_before = other.node_id != node.node_id and other.address == node.address
            if is_before and other.state is NodeState.SILENT:
                transitions += self._leave(other, reason)
        return transitions

    def deregister(
        self, session: Session, reason: str, now_s: float, *, unfinished: bool = False
    ) -> list[Transition]:
        """End the caller's membership; no effect on a caller that has left. An `unfinished` worker
        is gone: it may be replaced within the worker timeout, and the work is not done before.
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
        """A launched process has ended: its workers are gone, its readers have left."""
        transitions: list[Transition] = []
        for member in list(self._state.members.values()):
            node = member.node
            if member.registration.launch_id != launch_id or not node.state.is_member:
                continue
            if node.role is Role.WORKER:
                transitions += self._declare_gone(node, 0.0)
            elif node.role is Role.READER:
                transitions += self._leave(node, "its process has ended")
        return transitions

    def look(self, now_s: float) -> list[Transition]:
        """Act on the time: nodes fall silent, are given up, or gone."""
        transitions: list[Transition] = []
        for node_id in self._detector.look(now_s):
            node = self._move(self._state.members[node_id].node, NodeState.SILENT)
            transitions.append(NodeSilent(node, self._detector.quiet_s(node_id, now_s)))
        is_cut_off = self._note_cut(now_s)
        for node in () if is_cut_off else self._unneeded():
            silence_s = self._detector.silence_s(node.node_id, now_s)
            if silence_s > GIVEN_UP_LEASES * self._settings.lease_s:
                told = replace(node, silence_ms=round(silence_s * 1000))
                transitions += self._leave(told, f"given up after {silence_s:.1f} s of silence")
        late = [node_id for node_id, until_s in self._may_return.items() if now_s >= until_s]
        for node_id in late:
            del self._may_return[node_id]
        if self._settings.stop_when_done:
            transitions += self.finish()
        timeout_s = self._settings.worker_timeout_s
        watched = timeout_s and not is_cut_off
        for node in self._state.nodes_of(Role.WORKER) if watched else ():
            silence_s = self._detector.silence_s(node.node_id, now_s)
            if node.state is NodeState.SILENT and silence_s > timeout_s:
                transitions.extend(self._declare_gone(node, silence_s))
        return transitions

    def _note_cut(self, now_s: float) -> bool:
        """True while the scheduler is cut off. Silence counts from the end of that."""
        hears_nobody = self._hears_nobody(now_s)
        if self._cut is None:
            if not hears_nobody:
                return False
            self._cut = _Cut(now_s, self._state.next_node_id)
        cut = self._cut
        is_long = now_s - cut.begun_s > CUT_OFF_S
        if hears_nobody:
            cut.ended_s = None
            return not is_long
        if cut.ended_s is None:
            cut.ended_s = now_s
            if not is_long:
                self._detector.renew(now_s)
        timeout_s = self._settings.worker_timeout_s or 0.0
        if self._has_heard_any_before(cut.next_node_id) or now_s - cut.ended_s > timeout_s:
            self._cut = None
        return False

    def _has_heard_any_before(self, node_id: int) -> bool:
        """True if a node of an earlier id is heard."""
        nodes = (each.node for each in self._state.members.values())
        return any(n.state is NodeState.ALIVE and n.node_id < node_id for n in nodes)

    def _hears_nobody(self, now_s: float) -> bool:
        """True if all members are silent, a server among them, and nobody wants to be one: rather
        the scheduler is cut off.
        """
        nodes = [each.node for each in self._state.members.values() if each.node.state.is_member]
        has_server = any(node.role is Role.SERVER for node in nodes)
        is_reached = now_s - self._reached_s <= self._settings.lease_s
        return (
            has_server and not is_reached and all(node.state is NodeState.SILENT for node in nodes)
        )

    def _unneeded(self) -> list[Node]:
        """Silent nodes that nothing waits for; a silent server may have the only copy of values."""
        nodes = self._state.nodes_of(Role.READER) + self._state.nodes_of(Role.SERVER)
        silent = [node for node in nodes if node.state is NodeState.SILENT]
        ranges = self._state.ranges if silent else ()
        held = self._state.range_bytes
        holders = {node_id for r in ranges if held.get(r.range_id) for node_id in r.holders}
        return [node for node in silent if node.node_id not in holders]

    def _move(self, node: Node, state: NodeState) -> Node:
        members = self._state.members
        members[node.node_id] = replace(members[node.node_id], node=replace(node, state=state))
        return members[node.node_id].node

    def _leave(self, node: Node, reason: str) -> list[Transition]:
        transitions: list[Transition] = [NodeLeft(self._move(node, NodeState.LEFT), reason)]
        if node.role is not Role.WORKER:
            nodes = self._state.nodes_of(node.role)
            self._forget([each for each in nodes if each.state is NodeState.LEFT])
        return transitions + self._ended(node)

    def _declare_gone(self, node: Node, silence_s: float) -> list[Transition]:
        told = replace(node, silence_ms=round(silence_s * 1000))
        return [WorkerGone(self._move(told, NodeState.GONE)), *self._ended(node)]

    def _ended(self, node: Node) -> list[Transition]:
        """A node's membership has ended; the cluster may be finished."""
        self._detector.forget(node.node_id)
        self._unheard.discard(node.node_id)
        return self.finish() if self._settings.stop_when_done else []

    @property
    def workers_are_done(self) -> bool:
        """True if all workers of all runs have registered, and none is left. The run without a name
        counts if there is no other, or if it has had a worker.
        """
        runs = list(self._state.runs)
        if not runs or self._state.workers_of(""):
            runs.append("")
        return all(self.are_done(name) for name in runs)

    def is_over(self, run: str) -> bool:
        """True if no worker joins the run any more: all have registered and left, or the run was
        ended. A gone worker may be replaced, even if it was the last.
        """
        known = self._state.runs.get(run)
        if known is None or known.has_ended:
            return known is not None
        workers = self._state.workers_by_rank(run)
        have_come = all(rank in workers for rank in range(known.worker_count))
        return have_come and all(each.state is NodeState.LEFT for each in workers.values())

    def are_done(self, run: str) -> bool:
        """True if all workers of a run have registered, and none is left. A worker that ended
        unfinished counts as there while it may be replaced.
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
        if self._state.finished or not self.workers_are_done:
            return []
        self._state.finished = True
        return [ClusterFinished()]

    def _forget(self, ended: list[Node]) -> None:
        """Remove all but the newest of these, and those that the state still names."""
        state = self._state
        sources = (source.node_id for source in state.log_sources.values())
        named = state.holders.union(sources, *(p.servers for p in state.proposals.values()))
        for node in ended[: max(0, len(ended) - KEPT_COUNT)]:
            if node.node_id in named:
                continue
            state.view_bytes -= view_size.node_bytes(node)
            member = state.members.pop(node.node_id)
            del state.node_of_registration[member.registration.registration_id]
