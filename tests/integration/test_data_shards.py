"""Workers share a data set out by shards that the scheduler leases (SEMANTICS S20)."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import ps_worker as ps
from ps_cli.console import scheduler_query
from ps_core.limits import MAX_HELD_SHARD_COUNT
from ps_runtime.checkpoint.store import resolve
from ps_worker.client.data_shards import DataShards
from pushpull.v1 import scheduler_pb2
from tests.integration.command_line import run_here
from tests.integration.lane_cluster import until
from tests.integration.replicated_cluster import DEADLINE_S, replicated_cluster, together
from tests.integration.warm_processes import warm_context

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

SAMPLES, SHARD, BATCH = 96, 8, 4
SHARDS = 12
PATIENCE = {"PUSHPULL_WORKER_TIMEOUT_S": "2.5"}


def data(samples: int = SAMPLES) -> Any:
    return [torch.tensor([float(number)]) for number in range(samples)]


class Fetched:
    """A loader that has fetched all that there is before its first batch is trained on."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._loader))


class Trainer:
    """A worker that trains a model of one weight."""

    def __init__(self, client: ps.Client, samples: int = SAMPLES) -> None:
        self.model = nn.Linear(1, 1)
        self.optimizer = ps.DistributedOptimizer(
            client, self.model, ps.SGD(lr=0.0), consistency="asp"
        )
        self.data = data(samples)
        self.shards = client.data_shards(self.data, shard_size=SHARD)

    def loader(self, **options: Any) -> DataLoader[Any]:
        return DataLoader(self.data, BATCH, sampler=self.shards, **options)

    def step(self, batch: torch.Tensor) -> list[int]:
        self.optimizer.zero_grad()
        self.model(batch).sum().backward()
        self.optimizer.step()
        return [int(one) for one in batch.flatten()]

    def step_each(self, batches: Iterator[torch.Tensor], seen: list[int]) -> None:
        for batch in batches:
            seen += self.step(batch)

    def train(self, passes: int, **options: Any) -> list[tuple[int, int]]:
        """Each sample that it trained on, and its pass."""
        loader, seen = self.loader(**options), []
        for number in range(self.shards.pass_number, passes):
            for batch in self.shards.over(loader):
                seen += [(number, sample) for sample in self.step(batch)]
        return seen


def connected(address: str, stack: ExitStack, count: int) -> list[ps.Client]:
    return [
        stack.enter_context(ps.connect(address, rank=rank, request_deadline_s=DEADLINE_S))
        for rank in range(count)
    ]


def once(passes: int, samples: int = SAMPLES) -> Counter[tuple[int, int]]:
    return Counter(itertools.product(range(passes), range(samples)))


def status(address: str) -> scheduler_pb2.DataSetStatus:
    response = asyncio.run(scheduler_query.first_status(address)).response
    (found,) = response.data_sets
    return found


@pytest.fixture
def address() -> Iterator[str]:
    with ps.local_cluster(1, 1) as cluster:
        yield cluster.address


@pytest.fixture
def client(address: str) -> Iterator[ps.Client]:
    with ps.connect(address) as client:
        yield client


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [0, 2])
def test_each_pass_has_every_sample_once(processes: int) -> None:
    """The last shard is smaller, so a batch may have samples of two."""
    samples = SAMPLES - 2
    options = {"num_workers": processes, "persistent_workers": processes > 0}
    with ps.local_cluster(1, 2) as cluster, ExitStack() as stack:
        trainers = [Trainer(client, samples) for client in connected(cluster.address, stack, 2)]
        seen = together([partial(each.train, 3, **options) for each in trainers])
        assert Counter([*seen[0], *seen[1]]) == once(3, samples)
        told = status(cluster.address)
        with urllib.request.urlopen(f"http://{cluster.http_address}/metrics") as page:
            metrics = page.read().decode()
    for event in ("issued", "done"):
        count = float(3 * SHARDS)
        assert f'pushpull_scheduler_data_shards_total{{event="{event}"}} {count}' in metrics
    assert (told.pass_number, told.done_count, told.leased_count) == (3, 0, 0)
    assert told.reissued_count == 0
    orders = [[sample for number, sample in seen[0] if number == n] for n in range(3)]
    assert orders[0] != orders[1]


def train_as_told(address: str, pipe: Connection) -> None:
    """A worker process that trains on a batch for each word, and says which samples it had."""
    trainer = Trainer(ps.connect(address, rank=2, request_deadline_s=DEADLINE_S))
    for batch in trainer.shards.over(trainer.loader()):
        pipe.send(trainer.step(batch))
        pipe.recv()
    os._exit(0)


def test_shards_of_a_killed_worker_are_issued_again_by_a_scheduler_that_was_killed_too() -> None:
    """The worker has done a shard and is in its second; others wait for what it has."""
    context = warm_context()
    ours, theirs = context.Pipe()
    with (
        replicated_cluster(1, 3, PATIENCE, replica_count=1, has_journal=True) as cluster,
        ExitStack() as stack,
    ):
        trainers = [Trainer(client) for client in connected(cluster.address, stack, 2)]
        victim = context.Process(target=train_as_told, args=(cluster.address, theirs), daemon=True)
        victim.start()
        stack.callback(victim.kill)
        trained = []
        for _ in range(SHARD // BATCH + 1):
            assert ours.poll(DEADLINE_S)
            trained += ours.recv()
            ours.send("go on")
        assert ours.poll(DEADLINE_S)
        trained += ours.recv()

        def kill() -> None:
            until(lambda: status(cluster.address).done_count == SHARDS - 2, "two are left")
            cluster.kill_scheduler()
            cluster.start_scheduler_again()
            told = status(cluster.address)
            assert (told.done_count, told.leased_count) == (SHARDS - 2, 2)
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)

        *seen, _ = together([*(partial(each.train, 1) for each in trainers), kill])
        told = status(cluster.address)
    living = Counter(sample for _, sample in seen[0] + seen[1])
    done, again = Counter(trained[:SHARD]), Counter(trained[SHARD:])
    assert len(again) == SHARD
    assert living + done == Counter(range(SAMPLES))
    assert living & again == again
    assert (told.pass_number, told.reissued_count) == (1, 2)


@pytest.mark.thorough
def test_a_worker_trains_on_what_it_has_while_no_scheduler_answers() -> None:
    """Its reports wait longer than it would wait for shards, and are made again."""
    with (
        replicated_cluster(1, 1, replica_count=1, has_journal=True) as cluster,
        ExitStack() as stack,
    ):
        (client,) = connected(cluster.address, stack, 1)
        trainer = Trainer(client)
        trainer.shards = client.data_shards(trainer.data, shard_size=SHARD, timeout_s=5.0)
        seen: list[int] = []
        for batch in trainer.shards.over(trainer.loader()):
            seen += trainer.step(batch)
            if len(seen) == SHARD + BATCH:  # it has another shard when its call is answered
                until(lambda: status(cluster.address).leased_count == 2, "another one is leased")
                cluster.kill_scheduler()
            elif len(seen) == 2 * SHARD + BATCH:  # it has reported the second, to nobody
                call = trainer.shards._call
                assert call is not None
                assert isinstance(call.exception(DEADLINE_S), ps.WaitExpired)
                cluster.start_scheduler_again()
        assert Counter(seen) == Counter(range(SAMPLES))
        told = status(cluster.address)
    assert (told.pass_number, told.reissued_count) == (1, 0)


@pytest.mark.thorough
def test_a_restored_run_goes_on_with_the_shards_that_were_not_done(tmp_path: Path) -> None:
    root = str(tmp_path / "checkpoints")
    with ps.local_cluster(1, 1, checkpoint_url=root) as cluster, ExitStack() as stack:
        (client,) = connected(cluster.address, stack, 1)
        trainer = Trainer(client)
        first: list[int] = []
        for batch in trainer.shards.over(trainer.loader()):
            first += trainer.step(batch)
            if len(first) == 3 * SHARD + BATCH:  # the third shard is done with the next batch
                until(lambda: status(cluster.address).done_count == 3, "three are done")
                client.checkpoint("for the test").wait(DEADLINE_S)
                break
    with resolve(root).reader as reader:
        (saved,) = reader.manifest.data_sets
    assert (saved.pass_number, saved.issued_count, len(saved.open_shards)) == (0, 5, 2)
    shown = run_here("checkpoint", "show", reader.directory.url, cwd=tmp_path).stdout
    assert f"data 'data': pass 0, 3 of {SHARDS} shards done" in shown
    done = first[: 3 * SHARD]
    with ps.local_cluster(1, 2, resume=root) as cluster, ExitStack() as stack:
        trainers = [Trainer(client) for client in connected(cluster.address, stack, 2)]
        seen = together([partial(each.train, 2) for each in trainers])
        told = status(cluster.address)
    second = Counter([*seen[0], *seen[1]])
    assert second == once(2) - Counter((0, sample) for sample in done)
    assert (told.pass_number, told.reissued_count) == (2, 2)


@pytest.mark.thorough
def test_who_waits_for_the_shards_of_others_is_in_their_checkpoints(tmp_path: Path) -> None:
    """They wait for the checkpoint, with samples that they have not trained on."""
    root = str(tmp_path / "checkpoints")
    with ps.local_cluster(1, 2, checkpoint_url=root) as cluster, ExitStack() as stack:
        first, second = connected(cluster.address, stack, 2)
        trainers = [Trainer(first), Trainer(second)]
        batches, seen = trainers[0].shards.over(trainers[0].loader()), list[int]()
        seen += trainers[0].step(next(batches))
        with ThreadPoolExecutor(1) as threads:
            others = threads.submit(trainers[1].train, 1)
            until(lambda: status(cluster.address).done_count == SHARDS - 1, "the other waits")
            first.checkpoint("for the test").wait(DEADLINE_S / 2)
            trainers[0].step_each(batches, seen)
            found = [*others.result(), *((0, sample) for sample in seen)]
    assert Counter(found) == once(1)


@pytest.mark.thorough
def test_ranges_are_done_when_the_next_is_asked_for(client: ps.Client) -> None:
    shards = client.data_shards(SAMPLES - 2, shard_size=SHARD)
    found: list[int] = []
    for begin, end in shards.ranges():
        found += range(begin, end)
    assert Counter(found) == Counter(range(SAMPLES - 2))
    assert shards.pass_number == 1
    assert [end - begin for begin, end in shards.ranges()].count(SHARD - 2) == 1


@pytest.mark.thorough
def test_a_loop_that_takes_no_steps_has_every_sample_too(client: ps.Client) -> None:
    """Nothing says that a batch was trained on before the loop ends: it ends when the worker has as
    many shards as it may.
    """
    count = 2 * MAX_HELD_SHARD_COUNT + 3
    shards = client.data_shards(count, shard_size=1)
    given: Any = list(range(count))
    loader: DataLoader[Any] = DataLoader(given, 1, sampler=shards)
    assert Counter(int(batch) for batch in shards.over(loader)) == Counter(range(count))


@pytest.mark.thorough
@pytest.mark.parametrize("steps_elsewhere", [0, 50])
def test_a_loop_that_was_left_begins_its_shards_again(
    client: ps.Client, steps_elsewhere: int
) -> None:
    """What was done counts, also where another table is ahead of those that the loop trains."""
    other = client.create_table("other", 4, optimizer=ps.SGD(lr=1.0), consistency="asp")
    for _ in range(steps_elsewhere):
        client.push_pull(other, np.zeros(4, np.float32))
    trainer = Trainer(client)
    seen: list[int] = []
    for batch in trainer.shards.over(trainer.loader()):
        seen += trainer.step(batch)
        if len(seen) == SHARD + BATCH:
            break
    again = [sample for _, sample in trainer.train(1)]
    assert Counter(again) == Counter(range(SAMPLES)) - Counter(seen[:SHARD])


class OneShard:
    """A loader that ends with its first shard, or fails after it."""

    def __init__(self, loader: DataLoader[Any], error: str = "") -> None:
        self._loader, self._error = loader, error

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(self._loader, SHARD // BATCH)
        if self._error:
            raise OSError(self._error)


def test_a_shard_is_done_with_the_step_after_which_the_loop_ends(
    address: str, client: ps.Client
) -> None:
    """Whether the script leaves the loop, or an error ends it before the next batch is there."""
    trainer = Trainer(client)
    shards, seen = trainer.shards, list[int]()
    for batch in shards.over(trainer.loader()):
        seen += trainer.step(batch)
        if len(seen) == SHARD:
            break
    for number in (2, 3):
        loader = OneShard(trainer.loader(), "no disk")
        with pytest.raises(OSError, match="no disk"):
            trainer.step_each(shards.over(loader, BATCH), seen)
        assert len(seen) == number * SHARD
    for begin, _ in shards.ranges():  # a script may take several steps for one
        trainer.step(torch.zeros(1))
        assert begin not in seen
        break
    kept = shards.over(trainer.loader())
    begun = trainer.step(next(kept))
    assert begun[0] // SHARD * SHARD == begin
    others = shards.over(OneShard(trainer.loader()), BATCH)
    seen += trainer.step(next(others))
    assert Counter(seen[-BATCH:]) == Counter(begun)
    del kept  # it ends after the other loop has begun
    trainer.step_each(others, seen)
    assert Counter(seen) == Counter(range(SAMPLES))
    told = status(address)
    assert (told.pass_number, told.reissued_count) == (1, 0)


def test_a_loop_that_was_left_and_is_kept_in_a_variable_counts_its_steps(
    client: ps.Client,
) -> None:
    """Another loop begins what it had not trained; it cannot go on beside that one."""
    trainer = Trainer(client)
    loader, seen = trainer.loader(), list[int]()
    kept = trainer.shards.over(loader)
    for batch in kept:
        seen += trainer.step(batch)
        if len(seen) == 2 * SHARD:
            break
    others = trainer.shards.over(loader)
    seen += trainer.step(next(others))
    with pytest.raises(ps.InvalidConfig, match=r"after another one has begun, .* one loop at a ti"):
        next(kept)
    trainer.step_each(others, seen)
    assert Counter(seen) == Counter(range(SAMPLES))


def test_tables_stay_asynchronous_in_a_pass(client: ps.Client) -> None:
    trainer = Trainer(client)
    shards, seen = trainer.shards, list[int]()
    words = r"is asp, and would be bsp while shards of data set 'data' .* Nothing has changed; ask"
    for batch in shards.over(trainer.loader()):
        seen += trainer.step(batch)
        if len(seen) == SHARD:
            with pytest.raises(ps.InvalidConfig, match=words):
                trainer.optimizer.set_consistency("bsp")
    assert Counter(seen) == Counter(range(SAMPLES))
    seen = []
    given = shards.over(trainer.loader())
    seen += trainer.step(next(given))
    client.create_table("late", 4, optimizer=ps.SGD(lr=1.0))
    with pytest.raises(ps.InvalidConfig, match="table 'late' is bsp, where workers wait"):
        trainer.step_each(given, seen)
    assert len(seen) == SHARD
    client.set_consistency("late", "asp")
    trainer.step_each(shards.over(trainer.loader()), seen)
    assert Counter(seen) == Counter(range(SAMPLES))
    trainer.optimizer.set_consistency("bsp")


def accumulated(trainer: Trainer, given: Any, batches: int) -> list[int]:
    """All samples of a pass, with a step after so many batches."""
    seen: list[int] = []
    for number, batch in enumerate(given, 1):
        values = torch.as_tensor(batch, dtype=torch.float32).reshape(-1, 1)
        trainer.model(values).sum().backward()
        seen += [int(one) for one in values.flatten()]
        if number % batches == 0:
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
    return seen


@pytest.mark.thorough
def test_steps_of_several_batches_end_with_the_pass(client: ps.Client) -> None:
    trainer = Trainer(client)
    for _ in range(2):
        seen = accumulated(trainer, trainer.shards.over(trainer.loader()), 4)
        assert Counter(seen) == Counter(range(SAMPLES))
    assert (trainer.shards.pass_number, trainer.optimizer.clock) == (2, 2 * SAMPLES // BATCH // 4)


@pytest.mark.thorough
@pytest.mark.parametrize("reads", [False, True])
def test_samples_without_a_step_at_the_end_of_a_pass_are_not_done(
    address: str, client: ps.Client, reads: bool
) -> None:
    """A worker that dies then, or a checkpoint, would lose their gradients."""
    trainer = Trainer(client)
    shards = trainer.shards

    def given() -> Iterator[Any]:
        if not reads:
            return shards.over(trainer.loader())
        return (range(*ends) for ends in shards.ranges())

    every = 5 * SHARD // (SHARD if reads else BATCH)
    words = r"no more samples .* the gradients of its last 16 samples wait for a step\. Expected a"
    with pytest.raises(ps.InvalidConfig, match=words):
        accumulated(trainer, given(), every)
    told = status(address)
    assert (told.pass_number, told.done_count) == (0, 10)
    assert len(accumulated(trainer, given(), every // 5)) == 2 * SHARD
    assert shards.pass_number == 1


@pytest.mark.thorough
def test_a_step_may_have_samples_of_a_shard_that_comes_late() -> None:
    """The loader has ended when the other worker leaves what it has."""
    with ps.local_cluster(1, 2) as cluster, ExitStack() as stack:
        first, second = connected(cluster.address, stack, 2)
        trainer = Trainer(first)
        other = second.data_shards(SAMPLES, shard_size=SHARD)
        ranges = other.ranges()
        next(ranges)
        here = (SHARDS - status(cluster.address).leased_count) * SHARD // BATCH
        seen: list[int] = []
        loader = Fetched(trainer.loader())
        for number, batch in enumerate(trainer.shards.over(loader, BATCH), 1):
            trainer.model(batch).sum().backward()
            seen += [int(one) for one in batch.flatten()]
            if number == here:
                second.close()
                until(lambda: status(cluster.address).reissued_count > 0, "they are issued again")
            elif number in {3, SAMPLES // BATCH}:
                trainer.optimizer.step()
            elif number == here + 1:  # its loader has ended, and the first step had one shard
                assert status(cluster.address).done_count == 1
        assert Counter(seen) == Counter(range(SAMPLES))
        assert status(cluster.address).pass_number == 1


@pytest.mark.thorough
def test_batches_that_leave_no_gradient_are_done(client: ps.Client) -> None:
    """As in an evaluation, and where the script drops the gradients of a batch."""
    trainer = Trainer(client)
    trainer.train(1)
    for batch in trainer.shards.over(trainer.loader()):
        trainer.model(batch)
    for batch in trainer.shards.over(trainer.loader()):
        trainer.model(batch).sum().backward()
        trainer.optimizer.zero_grad()
    assert trainer.shards.pass_number == 3


@pytest.mark.thorough
def test_who_waits_is_told_who_has_the_last_shards_and_waits_again() -> None:
    """What it reported meanwhile counts once."""
    with ps.local_cluster(1, 2) as cluster, ExitStack() as stack:
        first, second = connected(cluster.address, stack, 2)
        waits = second.data_shards(3 * SHARD, shard_size=SHARD, timeout_s=0.3)
        has = first.data_shards(3 * SHARD, shard_size=SHARD).ranges()
        ranges = waits.ranges()
        found = [next(ranges), next(has)]
        words = r"the last [12] shards of pass 0 of data set 'data' are leased to worker node \d"
        for waiting in (ranges, waits.ranges()):
            with pytest.raises(ps.WaitExpired, match=words):
                found += waiting
        found += has
        assert sorted(found) == [(SHARD * n, SHARD * (n + 1)) for n in range(3)]
        assert list(waits.ranges()) == []
        assert waits.pass_number == 1


@pytest.mark.thorough
def test_what_cannot_be_shared_out_is_refused() -> None:
    with ps.local_cluster(1, 2) as cluster, ExitStack() as stack:
        client, other = connected(cluster.address, stack, 2)
        for arguments, words in (
            ((0, 1), "has 0 samples, shards of 1 and seed 0; expected 1 sample or more"),
            (([], 1), "has 0 samples"),
            ((10, 11), "has 10 samples, shards of 11"),
            ((10, 0), "shards of 0"),
        ):
            with pytest.raises(ps.InvalidConfig, match=words):
                client.data_shards(arguments[0], shard_size=arguments[1])
        client.data_shards(SAMPLES, shard_size=SHARD)
        words = f"sample_count of data set 'data' is 90, and was declared as {SAMPLES} by another"
        with pytest.raises(ps.InvalidConfig, match=words):
            other.data_shards(90, shard_size=SHARD)
        with pytest.raises(ps.InvalidConfig, match=r"shard_size .* is 4, and was declared as 8"):
            other.data_shards(SAMPLES, shard_size=4)
        reader = stack.enter_context(ps.connect(cluster.address, role="reader"))
        with pytest.raises(ps.NotPermitted, match="a reader may not lease data shards"):
            reader.data_shards(SAMPLES, shard_size=SHARD)


@pytest.mark.thorough
def test_a_shard_is_not_done_before_its_step_is_in_the_parameters() -> None:
    """A script that waits for none of its pushes asks for the next shard all the same."""
    with ps.local_cluster(1, 1) as cluster, ps.connect(cluster.address) as client:
        table = client.create_table("t", 1, optimizer=ps.SGD(lr=1.0), consistency="asp")
        shards = client.data_shards(SAMPLES, shard_size=SHARD, timeout_s=5.0)
        seen: list[int] = []
        (server,) = [pid for name, pid in cluster.process_ids.items() if "server" in name]
        os.kill(server, signal.SIGSTOP)

        def train() -> None:
            for begin, _ in shards.ranges():
                # What is refused is for its ticket to say.
                client.push(table, np.full(1, 1.0 if seen else np.nan, np.float32))
                seen.append(begin)

        with pytest.raises(ps.WaitExpired, match="table 't'"):
            train()
        assert status(cluster.address).done_count == 0
        os.kill(server, signal.SIGCONT)
        train()
        assert sorted(seen) == [*range(0, SAMPLES, SHARD)]


def refused(shards: DataShards, loader: Any, words: str, **options: Any) -> None:
    with pytest.raises(ps.InvalidConfig, match=words):
        next(shards.over(loader, **options))


def test_loaders_that_would_miscount_are_refused(client: ps.Client) -> None:
    given = data()
    shards = client.data_shards(given, shard_size=SHARD)
    with pytest.raises(ps.InvalidConfig, match=r"iterate shards\.over"):
        next(iter(DataLoader(given, BATCH, sampler=shards)))
    refused(shards, DataLoader(given, BATCH, sampler=shards, drop_last=True), "drop_last=False")
    dropping = BatchSampler(shards, BATCH, drop_last=True)
    refused(shards, DataLoader(given, batch_sampler=dropping), "drop_last=False")
    unordered = DataLoader(given, BATCH, sampler=shards, num_workers=1, in_order=False)
    refused(shards, unordered, "expected in_order=True")
    refused(shards, ps.prefetch(unordered, lambda _: {}), "expected in_order=True")
    strange = DataLoader(given, BATCH, sampler=RandomSampler(given))
    refused(shards, strange, "has drawn 0 from data set 'data'; expected a DataLoader with sampler")
    refused(shards, [torch.zeros(1)], "no batch_size; give batch_size=")
    refused(shards, [torch.zeros(1)], "has drawn 0", batch_size=1)
    client.create_table("stepped", 4, optimizer=ps.SGD(lr=1.0))
    words = "table 'stepped' is bsp, where workers wait .*; expected consistency='asp', or ps.Dist"
    refused(shards, DataLoader(given, BATCH, sampler=shards), words)


def test_steps_that_are_not_at_the_servers_yet_are_refused(client: ps.Client) -> None:
    """A shard would be done, and its worker's inner steps lost with it."""
    outer = ps.Outer(partial(torch.optim.SGD, lr=0.1), inner_steps=5)
    ps.DistributedOptimizer(client, nn.Linear(2, 2), outer, consistency="asp")
    shards = client.data_shards(data(), shard_size=SHARD)
    loader = DataLoader(data(), BATCH, sampler=shards)
    refused(shards, loader, r"an update for each 5 steps \(ps.Outer\), .* expected another opt")
