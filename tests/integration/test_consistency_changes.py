"""Another consistency while a table is trained: on a real cluster, over both lanes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import ps_worker as ps
from tests.integration.lane_cluster import until

pytestmark = pytest.mark.slow

WORKERS = 3
BLOCK = 64
ELEMENTS = 40 * BLOCK
"""Blocks in ranges of both servers."""

DEADLINE_S = 30.0
_names = count()

Floats = npt.NDArray[np.float32]


class Team:
    """Three workers of one cluster, and the clock that each is at."""

    def __init__(self, workers: list[ps.Client], server_pids: list[int]) -> None:
        self.workers = workers
        self.server_pids = server_pids

    def tables(self, consistency: str, **options: Any) -> list[ps.TableHandle]:
        """A new table, as each worker sees it; its value is the sum of all that was pushed."""
        name = f"table {next(_names)}"
        sums: dict[str, Any] = {"optimizer": ps.SGD(lr=1.0, maximize=True), "reduction": "sum"}
        return [
            worker.create_table(
                name, ELEMENTS, consistency=consistency, block_elements=BLOCK, **(sums | options)
            )
            for worker in self.workers
        ]

    def steps(self, rank: int, table: ps.TableHandle, number: int, value: float = 1.0) -> None:
        """So many steps, each of which reads before the next."""
        for _ in range(number):
            self.workers[rank].push_pull(table, np.full(ELEMENTS, value, np.float32))

    def reading(self, rank: int, table: ps.TableHandle) -> Any:
        """A read by the worker at its clock, that may have to wait."""
        return self.workers[rank].pull(table, callback=lambda _: None)


@pytest.fixture(scope="module", params=["shm", pytest.param("grpc", marks=pytest.mark.second_lane)])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    with ps.local_cluster(servers=2, workers=WORKERS) as cluster:
        workers = [
            ps.connect(
                cluster.address, rank=rank, lane=request.param, request_deadline_s=DEADLINE_S
            )
            for rank in range(WORKERS)
        ]
        pids = [pid for name, pid in cluster.process_ids.items() if name.startswith("server")]
        yield Team(workers, pids)
        for worker in workers:
            worker.close(leave=False)


def _value(values: Any) -> float:
    """The one value that all elements have."""
    found = np.unique(np.asarray(values))
    assert len(found) == 1, f"the blocks differ: {found}"
    return float(found[0])


def _together(team: Team, tables: list[ps.TableHandle], value: float = 1.0) -> None:
    """One step of every worker, committed."""
    tickets = [
        worker.push(table, np.full(ELEMENTS, value, np.float32))
        for worker, table in zip(team.workers, tables, strict=True)
    ]
    for worker, ticket in zip(team.workers, tickets, strict=True):
        worker.wait(ticket)


def test_out_of_asp_all_workers_meet_at_one_clock(team: Team) -> None:
    tables = team.tables("asp")
    team.steps(0, tables[0], 5)
    team.steps(1, tables[1], 2)
    last = team.workers[1].set_consistency(tables[1], "bsp")
    assert last == 6, "worker 0 has read for its sixth step"
    until(lambda: str(team.workers[2].consistency_of(tables[2])) == "bsp", "all hear of it")
    team.workers[0].push(tables[0], np.ones(ELEMENTS, np.float32))
    read = team.reading(0, tables[0])  # for clock 7, which is BSP: with everything up to 6 in it
    with pytest.raises(ps.WaitExpired, match=r"clock 6 of worker 1 \(clock 2.*worker 2") as told:
        team.workers[0].pull(tables[0], timeout_s=1.0)
    assert "bsp allows no more" in str(told.value)
    team.steps(1, tables[1], 2)  # below clock 6 they run as before
    assert not read.done()
    with ThreadPoolExecutor(2) as pool:  # their sixth step reads at clock 6 too
        list(pool.map(lambda rank: team.steps(rank, tables[rank], 6 - tables[rank].clock), (1, 2)))
    assert _value(team.workers[0].wait(read)) == 3 * 6
    _together(team, tables, 2.0)
    for worker, table in zip(team.workers, tables, strict=True):
        assert _value(worker.pull(table)) == 3 * 6 + 3 * 2


@pytest.mark.thorough
def test_a_worker_that_waits_is_freed(team: Team) -> None:
    """SSP holds it; from its clock on, ASP does not."""
    tables = team.tables("ssp:2")
    team.steps(0, tables[0], 2)
    team.workers[0].push(tables[0], np.ones(ELEMENTS, np.float32))
    read = team.reading(0, tables[0])
    with pytest.raises(ps.WaitExpired, match="ssp:2 allows no more"):
        team.workers[0].pull(tables[0], timeout_s=0.5)
    assert team.workers[0].set_consistency(tables[0], "asp") == 3
    assert _value(team.workers[0].wait(read)) == 3
    team.steps(0, tables[0], 4)
    team.steps(1, tables[1], 1)
    assert _value(team.workers[2].pull(tables[2])) == 8


@pytest.mark.thorough
def test_out_of_bsp_nobody_waits_any_more(team: Team) -> None:
    tables = team.tables("bsp")
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda rank: team.steps(rank, tables[rank], 2), range(WORKERS)))
    assert team.workers[0].set_consistency(tables[0], "asp:divide") == 3
    _together(team, tables)
    team.steps(0, tables[0], 3)
    assert _value(team.workers[0].pull(tables[0])) == 3 * WORKERS + 3
    assert team.workers[1].set_consistency(tables[1].name, "ssp:3") == 7
    team.workers[0].wait(team.workers[0].push(tables[0], np.ones(ELEMENTS, np.float32)))
    with pytest.raises(ps.WaitExpired, match=r"clock 4 of worker 1 .*ssp:3 allows no more"):
        team.workers[0].pull(tables[0], timeout_s=0.5)


@pytest.mark.thorough
def test_a_step_that_was_waiting_belongs_to_the_setting_of_before(team: Team) -> None:
    """One of three has sealed clock 1 under BSP: it is formed so, then one backup worker counts."""
    tables = team.tables("bsp")
    team.workers[0].push(tables[0], np.ones(ELEMENTS, np.float32))
    read = team.reading(0, tables[0])
    assert team.workers[0].set_consistency(tables[0], "bsp:backup=1", after_clock=1) == 1
    with pytest.raises(ps.WaitExpired, match="update 1 of table"):
        team.workers[0].pull(tables[0], timeout_s=0.5)
    for rank in (1, 2):
        team.workers[rank].push(tables[rank], np.ones(ELEMENTS, np.float32))
    assert _value(team.workers[0].wait(read)) == 3
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: team.steps(rank, tables[rank], 2), (0, 1)))
    late = team.workers[2].push(tables[2], np.ones(ELEMENTS, np.float32))
    assert team.workers[2].wait(late).discarded
    assert _value(team.workers[2].pull(tables[2])) == 3 + 2 * 2
    team.workers[2].catch_up(tables[2])
    assert tables[2].clock == 3, "it has gone where the others are"
    # Out of backup workers again: the one that was left behind is waited for.
    assert team.workers[2].set_consistency(tables[2], "ssp:0") == 4
    for rank in (0, 1):
        team.workers[rank].push(tables[rank], np.ones(ELEMENTS, np.float32))
    assert _value(team.workers[0].pull(tables[0])) == 7 + 2
    late = team.workers[2].push(tables[2], np.ones(ELEMENTS, np.float32))
    assert team.workers[2].wait(late).discarded
    assert _value(team.workers[2].pull(tables[2])) == 7 + 2
    _together(team, tables)
    for worker, table in zip(team.workers, tables, strict=True):
        assert _value(worker.pull(table)) == 9 + 3


@pytest.mark.thorough
def test_who_was_left_behind_on_one_table_does_not_wait_crosswise(team: Team) -> None:
    """Two tables, stepped one after the other: without backup workers everybody waits for all, and
    the one that was late on both has read one of them since.
    """
    pairs = list(zip(team.tables("bsp:backup=1"), team.tables("bsp:backup=1"), strict=True))

    def train(rank: int, clock: int) -> None:
        while pairs[rank][1].clock < clock:
            for table in pairs[rank]:
                team.steps(rank, table, 1)

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda rank: train(rank, 3), (0, 1)))
        team.workers[2].pull(pairs[2][0])
        for table in pairs[0]:
            team.workers[0].set_consistency(table, "bsp")
        list(pool.map(lambda rank: train(rank, 6), range(WORKERS)))
    for table in pairs[0]:  # update 4 was read for, so it is still one of backup workers
        assert _value(team.workers[0].pull(table)) in (3 * 2 + 2 + 2 * 3, 3 * 2 + 3 * 3)


def test_all_may_ask_and_say_from_when(team: Team) -> None:
    tables = team.tables("bsp")
    with ThreadPoolExecutor(WORKERS) as pool:
        clocks = pool.map(
            lambda rank: team.workers[rank].set_consistency(tables[rank], "asp", after_clock=4),
            range(WORKERS),
        )
        assert set(clocks) == {4}
        list(pool.map(lambda rank: team.steps(rank, tables[rank], 4), range(WORKERS)))
    team.steps(0, tables[0], 2)
    assert _value(team.workers[1].pull(tables[1])) == 4 * WORKERS + 2


@pytest.mark.thorough
def test_changes_without_end_lose_nothing(team: Team) -> None:
    """Three workers train as fast as they can while the setting goes round and round."""
    tables = team.tables("bsp")
    settings = ("ssp:1", "asp", "bsp", "asp:damp=0.0000001", "ssp:0", "asp:compensate=0.001", "bsp")
    steps = 60

    def change(_: int) -> None:
        for setting in settings * 2:
            team.workers[0].set_consistency(tables[0], setting)

    with ThreadPoolExecutor(WORKERS + 1) as pool:
        changing = pool.submit(change, 0)
        list(pool.map(lambda rank: team.steps(rank, tables[rank], steps, 0.0), range(WORKERS)))
        changing.result()
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda rank: team.steps(rank, tables[rank], 1), range(WORKERS)))
    assert [_value(w.pull(t)) for w, t in zip(team.workers, tables, strict=True)] == [3.0] * WORKERS


@pytest.mark.thorough
def test_a_server_that_does_not_promise_is_named_and_nothing_changes(team: Team) -> None:
    tables = team.tables("asp")
    team.steps(0, tables[0], 1)
    os.kill(team.server_pids[1], signal.SIGSTOP)
    try:
        with pytest.raises(ps.WaitExpired, match=r"waits until server node .* is prepared"):
            team.workers[0].set_consistency(tables[0], "bsp", timeout_s=2.0)
        for _ in range(20):  # a wait may end a moment before its deadline, or after it
            with pytest.raises(ps.WaitExpired, match=r"is prepared$"):
                team.workers[0].set_consistency(tables[0], "bsp", timeout_s=0.1)
    finally:
        os.kill(team.server_pids[1], signal.SIGCONT)
    assert str(team.workers[0].consistency_of(tables[0])) == "asp"
    team.steps(0, tables[0], 2)
    assert team.workers[0].set_consistency(tables[0], "ssp:9") == 4
    team.steps(1, tables[1], 1)
    assert _value(team.workers[2].pull(tables[2])) == 4


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("ssp:-1", "staleness is -1; expected 0 to"),
        ("bsp:backup=3", "3 backup workers of 3 workers; expected fewer"),
        ("bsp,asp", "expected one of bsp"),
    ],
)
def test_what_cannot_be_is_refused(team: Team, setting: str, words: str) -> None:
    tables = team.tables("bsp")
    with pytest.raises(ps.InvalidConfig, match=words):
        team.workers[0].set_consistency(tables[0], setting)
    assert str(team.workers[0].consistency_of(tables[0])) == "bsp"


def test_what_the_table_cannot_do_is_refused(team: Team) -> None:
    sums = team.tables("bsp", optimizer=ps.Aggregate())
    with pytest.raises(ps.InvalidConfig, match="AGGREGATE needs BSP"):
        team.workers[0].set_consistency(sums[0], "ssp:1")
    values = team.tables("bsp", optimizer=ps.Assign())
    with pytest.raises(ps.InvalidConfig, match="ASSIGN takes values"):
        team.workers[0].set_consistency(values[0], "asp:reject=1")
    with pytest.raises(ps.TableNotFound, match="there is no table 'nobody'"):
        team.workers[0].set_consistency("nobody", "asp")
    with pytest.raises(ps.InvalidConfig, match="after_clock"):
        team.workers[0].set_consistency(sums[0], "bsp", after_clock=2**60)
    with pytest.raises(ps.InvalidConfig, match=r"after_clock is 2\.5; expected a whole number"):
        team.workers[0].set_consistency(sums[0], "bsp", after_clock=2.5)  # type: ignore[arg-type]
