"""Shards of a data set against a dumb twin, which writes down what became of each shard."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ps_core.change import ChangeOutcome
from ps_core.cluster_view import Role, Session
from ps_core.consistency import Mode, parsed
from ps_core.errors import InvalidConfig
from ps_core.keys import NodeId
from ps_core.manifest import DataSetSpec
from scheduler.machine.changes import ChangeRequest
from scheduler.machine.data_shards import DataSet, ShardLease, ShardRequest
from scheduler.machine.state import Restored
from tests.examples import examples
from tests.unit.cluster_harness import SPEC as TABLE
from tests.unit.cluster_harness import Harness

PENDING, DONE = "pending", "done"


@dataclass
class Twin:
    """What became of each shard: PENDING, DONE, or the node that has it."""

    shard_count: int
    pass_number: int = 0
    reissued_count: int = 0
    shards: dict[int, object] = field(default_factory=dict)
    issued: list[int] = field(default_factory=list)
    """The shards of the pass in the order of their first issue."""

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.shards = dict.fromkeys(range(self.shard_count), PENDING)
        self.issued = []

    def of(self, what: object) -> set[int]:
        return {shard for shard, is_now in self.shards.items() if is_now == what}

    def end(self, worker: NodeId) -> None:
        lost = self.of(worker)
        self.shards |= dict.fromkeys(lost, PENDING)
        self.reissued_count += len(lost)


class ShardsAgainstTwin(RuleBasedStateMachine):
    """Random requests; every answer is checked."""

    @initialize(shard_count=st.integers(1, 12), workers=st.integers(1, 3), seed=st.integers(0, 3))
    def form(self, shard_count: int, workers: int, seed: int) -> None:
        self.spec = DataSetSpec("data", max(3, 3 * shard_count - 1), 3, seed)
        self.twin = Twin(shard_count)
        self.harness = Harness(worker_count=3)
        self.workers: list[Session] = []
        self.last: dict[NodeId, ShardRequest] = {}
        for _ in range(workers):
            self.come()
        self.with_table()

    def with_table(self) -> None:
        self.servers = [self.harness.join(Role.SERVER) for _ in range(2)]
        self.harness.create(self.workers[0], replace(TABLE, consistency=parsed("asp")))

    def come(self) -> None:
        self.workers.append(self.harness.join(Role.WORKER))

    def ask(self, worker: Session, request: ShardRequest) -> ShardLease:
        decision = self.harness.cluster.lease_data_shards(worker, request, self.harness.now_s)
        return decision.reply

    @rule(data=st.data(), want_count=st.integers(0, 4), names_pass=st.booleans())
    def lease(self, data: st.DataObject, want_count: int, *, names_pass: bool) -> None:
        """A worker reports some of what it has, and wants so many."""
        worker, twin = data.draw(st.sampled_from(self.workers)), self.twin
        held = sorted(twin.of(worker.node_id))
        done = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
        number = twin.pass_number
        own = number if done or names_pass else None
        request = self.last[worker.node_id] = ShardRequest(self.spec, own, tuple(done), want_count)
        lease = self.ask(worker, request)
        twin.shards |= dict.fromkeys(done, DONE)
        assert lease.reported_count == len(done)
        if len(twin.of(DONE)) == twin.shard_count:
            twin.pass_number += 1
            twin.begin()
            assert (lease.shards, lease.issued_count, lease.waits_for) == ((), 0, "")
        else:
            self.check_issued(worker, lease, want_count)
        assert lease.pass_number == twin.pass_number

    def check_issued(self, worker: Session, lease: ShardLease, want_count: int) -> None:
        twin = self.twin
        had, pending = twin.of(worker.node_id), twin.of(PENDING)
        new = set(lease.shards) - had
        assert set(lease.shards) >= had
        assert len(lease.shards) == len(set(lease.shards))
        assert new <= pending, "DS-1: others have it, or it is done"
        assert len(new) == lease.issued_count == min(max(want_count - len(had), 0), len(pending))
        assert bool(lease.waits_for) == (want_count > 0 and not lease.shards)
        twin.issued += [shard for shard in lease.shards if shard in new - set(twin.issued)]
        assert not lease.waits_for or not pending
        twin.shards |= dict.fromkeys(new, worker.node_id)

    @precondition(lambda self: self.last)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """The answer of a worker's last request was lost."""
        node_id = data.draw(st.sampled_from(sorted(self.last)))
        (worker,) = [each for each in self.workers if each.node_id == node_id]
        request = self.last[node_id]
        lease = self.ask(worker, request)
        assert lease.reported_count == 0
        assert lease.pass_number == self.twin.pass_number
        if request.pass_number in (None, self.twin.pass_number):
            self.check_issued(worker, lease, request.want_count)
        else:
            assert (lease.shards, lease.waits_for) == ((), "")

    @rule(data=st.data(), shard=st.integers(0, 11), pass_ahead=st.integers(-1, 1))
    def lie(self, data: st.DataObject, shard: int, pass_ahead: int) -> None:
        """A report of what the worker does not have, or of another pass, changes nothing."""
        worker = data.draw(st.sampled_from(self.workers))
        number = self.twin.pass_number + pass_ahead
        request = ShardRequest(self.spec, number, (shard,), 1)
        is_last = (number, (shard,)) == self.last_report(worker)
        if (self.twin.shards.get(shard) == worker.node_id and not pass_ahead) or is_last:
            return
        before = self.data_set
        try:
            self.ask(worker, request)
        except InvalidConfig:
            assert self.data_set == before
        else:
            raise AssertionError("it was taken")

    def last_report(self, worker: Session) -> Any:
        data_set = self.data_set
        return None if data_set is None else data_set.reports.get(worker.node_id)

    @rule(data=st.data(), unfinished=st.booleans(), comes=st.booleans())
    def end(self, data: st.DataObject, *, unfinished: bool, comes: bool) -> None:
        """A worker leaves, or is gone; and another one takes its rank, perhaps."""
        if len(self.workers) == 1 and not comes:
            return
        worker = data.draw(st.sampled_from(self.workers))
        self.harness.cluster.deregister(
            worker, "test", self.harness.now_s, unfinished=unfinished or comes
        )
        self.workers.remove(worker)
        self.last.pop(worker.node_id, None)
        self.twin.end(worker.node_id)
        if comes:
            self.come()

    @rule(data=st.data(), text=st.sampled_from(["asp", "asp:reject=1", "bsp", "ssp:3"]))
    def change(self, data: st.DataObject, text: str) -> None:
        """A worker wants another setting for the table, which all servers prepare."""
        self.agree()  # to joins
        harness, worker = self.harness, data.draw(st.sampled_from(self.workers))
        cluster, before = harness.cluster, harness.cluster.view
        wanted = ChangeRequest("model", parsed(text), 0, harness.now_s + 5)
        is_refused = (
            before.tables[0].consistency.mode is Mode.ASP
            and wanted.consistency.mode is not Mode.ASP
            and any(what not in (PENDING, DONE) for what in self.twin.shards.values())
        )
        try:
            cluster.set_consistency(worker, wanted, harness.now_s)
        except InvalidConfig:
            assert is_refused, "S20: refused, and nobody has a shard"
            assert cluster.view == before
            return
        assert not is_refused, "S20: who has a shard would wait for who waits for it"
        self.agree()
        assert cluster.view.tables[0].consistency == wanted.consistency

    def agree(self) -> None:
        """The servers prepare what is proposed for the table, and take it."""
        cluster = self.harness.cluster
        while (proposed := cluster.view.tables[0].proposed) is not None:
            change = cluster.view.tables[0].table_id, proposed.number
            for server in self.servers:
                cluster.prepare_change(server, *change, proposed.after_clock)
            cluster.prepare_change(self.servers[0], *change, 0, ChangeOutcome.TAKEN)

    @rule()
    def start_again(self) -> None:
        self.harness.start_again()

    @precondition(lambda self: self.data_set is not None)
    @rule()
    def restore(self) -> None:
        """From a checkpoint of this moment, with as many workers."""
        assert self.data_set is not None
        saved = self.data_set.saved()
        for worker in self.workers:
            self.twin.end(worker.node_id)
        count = len(self.workers)
        restored = Restored("file:///c", {}, data_sets=(saved,))
        self.harness, self.workers, self.last = Harness(worker_count=3, restored=restored), [], {}
        for _ in range(count):
            self.come()
        self.with_table()

    @property
    def data_set(self) -> DataSet | None:
        return next(iter(self.harness.cluster.data_sets), None)

    @invariant()
    def it_is_as_the_twin_says(self) -> None:
        if not hasattr(self, "twin") or self.data_set is None:
            return
        twin, found = self.twin, self.data_set
        assert found.pass_number == twin.pass_number
        assert found.reissued_count == twin.reissued_count
        assert found.done_count == len(twin.of(DONE))
        assert dict(found.leases) == {
            shard: who for shard, who in twin.shards.items() if who not in (PENDING, DONE)
        }
        # DS-1: what is neither is pending, and the order is a function of seed and pass alone.
        order = replace(DataSet("", self.spec), pass_number=twin.pass_number)
        assert twin.issued == [order.shard_at(position) for position in range(found.issued_count)]
        assert set(found.returned) == twin.of(PENDING) & set(twin.issued)


TestShardsAgainstTwin = ShardsAgainstTwin.TestCase
TestShardsAgainstTwin.settings = settings(max_examples=examples(150), stateful_step_count=40)
