"""The cluster as a value: who counts, who is waited for, what a node is told, and whose token is
genuine.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core.change import Join
from ps_core.cluster_view import ClusterView, Node, NodeState, RangeAssignment, Role, Session
from ps_core.keys import AssignmentEpoch, Incarnation, KeyRange, NodeId, RangeId, Slot, TableId
from ps_core.tables import DType, OptimizerKind, OptimizerSpec, Table, TableSpec

KEY = bytes(range(32))
ALIVE, SILENT, LEFT, GONE = NodeState


def node(number: int, role: Role, rank: int = 0, state: NodeState = ALIVE) -> Node:
    return Node(NodeId(number), Incarnation(10 + number), role, rank, f"host:{number}", state)


def view_of(*nodes: Node, worker_count: int = 2) -> ClusterView:
    return ClusterView(1, "demo", worker_count, 1, nodes, (), ())


def session(**fields: object) -> Session:
    known = Session("demo", bytes(range(16)), NodeId(2), Incarnation(2), Role.WORKER)
    return replace(known, **fields)  # type: ignore[arg-type]  # what a test changes


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
    primary: int | None, *backups: int, joining: tuple[int, ...] = ()
) -> RangeAssignment:
    return RangeAssignment(
        RangeId(0), KeyRange(Slot(0), Slot(256)), AssignmentEpoch(1),
        None if primary is None else NodeId(primary),
        tuple(map(NodeId, backups)), tuple(map(NodeId, joining)),
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
    served = assignment(1, 2, joining=(3,))
    assert served.in_sync == (1, 2)
    assert served.holders == (1, 2, 3)


def test_nobody_is_in_sync_with_a_range_that_nobody_serves() -> None:
    """What a backup holds of it may be behind: only a primary knows what is committed."""
    lost = assignment(None, 2, joining=(3,))
    assert lost.in_sync == ()
    assert lost.holders == (3,)


def test_nodes_and_tables_are_found_by_what_they_are_called() -> None:
    spec = TableSpec("w", DType.FLOAT32, 8, OptimizerSpec(OptimizerKind.SGD)).validated()
    tables = Table(TableId(1), 0, spec), Table(TableId(2), 1, replace(spec, name="b"))
    server = node(1, Role.SERVER)
    view = replace(view_of(server), tables=tables)
    assert view.nodes_by_id == {1: server}
    assert view.tables_by_id == {1: tables[0], 2: tables[1]}
    assert view.tables_by_name == {"w": tables[0], "b": tables[1]}


# --- what is meant where nothing is said


def test_who_is_not_said_otherwise_is_the_first_and_was_never_silent() -> None:
    known = Session("demo", b"", NodeId(1), Incarnation(1), Role.WORKER)
    assert (known.rank, known.token) == (0, b"")
    assert node(1, Role.WORKER).silence_ms == 0
    assert view_of().finished is False


def test_who_joins_before_anything_was_trained_begins_at_the_first_clock() -> None:
    assert Join(2, Incarnation(7)).after_clock == 0
