"""Servers come, fall silent, wake up and leave, and primaries wish: what a configuration may be."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ps_core.cluster_view import (
    BackupRequest,
    ClusterView,
    NodeState,
    RangeAssignment,
    Role,
    Session,
)
from ps_core.errors import Fenced
from ps_core.keys import AssignmentEpoch, RangeId
from ps_core.tables.table_spec import TableSpec
from ps_runtime.cluster import wire
from scheduler.machine import view_size
from scheduler.machine.cluster import Created
from tests.examples import examples
from tests.unit.cluster_harness import SPEC, Harness

RANGE_COUNT = 4
STEP_S = 0.5


class ConfigurationsAtWork(RuleBasedStateMachine):
    """Random events; after each, every change of a configuration is one that the rules allow."""

    @initialize(
        replica_count=st.integers(2, 3),
        extra=st.integers(0, 2),
        block_count=st.integers(1, 3),
        stays=st.booleans(),
    )
    def form(self, replica_count: int, extra: int, block_count: int, *, stays: bool) -> None:
        self.harness = Harness(
            server_count=3, replica_count=replica_count, range_count=RANGE_COUNT, worker_count=1
        )
        self.replica_count = replica_count
        self.servers = [self.harness.join(Role.SERVER) for _ in range(3 + extra)]
        self.worker = self.harness.join(Role.WORKER)
        self.table_count = 0
        self.over: list[str] = []  # runs with one table, whose workers have left
        self.is_looked = False
        self.before = self.harness.cluster.view
        self.make_table(block_count, stays=stays)

    @rule(block_count=st.integers(1, 3), stays=st.booleans())
    def make_table(self, block_count: int, *, stays: bool) -> None:
        """While one server lives a table can be made, unless a range of it has no living one."""
        self.table_count += 1
        spec = TableSpec(f"t{self.table_count}", SPEC.dtype, 64 * block_count, SPEC.optimizer, 64)
        self.harness.beat(self.worker)
        if stays:
            made = self.harness.create(self.worker, spec)
        else:
            self.over.append(f"r{self.table_count}")
            worker = self.harness.join(Role.WORKER, run=self.over[-1], world_size=1)
            made = self.harness.create(worker, spec)
            self.harness.leave(worker)
        self.is_looked = False
        view = self.harness.cluster.view
        if isinstance(made, Created):
            held = made.table.blocks_by_range(RANGE_COUNT)
            assert all(view.ranges[r].primary in view.living_servers for r in held)

    @rule(choice=st.data())
    def remove_run(self, choice: st.DataObject) -> None:
        """Its table is no more, and some ranges may be empty."""
        if self.over:
            name = choice.draw(st.sampled_from(self.over))
            self.over.remove(name)
            self.harness.cluster.remove_run(self.harness.join(Role.OPERATOR), name)
            self.is_looked = False

    @rule(seconds=st.sampled_from([0.5, 4.0, 70.0]), choice=st.data())
    def pass_time(self, seconds: float, choice: st.DataObject) -> None:
        """A part of the servers is heard."""
        heard = [server for server in self.servers if choice.draw(st.booleans())]
        for _ in range(int(seconds / STEP_S)):
            for server in list(heard):
                try:
                    self.harness.beat(server)
                except Fenced:  # it had left
                    heard.remove(server)
            self.harness.pass_time(STEP_S, self.worker)
            self.look_at_what_changed()
        self.is_looked = True

    @rule()
    def come(self) -> None:
        if len(self.servers) < 12:
            self.servers.append(self.harness.join(Role.SERVER))
            self.is_looked = False

    @rule(choice=st.data(), count=st.sampled_from([1, 1, 1, 4]))
    def leave(self, choice: st.DataObject, count: int) -> None:
        for _ in range(count):
            self.harness.leave(choice.draw(st.sampled_from(self.servers)))
            self.look_at_what_changed()

    @rule(choice=st.data(), lag=st.sampled_from([0, 0, 0, 1]))
    def backup_request(self, choice: st.DataObject, lag: int) -> None:
        """A server wishes for some of those that it may have, of all ranges at once."""
        server = choice.draw(st.sampled_from(self.servers))
        before = self.harness.cluster.view.ranges
        backup_requests = [self.drawn(choice, server, assignment, lag) for assignment in before]
        try:
            decision = self.harness.cluster.set_backups(server, backup_requests)
        except Fenced:
            return
        may = {r.range_id for r in before if r.primary == server.node_id and not lag}
        assert set(decision.reply) == {r.range_id for r in before} - may
        now = self.harness.cluster.view.ranges
        for wanted in backup_requests:
            if wanted.range_id in may:
                kept = wanted.backups & set(before[wanted.range_id].backups)
                granted = frozenset(now[wanted.range_id].backups)
                assert kept <= granted <= wanted.backups
                count = max(len(kept), min(len(wanted.backups), self.replica_count - 1))
                assert len(granted) == count
                next_epoch = wanted.assignment_epoch + 1
                assert now[wanted.range_id].assignment_epoch == next_epoch
        self.is_looked = False

    @staticmethod
    def drawn(
        choice: st.DataObject, server: Session, assignment: RangeAssignment, lag: int
    ) -> BackupRequest:
        known = sorted({*assignment.backups, *assignment.catching_up} - {server.node_id})
        wanted = [node_id for node_id in known if choice.draw(st.booleans())]
        at = AssignmentEpoch(assignment.assignment_epoch - lag)
        return BackupRequest(assignment.range_id, at, frozenset(wanted))

    @invariant()
    def look_at_what_changed(self) -> None:
        """CL-2, CL-3."""
        view, before = self.harness.cluster.view, self.before
        for old, new in zip(before.ranges, view.ranges, strict=True):
            assert new.assignment_epoch - old.assignment_epoch in (0, 1)
            was_placed = old.primary is None and new.primary is not None
            if old.primary is not None and new.primary is None:
                self.check_unplaced(view, old, new)
                continue
            if was_placed and new.assignment_epoch > 2:
                assert (new.initial_holders, new.placed_epoch) == (
                    new.in_sync,
                    new.assignment_epoch,
                )
            if new.primary != old.primary and not was_placed and old.primary is not None:
                assert new.primary in old.backups
                others = set(old.in_sync) - {new.primary}
                is_member = view.nodes_by_id[old.primary].state.is_member
                assert set(new.backups) == others - (set() if is_member else {old.primary})
                assert old.primary not in view.living_servers
                assert new.term == new.assignment_epoch
            elif not was_placed:
                assert new.term == old.term
                assert set(new.backups) <= {*old.backups, *old.catching_up}
            if not was_placed:
                assert set(new.initial_holders) <= set(old.initial_holders)
                assert new.placed_epoch == old.placed_epoch
            assert set(new.initial_holders) <= set(new.in_sync)
            if new.assignment_epoch == old.assignment_epoch:
                assert (new.primary, new.backups) == (old.primary, old.backups)
            assert len(set(new.holders)) == len(new.holders) <= 2 * self.replica_count - 1
            if (new.primary, new.assignment_epoch) == (old.primary, old.assignment_epoch):
                assert {n for n in old.catching_up if view.nodes_by_id[n].state.is_member} <= set(
                    new.catching_up
                )
        self.before = view

    def check_unplaced(self, view: ClusterView, old: RangeAssignment, new: RangeAssignment) -> None:
        """It had no values, and no server that may come back to it."""
        assert new.range_id not in self.held_ranges(view)
        assert (new.holders, new.initial_holders, new.is_lost) == ((), (), False)
        assert new.assignment_epoch == old.assignment_epoch + 1
        members = {node.node_id for node in view.nodes if node.state.is_member}
        assert members.isdisjoint(old.in_sync)

    @staticmethod
    def held_ranges(view: ClusterView) -> set[RangeId]:
        return {r for table in view.tables for r in table.blocks_by_range(RANGE_COUNT)}

    @invariant()
    def what_is_lost_had_values(self) -> None:
        view = self.harness.cluster.view
        if self.is_looked:
            assert {r.range_id for r in view.lost_ranges} <= self.held_ranges(view)
            members = {node.node_id for node in view.nodes if node.state.is_member}
            gone = [r.range_id for r in view.ranges if r.primary and members.isdisjoint(r.in_sync)]
            assert [r.range_id for r in view.lost_ranges] == gone

    @invariant()
    def whoever_can_serve_does_and_whoever_is_free_joins(self) -> None:
        view = self.harness.cluster.view
        for assignment in view.ranges if self.is_looked else ():
            if assignment.primary is None:
                continue
            living = [n for n in assignment.in_sync if n in view.living_servers]
            if not living:
                continue
            assert assignment.primary in living
            living_joiners = view.living_servers & set(assignment.catching_up)
            is_full = len(assignment.backups) + len(living_joiners) >= self.replica_count - 1
            has_room = len(assignment.holders) < 2 * self.replica_count - 1
            assert is_full or not has_room or view.living_servers <= set(assignment.holders)

    @invariant()
    def who_has_left_by_silence_holds_nothing(self) -> None:
        view = self.harness.cluster.view
        held = {node_id for assignment in view.ranges for node_id in assignment.holders}
        for node in view.nodes:
            if node.state is NodeState.LEFT and node.silence_ms:
                assert node.node_id not in held
        message = wire.view_to_proto(view)
        assert wire.view_from_proto(message) == replace(view)
        fixed_bytes = view_size.fixed_bytes("c-1", RANGE_COUNT, self.replica_count)
        assert message.ByteSize() <= fixed_bytes + self.harness.cluster._state.view_bytes


TestConfigurationsAtWork = ConfigurationsAtWork.TestCase
TestConfigurationsAtWork.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None
)
