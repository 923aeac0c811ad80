"""What becomes of a change whose scheduler is not heard: the table's first range says (S6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ps_core.change import ChangeOutcome, ChangeResult, Join, TableChange
from ps_core.cluster_view import ClusterView, Role
from ps_core.consistency import Consistency, Mode, parsed
from ps_core.errors import NotOwner
from ps_core.keys import Incarnation, NodeId, TableId
from ps_core.sliced_work import at_once
from ps_server.ranges.schedule import Schedule
from ps_server.ranges.server_machine import Doubt, ServerMachine
from tests.unit.cluster_harness import Harness

TABLE = TableId(1)
BSP = parsed("bsp")


class Servers:
    """Two servers without a scheduler, whose newest view is given by hand."""

    def __init__(self) -> None:
        cluster = Harness()
        ids = [NodeId(cluster.join(Role.SERVER).node_id) for _ in range(2)]
        cluster.create(cluster.join(Role.WORKER))
        self.view = cluster.cluster.view
        (table,) = self.view.tables
        ranges = table.blocks_by_range(len(self.view.ranges))
        assert len(ranges) > 1
        first = self.view.ranges[min(ranges)].primary
        assert first is not None
        machines = {node_id: ServerMachine(node_id, 2) for node_id in ids}
        self.first, self.first_id = machines.pop(first), first
        ((self.other_id, self.other),) = machines.items()

    def propose(self, number: int, *, decided_after: int | None = None, join: Join | None = None,
                to: Sequence[ServerMachine] = ()) -> None:  # fmt: skip
        change = TableChange(number, decided_after or 0, parsed("asp"), join)
        change = replace(change, is_decided=decided_after is not None)
        (table,) = self.view.tables
        tables = (replace(table, proposed=change),)
        self.view = replace(self.view, view_number=self.view.view_number + 1, tables=tables)
        for machine in to or (self.first, self.other):
            self.show(machine, self.view)

    @staticmethod
    def show(machine: ServerMachine, view: ClusterView) -> None:
        machine.observe(view)
        at_once(machine.ending((), 0.0))
        at_once(machine.observing_changes(0.0))

    def settings(self, machine: ServerMachine) -> set[Consistency]:
        return {part.state.schedule.at(9) for part in machine.shards.values()}

    def holds(self, machine: ServerMachine) -> set[bool]:
        return {part.state.schedule.holds(9) for part in machine.shards.values()}

    def ask(self) -> ChangeResult | None:
        """The other server asks the first range's."""
        (doubt,) = self.other.doubts
        assert doubt == Doubt(TABLE, doubt.number, self.first_id)
        self.first.asked(TABLE, doubt.number, 0.0)
        settled = self.first.outcome(TABLE, doubt.number)
        if settled is not None:
            self.other.settled(doubt, settled, 0.0)
        return settled


def test_what_is_not_decided_is_given_up_and_nothing_is_held() -> None:
    """SC-2."""
    servers = Servers()
    servers.propose(1)
    assert servers.holds(servers.first) == servers.holds(servers.other) == {True}
    servers.other.go_on_alone(0.0)
    assert servers.holds(servers.other) == {True}, "it is not the one that decides"
    servers.first.go_on_alone(0.0)
    assert servers.ask() == ChangeResult(ChangeOutcome.GIVEN_UP)
    assert servers.holds(servers.other) == {False}
    assert [p.outcome for p in servers.first.prepared_changes] == [ChangeOutcome.GIVEN_UP]
    servers.propose(1, decided_after=3)  # the scheduler was only paused
    assert servers.settings(servers.first) == servers.settings(servers.other) == {BSP}
    assert not servers.holds(servers.other) - {False}


def test_what_was_decided_is_taken_everywhere_though_one_alone_heard_of_it() -> None:
    servers = Servers()
    servers.propose(1)
    servers.propose(1, decided_after=3, to=[servers.first])
    assert [p.outcome for p in servers.first.prepared_changes] == [ChangeOutcome.TAKEN]
    servers.other.go_on_alone(0.0)
    assert servers.ask() == ChangeResult(ChangeOutcome.TAKEN, 3)
    assert {s.mode for s in servers.settings(servers.other)} == {Mode.ASP}
    assert all(p.state.schedule.at(3) == BSP for p in servers.other.shards.values())


def test_a_proposal_that_the_first_range_has_not_heard_of_is_given_up_when_asked() -> None:
    servers = Servers()
    for machine in (servers.first, servers.other):
        servers.show(machine, servers.view)
    servers.propose(1, to=[servers.other])
    assert servers.ask() == ChangeResult(ChangeOutcome.GIVEN_UP)
    servers.propose(1, decided_after=2, to=[servers.first])
    assert servers.settings(servers.first) == {BSP}


@pytest.mark.parametrize("taken", [0, 1])
def test_a_proposal_before_the_newest_was_given_up(taken: int) -> None:
    """Who has not heard that, nor of the newest, held its steps for good without the scheduler."""
    servers = Servers()
    for number in range(1, taken + 1):
        servers.propose(number)
        servers.propose(number, decided_after=number)
    servers.propose(taken + 1)
    servers.propose(taken + 2, to=[servers.first])
    assert servers.ask() == ChangeResult(ChangeOutcome.GIVEN_UP)
    assert servers.holds(servers.other) == {False}
    assert servers.first.outcome(TABLE, taken + 2) is None, "it may be taken"


def test_an_answer_about_a_table_that_has_gone_meanwhile_changes_nothing() -> None:
    """Its run has ended; the server goes on."""
    servers = Servers()
    servers.propose(1)
    servers.other.go_on_alone(0.0)
    (doubt,) = servers.other.doubts
    at_once(servers.other.removing({TABLE}))
    servers.other.observe(
        replace(servers.view, view_number=servers.view.view_number + 1, tables=())
    )
    assert servers.other.settled(doubt, ChangeResult(ChangeOutcome.TAKEN, 3), 0.0) == []


def test_a_join_is_taken_as_a_setting_is() -> None:
    servers = Servers()
    servers.propose(1, join=Join(1, Incarnation(9)))
    servers.propose(1, decided_after=4, join=Join(1, Incarnation(9)), to=[servers.first])
    assert servers.ask() == ChangeResult(ChangeOutcome.TAKEN, 4)
    for part in servers.other.shards.values():
        assert part.state.by_rank[1].joined_clock == 4


def test_who_does_not_have_the_first_range_says_nothing() -> None:
    servers = Servers()
    servers.propose(1)
    with pytest.raises(NotOwner, match="first range"):
        servers.other.outcome(TABLE, 1)


def test_what_was_taken_is_never_given_up() -> None:
    """SC-2."""
    servers = Servers()
    servers.propose(1)
    servers.propose(1, decided_after=3)
    (schedule,) = {part.state.schedule for part in [servers.first.decider(TABLE)]}
    assert isinstance(schedule, Schedule)
    assert not schedule.give_up(1)
    assert schedule.settled(1) == ChangeResult(ChangeOutcome.TAKEN, 3)
