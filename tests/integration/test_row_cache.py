"""Rows that workers cache, on a cluster: as old as they may be, and no older.

Each row begins at zeros, and each step takes 1 from it: a row says how many steps it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker as ps
from pushpull.jagged import EmbeddingBagConfig, KeyedJaggedTensor
from tests.integration.lane_cluster import until
from tests.integration.replicated_cluster import replicated_cluster
from tests.integration.resumed_training import together

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

DIM, DEADLINE_S = 4, 30.0
IDS = torch.arange(6)


@pytest.fixture(scope="module")
def client() -> Iterator[ps.Client]:
    with (
        ps.local_cluster(servers=2, workers=1) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
    ):
        yield client


def counting(
    client: ps.Client, name: str, consistency: str = "asp", **options: Any
) -> ps.Embedding:
    dim = options.pop("dim", DIM)
    return ps.Embedding(
        client, name, dim, optimizer=ps.SGD(lr=1.0), init=ps.Zeros(), reduction="sum",
        consistency=consistency, **{"cache_rows": 1000, **options},
    )  # fmt: skip


def steps_in(values: torch.Tensor) -> int:
    """The steps that all of these rows have; they have equally many."""
    (count,) = values.detach().unique().tolist()
    return -int(count)


def step(rows: ps.Embedding, ids: torch.Tensor = IDS) -> int:
    """One step; the steps that the rows had with which it computed."""
    values = rows(ids)
    values.sum().backward()
    rows.step()
    return steps_in(values)


def looked_up(rows: ps.Embedding, ids: torch.Tensor = IDS) -> int:
    with torch.no_grad():
        return steps_in(rows(ids))


def push(client: ps.Client, rows: ps.Embedding, ids: torch.Tensor, count: int = 1) -> None:
    """Steps of these rows below the module, which looks nothing up."""
    ones = torch.ones(len(ids), rows.embedding_dim).numpy()
    for _ in range(count):
        client.wait(client.push_rows(rows.table, ids.numpy(), ones))


def seen_as(client: ps.Client, rows: ps.Embedding, setting: str) -> None:
    """Change the consistency, and wait until this worker has heard of it."""
    client.set_consistency(rows.table, setting)
    until(lambda: str(client.consistency_of(rows.table)) == setting, "the worker hears of it")


FOUND = {0: [0, 1, 2, 3, 4, 5, 6], 1: [0, 0, 2, 2, 4, 4, 6], 3: [0, 0, 0, 0, 4, 4, 4]}
"""The steps that the rows of each step have, by `cache_steps`."""


@pytest.mark.parametrize("step_count", FOUND)
def test_a_row_is_as_many_steps_old_as_it_may_be(client: ps.Client, step_count: int) -> None:
    rows = counting(client, f"old {step_count}", cache_steps=step_count)
    expected = FOUND[step_count]
    assert [step(rows) for _ in expected] == expected
    pulled = len(set(expected))
    assert rows.cache_miss_count == 6 * pulled
    assert rows.cache_hit_count == 6 * (len(expected) - pulled)
    assert f"cache_rows=1000, cache_steps={step_count}" in repr(rows)


@pytest.mark.parametrize("consistency", ["bsp", "ssp:2"])
def test_several_passes_of_a_step_pull_a_row_once(client: ps.Client, consistency: str) -> None:
    """And each step has all that it had without a cache."""
    rows = counting(client, f"passes {consistency}", consistency)
    taken = torch.zeros(6)
    for number in range(4):
        with torch.no_grad():
            assert torch.equal(-rows(IDS)[:, 0], taken)
        for part in (IDS[:4], IDS[2:]):
            rows(part).sum().backward()
            taken[part] += 1
        rows.step()
        assert rows.cache_miss_count == 6 * (number + 1)
        assert rows.cache_hit_count == 8 * (number + 1)


def test_a_pass_gets_rows_of_its_own(client: ps.Client) -> None:
    """What a script does to them changes neither the cache nor what another pass has."""
    rows = counting(client, "own", cache_steps=9)
    first = rows(IDS)
    with torch.no_grad():
        first.add_(5.0)
        second = rows(IDS)
        second.add_(7.0)
    assert looked_up(rows) == 0
    rows(IDS).sum().backward()
    rows.zero_grad()
    rows(IDS[:2]).sum().backward()
    rows.step()
    with torch.no_grad():
        pulled = client.pull_rows(rows.table, IDS.numpy())
    assert pulled[:, 0].tolist() == [-1.0, -1.0, 0.0, 0.0, 0.0, 0.0]


def test_each_row_is_kept_under_its_own_id(client: ps.Client) -> None:
    """Of batches whose rows come partly from the cache; ids come twice, and in any order."""
    rows = counting(client, "each", cache_steps=9)
    for number in range(6):
        push(client, rows, IDS[number:])
    for ids in (IDS[1::2], IDS, IDS.flip(0).repeat(2), IDS):
        with torch.no_grad():
            assert torch.equal(-rows(ids)[:, 0], ids + 1.0)
    assert (rows.cache_hit_count, rows.cache_miss_count) == (15, 6)


def test_prefetch_asks_for_nothing_but_what_the_cache_lacks(client: ps.Client) -> None:
    rows = counting(client, "ahead", cache_steps=2)
    assert step(rows, IDS[:4]) == 0
    rows.prefetch(IDS)
    assert (rows.cache_hit_count, rows.cache_miss_count) == (4, 6)
    (part,) = rows._ahead[0].pull.parts
    assert part.which is not None
    assert len(part.which) == 2
    with torch.no_grad():
        values = rows(IDS)[:, 0]
    assert values.tolist() == [0.0] * 6
    assert (rows.cache_hit_count, rows.cache_miss_count) == (4, 6)


def test_prefetch_asks_for_what_will_be_too_old_in_the_next_step(client: ps.Client) -> None:
    rows = counting(client, "in time", cache_steps=2)
    assert looked_up(rows) == 0
    for expected in (0, 0, 1):
        rows.prefetch(IDS)
        assert len(rows._ahead[-1].pull.parts) == expected
        push(client, rows, IDS)
    assert looked_up(rows) >= 1


def test_what_was_prefetched_is_not_older_where_it_is_used_late(client: ps.Client) -> None:
    """The rows of the cache were young enough for the next step, and it comes three steps later."""
    rows = counting(client, "late", cache_steps=1)
    assert looked_up(rows) == 0
    rows.prefetch(IDS)
    assert not rows._ahead[0].pull.parts, "the cache has all of them"
    push(client, rows, IDS, 3)
    assert looked_up(rows) == 3
    assert not rows._ahead


@pytest.mark.parametrize("step_count", [0, 1, 2, 5])
def test_rows_prefetched_without_a_cache_are_for_the_next_step_at_most(
    client: ps.Client, step_count: int
) -> None:
    """A loop that ended early leaves rows that nobody looks up, until another has the same ids."""
    rows = counting(client, f"left {step_count}", cache_rows=0)
    rows.prefetch(IDS)
    rows._pulls.finish(rows._ahead[0].pull)  # before any step
    push(client, rows, IDS, step_count)
    assert looked_up(rows) == (0 if step_count <= 1 else step_count)
    assert not rows._ahead


def test_rows_prefetched_under_asp_are_not_used_in_a_step_under_bsp(client: ps.Client) -> None:
    rows = counting(client, "switched ahead", cache_steps=5)
    rows.prefetch(IDS)
    push(client, rows, IDS)
    seen_as(client, rows, "bsp")
    assert looked_up(rows) == 1
    rows.prefetch(IDS)
    push(client, rows, IDS)
    assert looked_up(rows) == 2


def test_a_change_of_consistency_ends_what_the_setting_before_allowed(client: ps.Client) -> None:
    rows = counting(client, "switched", cache_steps=100)
    assert [step(rows) for _ in range(3)] == [0, 0, 0]
    seen_as(client, rows, "bsp")
    assert [step(rows) for _ in range(3)] == [3, 4, 5]
    seen_as(client, rows, "asp")
    assert [step(rows) for _ in range(3)] == [5, 5, 5]
    seen_as(client, rows, "ssp:4")
    assert [step(rows) for _ in range(2)] == [9, 10]
    seen_as(client, rows, "asp:reject=4")
    misses = rows.cache_miss_count
    assert [looked_up(rows) for _ in range(2)] == [11, 11]
    assert rows.cache_miss_count == misses + 12


def test_until_a_change_that_is_for_later_nothing_is_served(client: ps.Client) -> None:
    rows = counting(client, "for later", "bsp", cache_steps=0)
    assert client.set_consistency(rows.table, "asp", after_clock=2) == 2
    until(lambda: str(client.consistency_of(rows.table)) == "asp", "the worker hears of it")
    for number in range(2):
        misses = rows.cache_miss_count
        assert [looked_up(rows), step(rows)] == [number, number]
        assert rows.cache_miss_count == misses + 12
    misses = rows.cache_miss_count
    assert [looked_up(rows), step(rows)] == [2, 2]
    assert rows.cache_miss_count == misses + 6


def test_a_step_that_is_skipped_ages_the_rows(client: ps.Client) -> None:
    rows, head = counting(client, "skipped", cache_steps=2), torch.nn.Linear(DIM, 1)
    with torch.no_grad():
        head.weight.fill_(1.0)
    model = torch.nn.Sequential(rows, head)
    optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.0), name="skipped head")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    found = []
    for number in range(8):
        optimizer.zero_grad()
        found.append(looked_up(rows))
        factor = float("inf") if number in (1, 4) else 1.0
        scaler.scale(model(IDS).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert found == [0, 0, 0, 2, 2, 2, 4, 4]
    assert client.pull_rows(rows.table, [0])[0, 0] == -6.0


def test_rows_that_left_the_servers_are_read_again_in_time(client: ps.Client) -> None:
    """A row that was evicted is as it was at first; a cache may know it for `cache_steps` more."""
    rows = counting(client, "evicted", cache_steps=2, max_rows=16, partitions=1)
    row, found = torch.tensor([1000]), []
    push(client, rows, row)
    for _ in range(4):
        found.append(looked_up(rows, row))
        push(client, rows, torch.arange(32))
    assert found == [1, 1, 1, 0]


def test_two_embeddings_of_one_table_have_one_clock(client: ps.Client) -> None:
    first, second = (counting(client, "shared", cache_steps=2) for _ in range(2))
    assert looked_up(second) == 0
    assert [step(first) for _ in range(2)] == [0, 0]
    assert looked_up(second) == 0
    step(first)
    assert looked_up(second) == 3
    push(client, second, IDS, 3)
    assert looked_up(second) == 6


def test_a_bag_collection_has_a_cache_for_each_table(client: ps.Client) -> None:
    configs = [
        EmbeddingBagConfig(name=f"bag {name}", embedding_dim=DIM, feature_names=[name])
        for name in ("users", "items")
    ]
    model = ps.EmbeddingBagCollection(
        client, configs, optimizer=ps.SGD(lr=1.0), init=ps.Zeros(), consistency="asp",
        cache_rows=100, cache_steps=1, per_table={"bag items": {"cache_rows": 0, "cache_steps": 0}},
    )  # fmt: skip
    optimizer = ps.DistributedOptimizer(client, model, ps.SGD(), name="bags")
    lengths = torch.tensor([3, 3, 3, 3])
    features = KeyedJaggedTensor.from_lengths_sync(
        ["users", "items"], torch.cat([IDS, IDS]), lengths
    )
    found = []
    for _ in range(5):
        values = model(features).values()
        values.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(tuple((-values[0, [0, DIM]] / 3).tolist()))
    assert found == [(0, 0), (0, 1), (2, 2), (2, 3), (4, 4)]
    users, items = model.embedding_bags.values()
    assert users.cache_hit_count > 0
    assert items.cache_hit_count == items.cache_miss_count == 0
    assert "cache_rows" not in repr(items)


def test_a_reader_caches_none() -> None:
    with (
        ps.local_cluster(servers=1, workers=1) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
        ps.connect(cluster.address, role="reader") as reader,
    ):
        rows = counting(client, "read", cache_steps=3)
        assert step(rows) == 0
        read = counting(reader, "read", cache_steps=3)
        assert looked_up(read) == 1
        step(rows)
        assert looked_up(read) == 2
        assert read.cache_hit_count == read.cache_miss_count == 0


def test_a_worker_whose_session_ended_is_told_though_the_cache_has_all() -> None:
    with ps.local_cluster(servers=1, workers=1) as cluster:
        client = ps.connect(cluster.address, request_deadline_s=DEADLINE_S)
        rows = counting(client, "ended", cache_steps=3)
        assert looked_up(rows) == looked_up(rows) == 0
        assert rows.cache_hit_count == 6
        client.close()
        with pytest.raises(ps.InvalidConfig, match="closed"):
            rows(IDS)


@pytest.mark.parametrize("consistency", ["asp", "ssp:8"])
def test_synchronize_gives_rows_with_every_step_of_all_workers(consistency: str) -> None:
    """Also where a worker has just looked them up, or has asked for them ahead."""
    own = {"cache_steps": 9 if consistency == "asp" else 0}

    def work(client: ps.Client) -> list[int]:
        rows = counting(client, "met", consistency, **own)
        optimizer = ps.DistributedOptimizer(
            client, nn.ModuleDict({"rows": rows}), ps.SGD(), name="met", consistency=consistency
        )
        if client.rank == 1:
            client.barrier()
        for _ in range(3):
            rows(IDS).sum().backward()
            rows.prefetch(IDS[:4])  # of the next step's batch
            optimizer.step()
        found = [looked_up(rows)]
        rows.prefetch(IDS[:5])
        if client.rank == 0:
            client.barrier()
        optimizer.synchronize()
        return [*found, *(looked_up(rows, IDS[:count]) for count in (6, 5, 4))]

    with ps.local_cluster(servers=1, workers=2) as cluster:
        first, second = together(cluster.address, 2, work)
    assert first[0] < 6
    assert first[1:] == second[1:] == [6, 6, 6]


@pytest.mark.thorough
def test_after_a_restore_nothing_of_before_is_served(tmp_path: Path) -> None:
    with ps.local_cluster(1, 1, checkpoint_url=str(tmp_path)) as cluster:
        client = ps.connect(cluster.address, request_deadline_s=DEADLINE_S)
        rows = counting(client, "restored", cache_steps=50)
        assert step(rows) == 0
        made = client.checkpoint().wait()
        for _ in range(3):
            step(rows)
        again = client.restore(made.url)
        with pytest.raises((ps.Fenced, ps.InvalidConfig)):
            rows(IDS)
        restored = counting(again, "restored", cache_steps=50)
        assert looked_up(restored) == 1
        again.close()


@pytest.mark.thorough
@pytest.mark.parametrize(("lane", "storage"), [("grpc", "float16"), ("shm", "full")])
def test_a_killed_server_makes_no_row_older(lane: str, storage: str) -> None:
    """Two workers; of its own steps a row lacks two at most, and what it had it keeps."""
    with replicated_cluster(servers=3, workers=2) as cluster, ExitStack() as stack:
        clients = [
            stack.enter_context(
                ps.connect(cluster.address, lane=lane, request_deadline_s=DEADLINE_S)
            )
            for _ in range(2)
        ]
        options: dict[str, Any] = {"cache_steps": 2, "storage": storage}
        models = [counting(each, "counted", **options) for each in clients]
        pool = stack.enter_context(ThreadPoolExecutor(2))

        def train(model: ps.Embedding, count: int) -> list[torch.Tensor]:
            found = []
            for _ in range(count):
                values = model(IDS)
                model.prefetch(IDS)
                values.sum().backward()
                model.step()
                found.append(-values.detach()[:, 0])
            return found

        last = [torch.zeros(6) for _ in models]
        for number in range(4):
            if number in (1, 3):
                cluster.healed()  # a slow machine takes a backup for dead now and then
                cluster.kill(cluster.living[0])
            trained = pool.map(lambda model: train(model, 6), models)
            for at, found in enumerate(trained):
                for own, has in enumerate(found, 6 * number):
                    assert (has >= own - 2).all()
                    assert (has >= last[at]).all()
                    last[at] = has
        for each, model in zip(clients, models, strict=True):
            assert (each.pull_rows(model.table, IDS.numpy()) == -48.0).all()
            assert model.cache_hit_count > 0


def test_many_threads_look_rows_up_in_one_cache(client: ps.Client) -> None:
    """A small one of long rows, which come and go: each row that is found is whole, and young
    enough.
    """
    rows = counting(client, "threads", dim=16_384, cache_rows=16, cache_steps=2)
    ids = torch.arange(24)

    def evaluate(seed: int) -> list[tuple[int, int]]:
        draws, found = torch.Generator().manual_seed(seed), []
        with torch.no_grad():
            for _ in range(40):
                some = ids[torch.randint(24, (8,), generator=draws)]
                before, values = rows.table.clock, rows(some)
                assert (values == values[:, :1]).all()
                found.append((before, -int(values.max())))
        return found

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(evaluate, seed) for seed in range(3)]
        for _ in range(20):
            push(client, rows, ids)
        for run in running:
            assert all(has >= before - 2 for before, has in run.result(DEADLINE_S))
    assert rows.cache_hit_count > 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cache_rows": -1}, "cache_rows is -1"),
    ({"cache_steps": 2, "consistency": "bsp"}, "expected 0, or consistency='asp'"),
    ({"cache_steps": 2, "cache_rows": 0}, "expected cache_rows, too"),
    ({"consistency": "asp:divide"}, "servers judge a step"),
    ({"cache_rows": 2**31 - 1, "partitions": 1}, "expected fewer than this machine's memory"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_a_cache_that_cannot_be_is_refused(
    client: ps.Client, options: dict[str, Any], words: str
) -> None:
    settings = {"consistency": "asp", "cache_rows": 9, **options}
    with pytest.raises(ps.InvalidConfig, match=words):
        ps.Embedding(client, "refused", 4096, optimizer=ps.SGD(), **settings)
