"""The scheduler's machine when a table's consistency changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core import errors
from ps_core.change import ChangeOutcome, Join, TableChange
from ps_core.cluster_view import Role, Session
from ps_core.consistency import Consistency, parsed
from ps_core.keys import TableId
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_runtime.cluster import wire
from scheduler.machine import view_size
from scheduler.machine.changes import ChangeRequest, Outcome, PendingProposal, Withdrawn
from scheduler.machine.cluster import Created
from scheduler.machine.state import ChangeCommitted, ChangeDecided, ChangeProposed, ChangeWithdrawn
from tests.unit.cluster_harness import SPEC, Harness, refused
from tests.unit.test_cluster_checkpoints import Saving

MODEL = TableId(1)


class Changing(Harness):
    """Two servers, two workers and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.servers = [self.join(Role.SERVER) for _ in range(2)]
        self.workers = [self.join(Role.WORKER) for _ in range(2)]
        assert isinstance(self.create(self.workers[0]), Created)

    def wanted(
        self, text: str = "ssp:2", *, by: Session | None = None, within_s: float = 10.0, **more: int
    ) -> TableChange | PendingProposal:
        decision = self.cluster.set_consistency(
            by or self.workers[0],
            ChangeRequest("model", parsed(text), more.get("after_clock", 0), self.now_s + within_s),
            self.now_s,
        )
        self.transitions += decision.transitions
        return decision.reply

    def promise(self, server: int, number: int, clock: int) -> None:
        """And, where all have, the table's first range takes what is decided."""
        decision = self.cluster.prepare_change(self.servers[server], MODEL, number, clock)
        self.transitions += decision.transitions
        if any(isinstance(t, ChangeDecided) for t in decision.transitions):
            self.say(number, ChangeOutcome.TAKEN)

    def say(self, number: int, outcome: ChangeOutcome) -> None:
        """What became of a change, as the first range's primary has it."""
        server = self.servers[0]
        decision = self.cluster.prepare_change(server, MODEL, number, 0, outcome)
        self.transitions += decision.transitions

    def decide(self, number: int, clock: int) -> None:
        """All have promised, and nobody has taken it yet."""
        for server in self.servers:
            decision = self.cluster.prepare_change(server, MODEL, number, clock)
            self.transitions += decision.transitions

    def outcome(self, number: int) -> Outcome:
        return self.cluster.changes.outcome("model", number, self.now_s)

    def settle(self, number: int, clock: int) -> None:
        for server in (0, 1):
            self.promise(server, number, clock)

    def move(self, text: str, within_s: float = 10.0) -> None:
        wanted = ChangeRequest("model", parsed(text), 0, self.now_s + within_s, "they waited")
        self.transitions += self.cluster.move_bound(wanted, self.now_s).transitions

    def proposed(self) -> TableChange | None:
        return self.cluster.view.tables_by_name["model"].proposed

    @property
    def setting(self) -> Consistency:
        return self.cluster.view.tables_by_name["model"].consistency


def test_a_change_is_after_the_highest_clock_that_a_server_named() -> None:
    """CH-1."""
    cluster = Changing()
    pending = cluster.wanted()
    assert isinstance(pending, PendingProposal)
    assert "the change to ssp:2 of table 'model' waits until server node 1" in pending.reason
    assert "server node 2" in pending.reason
    cluster.promise(0, pending.number, 7)
    again = cluster.outcome(pending.number)
    assert isinstance(again, PendingProposal)
    assert "node 1" not in again.reason
    assert cluster.setting == Consistency()
    cluster.promise(1, pending.number, 4)
    assert cluster.outcome(pending.number) == TableChange(1, 7, parsed("ssp:2"))
    assert cluster.setting == parsed("ssp:2")
    kinds = [type(t) for t in cluster.transitions]
    assert kinds.count(ChangeProposed) == kinds.count(ChangeCommitted) == 1


def test_what_is_decided_is_settled_by_the_first_range_alone() -> None:
    """It may be in force there: neither the deadline nor another promise says anything of it."""
    cluster = Changing()
    pending = cluster.wanted(within_s=5.0)
    assert isinstance(pending, PendingProposal)
    cluster.decide(pending.number, 6)
    assert cluster.proposed() == TableChange(1, 6, parsed("ssp:2"), is_decided=True)
    cluster.pass_time(8.0, *cluster.servers, *cluster.workers)
    cluster.decide(pending.number, 3)
    still = cluster.outcome(pending.number)
    assert isinstance(still, PendingProposal)
    assert "is decided and waits for server node 1" in still.reason
    cluster.say(pending.number, ChangeOutcome.TAKEN)
    assert cluster.outcome(pending.number) == TableChange(1, 6, parsed("ssp:2"))


def test_what_servers_have_given_up_is_withdrawn_decided_or_not() -> None:
    cluster = Changing()
    for decides in (False, True):
        pending = cluster.wanted()
        assert isinstance(pending, PendingProposal)
        if decides:
            cluster.decide(pending.number, 6)
        cluster.say(pending.number, ChangeOutcome.GIVEN_UP)
        withdrawn = cluster.outcome(pending.number)
        assert isinstance(withdrawn, Withdrawn)
        assert "did not hear the scheduler" in withdrawn.reason
    cluster.say(pending.number, ChangeOutcome.TAKEN)
    assert cluster.setting == Consistency()


def test_what_is_not_decided_is_taken_by_nobody() -> None:
    cluster = Changing()
    pending = cluster.wanted()
    assert isinstance(pending, PendingProposal)
    cluster.say(pending.number, ChangeOutcome.TAKEN)
    assert isinstance(cluster.outcome(pending.number), PendingProposal)


def test_who_asks_for_what_is_under_way_or_done_changes_nothing() -> None:
    cluster = Changing()
    first = cluster.wanted()
    assert isinstance(first, PendingProposal)
    view = cluster.cluster.view
    second = cluster.wanted(by=cluster.workers[1])
    assert isinstance(second, PendingProposal)
    assert second.number == first.number
    other = cluster.wanted("asp")
    assert isinstance(other, PendingProposal)
    assert other.number == 0, "it waits for the first to be settled"
    assert cluster.cluster.view is view
    for server in (0, 1):
        cluster.promise(server, first.number, 3)
        cluster.promise(server, first.number, 3)
    view = cluster.cluster.view
    assert cluster.wanted() == TableChange(1, 3, parsed("ssp:2"))
    assert cluster.cluster.view is view
    assert isinstance(cluster.wanted("asp"), PendingProposal)
    assert cluster.outcome(first.number) == TableChange(1, 3, parsed("ssp:2")), "still its answer"


def test_a_change_that_several_wait_for_has_until_the_last_of_them_gives_up() -> None:
    cluster = Changing()
    first = cluster.wanted(within_s=2.0)
    second = cluster.wanted(by=cluster.workers[1], within_s=6.0)
    assert isinstance(first, PendingProposal)
    assert isinstance(second, PendingProposal)
    cluster.wanted(within_s=1.0)  # and no sooner
    for passed_s, is_open in ((4.0, True), (4.0, False)):
        cluster.pass_time(passed_s, *cluster.servers, *cluster.workers)
        assert isinstance(cluster.outcome(first.number), PendingProposal) == is_open


def test_who_asks_for_what_is_while_another_change_is_under_way_waits_for_that() -> None:
    """The table will not stay so."""
    cluster = Changing()
    cluster.wanted("ssp:2")
    pending = cluster.wanted("bsp")
    assert isinstance(pending, PendingProposal)
    assert pending.number == 0
    cluster.settle(1, 5)
    again = cluster.wanted("bsp")
    assert isinstance(again, PendingProposal)
    assert again.number == 2


def test_a_server_without_a_range_of_the_table_has_nothing_to_say() -> None:
    cluster = Changing()
    cluster.servers.append(cluster.join(Role.SERVER))
    cluster.wanted("ssp:2")
    cluster.promise(2, 1, 50)
    cluster.settle(1, 5)
    (table,) = cluster.cluster.view.tables
    assert table.change == TableChange(1, 5, parsed("ssp:2"))


def test_who_asks_for_the_end_of_an_older_change_is_told_the_newest() -> None:
    """It was taken; another came after it."""
    cluster = Changing()
    for number, text in ((1, "ssp:2"), (2, "asp")):
        cluster.wanted(text)
        cluster.settle(number, 5)
    newest = TableChange(2, 5, parsed("asp"))
    assert [cluster.outcome(number) for number in (1, 2)] == [newest, newest]
    assert isinstance(cluster.outcome(3), Withdrawn)


@pytest.mark.parametrize("after_clock", [0, 2**53 - 1])
def test_a_change_may_be_wanted_after_any_clock_that_a_script_can_name(after_clock: int) -> None:
    pending = Changing().wanted(after_clock=after_clock)
    assert isinstance(pending, PendingProposal)
    assert pending.number == 1


def test_a_change_may_fill_the_view_to_its_last_byte() -> None:
    cluster = Changing()
    state = cluster.cluster.journaled(cluster.now_s).state
    left_bytes = view_size.CHANGE_BYTES - 1
    state.view_bytes += view_size.free_bytes(cluster.cluster.settings, state) - left_bytes
    with pytest.raises(errors.Overloaded, match=f"which may grow by {left_bytes}"):
        cluster.wanted()
    state.view_bytes -= 1
    assert isinstance(cluster.wanted(), PendingProposal)
    assert view_size.free_bytes(cluster.cluster.settings, state) == 0


def test_as_it_was_created_is_no_change() -> None:
    assert Changing().wanted("bsp") == TableChange(0, 0, Consistency())


def test_what_is_not_promised_in_time_is_withdrawn_and_its_promises_count_no_more() -> None:
    cluster = Changing()
    pending = cluster.wanted(within_s=2.0)
    assert isinstance(pending, PendingProposal)
    cluster.promise(0, pending.number, 5)
    cluster.pass_time(2.5, *cluster.servers, *cluster.workers)
    withdrawn = cluster.outcome(pending.number)
    assert isinstance(withdrawn, Withdrawn)
    assert "waits until server node 2" in withdrawn.reason
    assert any(isinstance(t, ChangeWithdrawn) for t in cluster.transitions)
    assert cluster.cluster.view.tables[0].proposed is None
    again = cluster.wanted()
    assert isinstance(again, PendingProposal)
    assert again.number == 2
    for server in (0, 1):
        cluster.promise(server, pending.number, 5)
    assert isinstance(cluster.outcome(again.number), PendingProposal)
    cluster.promise(0, again.number, 9)
    cluster.promise(1, again.number, 8)
    assert cluster.outcome(again.number) == TableChange(2, 9, parsed("ssp:2"))


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (ChangeRequest("model", parsed("bsp:backup=2"), 0, 1e9), ["2 backup workers of 2 workers"]),
        (ChangeRequest("model", parsed("asp"), -1, 1e9), ["after_clock is -1; expected 0"]),
        (ChangeRequest("sums", parsed("asp"), 0, 1e9), ["AGGREGATE needs BSP"]),
    ],
)
def test_a_setting_that_cannot_be_is_refused(wanted: ChangeRequest, words: list[str]) -> None:
    cluster = Changing()
    sums = replace(SPEC, name="sums", optimizer=OptimizerSpec(OptimizerKind.AGGREGATE))
    cluster.create(cluster.workers[0], sums)
    refused(
        errors.InvalidConfig,
        *words,
        by=lambda: cluster.cluster.set_consistency(cluster.workers[0], wanted, cluster.now_s),
        of=cluster,
    )


def test_promises_that_cannot_be_are_refused() -> None:
    cluster = Changing()
    pending = cluster.wanted(after_clock=4)
    assert isinstance(pending, PendingProposal)
    refused(
        errors.InvalidConfig,
        "is clock 3; expected 4",
        by=lambda: cluster.promise(0, pending.number, 3),
        of=cluster,
    )
    refused(
        errors.NotPermitted,
        "is for servers",
        by=lambda: cluster.cluster.prepare_change(cluster.workers[0], MODEL, 1, 4),
        of=cluster,
    )
    refused(
        errors.TableNotFound,
        "there is no table 9",
        by=lambda: cluster.cluster.prepare_change(cluster.servers[0], TableId(9), 1, 4),
        of=cluster,
    )
    refused(
        errors.TableNotFound,
        "there is no table 'other'",
        by=lambda: cluster.cluster.set_consistency(
            cluster.workers[0], ChangeRequest("other", parsed("asp"), 0, 1e9), cluster.now_s
        ),
        of=cluster,
    )


def test_who_was_created_with_the_table_still_finds_it_after_a_change() -> None:
    cluster = Changing()
    pending = cluster.wanted()
    assert isinstance(pending, PendingProposal)
    for server in (0, 1):
        cluster.promise(server, pending.number, 0)
    assert isinstance(cluster.create(cluster.workers[1]), Created)


def test_a_bound_that_moves_stays_between_its_bounds_whatever_is_wished() -> None:
    cluster = Changing()
    pending = cluster.wanted("ssp:2..8@7")
    assert isinstance(pending, PendingProposal)
    cluster.settle(pending.number, 3)
    assert cluster.setting == parsed("ssp:2..8"), "it begins at its lowest"
    cluster.move("ssp:2..8@5")
    assert cluster.proposed() == TableChange(2, 3, parsed("ssp:2..8@5"))
    same = cluster.wanted("ssp:2..8")
    assert same == TableChange(1, 3, parsed("ssp:2..8")), (
        "it is so, and a move changes nothing of that"
    )
    assert isinstance(cluster.wanted("ssp:2..9"), PendingProposal)
    cluster.settle(2, 9)
    assert cluster.setting == parsed("ssp:2..8@5")
    view = cluster.cluster.view
    assert cluster.wanted("ssp:2..8") == TableChange(2, 9, parsed("ssp:2..8@5"))
    assert cluster.wanted("ssp:2..8@3") == TableChange(2, 9, parsed("ssp:2..8@5"))
    assert cluster.cluster.view is view
    other = cluster.wanted("ssp:2..9")
    assert isinstance(other, PendingProposal)
    cluster.settle(other.number, 9)
    assert cluster.setting == parsed("ssp:2..9")


def test_a_move_gives_way() -> None:
    cluster = Changing()
    cluster.move("ssp:2..8@5")
    assert cluster.proposed() is None, "the table's bound does not move"
    pending = cluster.wanted("ssp:2..8")
    assert isinstance(pending, PendingProposal)
    cluster.move("ssp:2..8@5")
    assert cluster.proposed() == TableChange(1, 0, parsed("ssp:2..8")), "not settled yet"
    cluster.settle(pending.number, 3)
    view = cluster.cluster.view
    cluster.move("ssp:2..8")
    cluster.move("ssp:2..9@5")
    assert cluster.cluster.view is view, "it is there already; it has other bounds now"
    other = cluster.wanted("asp", within_s=1.0)
    assert isinstance(other, PendingProposal)
    cluster.move("ssp:2..8@4")
    assert cluster.proposed() == TableChange(2, 0, parsed("asp")), "not settled yet"
    cluster.pass_time(1.5, *cluster.servers, *cluster.workers)
    cluster.move("ssp:2..8@4", within_s=2.0)
    cluster.pass_time(2.5, *cluster.servers, *cluster.workers)
    assert cluster.proposed() is None
    assert cluster.setting == parsed("ssp:2..8"), "withdrawn: as it was"
    reasons = [t.reason for t in cluster.transitions if isinstance(t, ChangeProposed)]
    assert reasons == ["", "", "they waited"]


def test_a_move_is_not_before_the_setting_that_it_belongs_to() -> None:
    cluster = Changing()
    pending = cluster.wanted("ssp:2..8", after_clock=20)
    assert isinstance(pending, PendingProposal)
    cluster.settle(pending.number, 20)
    cluster.move("ssp:2..8@5")
    assert cluster.proposed() == TableChange(2, 20, parsed("ssp:2..8@5"))


def test_who_creates_the_table_again_finds_it_wherever_its_bound_is() -> None:
    cluster = Changing()
    spec = replace(SPEC, name="moving", consistency=parsed("ssp:2..8"))
    created = cluster.create(cluster.workers[0], spec)
    at_five = replace(spec, consistency=parsed("ssp:2..8@5"))
    assert cluster.create(cluster.workers[1], at_five) == created
    refused(
        errors.TableExists,
        "consistency is ssp:2..8; got ssp:2..9",
        by=lambda: cluster.create(
            cluster.workers[1], replace(spec, consistency=parsed("ssp:2..9"))
        ),
        of=cluster,
    )


def test_the_bound_of_a_change_in_the_view_is_above_its_size() -> None:
    huge = 2**53 - 1
    for text in (
        "asp:compensate=0.123456789,adaptive",
        "bsp:backup=9,grace=59999ms",
        "ssp:999998..1000000@999999",
    ):
        change = TableChange(2**32 - 1, huge, parsed(text))
        assert wire.change_to_proto(change).ByteSize() + 2 <= view_size.CHANGE_BYTES


def test_a_successor_joins_each_table_and_changes_no_setting() -> None:
    cluster = Changing()
    pending = cluster.wanted(after_clock=50)
    assert isinstance(pending, PendingProposal)
    for server in (0, 1):
        cluster.promise(server, pending.number, 50)
    cluster.pass_time(40, *cluster.servers, cluster.workers[0])
    successor = cluster.join(Role.WORKER)
    assert successor.rank == 1
    (table,) = cluster.cluster.view.tables
    assert table.proposed is not None
    assert table.proposed.join == Join(1, successor.incarnation)
    cluster.promise(0, table.proposed.number, 4)
    cluster.promise(1, table.proposed.number, 6)
    (table,) = cluster.cluster.view.tables
    assert table.joins == (Join(1, successor.incarnation, 6),)
    assert table.change == TableChange(1, 50, parsed("ssp:2"))
    later = replace(SPEC, name="later")
    created = cluster.create(cluster.workers[0], later)
    assert isinstance(created, Created)
    assert created.table.joins == (Join(1, successor.incarnation, 0),)


def test_a_join_that_is_not_promised_is_proposed_again() -> None:
    cluster = Changing()
    cluster.pass_time(40, *cluster.servers, cluster.workers[0])
    cluster.join(Role.WORKER)
    (table,) = cluster.cluster.view.tables
    assert table.proposed is not None
    cluster.pass_time(5, *cluster.servers, cluster.workers[0])
    (again,) = cluster.cluster.view.tables
    assert again.proposed is not None
    assert again.proposed.number > table.proposed.number
    assert again.proposed.join == table.proposed.join


def test_a_proposal_ends_when_a_range_has_another_primary_who_promised_nothing_for_it() -> None:
    """What the others promised says nothing of the clocks that its backup may have let through."""
    cluster = Harness(server_count=2, replica_count=2)
    servers = [cluster.join(Role.SERVER) for _ in range(2)]
    worker = cluster.join(Role.WORKER)
    cluster.create(worker)
    wanted = ChangeRequest("model", parsed("ssp:2"), 0, cluster.now_s + 60.0)
    pending = cluster.cluster.set_consistency(worker, wanted, cluster.now_s).reply
    assert isinstance(pending, PendingProposal)
    cluster.cluster.prepare_change(servers[0], MODEL, pending.number, 0)
    cluster.pass_time(4.0, servers[0], worker)  # before all had promised
    withdrawn = cluster.cluster.changes.outcome("model", pending.number, cluster.now_s)
    assert isinstance(withdrawn, Withdrawn)
    assert "was lost" in withdrawn.reason


def test_who_waits_for_a_checkpoint_hears_what_that_waits_for() -> None:
    """Also where the table's own servers are prepared: all tables are cut at once."""
    cluster = Saving()
    cluster.begin()
    wanted = ChangeRequest("model", parsed("ssp:2"), 0, cluster.now_s + 90)

    def waits_for() -> str:
        asked = cluster.cluster.set_consistency(cluster.workers[0], wanted, cluster.now_s)
        reply = cluster.note(asked)
        assert isinstance(reply, PendingProposal)
        return reply.reason

    cluster.promise(0, 5, 4)
    cluster.promise(1, 5)
    assert "checkpoint 7 of table 'model' waits until server node 2 at" in waits_for()
    cluster.promise(1, 5, 4)
    assert waits_for() == "checkpoint 7 of table 'model' waits for the clocks of workers"
