"""Embeddings in a module that an optimizer trains: its steps are of rows and parameters."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ps_worker as ps
from ps_core import limits
from pushpull.jagged import EmbeddingBagConfig, KeyedJaggedTensor
from tests.integration.lane_cluster import lane_cluster, until
from tests.integration.replicated_cluster import replicated_cluster

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

DIM, IDS, DEADLINE_S = 4, 20, 30.0
EVERYTHING = torch.arange(IDS)


@pytest.fixture(scope="module")
def client() -> Iterator[ps.Client]:
    with (
        ps.local_cluster(servers=2, workers=1) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
    ):
        yield client


class Tastes(nn.Module):
    """Rows, and a head over them."""

    def __init__(self, users: nn.Module) -> None:
        super().__init__()
        self.users = users
        torch.manual_seed(1)
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.users(ids))
        return found


def tastes(client: ps.Client, name: str, **options: Any) -> Tastes:
    options = {"optimizer": ps.SGD(lr=0.1), "seed": 5, **options}
    return Tastes(ps.Embedding(client, name, DIM, **options))


def twin_of(model: Tastes) -> Tastes:
    """torch's alone, with the values that the model has at first."""
    users = nn.Embedding(IDS, DIM)
    with torch.no_grad():
        users.weight.copy_(model.users(EVERYTHING))
    twin = Tastes(users)
    twin.head.load_state_dict(model.head.state_dict())
    return twin


def batch(step: int) -> torch.Tensor:
    """Some ids several times, each of a tenth of them at most."""
    draws = torch.Generator().manual_seed(step)
    return torch.randint(IDS, (12,), generator=draws)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    found: torch.Tensor = (model(batch(step)) - 1.0).square().mean()
    return found


def assert_same(model: Tastes, twin: Tastes) -> None:
    with torch.no_grad():
        torch.testing.assert_close(model.users(EVERYTHING), twin.users(EVERYTHING))
    torch.testing.assert_close(model.head.state_dict(), twin.head.state_dict())


@pytest.mark.thorough
@pytest.mark.parametrize("cache_rows", [0, 9])
def test_one_step_is_of_both(client: ps.Client, cache_rows: int) -> None:
    """Gradients are cleared before or after the forward pass, and of two passes are added up. A
    cache has less than half of the rows.
    """
    name = f"both {cache_rows}"
    model = tastes(client, f"{name}/users", cache_rows=cache_rows)
    twin = twin_of(model)
    users = model.users
    assert isinstance(users, ps.Embedding)
    optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.05), name=name)
    head, rows = list(twin.head.parameters()), list(twin.users.parameters())
    groups: list[dict[str, Any]] = [{"params": head}, {"params": rows, "lr": 0.1}]
    reference = torch.optim.SGD(groups, lr=0.05)
    for step in range(6):
        users.hyperparameters["lr"] = reference.param_groups[1]["lr"] = 0.1 / (1 + step)
        for each, chosen in ((model, optimizer), (twin, reference)):
            loss_of(each, 100 + step)  # without a backward pass
            first = loss_of(each, step)
            chosen.zero_grad()
            first.backward()
            loss_of(each, 10 + step).backward()
            chosen.step()
    assert_same(model, twin)
    assert optimizer.clock == users.table.clock == 6
    assert {result.clock for result in optimizer.results} == {6}
    assert bool(users.cache_hit_count) == bool(cache_rows)
    assert len(optimizer.results) == 2


def test_a_reader_pulls_a_model_whose_rows_have_its_name(client: ps.Client) -> None:
    """As `checkpoint export --prefix` wants them to."""
    model = tastes(client, "pulled/users")
    optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.1), name="pulled")
    loss_of(model, 0).backward()
    optimizer.step()
    [address] = client.connection.config.scheduler
    with ps.connect(address, role="reader") as reader:
        read = tastes(reader, "pulled/users")
        assert ps.pull_model(reader, read, "pulled", timeout_s=DEADLINE_S) == 1
        assert torch.equal(read.head.weight, model.head.weight)
        assert torch.equal(read(EVERYTHING), model(EVERYTHING))


def test_a_module_may_have_nothing_but_embeddings(client: ps.Client) -> None:
    model = ps.Embedding(client, "alone", DIM, optimizer=ps.SGD(lr=0.1), seed=2)
    twin = nn.Embedding(IDS, DIM)
    with torch.no_grad():
        twin.weight.copy_(model(EVERYTHING))
    optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.1), name="alone")
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        for each, chosen in ((model, optimizer), (twin, reference)):
            chosen.zero_grad()
            loss_of(each, step).backward()
            chosen.step()
    with torch.no_grad():
        torch.testing.assert_close(model(EVERYTHING), twin(EVERYTHING))
    assert optimizer.clock == model.table.clock == 3
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)


def test_rows_are_frozen_and_unfrozen(client: ps.Client) -> None:
    model = tastes(client, "frozen/users")
    twin = twin_of(model)
    optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.1), name="frozen")
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(4):
        for each, chosen in ((model, optimizer), (twin, reference)):
            each.users.requires_grad_(step % 2 == 1)
            chosen.zero_grad()
            loss_of(each, step).backward()
            chosen.step()
    assert_same(model, twin)


def test_a_collection_is_frozen_whole(client: ps.Client) -> None:
    tables = [EmbeddingBagConfig(name="frozen ids", embedding_dim=DIM)]
    bags = ps.EmbeddingBagCollection(client, tables, optimizer=ps.SGD(lr=0.1))
    ids, lengths = torch.arange(3), torch.ones(3, dtype=torch.int64)
    batch = KeyedJaggedTensor.from_lengths_sync(["frozen ids"], ids, lengths)
    assert not bags.requires_grad_(False)(batch).values().requires_grad
    assert bags.requires_grad_()(batch).values().requires_grad


def test_a_gradient_that_was_cleared_is_not_pushed(client: ps.Client) -> None:
    model = tastes(client, "cleared/users")
    twin = twin_of(model)
    optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.1), name="cleared")
    for each, chosen in ((model, optimizer), (twin, torch.optim.SGD(twin.parameters(), lr=0.1))):
        kept = loss_of(each, 1)
        kept.backward(retain_graph=True)
        chosen.zero_grad()
        kept.backward()
        chosen.step()
        chosen.zero_grad()
        loss_of(each, 2).backward()
        chosen.step()
    assert_same(model, twin)


@pytest.mark.thorough
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("setting", ["bsp", "asp", "bsp beside asp"])
def test_the_norm_is_of_both(client: ps.Client, setting: str, passes: int) -> None:
    """Where rows are under ASP and parameters under BSP, those are clipped by the norm of both, and
    these by their own.
    """
    name = f"norm {setting} {passes}"
    dense, *other = setting.split(" beside ")
    model = tastes(client, f"{name}/users", consistency=(other or [dense])[0])
    twin = twin_of(model)
    optimizer = ps.DistributedOptimizer(
        client, model, ps.SGD(lr=0.1), name=name, clip_norm=0.5, consistency=dense
    )
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(4):
        for each, chosen in ((model, optimizer), (twin, reference)):
            chosen.zero_grad()
            for number in range(passes):
                loss_of(each, 7 * number + step).backward()
        if other:
            gradients = [p.grad for p in twin.parameters() if p.grad is not None]
            both = torch.nn.utils.get_total_norm(gradients)
            torch.nn.utils.clip_grads_with_norm_(twin.users.parameters(), 0.5, both)
            expected = torch.nn.utils.clip_grad_norm_(twin.head.parameters(), 0.5)
        else:
            expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        optimizer.step()
        reference.step()
        assert optimizer.gradient_norm == pytest.approx(float(expected), rel=1e-5)
    assert_same(model, twin)


def test_add_clips_both(client: ps.Client) -> None:
    model = tastes(client, "add/users")
    twin = twin_of(model)
    local = ps.Add(lambda groups: torch.optim.SGD(groups, lr=0.1))
    optimizer = ps.DistributedOptimizer(client, model, local, name="add", clip_norm=0.5)
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        for each, chosen in ((model, optimizer), (twin, reference)):
            chosen.zero_grad()
            loss_of(each, step).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        optimizer.step()
        reference.step()
    assert_same(model, twin)


@pytest.mark.thorough
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_the_loss_scale_reaches_rows(client: ps.Client, clip_norm: float | None) -> None:
    name = f"scaled {clip_norm}"
    model = tastes(client, f"{name}/users", cache_rows=0 if clip_norm is None else 30)
    twin = twin_of(model)
    optimizer = ps.DistributedOptimizer(
        client, model, ps.SGD(lr=0.1), name=name, clip_norm=clip_norm
    )
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(4):
        optimizer.zero_grad()
        reference.zero_grad()
        loss = loss_of(model, step)
        scaler.scale(loss * float("inf") if step == 1 else loss).backward()
        loss_of(twin, step).backward()
        scaler.step(optimizer)
        scaler.update()
        if step != 1:
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(twin.parameters(), clip_norm)
            reference.step()
    assert_same(model, twin)
    assert scaler.get_scale() == 512.0


def test_an_overflow_that_the_scaler_does_not_see_says_what_helps(client: ps.Client) -> None:
    """It looks at parameters alone."""
    model = tastes(client, "unseen/users")
    twin = twin_of(model)
    optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.1), name="unseen")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(model, 0)).backward()
    (model.users(batch(0)) * float("inf")).sum().backward()
    with pytest.raises(ps.InvalidTensor, match=r"update\(scaler.get_scale\(\) / 2\)"):
        scaler.step(optimizer)
    assert_same(model, twin)
    assert optimizer.clock == 1
    scaler.update(scaler.get_scale() / 2)
    assert scaler.get_scale() == 512.0
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 1)).backward()
    loss_of(twin, 1).backward()
    scaler.step(optimizer)
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert_same(model, twin)


def test_a_scaler_of_nothing_but_rows_is_refused(client: ps.Client) -> None:
    rows = ps.Embedding(client, "scaled rows", DIM, optimizer=ps.SGD(lr=0.1))
    optimizer = ps.DistributedOptimizer(client, rows, ps.SGD(lr=0.1), name="scaled rows")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(rows, 0)).backward()
    with pytest.raises(ps.InvalidConfig, match=r"no parameter with a gradient.* bfloat16"):
        scaler.step(optimizer)
    assert optimizer.clock == 0


def test_rows_that_are_not_finite_skip_the_step_of_both(client: ps.Client) -> None:
    model = tastes(client, "not finite/users")
    twin = twin_of(model)
    optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.1), name="not finite")
    loss_of(model, 0).backward()
    (model.users(batch(0)) * float("inf")).sum().backward()
    with pytest.raises(ps.InvalidTensor, match="rows of 'not finite/users' has an infinity"):
        optimizer.step()
    assert_same(model, twin)
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    for each, chosen in ((model, optimizer), (twin, reference)):
        chosen.zero_grad()
        loss_of(each, 1).backward()
        chosen.step()
    assert_same(model, twin)


def test_a_step_of_rows_that_cannot_be_sent_is_refused_whole(
    client: ps.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tastes(client, "too many/users", partitions=1)
    twin = twin_of(model)
    optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.1), name="too many")
    loss_of(model, 0).backward()
    with monkeypatch.context() as patch:
        patch.setattr(limits, "MAX_ROW_COUNT", 3)
        with pytest.raises(ps.InvalidConfig, match="more partitions than 1"):
            optimizer.step()
    assert_same(model, twin)
    optimizer.step()
    loss_of(twin, 0).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert_same(model, twin)


@pytest.mark.thorough
def test_what_a_script_gets_wrong_is_refused(client: ps.Client) -> None:
    model = tastes(client, "wrong/users")
    users = model.users
    assert isinstance(users, ps.Embedding)

    def train(module: nn.Module, name: str, **options: Any) -> ps.DistributedOptimizer:
        return ps.DistributedOptimizer(client, module, ps.SGD(lr=0.1), name=name, **options)

    again = ps.Embedding(client, "wrong/users", DIM, optimizer=ps.SGD(lr=0.1), seed=5)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: train(nn.ModuleList([model, again]), "twice"), "two Embeddings of table"),
        (lambda: train(model, "backup", consistency="bsp:backup=1"), "without backup workers"),
        (
            lambda: ps.DistributedOptimizer(
                client,
                model,
                ps.Aggregate(lambda groups: torch.optim.SGD(groups, lr=0.1)),
                name="sums",
                clip_norm=1.0,
            ),
            "clip_norm with Aggregate does not reach rows",
        ),
    ]
    for wrong, words in cases:
        with pytest.raises(ps.InvalidConfig, match=words):
            wrong()
        gc.collect()  # what was refused owns no rows
    optimizer = train(model, "wrong")
    with pytest.raises(ps.InvalidConfig, match="another optimizer's"):
        train(model, "second")
    with pytest.raises(ps.InvalidConfig, match=r"remove this call of step\(\)"):
        users.step()
    with pytest.raises(ps.InvalidConfig, match="without backup workers"):
        optimizer.set_consistency("bsp:backup=1")
    users.hyperparameters["momentun"] = 0.9
    loss_of(model, 0).backward()
    with pytest.raises(ps.InvalidConfig, match="no hyperparameter 'momentun'"):
        optimizer.step()
    users.hyperparameters.clear()
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 0)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(ps.InvalidConfig, match="clip by the optimizer's clip_norm="):
        scaler.step(optimizer)
    assert optimizer.clock == users.table.clock == 0


def test_an_edit_takes_a_clock_of_the_rows_too(client: ps.Client) -> None:
    """Else a worker that joins later would take them for behind."""
    model = tastes(client, "edited/users")
    optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.1), name="edited")
    for step in range(3):
        with torch.no_grad():
            model.head.bias.add_(1.0)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        assert {result.clock for result in optimizer.results} == {2 * (step + 1)}


PREFETCHED = {"bsp": [0, -1, -2, -3], "ssp:2": [0, -1, -2, -3], "asp": [0, 0, -1, -2]}
"""The rows that each step computes with: under ASP they lack the step before it."""


@pytest.mark.parametrize("consistency", PREFETCHED)
def test_rows_are_prefetched_and_no_staler_than_they_may_be(
    client: ps.Client, consistency: str
) -> None:
    rows = ps.Embedding(
        client, f"ahead {consistency}", DIM, optimizer=ps.SGD(lr=1.0), init=ps.Zeros(),
        consistency=consistency,
    )  # fmt: skip
    batches = [torch.arange(5 + number) for number in range(4)]
    found = []
    loader = ps.prefetch(batches, lambda ids: {rows: ids})
    assert len(loader) == 4
    for number, ids in enumerate(loader):
        expected = [batch.tolist() for batch in batches[max(number, 1) : number + 2]]
        assert [ahead.ids.tolist() for ahead in rows._ahead] == expected
        values = rows(ids)
        assert len(rows._ahead) == min(1, 3 - number)
        found.append(values[0, 0].item())
        values.sum().backward()
        rows.step()
    assert found == PREFETCHED[consistency]


def test_rows_prefetched_for_another_clock_or_too_long_ago_are_pulled_again(
    client: ps.Client,
) -> None:
    rows = ps.Embedding(
        client, "not ahead", DIM, optimizer=ps.SGD(lr=1.0), init=ps.Zeros(), consistency="bsp"
    )
    ids = torch.arange(3)

    def step() -> None:
        rows(ids).sum().backward()
        rows.step()

    rows.prefetch(ids)
    assert rows(ids).eq(0.0).all()  # in the same step still: it waits for nothing
    rows.prefetch(ids + 1)
    rows.prefetch(ids + 2)
    assert len(rows._ahead) == 2
    step()
    assert rows(ids + 1)[0].eq(-1.0).all()
    assert len(rows._ahead) == 1
    rows.prefetch(ids)
    rows.step()
    while len(rows._ahead) > 1:
        rows._ahead.popleft()
    expired: Future[Any] = Future()
    expired.set_exception(ps.WaitExpired("too long ago"))
    parts = rows._ahead[0].pull.parts
    parts[0] = replace(parts[0], ticket=ps.PullTicket(rows.table.table, expired))
    assert rows(ids).eq(-1.0).all()
    assert not rows._ahead
    damped = ps.Embedding(client, "damped", DIM, optimizer=ps.SGD(), consistency="asp:divide")
    damped.prefetch(ids)
    assert not damped._ahead


@pytest.mark.thorough
@pytest.mark.parametrize(("lane", "cache_rows"), [("grpc", 0), ("shm", 30)])
def test_a_killed_server_loses_no_step_of_either(lane: str, cache_rows: int) -> None:
    """Two workers of one process against torch's mean of both gradients; rows are prefetched."""
    with replicated_cluster(servers=3, workers=2) as cluster, ExitStack() as stack:
        clients = [
            stack.enter_context(
                ps.connect(cluster.address, lane=lane, request_deadline_s=DEADLINE_S)
            )
            for _ in range(2)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(2))
        models = list(pool.map(lambda each: tastes(each, "users", cache_rows=cache_rows), clients))
        twin = twin_of(models[0])
        optimizers = list(
            pool.map(
                lambda each, model: ps.DistributedOptimizer(each, model, ps.SGD(lr=0.1)),
                clients,
                models,
            )
        )
        reference = torch.optim.SGD(twin.parameters(), lr=0.1)

        def step_of(rank: int, step: int) -> None:
            users = models[rank].users
            assert isinstance(users, ps.Embedding)
            users.prefetch(batch(2 * (step + 1) + rank))
            optimizers[rank].zero_grad()
            loss_of(models[rank], 2 * step + rank).backward()
            optimizers[rank].step()

        for step in range(20):
            if step == 7:
                cluster.healed()  # a slow machine takes a backup for dead now and then
                cluster.kill(cluster.living[0])
            for done in [pool.submit(step_of, rank, step) for rank in range(2)]:
                done.result(DEADLINE_S)
            reference.zero_grad()
            for rank in range(2):
                (loss_of(twin, 2 * step + rank) / 2).backward()
            reference.step()
        for model in models:
            assert_same(model, twin)


def test_other_hyperparameters_of_rows_are_told_with_what_helps() -> None:
    def said_to(address: str, rank: int) -> str:
        try:
            with ps.connect(address, rank=rank, request_deadline_s=DEADLINE_S) as client:
                rows = ps.Embedding(client, "rows", DIM, optimizer=ps.SGD(lr=0.1))
                optimizer = ps.DistributedOptimizer(client, nn.ModuleList([rows]), ps.SGD(lr=0.1))
                rows.hyperparameters["lr"] = 0.5 * (1 + rank)
                rows(EVERYTHING).sum().backward()
                optimizer.step()
        except ps.InvalidConfig as refused:
            return str(refused)
        return ""  # the other one has ended

    with ps.local_cluster(servers=1, workers=2) as cluster, ThreadPoolExecutor(2) as pool:
        (said,) = filter(None, pool.map(said_to, [cluster.address] * 2, range(2)))
    assert said.startswith("workers 0 and 1 disagree about clock 1 of table 'rows': lr: 0.5 and 1;")
    assert "begins with those of the table" in said
    assert "start all workers again from a checkpoint" in said


@pytest.mark.thorough
def test_a_worker_that_joins_steps_both_with_the_others() -> None:
    environment = {"PUSHPULL_MAX_WORKERS": "3"}
    with (
        lane_cluster(servers=2, workers=1, environment=environment) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as first,
        ThreadPoolExecutor(2) as pool,
    ):
        targets: list[int] = []
        clocks: list[int] = []

        def train(client: ps.Client) -> np.ndarray[Any, Any]:
            model = tastes(client, "users", cache_rows=30)
            optimizer = ps.DistributedOptimizer(client, model, ps.SGD(lr=0.01))
            edits = client.rank == 0
            while not targets or optimizer.clock < targets[0]:
                if edits and optimizer.clock == 2:  # alone, and then no more
                    with torch.no_grad():
                        model.head.bias.add_(1.0)
                optimizer.zero_grad()
                loss_of(model, optimizer.clock + client.rank).backward()
                optimizer.step()
                clocks.append(optimizer.clock)
                assert {result.clock for result in optimizer.results} == {optimizer.clock}
                if client.rank:
                    targets[:] = targets or [optimizer.clock + 5]
            assert isinstance(model.users, ps.Embedding)
            return client.pull_rows(model.users.table, EVERYTHING)

        runs = [pool.submit(train, first)]
        until(lambda: max(clocks, default=0) >= 5, "the first one trains")
        late = ps.connect(cluster.address, request_deadline_s=DEADLINE_S)
        assert late.is_late_joiner
        runs.append(pool.submit(train, late))
        ours, theirs = [run.result(60) for run in runs]
        assert np.array_equal(ours, theirs)
        late.close(leave=False)


@pytest.mark.thorough
def test_a_block_that_is_computed_anew_pushes_its_rows_once() -> None:
    """The rows take a clock for the round all the same."""
    with ps.local_cluster(servers=2, workers=2) as cluster, ExitStack() as stack:
        mine, other = (
            stack.enter_context(ps.connect(cluster.address, request_deadline_s=DEADLINE_S))
            for _ in range(2)
        )
        model = tastes(mine, "users", consistency="asp")
        optimizer = ps.DistributedOptimizer(
            mine, model, ps.SGD(lr=0.1), name="tastes", consistency="asp:reject=0"
        )
        (dense,) = (each for each in mine.tables.handles if each.name.startswith("tastes/"))
        handle = other.table(dense.name)
        twin = twin_of(model)
        given: list[torch.Tensor] = []

        def closure() -> float:
            optimizer.zero_grad()
            loss = loss_of(model, 3)
            loss.backward()
            if not given:  # an update beside it, which the pushed block does not know
                step = np.ones(handle.element_count, np.float32)
                other.wait(other.push(handle, step))
            given.append(loss)
            return loss.item()

        optimizer.step(closure)
        assert len(given) == 2
        loss_of(twin, 3).backward()
        reference = torch.optim.SGD(twin.users.parameters(), lr=0.1)
        reference.step()
        assert isinstance(model.users, ps.Embedding)
        assert model.users.table.clock == optimizer.clock == 2
        optimizer.step()  # the gradients of the head are there still, those of the rows are not
        with torch.no_grad():
            torch.testing.assert_close(model.users(EVERYTHING), twin.users(EVERYTHING))


@pytest.mark.thorough
def test_after_a_wait_that_expired_the_next_gradients_are_a_step_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of rows alone: no parameter has a gradient that could tell."""
    with ps.local_cluster(servers=2, workers=2) as cluster, ExitStack() as stack:
        clients = [
            stack.enter_context(ps.connect(cluster.address, request_deadline_s=DEADLINE_S))
            for _ in range(2)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(2))

        def make(client: ps.Client) -> tuple[ps.Embedding, ps.DistributedOptimizer]:
            rows = ps.Embedding(client, "alone", DIM, optimizer=ps.SGD(lr=1.0), init=ps.Zeros())
            return rows, ps.DistributedOptimizer(client, rows, ps.SGD(lr=0.1))

        def step(made: tuple[ps.Embedding, ps.DistributedOptimizer]) -> None:
            rows, optimizer = made  # without zero_grad, which would end the last step
            rows(EVERYTHING).sum().backward()
            optimizer.step()

        first, second = pool.map(make, clients)
        waits = clients[0].connection
        with monkeypatch.context() as patch:
            patch.setattr(waits, "config", replace(waits.config, request_deadline_s=1.0))
            with pytest.raises(ps.WaitExpired):
                step(first)
        pool.submit(step, second).result(DEADLINE_S)
        for done in [pool.submit(step, made) for made in (first, second)]:
            done.result(DEADLINE_S)
        for rows, optimizer in (first, second):
            assert optimizer.clock == 2
            with torch.no_grad():
                assert rows(EVERYTHING).eq(-2.0).all()
