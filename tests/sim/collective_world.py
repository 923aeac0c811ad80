"""A world of the machines of collective calls: workers step together and call once a step, while
the host moves, views come late, messages are lost, doubled and overtaken, and workers are declared
gone, replaced, and joined by others. One seed draws all of it.

The twin is a sentence: in lockstep, the round of clock c has one share of every worker that is
there at the end and was bound to call it, and nothing of another clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ps_core.change import Join
from ps_core.cluster_view import ClusterView, Node, NodeState, RangeAssignment, Role
from ps_core.collective_calls import Host, Round, Share, host_of, is_late_joiner, joined_after
from ps_core.errors import Fenced, StaleAssignment
from ps_core.keys import AssignmentEpoch, Incarnation, KeyRange, NodeId, RangeId, Slot, TableId
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_server.ranges.collective_rounds import CollectiveRounds
from ps_worker.collectives.rounds import Entering, Rounds

SERVERS = (NodeId(1), NodeId(2), NodeId(3))
WORKERS = 3
CLOCKS = 8
EVENTS = 700
HEALING_EVENTS = 300

_TABLE = Table(
    TableId(1), 0, TableSpec("w", DType.FLOAT32, 64, OptimizerSpec(OptimizerKind.SGD), 64)
)


class Violation(Exception):
    """An oracle says no."""


@dataclass(eq=False)
class Server:
    machine: CollectiveRounds
    view: ClusterView
    waiting: list[Message] = field(default_factory=list)


@dataclass(eq=False)
class Worker:
    node: Node
    view: ClusterView
    rounds: Rounds
    sealed: int = 0
    called: int = 0
    share: Share | None = None
    joined: int | None = None  # after which clock; None: it has not yet
    given: dict[int, Round] = field(default_factory=dict)

    @property
    def incarnation(self) -> Incarnation:
        return self.node.incarnation


@dataclass(eq=False)
class Message:
    """What a worker asks; `answer` is what it is told, where it is on its way back."""

    worker: Worker
    host: Host
    view_number: int
    entering: Entering
    answer: Round | None = None
    is_answer: bool = False
    is_stale: bool = False


class World:
    """One run.

    Args:
        seed: draws it.
        machine: what hosts are.
        rounds: what workers know.
        is_lockstep: a step waits for everybody's; else workers run apart between two calls, and who
            joins may miss one.
    """

    def __init__(
        self,
        seed: int,
        machine: Callable[[NodeId], CollectiveRounds] = CollectiveRounds,
        rounds: type[Rounds] = Rounds,
        *,
        is_lockstep: bool = True,
    ) -> None:
        self.rng = random.Random(seed)
        self._rounds = rounds
        self._is_lockstep = is_lockstep
        self._calls_every = 1 if is_lockstep else 2
        self._numbers = iter(range(11, 1000))
        self.messages: list[Message] = []
        self.workers: list[Worker] = []
        self._last_clock = CLOCKS
        nodes = tuple(
            Node(server, Incarnation(int(server)), Role.SERVER, 0, "", NodeState.ALIVE)
            for server in SERVERS
        )
        first = RangeAssignment(
            RangeId(0), KeyRange(Slot(0), Slot(65536)), AssignmentEpoch(1), SERVERS[0]
        )
        self.view = ClusterView(1, "sim", WORKERS, 3, nodes, (first,), (_TABLE,))
        self.servers = {server: Server(machine(server), self.view) for server in SERVERS}
        for rank in range(WORKERS):
            self._register(rank)
        for server in self.servers.values():
            self._server_sees(server)

    # --- what the scheduler does

    def _publish(self, **changes: object) -> None:
        self.view = replace(self.view, view_number=self.view.view_number + 1, **changes)  # type: ignore[arg-type]

    def _register(self, rank: int) -> None:
        number = next(self._numbers)
        node = Node(NodeId(number), Incarnation(number), Role.WORKER, rank, "", NodeState.ALIVE)
        self._publish(nodes=(*self.view.nodes, node))
        newcomer = is_late_joiner(self.view, node)
        worker = Worker(node, self.view, self._rounds(is_late_joiner=newcomer))
        if not newcomer:
            worker.joined = 0
        self.workers.append(worker)
        self._tell_of(worker)

    def _join(self) -> None:
        """A worker that has registered joins, after the highest clock that was reached."""
        due = [worker for worker in self.members if worker.joined is None]
        if not due:
            return
        worker = self.rng.choice(due)
        worker.joined = worker.sealed = worker.called = max(one.sealed for one in self.workers)
        table = self.view.tables[0]
        others = tuple(join for join in table.joins if join.rank != worker.node.rank)
        join = Join(worker.node.rank, worker.incarnation, worker.joined)
        self._publish(tables=(replace(table, joins=(*others, join)),))

    def _move(self) -> None:
        first = self.view.ranges[0]
        primary = self.rng.choice(SERVERS)
        epoch = AssignmentEpoch(first.assignment_epoch + 1)
        self._publish(ranges=(replace(first, primary=primary, assignment_epoch=epoch),))

    def _declare_gone(self) -> None:
        if len(self.members) < 2 or len(self.workers) > 3 * WORKERS:
            return
        gone = self.rng.choice(self.members).node
        nodes = (
            replace(n, state=NodeState.GONE) if n.node_id == gone.node_id else n
            for n in self.view.nodes
        )
        self._publish(nodes=tuple(nodes))

    def _newcomer(self) -> None:
        here = {worker.node.rank for worker in self.members}
        free = [rank for rank in range(WORKERS + 2) if rank not in here]
        if free and len(self.workers) < 4 * WORKERS:
            self._register(self.rng.choice(free))

    @property
    def members(self) -> list[Worker]:
        states = {node.incarnation: node.state for node in self.view.nodes}
        return [worker for worker in self.workers if states[worker.incarnation].is_member]

    # --- who sees what

    def _server_sees(self, server: Server) -> None:
        server.view = self.view
        server.machine.observe(self.view)
        self._answer(server)

    def _worker_sees(self, worker: Worker) -> None:
        worker.view = self.view
        self._tell_of(worker)

    def _tell_of(self, worker: Worker) -> None:
        host = host_of(worker.view)
        if host is not None and worker.rounds.must_announce(host):
            self._send(worker, None)

    # --- what workers do

    def _send(self, worker: Worker, share: Share | None) -> None:
        host = host_of(worker.view)
        if host is not None:
            entering = worker.rounds.entering(host, share)
            self.messages.append(Message(worker, host, worker.view.view_number, entering))

    def _advance(self, worker: Worker) -> None:
        """The worker's script goes on: it steps, waits for the others' step, and calls."""
        if worker.joined is None:
            return
        if worker.share is not None:
            self._tell_of(worker)
            self._send(worker, worker.share)
        elif worker.called < worker.sealed and not worker.sealed % self._calls_every:
            if self._may_call(worker):
                node = worker.node
                words = f"call {worker.sealed}"
                worker.share = Share(node.rank, node.incarnation, words, worker.sealed)
        elif worker.sealed < self._last_clock and self._may_push(worker):
            worker.sealed += 1

    def _may_call(self, worker: Worker) -> bool:
        """Its step has ended: under BSP everybody who has joined before it has sealed it."""
        joined = [one for one in self.members if one.joined is not None]
        return not self._is_lockstep or all(
            one.sealed >= worker.sealed
            for one in joined
            if one.joined is not None and one.joined < worker.sealed
        )

    def _may_push(self, worker: Worker) -> bool:
        """Every server has confirmed the view in which a newcomer has joined (S6)."""
        node = worker.node
        return all(
            not is_late_joiner(server.view, node)
            or joined_after(server.view, node.incarnation) is not None
            for server in self.servers.values()
        )

    # --- the network

    def _deliver(self, message: Message) -> None:
        if message.is_answer:
            self._take_answer(message)
            return
        server = self.servers[message.host.server]
        if server.view.view_number < message.view_number:
            self.messages.append(message)
            return
        who, entering = message.worker.incarnation, message.entering
        try:
            server.machine.check_here(who)
            server.machine.check_host(message.host.assignment_epoch)
            server.machine.enter(who, *entering)
        except Fenced:
            return
        except StaleAssignment:
            self.messages.append(replace(message, is_answer=True, is_stale=True))
            return
        server.waiting.append(message)
        self._answer(server)

    def _answer(self, server: Server) -> None:
        waiting, server.waiting = server.waiting, []
        for message in waiting:
            who, entering = message.worker.incarnation, message.entering
            answer = server.machine.answer(who, entering.ended_round)
            try:
                server.machine.check_host(message.host.assignment_epoch)
            except StaleAssignment:
                continue
            if entering.share is None or answer is not None:
                self.messages.append(replace(message, answer=answer, is_answer=True))
            else:
                server.waiting.append(message)

    def _take_answer(self, message: Message) -> None:
        worker, host = message.worker, message.host
        if message.is_stale:
            worker.rounds.must_tell_again()
        elif host != host_of(worker.view):
            return
        elif message.entering.share is None:
            worker.rounds.told(host)
        elif message.entering.share is worker.share and message.answer is not None:
            ended = message.answer
            worker.rounds.ended(host, ended)
            worker.given[ended.number] = ended
            worker.called, worker.share = worker.sealed, None

    # --- the run

    def run(self) -> None:
        """The whole of it.

        Raises:
            Violation: the machines did what they must not.
        """
        for _ in range(EVENTS):
            self._event()
        if not self._is_lockstep:  # one that has missed a call ends its last beside a later one
            self._last_clock += 2 * WORKERS * self._calls_every
        for _ in range(HEALING_EVENTS):
            if self._is_over():
                break
            self._heal()
        else:
            at = [(one.node.rank, one.sealed, one.called) for one in self.members]
            raise Violation(f"nobody goes on; (rank, sealed, called): {at}")
        self._check()

    def _event(self) -> None:
        kind = self.rng.random()
        if kind < 0.35:
            self._advance(self.rng.choice(self.workers))
        elif kind < 0.7:
            self._carry()
        elif kind < 0.8:
            self._server_sees(self.rng.choice(list(self.servers.values())))
        elif kind < 0.95:
            self._worker_sees(self.rng.choice(self.members))
        elif kind < 0.97:
            self._move()
        elif kind < 0.99:
            self._join()
        else:
            self.rng.choice((self._declare_gone, self._newcomer))()

    def _carry(self) -> None:
        """A message arrives, out of order; or it is lost, or arrives twice."""
        if not self.messages:
            return
        message = self.messages.pop(self.rng.randrange(len(self.messages)))
        fate = self.rng.random()
        if fate < 0.15:
            return
        if fate < 0.3:
            self.messages.append(message)
        self._deliver(message)

    def _heal(self) -> None:
        """All views arrive, and every message."""
        self._join()
        for server in self.servers.values():
            self._server_sees(server)
        for worker in self.members:
            self._worker_sees(worker)
            self._advance(worker)
        messages, self.messages = self.messages, []
        for message in messages:
            self._deliver(message)

    def _is_over(self) -> bool:
        return all(one.called >= CLOCKS and one.joined is not None for one in self.members)

    def _check(self) -> None:
        members = self.members
        rounds: dict[int, Round] = {}
        for worker in members:
            for number, ended in worker.given.items():
                if rounds.setdefault(number, ended) != ended:
                    raise Violation(f"COL-1: round {number} is {ended} and {rounds[number]}")
        seen: set[tuple[Incarnation, str]] = set()
        for ended in rounds.values():
            # One that is gone, and does not know it, may be in a round of who has heard it already.
            here = {worker.incarnation for worker in members}
            clocks = {share.clock for share in ended.shares if share.incarnation in here}
            if len(clocks) != 1 and self._is_lockstep:
                raise Violation(f"round {ended.number} has calls of clocks {sorted(clocks)}")
            for share in ended.shares:
                if (share.incarnation, share.call) in seen:
                    raise Violation(f"COL-2: {share} is in two rounds")
                seen.add((share.incarnation, share.call))
        for worker in members:
            for clock in range((worker.joined or 0) + 1, CLOCKS + 1):
                is_call = not clock % self._calls_every
                if is_call and (worker.incarnation, f"call {clock}") not in seen:
                    raise Violation(f"rank {worker.node.rank} is not in the round of {clock}")
