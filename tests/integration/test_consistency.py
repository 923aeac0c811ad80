"""Every consistency setting on a real cluster, over both lanes: who waits, what is turned away."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import numpy as np
import pytest

import ps_worker as ps

pytestmark = pytest.mark.slow

WORKERS = 3
ELEMENTS = 3 * 64 * 1024
"""Three blocks of 256 KiB, which may lie in shared memory."""

_names = count()


class Team:
    """Three workers of one cluster."""

    def __init__(self, workers: list[ps.Client]) -> None:
        self.workers = workers

    def tables(self, consistency: str, **options: Any) -> list[ps.TableHandle]:
        """A new table, as each worker sees it."""
        name = f"table {next(_names)}"
        optimizer = options.pop("optimizer", ps.SGD(lr=1.0))
        return [
            worker.create_table(
                name,
                ELEMENTS,
                optimizer=optimizer,
                consistency=consistency,
                block_elements=64 * 1024,
                **options,
            )
            for worker in self.workers
        ]


@pytest.fixture(scope="module", params=["shm", "grpc"])
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    lane = str(request.param)
    with ps.local_cluster(servers=2, workers=WORKERS) as cluster:
        workers = [
            ps.connect(cluster.address, rank=rank, lane=lane, request_deadline_s=30.0)
            for rank in range(WORKERS)
        ]
        yield Team(workers)
        for worker in workers:
            worker.close(leave=False)


def _ones(value: float = 1.0) -> Any:
    return np.full(ELEMENTS, value, np.float32)


def test_ssp_waits_for_who_is_too_far_behind_and_says_so(team: Team) -> None:
    one, two, three = team.workers
    tables = team.tables("ssp:1")
    three.wait(three.push(tables[2], _ones()))
    for clock in (1, 2):
        one.wait(one.push(tables[0], _ones()))
        assert tables[0].clock == clock
    with pytest.raises(ps.WaitExpired) as late:
        one.pull(tables[0], timeout_s=0.3)
    assert "waits for clock 1 of worker 1 " in late.value.message
    assert "ssp:1 allows no more" in late.value.message
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(one.pull, tables[0])
        two.wait(two.push(tables[1], _ones()))
        pulled = waiting.result(30)
    np.testing.assert_array_equal(pulled, _ones(-4.0))  # each step is applied whole


def test_ssp_pulls_miss_nothing_within_the_bound(team: Team) -> None:
    """G3, with real gradients: worker k's steps are powers of a base that tells them apart."""
    tables = team.tables("ssp:2", dtype="float64")
    steps = 12

    def train(rank: int) -> None:
        worker, table = team.workers[rank], tables[rank]
        for clock in range(1, steps + 1):
            gradient = np.full(ELEMENTS, -(64.0**rank))
            worker.wait(worker.push(table, gradient))
            seen = worker.pull(table)
            for value in set(seen[:: 64 * 1024].tolist()):
                counts = [int(value // 64**other) % 64 for other in range(WORKERS)]
                assert counts[rank] == clock
                assert min(counts) >= clock - 2, counts

    with ThreadPoolExecutor(WORKERS) as threads:
        list(threads.map(train, range(WORKERS)))


def test_what_is_too_stale_is_turned_away_and_named(team: Team) -> None:
    one, two, _ = team.workers
    tables = team.tables("asp:reject=1")
    one.pull(tables[0])
    for _ in range(2):
        two.wait(two.push(tables[1], _ones()))
    result = one.wait(one.push(tables[0], _ones(100.0)))
    assert result.rejected == (0, 1, 2)
    assert result.staleness == 2
    np.testing.assert_array_equal(one.pull(tables[0]), _ones(-2.0))
    again = one.wait(one.push(tables[0], _ones(100.0)))
    assert again.rejected == ()
    np.testing.assert_array_equal(one.pull(tables[0]), _ones(-102.0))


def test_what_was_too_stale_leaves_what_a_codec_had_left_before(team: Team) -> None:
    """Its gradient is computed anew, and must not come twice (RES-1)."""
    one, two, _ = team.workers
    tables = team.tables("asp:reject=1", push_codec="topk:0.25")
    residuals = tables[0].steps.residuals
    assert residuals is not None
    one.wait(one.push(tables[0], _ones()))
    left = residuals.state_dict()["residuals"].numpy()
    assert np.count_nonzero(left) == ELEMENTS * 3 // 4
    one.pull(tables[0])
    for _ in range(2):
        two.wait(two.push(tables[1], _ones()))
    assert one.wait(one.push(tables[0], _ones(100.0))).rejected == (0, 1, 2)
    np.testing.assert_array_equal(residuals.state_dict()["residuals"].numpy(), left)


@pytest.mark.parametrize(("policy", "scale"), [("damp=0.5", 0.4), ("divide", 1 / 3)])
def test_what_is_stale_is_scaled(team: Team, policy: str, scale: float) -> None:
    one, two, _ = team.workers
    tables = team.tables(f"asp:{policy}")
    one.pull(tables[0])
    for _ in range(3):
        two.wait(two.push(tables[1], _ones(0.0)))
    assert one.wait(one.push(tables[0], _ones())).staleness == 3
    np.testing.assert_allclose(one.pull(tables[0]), _ones(-scale), rtol=1e-6)


@pytest.mark.parametrize("policy", ["compensate=0.5", "compensate=0.5,adaptive"])
def test_what_is_stale_is_compensated_for_what_changed_since(team: Team, policy: str) -> None:
    one, two, _ = team.workers
    tables = team.tables(f"asp:{policy}")
    one.pull(tables[0])
    two.wait(two.push(tables[1], _ones(3.0)))  # never pulled: taken as it is
    np.testing.assert_array_equal(two.pull(tables[1]), _ones(-3.0))
    one.wait(one.push(tables[0], _ones(2.0)))
    strength = 0.5 / (0.05 * 2.0**2 + 1e-7) ** 0.5 if "adaptive" in policy else 0.5
    gradient = 2.0 + strength * 2.0**2 * (-3.0 - 0.0)
    np.testing.assert_allclose(one.pull(tables[0]), _ones(-3.0 - gradient), rtol=1e-5)
    one.wait(one.push(tables[0], _ones(1.0)))  # nothing came between
    np.testing.assert_allclose(one.pull(tables[0]), _ones(-3.0 - gradient - 1.0), rtol=1e-5)


def test_backup_workers_go_on_without_the_slowest(team: Team) -> None:
    one, two, three = team.workers
    tables = team.tables("bsp:backup=1")
    for clock in (1, 2, 3):
        tickets = [one.push(tables[0], _ones(1.0)), two.push(tables[1], _ones(3.0))]
        for worker, ticket in zip((one, two), tickets, strict=True):
            assert not worker.wait(ticket).discarded
        np.testing.assert_array_equal(one.pull(tables[0]), _ones(-2.0 * clock))
    for clock in (1, 2, 3):  # its client has other tables, so that it leaves out none (S7)
        assert three.wait(three.push(tables[2], _ones(1000.0))).discarded
        assert tables[2].clock == clock
    np.testing.assert_array_equal(three.pull(tables[2]), _ones(-6.0))
    tickets = [three.push(tables[2], _ones(5.0)), one.push(tables[0], _ones(1.0))]
    assert not three.wait(tickets[0]).discarded
    np.testing.assert_array_equal(three.pull(tables[2]), _ones(-9.0))


def test_the_next_step_brings_what_was_discarded_of_one_in_int8(team: Team) -> None:
    """Its gradient comes back to what its codec has left (RES-1)."""
    one, two, three = team.workers
    tables = team.tables("bsp:backup=1", reduction="sum", push_codec="int8")
    tickets = [one.push(tables[0], _ones(1.0)), two.push(tables[1], _ones(3.0))]
    for worker, ticket in zip((one, two), tickets, strict=True):
        worker.wait(ticket)
    late = three.wait(three.push(tables[2], _ones(100.0)))
    assert late.discarded
    assert late.discarded_blocks == tuple(range(tables[2].table.block_count))
    np.testing.assert_allclose(one.pull(tables[0]), _ones(-4.0), rtol=1e-5)
    tickets = [three.push(tables[2], _ones(5.0)), one.push(tables[0], _ones(1.0))]
    assert not three.wait(tickets[0]).discarded
    np.testing.assert_allclose(three.pull(tables[2]), _ones(-110.0), rtol=1e-5)


def test_the_grace_time_lets_the_slowest_in(team: Team) -> None:
    tables = team.tables("bsp:backup=1,grace=30000ms")
    tickets = [
        worker.push(table, _ones(value))
        for worker, table, value in zip(team.workers, tables, (1.0, 2.0, 6.0), strict=True)
    ]
    results = [w.wait(t) for w, t in zip(team.workers, tickets, strict=True)]
    assert not any(result.discarded for result in results)
    np.testing.assert_array_equal(team.workers[0].pull(tables[0]), _ones(-3.0))


def test_the_grace_time_ends_by_itself(team: Team) -> None:
    one, two, _ = team.workers
    tables = team.tables("bsp:backup=1,grace=20ms")
    tickets = [one.push(tables[0], _ones()), two.push(tables[1], _ones())]
    one.wait(tickets[0])
    np.testing.assert_array_equal(one.pull(tables[0]), _ones(-1.0))


@pytest.mark.parametrize("consistency", ["bsp", "ssp:1", "asp"])
def test_deltas_are_added(team: Team, consistency: str) -> None:
    tables = team.tables(consistency, optimizer=ps.Add(), reduction="sum", init=ps.Constant(10.0))
    tickets = [
        worker.push(table, _ones(value))
        for worker, table, value in zip(team.workers, tables, (1.0, 2.0, -6.0), strict=True)
    ]
    for worker, ticket in zip(team.workers, tickets, strict=True):
        worker.wait(ticket)
    np.testing.assert_array_equal(team.workers[0].pull(tables[0]), _ones(7.0))


def test_too_many_backup_workers_are_refused(team: Team) -> None:
    with pytest.raises(ps.InvalidConfig, match="3 backup workers of 3 workers; expected fewer"):
        team.tables("bsp:backup=3")


def test_another_consistency_is_another_table(team: Team) -> None:
    (table, *_) = team.tables("ssp:1")
    with pytest.raises(ps.TableExists, match="its consistency is ssp:1; got ssp:2"):
        team.workers[1].create_table(
            table.name,
            ELEMENTS,
            optimizer=ps.SGD(lr=1.0),
            consistency=ps.SSP(2),
            block_elements=64 * 1024,
        )
