"""Embedding tables on a cluster, against torch's own on one process, and through its changes."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ps_worker as ps
from ps_core import limits
from ps_core.rows import first_values, mixed_ids, salt_of
from ps_runtime.launch.cluster_shape import CheckpointPlan
from ps_worker.embedding.rows import cut_ids, rows_of
from ps_worker.training.trained_rows import MAX_PASS_COUNT
from tests.integration.command_line import run_here
from tests.integration.replicated_cluster import replicated_cluster
from tests.integration.rows_alone import RowsAlone

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

DIM, DEADLINE_S = 8, 30.0
IDS = 200


@pytest.fixture(scope="module")
def client() -> Iterator[ps.Client]:
    with (
        ps.local_cluster(servers=2, workers=1) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
    ):
        yield client


def twin_of(embedding: ps.Embedding) -> nn.Embedding:
    """torch's, with the rows that the servers begin with."""
    twin = nn.Embedding(IDS, DIM, sparse=True)
    with torch.no_grad():
        twin.weight.copy_(embedding(torch.arange(IDS)))
    return twin


OPTIMIZERS: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (ps.SGD(lr=0.1), lambda given: torch.optim.SGD(given, lr=0.1)),
    "adagrad": (ps.Adagrad(lr=0.1), lambda given: torch.optim.Adagrad(given, lr=0.1)),
    "adagrad from 0.1": (
        ps.Adagrad(lr=0.1, initial_accumulator_value=0.1),
        lambda given: torch.optim.Adagrad(given, lr=0.1, initial_accumulator_value=0.1),
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_as_torchs_with_sparse_gradients(client: ps.Client, name: str) -> None:
    ours, theirs = OPTIMIZERS[name]
    embedding = ps.Embedding(client, f"rows of {name}", DIM, optimizer=ours, seed=3)
    twin = twin_of(embedding)
    reference = theirs(twin.parameters())
    draws = torch.Generator().manual_seed(5)
    target = torch.randn(DIM, generator=draws)
    for _ in range(20):
        ids = torch.randint(IDS, (4, 6), generator=draws)  # some come twice
        for model in (embedding, twin):
            ((model(ids) - target) ** 2).mean().backward()
        embedding.step()
        with torch.sparse.check_sparse_tensor_invariants():
            reference.step()
        reference.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(embedding(torch.arange(IDS)), twin.weight, rtol=0, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("shape", ["matrix", "offsets", "last offset"])
def test_a_bag_is_torchs(client: ps.Client, mode: str, shape: str) -> None:
    draws = torch.Generator().manual_seed(7)
    bag = ps.EmbeddingBag(
        client,
        f"bag {mode} {shape}",
        DIM,
        mode=mode,
        include_last_offset=shape == "last offset",
        optimizer=ps.SGD(lr=0.1),
    )
    with torch.no_grad():
        all_ids = torch.arange(50)
        rows = (
            bag(all_ids[:, None]) if shape == "matrix" else bag(all_ids, *_offsets(shape, [1] * 50))
        )
    twin = nn.EmbeddingBag.from_pretrained(
        rows.clone(), freeze=False, mode=mode, include_last_offset=shape == "last offset"
    )
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(5):
        counts = [3, 1, 4, 2] if shape != "matrix" else [5] * 4
        ids = torch.randint(50, (sum(counts),), generator=draws)
        weights = torch.rand(len(ids), generator=draws) if mode == "sum" else None
        given: tuple[Any, ...] = (ids, *_offsets(shape, counts), weights)
        if shape == "matrix":
            given = ids.reshape(4, 5), None, None if weights is None else weights.reshape(4, 5)
        for model in (bag, twin):
            model(*given).square().sum().backward()
        bag.step()
        reference.step()
        reference.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(bag(*given), twin(*given), rtol=0, atol=1e-5)


def _offsets(shape: str, counts: list[int]) -> tuple[torch.Tensor, ...]:
    """Where each bag begins, if that is said, and where the last ends, if that is said, too."""
    if shape == "matrix":
        return ()
    begins = torch.tensor([0, *counts]).cumsum(0)
    return (begins if shape == "last offset" else begins[:-1],)


@pytest.mark.thorough
def test_under_adam_each_row_is_a_parameter_of_its_own(client: ps.Client) -> None:
    table = client.create_embedding("adam", DIM, optimizer=ps.Adam(lr=0.1), init=ps.Uniform(1.0))
    rows = [nn.Parameter(torch.from_numpy(client.pull_rows(table, each))) for each in range(10)]
    optimizers = [torch.optim.Adam([row], lr=0.1) for row in rows]
    draws = np.random.default_rng(2)
    for _ in range(12):
        ids = draws.permutation(10)[:4]
        gradients = draws.standard_normal((4, DIM)).astype(np.float32)
        client.wait(client.push_rows(table, ids, gradients))
        for row_id, gradient in zip(ids, gradients, strict=True):
            rows[row_id].grad = torch.from_numpy(gradient)
            optimizers[row_id].step()
    expected = np.stack([row.detach().numpy() for row in rows])
    np.testing.assert_allclose(client.pull_rows(table, range(10)), expected, rtol=0, atol=1e-6)


@pytest.mark.thorough
def test_row_wise_adagrad_has_one_number_for_each_row(client: ps.Client) -> None:
    table = client.create_embedding("row-wise", DIM, optimizer=ps.RowwiseAdagrad(lr=0.5, eps=0.0))
    draws = np.random.default_rng(1)
    expected, sums = np.zeros(DIM), 0.0
    for _ in range(5):
        gradient = draws.standard_normal(DIM).astype(np.float32)
        client.wait(client.push_rows(table, [7], gradient[None]))
        sums += float((gradient.astype(np.float64) ** 2).mean())
        expected -= 0.5 * gradient / np.sqrt(sums)
    np.testing.assert_allclose(client.pull_rows(table, 7), expected, rtol=1e-5)


@pytest.mark.thorough
def test_ftrl_trains_what_has_a_signal_and_leaves_exact_zeros_elsewhere(client: ps.Client) -> None:
    embedding = ps.Embedding(
        client, "sparse", DIM, optimizer=ps.FTRL(lr=0.5, l1=1.0), init=ps.Normal(0.1)
    )
    draws = torch.Generator().manual_seed(8)
    target = torch.tensor([2.0, -1.0, 0.5])
    for _ in range(60):
        ids = torch.randint(20, (40,), generator=draws)  # most come several times
        rows = embedding(ids)
        noise = 1e-3 * torch.randn(40, DIM - 3, generator=draws)
        (((rows[:, :3] - target) ** 2).sum() + (rows[:, 3:] * noise).sum()).backward()
        embedding.step()
    with torch.no_grad():
        trained, others = embedding(torch.arange(20)), embedding(torch.arange(20, 40))
    torch.testing.assert_close(trained[:, :3], target.expand(20, 3), rtol=0, atol=0.05)
    assert not trained[:, 3:].any()
    assert others.all(), "a row without a step has its initial value"


def test_a_row_that_nobody_touched_is_a_function_of_seed_and_id(client: ps.Client) -> None:
    ids = np.array([0, 5, 2**63, 2**64 - 1, 5], np.uint64)
    first = client.create_embedding("a", DIM, optimizer=ps.SGD(), init=ps.Normal(0.5), seed=1)
    same = client.create_embedding("b", DIM, optimizer=ps.SGD(), init=ps.Normal(0.5), seed=1)
    other = client.create_embedding("c", DIM, optimizer=ps.SGD(), init=ps.Normal(0.5), seed=2)
    rows = client.pull_rows(first, ids)
    assert rows.shape == (5, DIM)
    assert np.array_equal(rows, client.pull_rows(same, ids))
    assert np.array_equal(rows[1], rows[4])
    assert not np.array_equal(rows, client.pull_rows(other, ids))
    assert len(np.unique(rows)) > 25


def test_what_is_pushed_several_times_in_a_step_is_summed(client: ps.Client) -> None:
    table = client.create_embedding("sums", 2, optimizer=ps.SGD(lr=1.0))
    client.push_rows(table, [1, 2, 1], np.ones((3, 2), np.float32), seal=False)
    client.push_rows(table, [2, 3], np.full((2, 2), 10, np.float32), seal=False)
    client.wait(client.seal(table))
    rows = client.pull_rows(table, [1, 2, 3, 4])
    assert rows[:, 0].tolist() == [-2.0, -11.0, -10.0, 0.0]


def test_thousands_of_ids_come_in_several_requests(client: ps.Client) -> None:
    table = client.create_embedding("many", 4, optimizer=ps.SGD(lr=1.0))
    ids = np.random.default_rng(2).permutation(40_000)
    client.wait(client.push_rows(table, ids, np.repeat(ids[:, None], 4, 1).astype(np.float32)))
    rows = client.pull_rows(table, np.arange(40_000).reshape(200, 200))
    assert rows.shape == (200, 200, 4)
    assert np.array_equal(rows[..., 0].reshape(-1), -np.arange(40_000))


@pytest.mark.thorough
def test_more_pulls_at_once_than_shared_memory_holds_have_their_rows(client: ps.Client) -> None:
    """Some come as bytes then, and none has another's rows."""
    table = client.create_embedding("at once", 64, optimizer=ps.SGD(), init=ps.Normal(1.0))
    spec = rows_of(table.table)
    count = limits.LANE_ANSWER_BYTES // (64 * 4 * 2)
    batches = [cut_ids(np.arange(n, n + count, dtype=np.uint64), spec) for n in range(6)]
    for _ in range(3):  # first without shared memory, which is only being reserved
        tickets = [client.pulls.start_rows(table, batch) for batch in batches]
        found = [client.wait(t)[b.places] for t, b in zip(tickets, batches, strict=True)]
        for first, second in itertools.pairwise(found):
            assert np.array_equal(first[1:], second[:-1])
    salt, values = salt_of(0), table.table.spec.initializer
    assert np.array_equal(
        found[0], first_values(mixed_ids(np.arange(count, dtype=np.uint64), salt), values, 64, "f4")
    )


@pytest.mark.thorough
def test_a_step_that_was_received_is_taken_whole_by_a_backup_without_memory() -> None:
    """It has rows that are there, in all partitions, and a new one. When it is sent again, the
    backup makes that row, since the step is sealed in the other ranges.
    """
    ids = np.arange(1_500)
    with replicated_cluster(servers=2, workers=2) as cluster, ExitStack() as stack:
        clients = [
            stack.enter_context(ps.connect(cluster.address, request_deadline_s=DEADLINE_S))
            for _ in range(2)
        ]
        tables = [c.create_embedding("rows", 256, optimizer=ps.SGD(lr=1.0)) for c in clients]

        def push(rank: int, own: Any) -> Any:
            return clients[rank].push_rows(tables[rank], own, np.ones((len(own), 256), np.float32))

        for client, ticket in zip(clients, [push(0, ids), push(1, ids)], strict=True):
            client.wait(ticket)
        first, second = cluster.living
        cluster.kill(second)
        small = cluster.served(cluster.begin({"PUSHPULL_MEMORY_MB": "1"}))
        cluster.healed()
        step = push(0, np.append(ids[:200], 10_000_000))
        with pytest.raises(ps.WaitExpired, match="worker 1"):  # it is sealed, and all have it
            clients[0].wait(step, timeout_s=2.0)
        cluster.kill(first)
        assert clients[1].wait(push(1, ids[:200])).applied
        assert clients[0].wait(step).applied
        assert cluster.living == [small]
        rows = clients[0].pull_rows(tables[0], np.append(ids, 10_000_000))
        assert (rows[:200] == -2).all()
        assert (rows[200:1_500] == -1).all()
        assert (rows[1_500] == -0.5).all(), "worker 1 had no gradient of it"
        step = push(0, np.arange(20_000, 40_000))
        clients[1].wait(push(1, ids[:1]))
        with pytest.raises(ps.TableFull):
            clients[0].wait(step)


@pytest.mark.thorough
def test_rows_beyond_a_servers_memory_are_refused_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that is refused changes no row on any server."""
    monkeypatch.setenv("PUSHPULL_MEMORY_MB", "4")
    with (
        ps.local_cluster(servers=2, workers=1) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
    ):
        table = client.create_embedding("full", 256, optimizer=ps.SGD(lr=1.0))
        ones, made = np.ones((500, 256), np.float32), 0

        def pushed(first: int) -> ps.StepResult:
            return client.wait(client.push_rows(table, np.arange(first, first + 500), ones))

        def fill() -> None:
            nonlocal made
            for first in range(0, 40_000, 500):
                pushed(first)
                made = first + 500

        with pytest.raises(ps.TableFull, match=r"'full' has no space .* \(memory_mb\)"):
            fill()
        assert 5_000 < made < 9_000
        assert not client.pull_rows(table, np.arange(made, made + 500)).any()
        assert pushed(0).applied
        rows = client.pull_rows(table, np.arange(made))
        assert (rows[:500] == -2.0).all()
        assert (rows[500:] == -1.0).all()


def test_rows_that_no_optimizer_steps_are_told(
    client: ps.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """The optimizer was given the parameters of a model, which are without its rows."""
    rows = ps.Embedding(client, "left out", 2, optimizer=ps.SGD(lr=0.1))
    model = nn.Sequential(rows, nn.Linear(2, 1))
    optimizer = ps.DistributedOptimizer(
        client, model.parameters(), ps.SGD(lr=0.1), name="without rows"
    )

    def trained(*, are_stepped: bool = False) -> int:
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.arange(2)).sum().backward()
            optimizer.step()
            if are_stepped:
                rows.step()
        return caplog.text.count("rows_not_stepped")

    assert trained() == 1
    assert "'left out'" not in caplog.text.split("rows_not_stepped")[0]
    rows.zero_grad()
    assert trained(are_stepped=True) == 1


def test_a_script_that_never_steps_is_told(client: ps.Client) -> None:
    embedding = ps.Embedding(client, "never stepped", 2, optimizer=ps.SGD())
    with torch.no_grad():
        for _ in range(3):
            embedding(torch.arange(2))
    rows = embedding(torch.arange(2))
    passes = embedding.trained._passes
    rows.sum().backward(retain_graph=True)
    assert len(passes) == 1
    passes *= MAX_PASS_COUNT
    with pytest.raises(ps.InvalidConfig, match=r"1024 backward passes .* expected a step"):
        embedding(torch.arange(2)).sum().backward()
    embedding.zero_grad()
    rows.sum().backward()
    assert embedding.step().applied


def test_backup_workers_are_refused(client: ps.Client) -> None:
    """A late worker would push to a clock that is over, again and again."""
    with pytest.raises(ps.InvalidConfig, match="without them, SSP or ASP"):
        ps.Embedding(client, "late", 2, optimizer=ps.SGD(), consistency="bsp:backup=1")


@pytest.mark.thorough
def test_steps_that_backup_workers_discard_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """An operator has set them, as `pushpull tables set` does: nobody can refuse that."""
    with ps.local_cluster(servers=1, workers=2) as cluster, ExitStack() as stack:
        clients = [
            stack.enter_context(ps.connect(cluster.address, request_deadline_s=DEADLINE_S))
            for _ in range(2)
        ]
        quick, late = (ps.Embedding(each, "rows", 2, optimizer=ps.SGD()) for each in clients)
        clients[0].set_consistency("rows", "bsp:backup=1")
        for embedding, is_told in ((quick, False), (late, True)):
            for _ in range(3):
                embedding(torch.arange(2)).sum().backward()
                assert embedding.step().discarded is is_told
            assert caplog.text.count("rows_of_late_step_lost") == is_told
        assert "pushpull tables set 'rows' bsp" in caplog.text


def test_a_reader_names_the_length_of_a_row(client: ps.Client) -> None:
    ps.Embedding(client, "read", 2, optimizer=ps.SGD())
    (address,) = client.connection.config.scheduler
    with ps.connect(address, role="reader") as reader:
        with pytest.raises(ps.InvalidConfig, match="dim is 3, and rows of table 'read' have 2"):
            ps.Embedding(reader, "read", 3, optimizer=ps.SGD())
        rows = ps.Embedding(reader, "read", 2, optimizer=ps.SGD())
        assert rows.embedding_dim == 2
        rows.zero_grad()  # as of a module in which it is
        assert not reader.checkpoints.save_points.has_state


def test_it_is_neither_copied_nor_pickled(client: ps.Client) -> None:
    model = nn.Sequential(ps.Embedding(client, "one", 2, optimizer=ps.SGD()), nn.Linear(2, 1))
    for take in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ps.InvalidConfig, match="its rows are on the servers"):
            take(model)
    assert list(model.state_dict()) == ["1.weight", "1.bias"]
    assert str(model[0]) == "Embedding('one', 2)"


REFUSED: list[tuple[Any, Any, type[ps.PushpullError], str]] = [
    ([-1], np.ones((1, 2), np.float32), ps.InvalidKeys, "negative"),
    ([1.5], np.ones((1, 2), np.float32), ps.InvalidTensor, "whole numbers"),
    ([1], np.ones((1, 3), np.float32), ps.InvalidTensor, "expected that of the ids, and 2"),
    ([1], np.ones((1, 2)), ps.InvalidTensor, "float64; expected float32"),
    ([1], np.full((1, 2), np.nan, np.float32), ps.InvalidTensor, "gradient of id 1 is not finite"),
]


@pytest.mark.parametrize(("ids", "gradients", "error", "words"), REFUSED)
def test_what_is_wrong_is_refused_and_changes_nothing(
    client: ps.Client, ids: Any, gradients: Any, error: type[Exception], words: str
) -> None:
    table = client.create_embedding("refused", 2, optimizer=ps.SGD(lr=1.0))
    with pytest.raises(error, match=words):
        client.wait(client.push_rows(table, ids, gradients))
    assert not client.pull_rows(table, [0, 1]).any()


def test_a_hash_may_be_negative(client: ps.Client) -> None:
    table = client.create_embedding("hashes", 2, optimizer=ps.SGD(lr=1.0))
    ones = np.ones((1, 2), np.float32)
    client.wait(client.push_rows(table, [-1], ones, hashed_ids=True))
    rows = client.pull_rows(table, np.array([2**64 - 1], np.uint64))
    assert np.array_equal(rows, -ones)


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": ps.AdamW()}, "optimizer is adamw"),
    ({"optimizer": ps.SGD(momentum=0.9)}, "momentum"),
    ({"optimizer": ps.FTRL(lr=1e-19)}, "'lr' is 1e-19; expected at least 1e-18"),
    ({"optimizer": ps.SGD(), "partitions": -1}, "partition_count is -1"),
    ({"optimizer": ps.SGD(), "max_rows": 1e6}, "max_rows is 1000000.0; expected a whole number"),
    ({"optimizer": ps.SGD(), "max_rows": 9, "eviction": "fifo"}, "expected one of 'lru', 'lfu'"),
    ({"optimizer": ps.SGD(), "storage": "int4"}, "expected one of 'full', 'float16', 'bfloat16'"),
    ({"optimizer": ps.SGD(), "storage": "int8", "dtype": "float64"}, "a table of finite float32"),
    ({"optimizer": ps.SGD(), "dtype": "bfloat16"}, "bfloat16"),
    ({"optimizer": ps.SGD(), "init": ps.FromRank0()}, "from_rank_zero"),
    ({"optimizer": ps.SGD(), "consistency": ps.ASP(compensate=0.1)}, "compensation"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("options", "words"), SETTINGS)
def test_a_setting_that_rows_do_not_have_is_refused(
    client: ps.Client, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ps.InvalidConfig, match=words):
        client.create_embedding("wrong", 2, **options)


def test_verbs_of_the_other_kind_of_table_are_refused(client: ps.Client) -> None:
    rows = client.create_embedding("rows", 2, optimizer=ps.SGD())
    dense = client.create_table("dense", 2, optimizer=ps.SGD())
    for wrong in (
        lambda: client.pull(rows),
        lambda: client.push(rows, np.ones(2, np.float32)),
        lambda: client.pull_rows(dense, [1]),
        lambda: client.push_rows(dense, [1], np.ones((1, 2), np.float32)),
    ):
        with pytest.raises(ps.InvalidConfig, match="rows"):
            wrong()


@pytest.mark.parametrize("lane", ["grpc", pytest.param("shm", marks=pytest.mark.second_lane)])
def test_two_workers_are_averaged_and_a_killed_server_loses_nothing(lane: str) -> None:
    """Whole numbers: each sum is exact, whoever applied it."""
    with replicated_cluster(servers=3, workers=2) as cluster, ExitStack() as stack:
        clients = [
            stack.enter_context(
                ps.connect(cluster.address, lane=lane, request_deadline_s=DEADLINE_S)
            )
            for _ in range(2)
        ]
        adds = ps.SGD(lr=1.0, maximize=True)
        tables = [client.create_embedding("counts", 4, optimizer=adds) for client in clients]
        draws = np.random.default_rng(3)
        expected = np.zeros(IDS)
        for step in range(30):
            tickets = []
            for client, table in zip(clients, tables, strict=True):
                ids = draws.integers(IDS, size=50)
                np.add.at(expected, ids, 1.0)
                rows = np.full((50, 4), 2.0, np.float32)  # the mean of two workers halves it
                tickets.append((client, client.push_rows(table, ids, rows)))
            for client, ticket in tickets:
                client.wait(ticket)
            if step == 10:
                cluster.healed()  # a slow machine takes a backup for dead now and then
                cluster.kill(cluster.living[0])
        for client, table in zip(clients, tables, strict=True):
            assert np.array_equal(client.pull_rows(table, np.arange(IDS))[:, 0], expected)


@pytest.mark.thorough
@pytest.mark.parametrize("lane", ["grpc", "shm"])
def test_the_hottest_rows_are_shown(lane: str, tmp_path: Path) -> None:
    draws, everything = np.random.default_rng(8), np.arange(IDS)
    with (
        ps.local_cluster(2, 1) as cluster,
        ps.connect(cluster.address, lane=lane, request_deadline_s=DEADLINE_S) as client,
    ):
        table = client.create_embedding("hot", DIM, optimizer=ps.SGD(), partitions=4)
        client.create_table("dense", 4, optimizer=ps.SGD())
        client.wait(client.push_rows(table, everything[:100], np.ones((100, DIM), np.float32)))
        for _ in range(300):
            ids = np.append(draws.integers(IDS, size=20), [7, 3])
            client.pull_rows(table, ids)
        command = ("tables", "top", "h*", "--scheduler", cluster.address)
        shown, found = run_here(*command, cwd=tmp_path), run_here(*command, "--json", cwd=tmp_path)
        nothing = run_here("tables", "top", "none", "--scheduler", cluster.address, cwd=tmp_path)
    assert shown.returncode == found.returncode == 0, shown.stderr
    assert "hot: 100 rows" in shown.stdout
    (entry,) = json.loads(found.stdout)["tables"]
    assert {each["id"] for each in entry["pulled"][:2]} == {3, 7}
    assert entry["pushed_count"] == 100
    assert 0.4 < entry["found_share"] < 0.7
    assert sum(each["row_count"] for each in entry["ranges"]) == 100
    assert nothing.returncode != 0
    assert "no table is 'none'" in nothing.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("lane", "options"),
    [
        ("grpc", {"max_rows": 60, "partitions": 4, "storage": "int8"}),
        ("shm", {"max_rows": 90, "eviction": "lfu", "evict_after": 8, "admit_after": 2}),
    ],
    ids=["lru, rounded", "lfu, by age, admitted"],
)
def test_rows_leave_and_are_admitted_and_rounded_alike_on_every_server(
    lane: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Through a server's death, a backup that joins, and a restore on one server more."""
    draws, everything = np.random.default_rng(7), np.arange(IDS)

    def create(client: ps.Client) -> ps.TableHandle:
        return client.create_embedding(
            "kept", DIM, optimizer=ps.Adagrad(lr=0.1), init=ps.Uniform(1.0), **options
        )

    def train(client: ps.Client, table: ps.TableHandle, alone: RowsAlone, count: int) -> None:
        for _ in range(count):
            ids = (draws.zipf(1.3, 30) - 1) % IDS
            gradients = draws.standard_normal((30, DIM)).astype(np.float32)
            client.wait(client.push_rows(table, ids, gradients))
            alone.step([(ids, gradients)])
        assert np.array_equal(client.pull_rows(table, everything), alone.pull(everything))

    plan = CheckpointPlan(str(tmp_path))
    with (
        replicated_cluster(servers=3, workers=1, checkpoints=plan) as cluster,
        ps.connect(cluster.address, lane=lane, request_deadline_s=DEADLINE_S) as client,
    ):
        table = create(client)
        alone = RowsAlone(table)
        train(client, table, alone, 6)
        for _ in range(2):  # a backup that joined serves in the end
            cluster.healed()
            cluster.kill(cluster.living[0])
            train(client, table, alone, 6)
        made = client.checkpoint().wait()
    assert 0 < alone.store.row_count < IDS
    with (
        ps.local_cluster(3, 1, resume=made.url) as again,
        ps.connect(again.address, lane=lane, request_deadline_s=DEADLINE_S) as client,
    ):
        train(client, create(client), alone, 8)


@pytest.mark.thorough
def test_the_state_of_ftrl_is_in_a_checkpoint(tmp_path: Path) -> None:
    draws = np.random.default_rng(6)
    steps = [(draws.integers(20, size=30), draws.standard_normal((30, 3))) for _ in range(6)]

    def trained(client: ps.Client, some: slice) -> ps.TableHandle:
        ftrl = ps.FTRL(lr=0.2, l1=1.5, l2=0.1)
        table = client.create_embedding("kept", 3, optimizer=ftrl, init=ps.Uniform(1.0))
        client.pull_rows(table, np.arange(20))  # after a restore: takes up its clock
        for step, (ids, rows) in list(enumerate(steps))[some]:
            terms = {"lr": 0.2 / (1 + step)}
            pushed = client.push_rows(table, ids, rows.astype(np.float32), hyperparameters=terms)
            client.wait(pushed)
        return table

    with (
        ps.local_cluster(2, 1, checkpoint_url=str(tmp_path)) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
    ):
        trained(client, slice(0, 3))
        made = client.checkpoint().wait()
        undisturbed = client.pull_rows(trained(client, slice(3, 6)), np.arange(20))
    assert 0 < np.count_nonzero(undisturbed) < undisturbed.size
    with (
        ps.local_cluster(1, 1, resume=made.url) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
    ):
        resumed = client.pull_rows(trained(client, slice(3, 6)), np.arange(20))
    assert np.array_equal(resumed, undisturbed)
    out, state = tmp_path / "model.safetensors", tmp_path / "state.safetensors"
    command = ("checkpoint", "export", made.url, str(out), "--optimizer", str(state))
    assert run_here(*command, cwd=tmp_path).returncode == 0
    arrays = load_file(state)
    assert set(arrays) == {"kept/rows/held", "kept/rows/sum"}
    assert all(array.abs().max() > 0 for array in arrays.values())


@pytest.mark.thorough
def test_a_checkpoint_restores_rows_and_state_on_another_number_of_servers(tmp_path: Path) -> None:
    draws = np.random.default_rng(4)
    steps = [
        (draws.integers(IDS, size=60), draws.standard_normal((60, DIM)).astype(np.float32))
        for _ in range(8)
    ]

    def create(client: ps.Client) -> ps.TableHandle:
        return client.create_embedding(
            "kept", DIM, optimizer=ps.Adagrad(lr=0.1), init=ps.Uniform(1.0), seed=9
        )

    def train(client: ps.Client, table: ps.TableHandle, some: slice) -> None:
        for ids, rows in steps[some]:
            client.wait(client.push_rows(table, ids, rows))

    everything = np.arange(IDS + 10)
    with (
        ps.local_cluster(2, 1, checkpoint_url=str(tmp_path)) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
    ):
        table = create(client)
        train(client, table, slice(0, 4))
        made = client.checkpoint().wait()
        train(client, table, slice(4, 5))
        later = client.checkpoint().wait()
        train(client, table, slice(5, 8))
        undisturbed = client.pull_rows(table, everything)
    with (
        ps.local_cluster(3, 1, resume=made.url) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
    ):
        table = create(client)
        client.pull_rows(table, everything)
        assert table.clock == 4
        train(client, table, slice(4, 8))
        assert np.array_equal(client.pull_rows(table, everything), undisturbed)
        listed = run_here("tables", "list", "--scheduler", cluster.address, cwd=tmp_path)
    assert "kept: rows of 8 elements of float32, adagrad, bsp" in listed.stdout
    shown = run_here("checkpoint", "show", made.url, cwd=tmp_path)
    assert "kept: rows of 8 elements of float32 in 8 blocks" in shown.stdout
    assert run_here("checkpoint", "verify", made.url, cwd=tmp_path).returncode == 0
    compacted = run_here("checkpoint", "compact", later.url, cwd=tmp_path)
    assert compacted.returncode == 0, compacted.stderr
    different = run_here("checkpoint", "diff", made.url, later.url, cwd=tmp_path)
    assert re.search(r"kept: \d+ of 8 partitions .* of \d+ rows \d+ have", different.stdout)
    out, state = tmp_path / "model.safetensors", tmp_path / "state.safetensors"
    command = ("checkpoint", "export", made.url, str(out), "--optimizer", str(state))
    exported = run_here(*command, cwd=tmp_path)
    assert exported.returncode == 0, exported.stderr
    found, sums = load_file(out), load_file(state)["kept/rows/sum"]
    trained = np.unique(np.concatenate([ids for ids, _ in steps[:4]]))
    order = torch.argsort(found["kept/ids"])
    assert found["kept/ids"][order].tolist() == trained.tolist()
    with (
        ps.local_cluster(1, 1, resume=made.url) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
    ):
        rows = client.pull_rows(create(client), trained)
    assert np.array_equal(found["kept/rows"][order].numpy(), rows)
    expected = np.zeros((IDS, DIM), np.float32)
    for ids, gradients in steps[:4]:
        summed = np.zeros_like(expected)
        np.add.at(summed, ids, gradients)
        expected += np.square(summed)
    assert np.allclose(sums[order].numpy(), expected[trained], rtol=1e-5)
    described = json.loads(state.with_suffix(".json").read_text(encoding="utf-8"))
    assert described["state"] == {"kept/rows": {"slots": ["sum"]}}
    assert described["groups"][0]["tensors"] == ["kept/rows"]
