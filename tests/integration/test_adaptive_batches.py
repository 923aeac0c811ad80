"""Adaptive batches: under BSP a slow worker trains on fewer samples of each step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import ps_worker as ps
from ps_core.errors import JoinRefused
from tests.integration import resumed_training
from tests.integration.lane_cluster import until

pytestmark = pytest.mark.slow

WORKERS = 3
SAMPLES = 600
BATCH = 8
_names = count()


@pytest.fixture(scope="module")
def workers() -> Iterator[list[ps.Client]]:
    with ps.local_cluster(servers=1, workers=WORKERS) as cluster:
        clients = [ps.connect(cluster.address, rank=rank) for rank in range(WORKERS)]
        yield clients
        for client in clients:
            client.close(leave=False)


def together(clients: list[ps.Client], work: Any) -> list[Any]:
    with ThreadPoolExecutor(len(clients)) as threads:
        return list(threads.map(work, clients))


class Recorder:
    """One worker's training: a parameter that is pulled to the mean of the samples' values, and all
    indexes that it has seen.
    """

    def __init__(self, client: ps.Client, name: str, **options: Any) -> None:
        self.client = client
        self.weight = torch.nn.Parameter(torch.zeros(4))
        self.optimizer = ps.DistributedOptimizer(
            client, [self.weight], ps.SGD(lr=1.0), name=name, **options
        )
        self.seen: list[int] = []
        self.sizes: list[int] = []
        self.means: list[float] = []

    def train(self, indexes: list[int], weight: float) -> None:
        """A step whose mean gradient is minus the mean of all workers' indexes."""
        self.seen += indexes
        self.sizes.append(len(indexes))
        self.optimizer.zero_grad()
        before = float(self.weight.detach()[0])
        values = torch.tensor(indexes, dtype=torch.float32)
        loss = -(self.weight.mean() * 4 * values.mean())
        (weight * loss).backward()
        self.optimizer.step()
        self.means.append(float(self.weight.detach()[0]) - before)


@pytest.mark.thorough
def test_the_slow_worker_gets_fewer_samples_and_the_mean_is_that_of_all() -> None:
    """A step takes a worker six times as long as others, however few samples it has."""

    def work(rank: int) -> Recorder:
        options: Any = {"rank": rank, "compute": "permanent:2ms,15ms,rank=2"}
        with ps.connect(cluster.address, **options) as client:
            return trained(client)

    def trained(client: ps.Client) -> Recorder:
        recorder = Recorder(client, "model")
        batches = client.adaptive_batches(360, BATCH, bounds=(2, 12), every=3)
        for number in range(batches.pass_number, 2):
            assert batches.pass_number == number
            for indexes in batches.over(batches):
                recorder.train(indexes, batches.weight)
        return recorder

    with (
        ps.local_cluster(servers=1, workers=WORKERS) as cluster,
        ThreadPoolExecutor(WORKERS) as threads,
    ):
        found = list(threads.map(work, range(WORKERS)))
    seen = Counter(index for recorder in found for index in recorder.seen)
    assert seen == dict.fromkeys(range(360), 2)
    steps = list(zip(*(recorder.sizes for recorder in found), strict=True))
    assert steps[:6] == [(BATCH,) * 3] * 6
    assert all(sum(sizes) == BATCH * WORKERS for sizes in steps)
    last = [sum(recorder.sizes[-10:]) for recorder in found]
    assert last[2] < 0.7 * min(last[:2]), last
    places = [0] * WORKERS
    for step, sizes in enumerate(steps):
        indexes = [r.seen[p : p + n] for r, p, n in zip(found, places, sizes, strict=True)]
        places = [p + n for p, n in zip(places, sizes, strict=True)]
        mean = sum(map(sum, indexes)) / sum(sizes)
        for recorder in found:
            assert recorder.means[step] == pytest.approx(mean, rel=1e-3)


@pytest.mark.thorough
def test_a_loader_with_processes_fetches_ahead(workers: list[ps.Client]) -> None:
    name = f"model-{next(_names)}"

    def work(client: ps.Client) -> Recorder:
        recorder = Recorder(client, name)
        batches = client.adaptive_batches(SAMPLES, BATCH, every=8, name=name)
        loader: Any = DataLoader(
            range(SAMPLES),  # type: ignore[arg-type]
            batch_sampler=batches, num_workers=2, prefetch_factor=2,
            multiprocessing_context="forkserver",
        )  # fmt: skip
        for indexes in batches.over(loader):
            recorder.train(indexes.tolist(), batches.weight)
        return recorder

    found = together(workers, work)
    seen = Counter(index for recorder in found for index in recorder.seen)
    assert seen == dict.fromkeys(range(SAMPLES), 1)


def test_each_pass_has_an_order_of_its_own(workers: list[ps.Client]) -> None:
    name = f"model-{next(_names)}"

    def work(client: ps.Client) -> list[list[int]]:
        batches = client.adaptive_batches(48, BATCH, name=name)
        recorders = [Recorder(client, f"{name}-{number}") for number in range(2)]
        for recorder in recorders:
            for indexes in batches.over(batches):
                recorder.train(indexes, batches.weight)
        return [recorder.seen for recorder in recorders]

    by_pass = zip(*together(workers, work), strict=True)
    first, second = (list(chain(*of_workers)) for of_workers in by_pass)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(48))


def test_a_loader_that_fetches_too_far_ahead_is_refused(workers: list[ps.Client]) -> None:
    name = f"model-{next(_names)}"

    def work(client: ps.Client) -> str:
        batches = client.adaptive_batches(SAMPLES, BATCH, every=2, name=name)
        with pytest.raises(ps.InvalidConfig) as raised:
            next(iter(batches.over(_Eager(batches))))
        return raised.value.message

    for message in together(workers, work):
        assert "fetches too far ahead. Expected a larger `every` than 2" in message


class _Eager:
    """A loader that draws all batches before the first is used."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._batches))


@pytest.mark.thorough
def test_a_run_goes_on_where_it_was_with_another_number_of_workers(tmp_path: Path) -> None:
    """Each sample of a pass is trained on once, before the checkpoint or after it."""
    root = str(tmp_path)

    def work(client: ps.Client, stop: int) -> list[int]:
        recorder = Recorder(client, "model")
        batches = client.adaptive_batches(100, BATCH, every=2)
        for _ in range(batches.pass_number, 2):
            for indexes in batches.over(batches):
                recorder.train(indexes, batches.weight)
                if len(recorder.sizes) == stop:
                    client.checkpoint().wait(30.0)
                    return recorder.seen
        return recorder.seen

    seen: Counter[int] = Counter()
    for workers, resume, stop in ((3, "", 2), (2, root, 0)):
        with ps.local_cluster(1, workers, checkpoint_url=root, resume=resume) as cluster:
            run = partial(work, stop=stop)
            for indexes in resumed_training.together(cluster.address, workers, run):
                seen.update(indexes)
    assert seen == dict.fromkeys(range(100), 2)


def test_the_others_go_on_without_a_worker_that_is_gone() -> None:
    """Its samples of the steps until the next agreement are unseen; then others have its share."""
    sizes: dict[int, list[int]] = {}

    def work(client: ps.Client) -> None:
        recorder = Recorder(client, "model")
        batches = client.adaptive_batches(SAMPLES, BATCH, every=2)
        for indexes in batches.over(batches):
            recorder.train(indexes, batches.weight)
            if client.rank == 2 and len(recorder.sizes) == 3:
                client.close()
                break
        sizes[client.rank] = recorder.sizes

    with ps.local_cluster(servers=1, workers=WORKERS) as cluster:
        clients = [
            ps.connect(cluster.address, rank=rank, request_deadline_s=30.0)
            for rank in range(WORKERS)
        ]
        together(clients, work)
        until(lambda: len(sizes) == WORKERS, "all have ended")
        for client in clients[:2]:
            client.close()
    assert [len(sizes[rank]) for rank in (0, 1)] == [len(sizes[0])] * 2
    assert sizes[0][3] + sizes[1][3] == 2 * BATCH
    assert sizes[0][8] + sizes[1][8] == WORKERS * BATCH


def test_a_worker_in_the_place_of_another_is_refused_for_good() -> None:
    """So it is not started again in vain (`pushpull train --max-restarts`)."""
    with ps.local_cluster(servers=1, workers=1) as cluster:
        Recorder(ps.connect(cluster.address), "model").client.close(leave=False)
        with ps.connect(cluster.address, rank=0) as client:
            words = "worker 0 joins others .*: start all workers again, .*pushpull train --resume"
            with pytest.raises(JoinRefused, match=words):
                client.adaptive_batches(SAMPLES, BATCH)


@pytest.mark.thorough
def test_a_wait_that_expires_is_taken_up_again() -> None:
    """At the first batch, and at the first agreement."""

    def trained(client: ps.Client, loop: Iterator[list[int]], until: int) -> None:
        rank = client.rank
        while len(seen[rank]) < until:
            seen[rank].append(next(loop))
            optimizers[rank].zero_grad()
            (shared[rank].weight * weights[rank].sum()).backward()
            optimizers[rank].step()

    with (
        ps.local_cluster(servers=1, workers=2) as cluster,
        ps.connect(cluster.address, rank=0, request_deadline_s=1.0) as first,
        ps.connect(cluster.address, rank=1) as second,
    ):
        clients, seen = [first, second], [list[list[int]](), list[list[int]]()]
        weights = [torch.nn.Parameter(torch.zeros(4)) for _ in clients]
        optimizers = [
            ps.DistributedOptimizer(client, [weight], ps.SGD(lr=1.0), name="model")
            for client, weight in zip(clients, weights, strict=True)
        ]
        shared = [client.adaptive_batches(64, 4, every=2) for client in clients]
        loops = [batches.over(batches) for batches in shared]
        with ThreadPoolExecutor(2) as threads:
            for until in (0, 2):
                with pytest.raises(ps.WaitExpired, match="worker 1"):
                    next(loops[0])
                other = threads.submit(trained, second, loops[1], until + 2)
                trained(first, loops[0], until + 2)
                other.result()
            assert list(map(len, seen)) == [4, 4]
            other = threads.submit(trained, second, loops[1], 8)
            trained(first, loops[0], 8)
            other.result()
        assert sorted(index for own in seen for batch in own for index in batch) == list(range(64))


# --- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"consistency": "asp"}, "is asp with 0 inner steps, and adaptive batches are for steps"),
        ({"consistency": "bsp:backup=1"}, "expected BSP without backup workers"),
    ],
)
def test_tables_whose_workers_take_other_steps_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with (
        ps.local_cluster(servers=1, workers=2) as cluster,
        ps.connect(cluster.address, rank=0) as client,
    ):
        weight = torch.nn.Parameter(torch.zeros(4))
        ps.DistributedOptimizer(client, [weight], ps.SGD(lr=1.0), **options)
        batches = client.adaptive_batches(SAMPLES, BATCH)
        with pytest.raises(ps.InvalidConfig, match=message):
            next(iter(batches.over(batches)))


def test_a_script_that_forgets_the_weight_is_told() -> None:
    def work(rank: int) -> str:
        options: Any = {"rank": rank, "compute": "permanent:1ms,20ms,rank=1"}
        with ps.connect(cluster.address, **options) as client:
            recorder = Recorder(client, "model")
            batches = client.adaptive_batches(SAMPLES, BATCH, every=1)
            unweighed = batches.over(batches)
            train = partial(recorder.train, weight=1.0)
            with pytest.raises(ps.InvalidConfig) as raised:
                deque(map(train, unweighed), maxlen=0)
            assert len(recorder.sizes) >= 2
            return raised.value.message

    with ps.local_cluster(servers=1, workers=2) as cluster, ThreadPoolExecutor(2) as threads:
        for message in threads.map(work, range(2)):
            assert "did not read `weight` for its last batch, which is" in message


def test_workers_that_differ_are_told(workers: list[ps.Client]) -> None:
    name = f"model-{next(_names)}"

    def work(client: ps.Client) -> str:
        batches = client.adaptive_batches(SAMPLES + client.rank, BATCH, name=name)
        with pytest.raises(ps.InvalidConfig) as raised:
            next(iter(batches.over(batches)))
        return raised.value.message

    for message in together(workers, work):
        assert message == "workers differ in the length of their adaptive batches: 600, 601, 602"


def test_a_loader_outside_of_over_is_refused(workers: list[ps.Client]) -> None:
    batches = workers[0].adaptive_batches(SAMPLES, BATCH, name=f"model-{next(_names)}")
    with pytest.raises(ps.InvalidConfig, match=r"iterate batches\.over\(loader\)"):
        next(iter(batches))


def test_a_position_of_other_data_is_refused(workers: list[ps.Client]) -> None:
    batches = workers[0].adaptive_batches(SAMPLES, BATCH, name=f"model-{next(_names)}")
    state = batches.state_dict()
    with pytest.raises(ps.InvalidConfig, match="the length of adaptive batches is 600, and was 9"):
        batches.load_state_dict({**state, "length": 9})
    with pytest.raises(ps.InvalidCheckpoint, match="not a position of adaptive batches"):
        batches.load_state_dict({"pass": 1})
