"""The scheduler's machine against a dumb twin that derives everything from its whole history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ps_core import errors, limits
from ps_core.change import ChangeOutcome, TableChange
from ps_core.cluster_view import ClusterView, NodeState, Role, Session
from ps_core.consistency import Consistency, Mode
from ps_core.keys import Incarnation, NodeId, TableId
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table_spec import TableSpec
from ps_runtime.cluster import wire
from scheduler.journal import records
from scheduler.machine import view_size
from scheduler.machine.cluster import Cluster, Created, Decision
from scheduler.machine.membership import GIVEN_UP_LEASES
from scheduler.machine.state import ClusterSettings, ClusterState, Registration
from tests.examples import examples

LEASE_S = limits.LEASE_S
WORKER_TIMEOUT_S = limits.WORKER_TIMEOUT_S
STEP_S = 0.5
RANGE_COUNT = 16

AnyT = TypeVar("AnyT")


@dataclass
class TwinNode:
    """One registration that was accepted."""

    request: Registration
    session: Session
    heard_s: list[float]
    has_left: bool = False
    is_gone: bool = False
    was_silent: bool = False  # when the scheduler was started again; it was not heard since

    def state(self, last_tick_s: float) -> NodeState:
        if self.is_gone:
            return NodeState.GONE
        if self.has_left:
            return NodeState.LEFT
        if self.was_silent:
            return NodeState.SILENT
        quiet_s = last_tick_s - max(self.heard_s)
        return NodeState.SILENT if quiet_s > LEASE_S else NodeState.ALIVE


@dataclass
class Twin:
    """What happened, in order, and what follows from it."""

    worker_count: int
    rank_count: int
    server_count: int
    nodes: list[TwinNode] = field(default_factory=list)
    tables: list[TableSpec] = field(default_factory=list)
    last_tick_s: float = 0.0

    def finished(self) -> bool:
        newest = {n.session.rank: n for n in self.nodes if n.request.role is Role.WORKER}
        have_come = set(newest) >= set(range(self.worker_count))
        return have_come and all(n.has_left for n in newest.values())

    def world_size(self) -> int:
        further = [n for n in self.nodes if n.session.rank >= self.worker_count]
        return self.worker_count + sum(not n.has_left for n in further)

    def free_ranks(self) -> set[int]:
        """Never given; or of one that is gone, or came beyond the first and has left."""
        workers = [n for n in self.nodes if n.request.role is Role.WORKER]
        held = {
            n.session.rank
            for n in workers
            if not n.is_gone and not (n.has_left and n.session.rank >= self.worker_count)
        }
        return set(range(self.rank_count)) - held

    def lowest_rank(self) -> int:
        """What a worker gets that asks for none: of the first if any is free, a new one before."""
        given = {n.session.rank for n in self.nodes if n.request.role is Role.WORKER}
        first, free = self.worker_count, self.free_ranks()
        return min(free, key=lambda rank: (rank >= first, rank < first and rank in given, rank))

    def alive_servers(self) -> list[TwinNode]:
        return [
            n
            for n in self.nodes
            if n.request.role is Role.SERVER and n.state(self.last_tick_s) is NodeState.ALIVE
        ]

    def refusal(self, request: Registration) -> type[errors.PushpullError] | None:
        """What a registration under a new id must be refused with, if it must be."""
        if self.finished():
            return errors.InvalidConfig
        if request.role is Role.SERVER:
            here = [n for n in self.nodes if n.request.role is Role.SERVER and not n.has_left]
            alive = [n.request.address for n in self.alive_servers()]
            fits = all(n.request.kernel_fingerprint == request.kernel_fingerprint for n in here)
            return None if fits and request.address not in alive else errors.InvalidConfig
        if request.role is Role.WORKER:
            free, asked = self.free_ranks(), request.requested_rank
            return None if (free if asked is None else asked in free) else errors.InvalidConfig
        return None

    def end_silent_servers(self, address: str) -> None:
        """Another server has come to where they were."""
        for node in self.nodes:
            is_there = bool(address) and node.request.address == address
            if is_there and node.state(self.last_tick_s) is NodeState.SILENT:
                node.has_left = True

    def ordinal_of(self, index: int) -> int:
        return sum(-(-t.element_count // t.block_elements) for t in self.tables[:index])


def spec_of(name: str, block_count: int, mode: Mode) -> TableSpec:
    """A table of `block_count` blocks; two of one name may differ."""
    return TableSpec(
        name=name,
        dtype=DType.FLOAT32,
        element_count=64 * block_count,
        optimizer=OptimizerSpec(OptimizerKind.ADAM),
        block_elements=64,
        consistency=Consistency(mode),
    )


def content(view: ClusterView) -> ClusterView:
    """The view without its number."""
    return replace(view, view_number=0)


class ClusterAgainstTwin(RuleBasedStateMachine):
    """Random events; every answer and every view is checked."""

    @initialize(
        worker_count=st.integers(1, 3),
        server_count=st.integers(1, 3),
        joined=st.sampled_from([(0, 0), (1, 4), (2, 3)]),
        further=st.integers(0, 2),
    )
    def form(
        self, worker_count: int, server_count: int, joined: tuple[int, int], further: int
    ) -> None:
        """A cluster, empty or with some workers and servers in it."""
        self.now_s = 0.0
        self.drawn = 0
        chosen = ClusterSettings(
            cluster_id="c",
            timeline=bytes(16),
            token_key=b"k" * 32,
            first_incarnation=Incarnation(10),
            worker_count=worker_count,
            server_count=server_count,
            max_workers=worker_count + further if further else 0,
            stop_when_done=True,
            range_count=RANGE_COUNT,
        )
        self.cluster = Cluster(chosen, 0.0)
        self.records: dict[str, bytes] = {}
        self.differences = records.Differences()
        self.twin = Twin(worker_count, worker_count + further, server_count)
        self.before = self.cluster.view
        for _ in range(joined[0]):
            self.register(Role.WORKER, None, 1, "")
        for host in range(joined[1]):
            self.register(Role.SERVER, None, host, "torch=2")

    def expect(
        self, call: Callable[[], Decision[AnyT]], refusal: type[errors.PushpullError] | None
    ) -> AnyT | None:
        """The reply of `call`, or None if it was refused with exactly `refusal`, as it must be."""
        old = self.cluster.view
        try:
            decision = call()
        except errors.PushpullError as error:
            if type(error) is not refusal:
                raise
            assert self.cluster.view == old
            return None
        assert refusal is None
        new = self.cluster.view
        assert bool(decision.transitions) == (content(new) != content(old))
        assert new.view_number == old.view_number + bool(decision.transitions)
        return decision.reply

    @rule(
        role=st.sampled_from([Role.SERVER, Role.WORKER, Role.READER]),
        rank=st.none() | st.integers(0, 5),
        host=st.integers(0, 4),
        kernels=st.sampled_from(["torch=2", "torch=2", "torch=2", "torch=3"]),
    )
    def register(self, role: Role, rank: int | None, host: int, kernels: str) -> None:
        self.drawn += 1
        request = Registration(
            registration_id=self.drawn.to_bytes(16, "big"),
            role=role,
            address=f"h{host}:1" if role is Role.SERVER else "",
            requested_rank=rank if role is Role.WORKER else None,
            kernel_fingerprint=kernels if role is Role.SERVER else "",
        )
        refusal = self.twin.refusal(request)
        lowest = self.twin.lowest_rank() if self.twin.free_ranks() else None
        session = self.expect(lambda: self.cluster.register(request, self.now_s), refusal)
        if session is not None:
            if request.requested_rank is not None:
                assert session.rank == request.requested_rank
            elif role is Role.WORKER:
                assert session.rank == lowest
            self.twin.end_silent_servers(request.address)
            self.twin.nodes.append(TwinNode(request, session, [self.now_s]))

    @rule()
    def operate(self) -> None:
        """An operator is no node: whatever it says changes nothing."""
        request = Registration(bytes(16), Role.OPERATOR)
        before = self.cluster.view
        session = self.expect(lambda: self.cluster.register(request, self.now_s), None)
        assert session is not None
        assert (session.role, session.node_id) == (Role.OPERATOR, 0)
        for _ in range(2):  # it does not leave, either
            self.expect(lambda: self.cluster.heartbeat(session, self.now_s), None)
            self.expect(lambda: self.cluster.deregister(session, "", self.now_s), None)
        assert self.cluster.view == before

    @rule(data=st.data())
    def register_again(self, data: st.DataObject) -> None:
        if self.twin.nodes:
            node = data.draw(st.sampled_from(self.twin.nodes))
            refusal = errors.Fenced if node.has_left else None
            session = self.expect(lambda: self.cluster.register(node.request, self.now_s), refusal)
            if session is not None:
                assert session == node.session
                node.heard_s.append(self.now_s)
                node.was_silent = False

    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        if self.twin.nodes:
            self.beat(data.draw(st.sampled_from(self.twin.nodes)))

    def beat(self, node: TwinNode) -> None:
        refusal = errors.Fenced if node.has_left else None
        number = self.expect(lambda: self.cluster.heartbeat(node.session, self.now_s), refusal)
        if number is not None:
            assert number == self.cluster.view.view_number
            node.heard_s.append(self.now_s)
            node.was_silent = False

    @rule(data=st.data())
    def deregister(self, data: st.DataObject) -> None:
        if self.twin.nodes:
            node = data.draw(st.sampled_from(self.twin.nodes))
            self.expect(lambda: self.cluster.deregister(node.session, "", self.now_s), None)
            node.has_left = True

    @rule(data=st.data(), forged=st.sampled_from(["token", "cluster_id", "incarnation"]))
    def forge(self, data: st.DataObject, forged: str) -> None:
        if not self.twin.nodes:
            return
        session = data.draw(st.sampled_from(self.twin.nodes)).session
        lies = {
            "token": (replace(session, token=bytes(32)), errors.Unauthenticated),
            "cluster_id": (replace(session, cluster_id="d"), errors.ForeignCluster),
            "incarnation": (
                replace(session, incarnation=Incarnation(session.incarnation + 1)),
                errors.Unauthenticated,
            ),
        }
        lie, refusal = lies[forged]
        spec = spec_of("t", 1, Mode.BSP)
        self.expect(lambda: self.cluster.heartbeat(lie, self.now_s), refusal)
        self.expect(lambda: self.cluster.deregister(lie, "", self.now_s), refusal)
        self.expect(lambda: self.cluster.create_table(lie, spec, self.now_s), refusal)

    @rule(
        data=st.data(),
        name=st.sampled_from("abcdef"),
        block_count=st.sampled_from([1, 2, 40]),
        mode=st.sampled_from([Mode.BSP, Mode.BSP, Mode.ASP]),
    )
    def create_table(self, data: st.DataObject, name: str, block_count: int, mode: Mode) -> None:
        if not self.twin.nodes:
            return
        workers = [n for n in self.twin.nodes if n.request.role is Role.WORKER]
        node = data.draw(st.sampled_from([*workers * 3, *self.twin.nodes]))
        spec = spec_of(name, block_count, mode).validated()
        existing = next((t for t in self.twin.tables if t.name == name), None)
        refusal: type[errors.PushpullError] | None = None
        if node.has_left:
            refusal = errors.Fenced
        elif node.request.role is not Role.WORKER:
            refusal = errors.NotPermitted
        elif existing is not None and existing != spec:
            refusal = errors.TableExists
        created = self.expect(
            lambda: self.cluster.create_table(node.session, spec, self.now_s), refusal
        )
        if created is None:
            return
        if existing is None and self.must_wait(spec):
            assert not isinstance(created, Created)
            assert created.reason.startswith(f"table '{name}' waits for ")
            return
        assert isinstance(created, Created)
        assert created.table.spec == spec
        assert created.view_number == self.cluster.view.view_number
        if existing is None:
            self.twin.tables.append(spec)

    def must_wait(self, spec: TableSpec) -> bool:
        """Whether there are too few servers, or the primary of a range of the table is away."""
        alive = {n.session.node_id for n in self.twin.alive_servers()}
        if len(alive) < self.twin.server_count:
            return True
        first = self.twin.ordinal_of(len(self.twin.tables))
        count = spec.element_count // spec.block_elements
        slots = [(first + n) * 40_503 % 65_536 for n in range(count)]
        return any(
            r.primary is not None and r.primary not in alive
            for r in self.cluster.view.ranges
            if any(slot in r.slots for slot in slots)
        )

    @rule(seconds=st.sampled_from([0.5, 2.0, 4.0, 70.0]), data=st.data())
    def pass_time(self, seconds: float, data: st.DataObject) -> None:
        """Time goes by; a part of the nodes goes on beating."""
        here = [n for n in self.twin.nodes if not n.has_left]
        beating = [n for n in here if data.draw(st.booleans())]
        for _ in range(int(seconds / STEP_S)):
            self.now_s += STEP_S
            for node in beating:
                self.beat(node)
            self.expect(lambda: self.cluster.tick(self.now_s), None)
            self.twin.last_tick_s = self.now_s
            for node in here:
                if node.has_left:
                    continue
                quiet_s = self.now_s - max(node.heard_s)
                is_unneeded = node.request.role is Role.READER or (
                    node.request.role is Role.SERVER and not self.holds(node)
                )
                if is_unneeded and quiet_s > GIVEN_UP_LEASES * LEASE_S:
                    node.has_left = True
                if node.request.role is Role.WORKER and quiet_s > WORKER_TIMEOUT_S:
                    node.has_left = node.is_gone = True

    def holds(self, node: TwinNode) -> bool:
        return any(r.primary == node.session.node_id for r in self.cluster.view.ranges)

    @rule(now_s=st.sampled_from([0.0, 1e6]))
    def start_again(self, now_s: float) -> None:
        """The scheduler dies, and another goes on from its journal: by another clock, with nobody
        heard. All that it knew is there, and what was not decided is withdrawn.
        """
        for node in self.twin.nodes:
            node.was_silent = node.state(self.twin.last_tick_s) is NodeState.SILENT
            node.heard_s = [now_s]
        before, was = self.cluster.view, self.cluster._state
        kept = records.read(self.records)
        assert kept is not None
        self.same_state(was, kept.state)
        began = Cluster.resumed(kept, now_s)
        self.cluster, self.now_s = began.reply, now_s
        self.twin.last_tick_s = now_s
        after = self.cluster.view
        open_tables = [t for t in before.tables if t.proposed and not t.proposed.is_decided]
        assert after.tables == tuple(
            replace(t, proposed=None) if t in open_tables else t for t in before.tables
        )
        assert after == replace(
            before, tables=after.tables, view_number=before.view_number + bool(open_tables)
        )
        assert len(began.transitions) == len(open_tables)

    @staticmethod
    def same_state(was: ClusterState, found: ClusterState) -> None:
        """But for what ends with a scheduler, and room that nobody needs."""
        ends = {"proposals", "withdrawals", "checkpoint", "counted_joins", "view_bytes"}
        for each in fields(ClusterState):
            if each.name not in ends:
                assert getattr(found, each.name) == getattr(was, each.name), each.name
        assert found.proposals.keys() == was.proposals.keys()
        assert found.counted_joins <= was.counted_joins
        lacking = view_size.JOIN_BYTES * (len(was.counted_joins) - len(found.counted_joins))
        assert found.view_bytes == was.view_bytes - lacking

    @invariant()
    def the_journal_is_written(self) -> None:
        """What has changed, after each event (JR-1, with `start_again`)."""
        delta = self.differences.since(self.cluster.journaled(self.now_s))
        for key in delta.removed:
            del self.records[key]
        self.records |= delta.encoded()

    @invariant()
    def the_view_is_what_the_history_says(self) -> None:
        view, twin = self.cluster.view, self.twin
        assert [(n.node_id, n.role, n.rank, n.address, n.state) for n in view.nodes] == [
            (
                NodeId(index),
                node.request.role,
                node.session.rank,
                node.request.address,
                node.state(twin.last_tick_s),
            )
            for index, node in enumerate(twin.nodes, 1)
        ]
        assert [n.incarnation for n in view.nodes] == [10 + i for i in range(len(view.nodes))]
        assert [t.spec for t in view.tables] == twin.tables
        assert [t.table_id for t in view.tables] == list(range(1, len(twin.tables) + 1))
        for index, table in enumerate(view.tables):
            assert table.first_ordinal == twin.ordinal_of(index)
        assert view.finished == twin.finished()
        assert view.world_size == twin.world_size()
        assert set(view.awaited_ranks) == {
            n.session.rank for n in twin.nodes if n.request.role is Role.WORKER and not n.has_left
        } | (
            set(range(twin.worker_count))
            - {n.session.rank for n in twin.nodes if n.request.role is Role.WORKER}
        )
        assert self.cluster.servers_have_left == all(
            n.has_left for n in twin.nodes if n.request.role is Role.SERVER
        )

    @invariant()
    def ranges_that_hold_blocks_have_a_primary_and_keep_it(self) -> None:
        view, servers = self.cluster.view, {n.node_id for n in self.cluster.view.nodes}
        held = {r for t in view.tables for r in t.blocks_by_range(RANGE_COUNT)}
        for old, new in zip(self.before.ranges, view.ranges, strict=True):
            assert (new.primary is not None) == (new.range_id in held)
            assert new.primary is None or new.primary in servers
            assert new.assignment_epoch == old.assignment_epoch + (new.primary != old.primary)
            assert old.primary is None or new.primary == old.primary
        assert not (self.before.finished and not view.finished)
        self.before = view

    @invariant()
    def whoever_came_late_joins_each_table_or_has_joined(self) -> None:
        """And nobody else does; with one join of a table under way at a time."""
        twin, state = self.twin, self.cluster._state
        workers = [n for n in twin.nodes if n.request.role is Role.WORKER]
        firsts = {n.session.rank: n for n in reversed(workers)}
        late = [
            n
            for n in workers
            if n.session.rank >= twin.worker_count or n is not firsts[n.session.rank]
        ]
        for table in self.cluster.view.tables:
            due = [join.incarnation for join in state.joins_due.get(table.table_id, ())]
            assert due or table.table_id not in state.joins_due
            there = [join.incarnation for join in table.joins]
            assert len({join.rank for join in table.joins}) == len(table.joins)
            assert {*due, *there} <= {n.session.incarnation for n in late}
            newest = {n.session.rank: n for n in late if not n.has_left}
            assert {n.session.incarnation for n in newest.values()} <= {*due, *there}
            if due and table.proposed is not None:
                assert table.proposed.join is not None

    @rule(data=st.data(), clock=st.integers(0, 9))
    def promise(self, data: st.DataObject, clock: int) -> None:
        """A server promises what is proposed."""
        proposed = [t for t in self.cluster.view.tables if t.proposed is not None]
        servers = [n for n in self.twin.alive_servers() if not n.has_left]
        if not proposed or not servers:
            return
        table, server = data.draw(st.sampled_from(proposed)), data.draw(st.sampled_from(servers))
        assert table.proposed is not None
        number = table.proposed.number
        outcome = data.draw(st.sampled_from([None, None, *ChangeOutcome]))
        self.expect(
            lambda: self.cluster.prepare_change(
                server.session, table.table_id, number, clock, outcome
            ),
            None,
        )

    @rule(again=st.booleans(), ends=st.booleans())
    def settle(self, *, again: bool, ends: bool) -> None:
        """Servers promise all that is proposed, and the first ranges take it: for workers that have
        ended meanwhile too, and where another scheduler has come.
        """
        servers = self.twin.alive_servers()
        for table in self.cluster.view.tables:
            change = table.proposed
            for server in servers if change is not None and not change.is_decided else ():
                self.say(server, table.table_id, change, None)
        joining = [t.proposed.join for t in self.cluster.view.tables if t.proposed is not None]
        late = {join.incarnation for join in joining if join is not None}
        for node in self.twin.nodes if ends else ():
            if node.session.incarnation in late and not node.has_left:
                session = node.session
                self.expect(partial(self.cluster.deregister, session, "", self.now_s), None)
                node.has_left = True
        if again:
            self.the_journal_is_written()
            self.start_again(self.now_s)
        for table in self.cluster.view.tables if servers else ():
            if table.proposed is not None and table.proposed.is_decided:
                self.say(servers[0], table.table_id, table.proposed, ChangeOutcome.TAKEN)
                assert self.cluster.view.tables_by_id[table.table_id].proposed is None

    def say(
        self,
        server: TwinNode,
        table_id: TableId,
        change: TableChange | None,
        outcome: ChangeOutcome | None,
    ) -> None:
        assert change is not None
        said = table_id, change.number, change.after_clock, outcome
        self.expect(partial(self.cluster.prepare_change, server.session, *said), None)

    @invariant()
    def the_view_survives_the_wire(self) -> None:
        message = wire.view_to_proto(self.cluster.view)
        assert wire.view_from_proto(message) == self.cluster.view
        fixed_bytes = view_size.fixed_bytes("c", RANGE_COUNT, 1)
        assert message.ByteSize() <= fixed_bytes + self.cluster._state.view_bytes


TestClusterAgainstTwin = ClusterAgainstTwin.TestCase
TestClusterAgainstTwin.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
