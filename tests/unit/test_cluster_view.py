"""The cluster as a value: who counts, who is waited for, what a node is told, and whose token is
genuine.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core.change import ChangeOutcome, ChangeResult, Checkpoint, Join, TableChange
from ps_core.cluster_view import (
    BackupRequest,
    ClusterView,
    Node,
    NodeState,
    RangeAssignment,
    Role,
    Session,
)
from ps_core.consistency import Consistency
from ps_core.errors import TableNotFound
from ps_core.keys import AssignmentEpoch, Incarnation, KeyRange, NodeId, RangeId, Slot, TableId
from ps_core.runs import Run
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec

KEY = bytes(range(32))
ALIVE, SILENT, LEFT, GONE = NodeState


def node(number: int, role: Role, rank: int = 0, state: NodeState = ALIVE) -> Node:
    return Node(NodeId(number), Incarnation(10 + number), role, rank, f"host:{number}", state)


def view_of(*nodes: Node, worker_count: int = 2) -> ClusterView:
    return ClusterView(1, "demo", worker_count, 1, nodes, (), ())


def session(**fields: object) -> Session:
    known = Session("demo", bytes(range(16)), NodeId(2), Incarnation(2), Role.WORKER)
    return replace(known, **fields)  # type: ignore[arg-type]  # what a test changes


def test_a_table_is_to_come_removed_or_there() -> None:
    table = Table(TableId(2), 0, TableSpec("t", DType.FLOAT32, 4, OptimizerSpec(OptimizerKind.SGD)))
    view = replace(view_of(), tables=(table,))
    assert [view.is_to_come(TableId(n)) for n in (1, 2, 3)] == [True, False, True]
    removed = replace(view, next_table_id=3)
    assert [removed.is_to_come(TableId(n)) for n in (1, 2, 3)] == [False, False, True]
    assert [removed.is_removed(TableId(n)) for n in (1, 2, 3)] == [True, False, False]


# --- tokens


def test_a_token_is_genuine_for_the_key_that_signed_it_and_no_other() -> None:
    signed = session(token=session().signed(KEY))
    assert signed.is_genuine(KEY)
    assert not signed.is_genuine(KEY[::-1])
    assert not session().is_genuine(KEY)


@pytest.mark.parametrize(
    "other",
    [
        {"cluster_id": "demo2"}, {"timeline": bytes(16)}, {"node_id": NodeId(3)},
        {"incarnation": Incarnation(3)}, {"role": Role.READER}, {"rank": 1},
    ],
)  # fmt: skip
def test_a_token_is_worth_nothing_for_another_identity(other: dict[str, object]) -> None:
    """Each field is under the signature: nobody becomes another by changing one."""
    assert not session(**other, token=session().signed(KEY)).is_genuine(KEY)


# --- nodes


@pytest.mark.parametrize(("state", "counts"), [(ALIVE, True), (SILENT, True)])
def test_who_is_silent_is_a_member_still(state: NodeState, counts: bool) -> None:
    assert state.is_member is counts


@pytest.mark.parametrize("state", [LEFT, GONE])
def test_who_left_or_is_gone_is_no_member(state: NodeState) -> None:
    assert state.is_member is False


def test_a_worker_that_is_gone_is_told_so_when_it_comes_back() -> None:
    gone = replace(node(4, Role.WORKER, 1, GONE), silence_ms=12_340)
    words = "worker 1 was declared gone after 12.3 s of silence"
    assert gone.gone_words == gone.ended_words == words
    assert gone.fence_words.startswith(f"{words} (node 4, incarnation 14): the others go on")


def test_the_silence_is_given_to_a_tenth_of_a_second() -> None:
    assert " after 30 s of " in replace(node(4, Role.WORKER, 1, GONE), silence_ms=30_004).gone_words
    given_up = replace(node(4, Role.SERVER, 0, LEFT), silence_ms=2_960)
    assert "node 4 (server) has left the cluster: it was given up after 3 s" in given_up.fence_words
    given_up = replace(given_up, silence_ms=2_940)
    assert "after 2.9 s of silence" in given_up.fence_words
    for state in (LEFT, GONE):
        long = replace(node(4, Role.WORKER, 1, state), silence_ms=99_000_000)
        assert "after 99000 s of silence" in long.fence_words


def test_who_left_by_itself_was_not_given_up() -> None:
    left = node(4, Role.WORKER, 1, LEFT)
    assert left.ended_words == "worker 1 has left the cluster"
    assert left.fence_words == "node 4 has left the cluster; register again to come back"


def test_a_worker_of_a_run_that_was_ended_is_not_told_to_come_back() -> None:
    """A server refuses it before the scheduler, which knows that the run is over."""
    left = replace(node(4, Role.WORKER, 1, LEFT), run="night")
    assert "since run 'night' was ended by an operator" in left.fence_words
    assert "come back" not in left.fence_words
    given_up = replace(left, silence_ms=2_940)
    assert "it was given up after 2.9 s of silence" in given_up.fence_words


def test_a_worker_that_is_gone_is_gone_however_short_its_silence() -> None:
    """The state says what happened; a silence of 0 is not a leave."""
    assert "was declared gone" in node(4, Role.WORKER, 1, GONE).fence_words


# --- workers of a view


def test_workers_that_have_not_come_are_awaited_and_those_that_ended_are_not() -> None:
    view = view_of(
        node(1, Role.WORKER, 0), node(2, Role.WORKER, 1, GONE), node(3, Role.WORKER, 2, SILENT),
        worker_count=4,
    )  # fmt: skip
    assert view.awaited_ranks == (0, 2, 3)
    assert [each.rank for each in view.ended_workers] == [1]
    assert view.world_size == 4


def test_a_rank_that_was_given_anew_is_awaited_again() -> None:
    view = view_of(node(1, Role.WORKER, 0, GONE), node(2, Role.WORKER, 0), worker_count=1)
    assert view.awaited_ranks == (0,)


def test_workers_beyond_the_first_count_while_they_are_here() -> None:
    here, gone = node(5, Role.WORKER, 2), node(6, Role.WORKER, 3, GONE)
    view = view_of(here, gone, worker_count=2)
    assert view.world_size == 3
    assert view.awaited_ranks == (0, 1, 2)
    assert view_of(gone, worker_count=2).world_size == 2


def test_servers_and_readers_are_no_workers() -> None:
    view = view_of(
        node(1, Role.SERVER, 7), node(2, Role.READER, 8), node(3, Role.SERVER, 0, LEFT),
        worker_count=1,
    )  # fmt: skip
    assert (view.world_size, view.awaited_ranks, view.ended_workers) == (1, (0,), ())


# --- servers and ranges


def assignment(
    primary: int | None, *backups: int, catching_up: tuple[int, ...] = ()
) -> RangeAssignment:
    return RangeAssignment(
        RangeId(0), KeyRange(Slot(0), Slot(256)), AssignmentEpoch(1),
        None if primary is None else NodeId(primary),
        tuple(map(NodeId, backups)), tuple(map(NodeId, catching_up)),
    )  # fmt: skip


def test_living_servers_are_servers_and_alive() -> None:
    view = view_of(
        node(1, Role.SERVER), node(2, Role.SERVER, 0, SILENT), node(3, Role.WORKER),
        node(4, Role.SERVER, 0, GONE),
    )  # fmt: skip
    assert view.living_servers == {1}
    assert view.in_sync_count(assignment(1, 2, 4)) == 1
    assert view.in_sync_count(assignment(4, 2)) == 0


def test_who_joins_a_range_holds_it_and_is_not_in_sync() -> None:
    served = assignment(1, 2, catching_up=(3,))
    assert served.in_sync == (1, 2)
    assert served.holders == (1, 2, 3)


def test_nobody_is_in_sync_with_a_range_that_nobody_serves() -> None:
    """What a backup holds of it may be behind: only a primary knows what is committed."""
    lost = assignment(None, 2, catching_up=(3,))
    assert lost.in_sync == ()
    assert lost.holders == (3,)


SPEC = TableSpec("w", DType.FLOAT32, 8, OptimizerSpec(OptimizerKind.SGD)).validated()
"""Of a table of one block: its first ordinal says in which range it is."""


def table(number: int, name: str, ordinal: int = 0, run: str = "") -> Table:
    return Table(TableId(number), ordinal, replace(SPEC, name=name), run=run)


def test_nodes_and_tables_are_found_by_what_they_are_called() -> None:
    tables = table(1, "w"), table(2, "b", 1)
    server = node(1, Role.SERVER)
    view = replace(view_of(server), tables=tables)
    assert view.nodes_by_id == {1: server}
    assert view.tables_by_id == {1: tables[0], 2: tables[1]}
    assert view.tables_by_name == {"w": tables[0], "b": tables[1]}
    assert view.table(TableId(2)) is tables[1]
    with pytest.raises(TableNotFound, match="there is no table 3 any more: its run was removed"):
        view.table(TableId(3))


# --- runs


def test_a_run_sees_nothing_of_the_one_without_a_name_but_servers() -> None:
    """Its checkpoints and what it was restored from are of the run without a name."""
    server, worker = node(1, Role.SERVER), node(2, Role.WORKER)
    made = Checkpoint(1, "file:///x")
    view = replace(
        view_of(server, worker), tables=(table(1, "w"),), checkpoint=made, restored_from="file:///y"
    )
    alone = view.of_run("a")
    assert (alone.nodes, alone.tables) == ((server,), ())
    assert (alone.checkpoint, alone.restored_from) == (None, "")
    beside = replace(view, runs=(Run("a", 3),))
    assert beside.of_run("") == view
    assert beside.of_run("a") == replace(alone, worker_count=3)


# --- ranges that are lost


def lost_view(lost: dict[int, int | None], *tables: Table, range_count: int = 8) -> ClusterView:
    """Of a cluster whose ranges are lost with these servers."""
    ranges = tuple(
        replace(assignment(lost.get(n, 1)), range_id=RangeId(n), is_lost=n in lost)
        for n in range(range_count)
    )
    return replace(view_of(node(1, Role.SERVER)), ranges=ranges, tables=tables)


def test_what_is_lost_is_named_with_who_had_it_and_what_it_held() -> None:
    """A block with ordinal 0 is in range 0, one with ordinal 1 in range 4."""
    kept, hit = table(1, "kept", 1), table(2, "hit", 0)
    view = lost_view({0: 12, 1: 9, 2: 9, 3: None}, kept, hit)
    assert [r.range_id for r in view.lost_ranges] == [0, 1, 2, 3]
    assert view.lost_words == (
        "4 of 8 key ranges are lost, with values of 'hit': server 9, 12 had the only copy, and is "
        "gone for good. Restore a checkpoint (client.restore, or a new run with --resume), or "
        "start the cluster anew"
    )


def test_where_nothing_is_lost_there_are_no_words() -> None:
    view = lost_view({}, table(1, "w"))
    assert (view.lost_ranges, view.lost_words) == ((), "")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("cab", "of 'a', 'b', 'c': server"),
        ("dcab", "of 'a', 'b', 'c' and 1 more: server"),
        ("edcab", "of 'a', 'b', 'c' and 2 more: server"),
    ],
)
def test_three_tables_are_named_and_the_others_counted(names: str, words: str) -> None:
    tables = (table(number, name) for number, name in enumerate(names))
    assert words in lost_view({0: 1}, *tables).lost_words


# --- ranges that wait for servers that are silent


def waiting_view(*held: tuple[int, ...], silent: tuple[int, ...]) -> ClusterView:
    """Of ranges with these holders in sync, four of them, of which 0 and 2 have values."""
    servers = (node(n, Role.SERVER, 0, SILENT if n in silent else ALIVE) for n in (1, 2, 3))
    ranges = tuple(
        replace(assignment(*(holders or (None,))), range_id=RangeId(number))
        for number, holders in enumerate(held)
    )
    return replace(view_of(*servers), ranges=ranges, tables=(table(1, "in 0"), table(2, "in 2", 1)))


def test_ranges_that_wait_for_one_server_are_counted_and_its_address_is_said() -> None:
    view = waiting_view((1,), (1,), (1,), (2,), silent=(1,))
    assert view.awaited_words == (
        "2 of 4 key ranges wait for server 1 at host:1, not heard for a lease, which alone has "
        "their values. Where it cannot come back, restore a checkpoint (client.restore, or a "
        "new run with --resume), or start the cluster anew"
    )


def test_all_that_hold_what_nobody_else_has_are_named() -> None:
    view = waiting_view((3, 1), (2,), (2, 1), (2,), silent=(1, 3))
    assert view.awaited_words.startswith(
        "1 of 4 key ranges wait for server 1 at host:1 and server 3 at host:3, not heard for a "
        "lease, which alone have their values. Where they cannot come back, "
    )


def test_a_range_that_no_server_got_yet_is_not_counted_among_those_that_wait() -> None:
    view = waiting_view((1,), (1,), (), (1,), silent=(1,))
    assert view.awaited_words.startswith("1 of 4 key ranges wait for server 1 at")


def test_who_has_a_living_holder_no_values_or_lost_them_waits_for_nobody() -> None:
    alive = waiting_view((1, 2), (1, 2), (2, 1), (2,), silent=(1,))
    without_values = waiting_view((2,), (1,), (2,), (1,), silent=(1,))
    waiting = waiting_view((1,), (1,), (2,), (2,), silent=(1,))
    lost = replace(waiting, ranges=tuple(replace(r, is_lost=True) for r in waiting.ranges))
    assert waiting.awaited_words
    for view in (alive, without_values, lost, view_of()):
        assert view.awaited_words == ""


# --- one view after the other


def test_a_newer_view_has_the_tables_of_the_older_where_they_are_equal() -> None:
    """What was worked out of them is known of them still."""
    before = replace(view_of(), tables=(table(1, "same"), table(2, "other")))
    newer = replace(view_of(), view_number=2, tables=(table(1, "same"), table(2, "other", 5)))
    found = newer.reusing(before)
    assert found == newer
    assert found.tables[0] is before.tables[0]
    assert found.tables[1] is newer.tables[1]


# --- what is meant where nothing is said


def test_who_is_not_said_otherwise_is_the_first_and_was_never_silent() -> None:
    known = Session("demo", b"", NodeId(1), Incarnation(1), Role.WORKER)
    assert (known.rank, known.token) == (0, b"")
    assert node(1, Role.WORKER).silence_ms == 0
    assert (view_of().finished, view_of().next_table_id) == (False, 0)


def test_who_joins_before_anything_was_trained_begins_at_the_first_clock() -> None:
    assert Join(2, Incarnation(7)).after_clock == 0


def test_nothing_is_lost_missing_decided_or_of_a_named_run_unless_it_is_said() -> None:
    placed = assignment(1)
    assert (placed.is_lost, placed.term, placed.initial_holders) == (False, 0, ())
    assert BackupRequest(RangeId(0), AssignmentEpoch(1), frozenset()).is_missing is False
    assert (node(1, Role.WORKER).run, view_of().restored_from) == ("", "")
    assert TableChange(1, 0, Consistency()).is_decided is False
    assert ChangeResult(ChangeOutcome.GIVEN_UP).after_clock == 0


def test_what_became_of_a_change_is_logged_in_these_words() -> None:
    assert [outcome.value for outcome in ChangeOutcome] == ["taken", "given up"]
