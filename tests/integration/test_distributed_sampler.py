"""Every sample of an epoch is seen once, by whichever workers train it: in one run, and in one that
goes on from a checkpoint with as many workers, more or fewer (S17).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ps_worker as ps
from ps_runtime.checkpoint.store import resolve
from tests.integration.lane_cluster import lane_cluster
from tests.integration.replicated_cluster import DEADLINE_S, together

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

ResultT = TypeVar("ResultT")

SAMPLES, BATCH = 48, 2
Seen = list[tuple[int, int, list[int]]]
"""Of each batch that was trained on: its epoch, the clock of its step, and its samples."""


def data() -> Any:
    return [torch.tensor([float(number)]) for number in range(SAMPLES)]


class FetchesAhead:
    """A loader that has fetched all of an epoch before its first batch is trained on."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.batch_size = loader.batch_size

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._loader))


def train(
    client: ps.Client,
    epochs: int,
    stop_after: int = 0,
    *,
    consistency: str = "bsp",
    goes_on: bool = False,
) -> Seen:
    """Train up to the end of `epochs`; or ask for a checkpoint after a step, and end, or go on.

    Whoever asked waits for the checkpoint before it leaves, so that the cluster is there for it.
    """
    model = nn.Linear(1, 1)
    optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.0), consistency=consistency)
    sampler = ps.DistributedSampler(client, data())
    loader: Any = DataLoader(data(), batch_size=BATCH, sampler=sampler)
    seen: Seen = []
    begun = optimizer.clock
    tickets = []
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for batch in sampler.follow(FetchesAhead(loader)):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            seen.append((epoch, optimizer.clock, [int(one) for one in batch.flatten()]))
            if optimizer.clock - begun == stop_after:
                if not goes_on:
                    client.barrier()
                tickets.append(client.checkpoint("for the test"))
                if not goes_on:
                    tickets[0].wait(DEADLINE_S)
                    return seen
    for ticket in tickets:
        ticket.wait(DEADLINE_S)
    return seen


def run(workers: int, work: Callable[[ps.Client], ResultT], **cluster: Any) -> list[ResultT]:
    """What each worker's work gives; who is done leaves."""

    def one(client: ps.Client) -> ResultT:
        with client:
            return work(client)

    with ps.local_cluster(1, workers, **cluster) as running:
        clients = [
            ps.connect(running.address, rank=rank, request_deadline_s=DEADLINE_S)
            for rank in range(workers)
        ]
        return together([partial(one, client) for client in clients])


def counted(histories: Iterable[Seen], epoch: int, up_to: int = 1 << 60) -> Counter[int]:
    """How often each sample of an epoch was trained on."""
    return Counter(
        sample
        for seen in histories
        for number, clock, samples in seen
        if number == epoch and clock <= up_to
        for sample in samples
    )


ONCE = Counter(range(SAMPLES))


@pytest.mark.thorough
def test_each_epoch_has_every_sample_once_in_another_order() -> None:
    histories = run(3, partial(train, epochs=2))
    assert counted(histories, 0) == counted(histories, 1) == ONCE
    orders = [[s for n, _, batch in histories[0] if n == epoch for s in batch] for epoch in (0, 1)]
    assert orders[0] != orders[1]
    assert len(orders[0]) == len(orders[1]) == SAMPLES // 3


def test_a_last_batch_that_is_not_full_ends_the_share() -> None:
    def work(client: ps.Client) -> tuple[int, int]:
        model = nn.Linear(1, 1)
        optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.0))
        sampler = ps.DistributedSampler(client, data())
        loader: Any = DataLoader(data(), batch_size=SAMPLES - 1, sampler=sampler)
        taken = []
        for batch in sampler.follow(loader):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            taken.append(sampler.state_dict()["taken"])
        first, last = taken
        return first, last

    assert run(1, work) == [(SAMPLES - 1, SAMPLES)]


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_run_goes_on_with_what_was_left_of_its_epoch(tmp_path: Path, workers: int) -> None:
    """Two workers stop in their second epoch; then as many, more or fewer go on."""
    root = str(tmp_path / "checkpoints")
    steps = SAMPLES // BATCH // 2 + 3
    first = run(2, partial(train, epochs=3, stop_after=steps), checkpoint_url=root)
    assert counted(first, 0) == ONCE
    second = run(workers, partial(train, epochs=3), checkpoint_url=root, resume=root)
    assert min(epoch for seen in second for epoch, _, _ in seen) == 1
    assert counted(first, 1) + counted(second, 1) == ONCE
    assert counted(second, 2) == ONCE


@pytest.mark.thorough
def test_it_goes_on_twice_within_an_epoch(tmp_path: Path) -> None:
    root = str(tmp_path / "checkpoints")
    first = run(2, partial(train, epochs=1, stop_after=3), checkpoint_url=root)
    second = run(3, partial(train, epochs=1, stop_after=2), checkpoint_url=root, resume=root)
    third = run(2, partial(train, epochs=1), checkpoint_url=root, resume=root)
    assert counted([*first, *second, *third], 0) == ONCE


@pytest.mark.thorough
def test_where_workers_run_apart_each_goes_on_from_where_it_was(tmp_path: Path) -> None:
    root = str(tmp_path / "checkpoints")

    def work(client: ps.Client) -> Seen:
        return train(client, 1, 4 + client.rank, consistency="asp")

    first = run(2, work, checkpoint_url=root)
    assert [len(seen) for seen in first] == [4, 5]
    second = run(3, partial(train, epochs=1, consistency="asp"), resume=root)
    assert counted([*first, *second], 0) == ONCE


@pytest.mark.thorough
@pytest.mark.parametrize("consistency", ["bsp", "ssp:3"])
def test_a_batch_that_is_in_the_scripts_hands_does_not_count(
    tmp_path: Path, consistency: str
) -> None:
    """One worker asks; the other's save point is where its next step begins, with the next batch
    in its hands.
    """
    root = str(tmp_path / "checkpoints")

    def work(client: ps.Client) -> Seen:
        return train(client, 1, 5 if client.rank else 0, consistency=consistency, goes_on=True)

    first = run(2, work, checkpoint_url=root)
    with resolve(root).reader as reader:
        (clock,) = {table.clock for table in reader.manifest.tables}
    second = run(2, partial(train, epochs=1, consistency=consistency), resume=root)
    assert counted(first, 0, up_to=clock) + counted(second, 0) == ONCE


@pytest.mark.thorough
def test_a_sampler_of_another_data_set_is_refused(tmp_path: Path) -> None:
    root = str(tmp_path / "checkpoints")
    run(1, partial(train, epochs=1, stop_after=3), checkpoint_url=root)

    def work(client: ps.Client) -> str:
        with pytest.raises(ps.InvalidConfig) as failure:
            ps.DistributedSampler(client, SAMPLES + 1)
        ps.DistributedSampler(client, SAMPLES + 1, name=None)
        return str(failure.value)

    (words,) = run(1, work, resume=root)
    assert f"the sampler's length is {SAMPLES + 1}, and was {SAMPLES}" in words


@pytest.mark.thorough
def test_a_state_that_a_script_keeps_itself_goes_on_too() -> None:
    def work(client: ps.Client) -> list[int]:
        model = nn.Linear(1, 1)
        optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.0))
        sampler = ps.DistributedSampler(client, SAMPLES)
        loader: Any = DataLoader(data(), batch_size=BATCH, sampler=sampler)
        seen = []
        for batch in sampler.follow(loader):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            seen += [int(one) for one in batch.flatten()]
            if len(seen) == 8:
                break
        other = ps.DistributedSampler(client, SAMPLES, name=None)
        other.load_state_dict(sampler.state_dict())
        assert len(other) == SAMPLES // 2 - 8
        return [*seen, *other]

    first, second = run(2, work)
    assert Counter([*first, *second]) == ONCE


def test_a_position_that_an_earlier_epoch_drops_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Accelerate's loader counts its epochs from 0 in each process, and says so to the sampler."""

    def work(client: ps.Client) -> None:
        sampler = ps.DistributedSampler(client, SAMPLES)
        for epoch in (1, 2, 0):  # from the beginning once more
            sampler.set_epoch(epoch)
        sampler.seek(2 * SAMPLES // BATCH, BATCH)
        for epoch in (2, 3, 2):
            sampler.set_epoch(epoch)
        assert "sampler_position_dropped" not in caplog.text
        sampler.seek(2 * SAMPLES // BATCH, BATCH)
        sampler.set_epoch(0)
        assert "sampler_position_dropped" in caplog.text

    run(1, work)


def test_a_worker_that_joins_has_the_place_of_its_rank_and_one_beyond_them_another_order() -> None:
    environment = {"PUSHPULL_MAX_WORKERS": "3"}
    with lane_cluster(1, 2, environment) as cluster, ExitStack() as stack:
        first, second, third = (
            stack.enter_context(ps.connect(cluster.address, request_deadline_s=DEADLINE_S))
            for _ in range(3)
        )
        samplers = [
            ps.DistributedSampler(client, SAMPLES, name=None) for client in (first, second, third)
        ]
        assert [len(sampler) for sampler in samplers] == [SAMPLES // 2] * 3
        assert Counter([*samplers[0], *samplers[1]]) == ONCE
        assert list(samplers[2]) != list(samplers[0])
        sought = ps.DistributedSampler(second, SAMPLES, name=None)
        sought.seek(SAMPLES // 2 // BATCH + 5, BATCH)
        samplers[1].set_epoch(1)
        assert sought.epoch == 1
        assert list(sought) == list(samplers[1])[5 * BATCH :]
        uneven: Any = DataLoader(data(), batch_size=7, sampler=sought, drop_last=True)
        for number in (0, 1, 9):
            sought.set_epoch(number)
            steps = number * len(uneven) + 2
            sought.seek(steps, 7, drop_last=True)
            assert (sought.epoch, len(sought)) == (number, SAMPLES // 2 - 2 * 7)
