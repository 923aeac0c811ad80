"""Runs of one cluster against a cluster for each: the same events lead to the same (RU-2)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ps_core.change import Join
from ps_core.cluster_view import NodeState, Role, Session
from ps_core.consistency import parsed
from ps_core.errors import InvalidConfig, PushpullError
from scheduler.journal import records
from scheduler.machine.changes import ChangeRequest
from tests.examples import examples
from tests.unit.cluster_harness import SPEC, Harness

RUNS = ("", "a", "b")
SIZES = {"": 2, "a": 1, "b": 3}


class WithServers(Harness):
    """A cluster with its two servers."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.servers = [self.join(Role.SERVER) for _ in range(2)]


@dataclass
class Place:
    """A cluster in which a run takes place; `name` is what the run is called there."""

    cluster: WithServers
    name: str
    world_size: int
    workers: list[Session] = field(default_factory=list)

    def act(self, what: str, number: int) -> str:
        """Do it; what came of it, in words that do not depend on other runs."""
        cluster = self.cluster
        worker = self.workers[number % len(self.workers)] if self.workers else None
        try:
            if what == "join":
                rank = number if number < 4 else None
                fields = {"run": self.name, "requested_rank": rank, "world_size": self.world_size}
                self.workers.append(cluster.join(Role.WORKER, **fields))
                return f"rank {self.workers[-1].rank}"
            if worker is None:
                return ""
            if what == "leave":
                cluster.leave(worker)
            elif what == "end in the middle":
                ended = cluster.cluster.deregister(worker, "", cluster.now_s, unfinished=True)
                cluster.transitions += ended.transitions
            elif what == "table":
                cluster.create(worker, replace(SPEC, name=f"t{number % 3}"))
            elif what == "set":
                wanted = ChangeRequest(f"t{number % 3}", parsed("asp"), 0, cluster.now_s + 5)
                cluster.cluster.set_consistency(worker, wanted, cluster.now_s)
            elif what == "promise":
                self._promise()
        except PushpullError as error:
            return type(error).__name__
        return "done"

    @property
    def is_over(self) -> bool:
        """Whether it has a name, and all its workers have come and left."""
        newest = self.cluster.cluster.journaled(0.0).state.workers_by_rank(self.name)
        states = {node.state for node in newest.values()}
        have_come = newest.keys() >= set(range(self.world_size))
        return bool(self.name) and have_come and states == {NodeState.LEFT}

    def _promise(self) -> None:
        """Its tables' servers promise whatever is proposed."""
        cluster = self.cluster.cluster
        for table in cluster.view.of_run(self.name).tables:
            for server in self.cluster.servers:
                change = table.proposed
                if change is not None:
                    cluster.prepare_change(server, table.table_id, change.number, 7)

    def seen(self) -> Any:
        """What the run sees of itself, with its own numbers for its workers."""
        view = self.cluster.cluster.view.of_run(self.name)
        nodes = [node for node in view.nodes if node.role is Role.WORKER]
        index = {node.incarnation: number for number, node in enumerate(nodes)}

        def joined(join: Join | None) -> tuple[int, int] | None:
            return None if join is None else (join.rank, index[join.incarnation])

        return (
            [(node.rank, node.state) for node in nodes],
            (view.worker_count, view.world_size, view.awaited_ranks),
            [
                (
                    table.spec,
                    table.change,
                    table.proposed
                    and (replace(table.proposed, join=None), joined(table.proposed.join)),
                    [joined(join) for join in table.joins],
                )
                for table in view.tables
            ],
        )


def cluster_of(size: int, further: int) -> WithServers:
    return WithServers(worker_count=size, max_workers=3 + further)


events = st.tuples(
    st.sampled_from(
        [
            "join",
            "join",
            "join",
            "leave",
            "leave",
            "end in the middle",
            "table",
            "table",
            "set",
            "promise",
            "remove",
        ]
    ),
    st.sampled_from(RUNS),
    st.integers(0, 5),
)
pauses = st.tuples(st.just("pause"), st.sets(st.integers(0, 5)), st.sampled_from([1, 6, 31]))


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(events | pauses, max_size=40), st.integers(0, 1))
def test_a_run_is_as_if_it_were_alone(what: list[Any], further: int) -> None:
    shared = cluster_of(SIZES[""], further)
    together = {run: Place(shared, run, SIZES[run]) for run in RUNS}
    alone = {run: Place(cluster_of(SIZES[run], further), "", SIZES[run]) for run in RUNS}
    removed: set[str] = set()
    for event, run, number in what:
        if event == "remove":
            _remove(together[run], removed)
        elif event == "pause":
            _pause(shared, [*together.values()], run, number)
            for place in alone.values():
                _pause(place.cluster, [place], run, number)
        elif event == "join" and together[run].is_over:
            assert together[run].act(event, number) == "InvalidConfig"
        else:
            assert together[run].act(event, number) == alone[run].act(event, number)
        for each in RUNS:
            if each in removed:
                assert shared.cluster.view.of_run(each).tables == ()
            elif together[each].workers:  # it has begun
                assert together[each].seen() == alone[each].seen()


def _remove(place: Place, removed: set[str]) -> None:
    """An operator wants the run to be no more. What is left of a cluster is what its journal gives
    one that never had the run's tables.
    """
    cluster, is_over = place.cluster, place.is_over
    operator = cluster.join(Role.OPERATOR)
    try:
        cluster.transitions += cluster.cluster.remove_run(operator, place.name).transitions
    except InvalidConfig:
        assert not is_over
        return
    assert is_over
    removed.add(place.name)
    kept = cluster.cluster.journaled(cluster.now_s)
    twin = records.read(records.Differences().since(kept).encoded())
    assert twin is not None
    for name in (
        "view_bytes", "counted_joins", "change_counts", "tables", "next_table_id", "joins_due",
        "range_bytes", "range_memory_bytes",
    ):  # fmt: skip
        assert getattr(kept.state, name) == getattr(twin.state, name), name


def _pause(cluster: WithServers, places: list[Place], quiet: set[int], seconds: int) -> None:
    """Time goes by; workers of these numbers in their runs are silent."""
    view = cluster.cluster.view
    heard = [
        worker
        for place in places
        for number, worker in enumerate(place.workers)
        if number not in quiet and view.nodes_by_id[worker.node_id].state.is_member
    ]
    cluster.pass_time(seconds, *cluster.servers, *heard)
