"""Add: each worker runs a torch optimizer of its own, and pushes how far that moved things.
Aggregate: each runs one on the sums, and the servers compare what scripts do to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker as ps

pytestmark = pytest.mark.slow

WORKERS = 2
STEPS = 5
NADAM = partial(torch.optim.NAdam, lr=0.05)

_names = count()


@pytest.fixture(scope="module", params=["shm", "grpc"])
def workers(request: pytest.FixtureRequest) -> Iterator[list[ps.Client]]:
    with ps.local_cluster(servers=2, workers=WORKERS) as cluster:
        clients = [
            ps.connect(cluster.address, rank=rank, lane=request.param) for rank in range(WORKERS)
        ]
        yield clients
        for client in clients:
            client.close(leave=False)


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 1))
    draw = torch.Generator().manual_seed(3)  # its own: threads share the default one
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1, generator=draw)
    return model


def _loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * rank + step)
    inputs = torch.randn(8, 40, generator=draw)
    loss: torch.Tensor = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
    return loss


def _together(workers: list[ps.Client], train: Any, count: int = WORKERS) -> list[Any]:
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(train, workers[:count], range(count)))


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _train(
    name: str, client: ps.Client, rank: int, *, consistency: str, scaled: bool = False
) -> torch.Tensor:
    model = _model()
    optimizer = ps.DistributedOptimizer(
        client, model, ps.Add(NADAM), name=name, consistency=consistency, block_elements=256
    )
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=64.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(_loss(model, rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.close()
    return _weights(model)


def test_bsp_averages_what_each_worker_did(workers: list[ps.Client]) -> None:
    """As one process that keeps an optimizer for each worker and averages after each step."""
    name = f"model-{next(_names)}"
    ends = _together(workers, lambda c, rank: _train(name, c, rank, consistency="bsp"))
    models = [_model() for _ in range(WORKERS)]
    optimizers = [NADAM(model.parameters()) for model in models]
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            _loss(model, rank, step).backward()
            optimizer.step()
        with torch.no_grad():
            for parts in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack(list(parts)).mean(dim=0)
                for part in parts:
                    part.copy_(mean)
    for end in ends:
        torch.testing.assert_close(end, _weights(models[0]), rtol=1e-4, atol=1e-5)
    assert torch.equal(*ends)


def test_loss_scaling_changes_nothing(workers: list[ps.Client]) -> None:
    plain, scaled = f"model-{next(_names)}", f"model-{next(_names)}"
    (first, _) = _together(workers, lambda c, rank: _train(plain, c, rank, consistency="bsp"))
    (second, _) = _together(
        workers, lambda c, rank: _train(scaled, c, rank, consistency="bsp", scaled=True)
    )
    torch.testing.assert_close(second, first, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("consistency", ["ssp:1", "asp"])
def test_without_bsp_every_move_is_applied_whole(
    workers: list[ps.Client], consistency: str
) -> None:
    """Each worker moves every parameter by -1 a step: all moves are in the end."""
    name = f"model-{next(_names)}"

    def train(client: ps.Client, _: int) -> Any:
        model = nn.Linear(500, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = ps.DistributedOptimizer(
            client,
            model,
            ps.Add(partial(torch.optim.SGD, lr=1.0)),
            name=name,
            consistency=consistency,
            block_elements=64,
        )
        for _ in range(STEPS):
            optimizer.zero_grad()
            model.weight.sum().backward()
            optimizer.step()
        optimizer.close()

    _together(workers, train)
    table = workers[0].table(f"{name}/0/float32")
    assert (workers[0].pull(table) == -float(WORKERS * STEPS)).all()


@pytest.mark.parametrize("codec", ["topk:0.1", "randomk:0.1"])
def test_moves_that_have_not_left_are_in_the_workers_own_parameters(
    workers: list[ps.Client], codec: str
) -> None:
    """Each worker moves every parameter by -1 a step, and sends a tenth of that."""
    name = f"model-{next(_names)}"

    def train(client: ps.Client, _: int) -> list[torch.Tensor]:
        model = nn.Linear(500, 1, bias=False)
        nn.init.zeros_(model.weight)
        add = ps.Add(partial(torch.optim.SGD, lr=1.0))
        optimizer = ps.DistributedOptimizer(
            client, model, add, name=name, block_elements=64, push_codec=codec
        )
        shown = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            model.weight.sum().backward()
            optimizer.step()
            shown.append(_weights(model))
            if len(shown) == STEPS - 2:
                optimizer.synchronize()
                common.append(_weights(model))
        optimizer.close()
        return shown

    common: list[torch.Tensor] = []
    for step, shown in enumerate(zip(*_together(workers, train), strict=True), start=1):
        assert torch.stack(shown).mean(dim=0).eq(-step).all(), "no move is lost or counted twice"
    assert torch.equal(*common), "all have the servers' values after synchronize"
    assert common[0].eq(0.0).float().mean() > 0.25, "some moves have not left"


def test_a_step_with_a_nan_moves_nothing(workers: list[ps.Client]) -> None:
    name = f"model-{next(_names)}"

    def train(client: ps.Client, rank: int) -> torch.Tensor:
        model = _model()
        before = _weights(model)
        optimizer = ps.DistributedOptimizer(
            client, model, ps.Add(NADAM), name=name, consistency="bsp"
        )
        bad = _loss(model, rank, 0) * (float("nan") if rank == 1 else 0.0)
        bad.backward()
        if rank == 1:
            with pytest.raises(ps.InvalidTensor, match="has an infinity or a NaN"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.close()
        torch.testing.assert_close(_weights(model), before, rtol=0, atol=1e-6)
        return _weights(model)

    assert torch.equal(*_together(workers, train))


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_the_local_optimizer_does_not_see_a_nan(
    workers: list[ps.Client], *, is_sparse: bool
) -> None:
    """Its momentum would have it for good, and each later step of that worker be refused."""
    name = f"model-{next(_names)}"

    def train(client: ps.Client, rank: int) -> tuple[list[int], torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Embedding(6, 4, sparse=is_sparse)
        factory = partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False)
        optimizer = ps.DistributedOptimizer(client, model, ps.Add(factory), name=name)
        refused = []
        for step in range(4):
            optimizer.zero_grad()
            factor = float("nan") if (step, rank) == (1, 0) else 1.0
            (model(torch.tensor([step, step + rank])).square().sum() * factor).backward()
            try:
                optimizer.step()
            except ps.InvalidTensor:
                refused.append(step)
        optimizer.close()
        return refused, _weights(model)

    (refused, first), (others, second) = _together(workers, train)
    assert (refused, others) == ([1], [])
    assert torch.equal(first, second)
    assert first.isfinite().all()


def test_the_local_optimizer_sees_a_nan_that_is_allowed(workers: list[ps.Client]) -> None:
    name = f"model-{next(_names)}"

    def train(client: ps.Client, rank: int) -> torch.Tensor:
        model = nn.Embedding(6, 4)
        factory = partial(torch.optim.SGD, lr=0.1, foreach=False)
        optimizer = ps.DistributedOptimizer(
            client, model, ps.Add(factory), name=name, allow_non_finite=True
        )
        factor = float("nan") if rank == 0 else 1.0
        (model(torch.tensor([rank])).square().sum() * factor).backward()
        optimizer.step()
        optimizer.close()
        return model.weight.isfinite().all(dim=1)

    for finite in _together(workers, train):
        assert finite.tolist() == [False, *[True] * 5]


def test_it_has_no_eager_mode(workers: list[ps.Client]) -> None:
    with pytest.raises(ps.InvalidConfig, match="mode is 'eager' with Add"):
        ps.DistributedOptimizer(workers[0], _model(), ps.Add(NADAM), name="none", mode="eager")


def test_it_needs_a_factory(workers: list[ps.Client]) -> None:
    with pytest.raises(ps.InvalidConfig, match="Add has no factory"):
        ps.DistributedOptimizer(workers[0], _model(), ps.Add(), name="none")


def _aggregated(
    name: str, client: ps.Client, change: Callable[[Any, nn.Module], None], step: int
) -> tuple[torch.Tensor, str]:
    """Three steps, with a change before one of them: the parameters, and the error of a step."""
    model = _model()
    optimizer = ps.DistributedOptimizer(client, model, ps.Aggregate(NADAM), name=name)
    told = ""
    for number in range(3):
        if number == step:
            change(optimizer, model)
        optimizer.zero_grad()
        _loss(model, client.rank, number).backward()
        try:
            optimizer.step()
        except ps.InvalidConfig as error:
            told = str(error)
            break
    optimizer.close()
    return _weights(model), told


def _set_rate(optimizer: Any, _model: nn.Module) -> None:
    optimizer.param_groups[0]["lr"] = 0.025


def _halve(_optimizer: Any, model: nn.Module) -> None:
    model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()})


def _load_state(optimizer: Any, _model: nn.Module) -> None:
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        entry["exp_avg"] = entry["exp_avg"] / 2
    optimizer.load_state_dict(saved)


ALONE = {
    _set_rate: "lr: 0.05 and 0.025",
    _halve: "changes of '0.weight', '0.bias', '2.weight' and 1 more at worker 1 alone",
    _load_state: "loaded optimizer state at worker 1 alone",
}


@pytest.mark.parametrize("change", ALONE)
def test_aggregate_takes_what_all_workers_do_and_refuses_what_one_does_alone(
    workers: list[ps.Client], change: Callable[[Any, nn.Module], None]
) -> None:
    """Its parameters would part from the others', and nothing brings them together again."""
    together, plain = f"model-{next(_names)}", f"model-{next(_names)}"
    ends = _together(workers, lambda client, _: _aggregated(together, client, change, 1))
    assert [told for _, told in ends] == ["", ""]
    assert torch.equal(ends[0][0], ends[1][0])
    others = _together(workers, lambda client, _: _aggregated(plain, client, change, 3))
    assert not torch.equal(ends[0][0], others[0][0])
    alone = f"model-{next(_names)}"
    steps = {0: 3, 1: 1}
    ends = _together(workers, lambda c, rank: _aggregated(alone, c, change, steps[rank]))
    for _, told in ends:
        assert f"workers 0 and 1 disagree about clock 2 of table '{alone}/0/float32'" in told
        assert ALONE[change] in told
        assert "expected the same at every worker" in told


def test_aggregate_is_refused_with_another_pull_codec_at_one_worker(
    workers: list[ps.Client],
) -> None:
    """Each copy would take its steps on sums that are rounded otherwise."""
    name = f"model-{next(_names)}"

    def work(client: ps.Client, rank: int) -> str:
        codec = ("fp16", "bf16")[rank]
        model = _model()
        optimizer = ps.DistributedOptimizer(
            client, model, ps.Aggregate(NADAM), name=name, pull_codec=codec
        )
        _loss(model, rank, 0).backward()
        with pytest.raises(ps.InvalidConfig) as refused:
            optimizer.step()
        optimizer.close()
        return refused.value.message

    for told in _together(workers, work):
        assert "pull_codec bf16 at worker 1 alone, pull_codec fp16 at worker 0 alone; " in told


def test_sparse_gradients_count_in_the_norm(workers: list[ps.Client]) -> None:
    """Of rows that come twice, and beside dense ones: as where all are dense."""
    name = f"model-{next(_names)}"

    def train(client: ps.Client, rank: int, is_sparse: bool) -> tuple[torch.Tensor, float | None]:
        model = nn.ModuleDict({"rows": nn.Embedding(6, 4, sparse=is_sparse), "head": _head()})
        nn.init.ones_(model["rows"].weight)  # type: ignore[arg-type]
        optimizer = ps.DistributedOptimizer(
            client,
            model,
            ps.Add(partial(torch.optim.SGD, lr=0.5)),
            name=f"{name} {is_sparse}",
            clip_norm=0.25,
        )
        for step in range(2):
            optimizer.zero_grad()
            ids = torch.tensor([rank, rank, 2 + step])
            model["head"](model["rows"](ids)).sum().backward()
            optimizer.step()
        optimizer.close()
        return _weights(model), optimizer.gradient_norm

    ends = _together(workers, lambda c, rank: train(c, rank, is_sparse=True))
    expected = _together(workers, lambda c, rank: train(c, rank, is_sparse=False))
    for (weights, norm), (as_dense, dense_norm) in zip(ends, expected, strict=True):
        torch.testing.assert_close(weights, as_dense)
        assert norm == pytest.approx(dense_norm)


def _head() -> nn.Module:
    head = nn.Linear(4, 1)
    nn.init.ones_(head.weight)
    nn.init.zeros_(head.bias)
    return head
