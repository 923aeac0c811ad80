"""A common model where workers run apart: every worker has every step of all (S17)."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker as ps
from tests.integration.replicated_cluster import DEADLINE_S, together

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

WORKERS = 3
STEPS = (9, 5, 7)
FEATURES = 70
MEETING = "synchronize slow"
OUTER = ps.Outer(
    partial(torch.optim.SGD, lr=1.0), inner_steps=4, lr=1.0, momentum=0.0, nesterov=False
)


@pytest.fixture(scope="module")
def clients() -> Iterator[list[ps.Client]]:
    with ps.local_cluster(servers=2, workers=WORKERS) as cluster, ExitStack() as stack:
        yield [
            stack.enter_context(
                ps.connect(cluster.address, rank=rank, request_deadline_s=DEADLINE_S)
            )
            for rank in range(WORKERS)
        ]


def optimizer_for(client: ps.Client, model: nn.Module, name: str, **options: Any) -> Any:
    options.setdefault("optimizer", ps.SGD(lr=1.0))
    return ps.DistributedOptimizer(
        client, model, name=name, reduction="sum", block_elements=64, **options
    )


def step(optimizer: Any, model: nn.Linear, gradient: float) -> None:
    """A step whose gradient is the same whole number everywhere."""
    optimizer.zero_grad()
    model(torch.full((1, FEATURES), gradient)).sum().backward()
    optimizer.step()


def zeroed() -> nn.Linear:
    model = nn.Linear(FEATURES, 2, bias=False)
    nn.init.zeros_(model.weight)
    return model


def train(client: ps.Client, name: str, steps: int, **options: Any) -> list[torch.Tensor]:
    """Its own steps, and the model when all are done; and again, after one more."""
    model = zeroed()
    optimizer = optimizer_for(client, model, name, **options)
    for _ in range(steps):
        step(optimizer, model, 10.0**client.rank)
    optimizer.synchronize()
    found = [model.weight.detach().clone()]
    step(optimizer, model, 10.0**client.rank)
    optimizer.synchronize()
    return [*found, model.weight.detach().clone()]


KINDS: dict[str, dict[str, Any]] = {
    "asp": {"consistency": "asp", "steps": STEPS},
    "asp eager": {"consistency": "asp", "steps": STEPS, "mode": "eager"},
    "ssp": {"consistency": "ssp:4", "steps": STEPS},
    "bsp": {"consistency": "bsp", "steps": (6, 6, 6)},
    "add": {
        "consistency": "asp",
        "steps": STEPS,
        "optimizer": ps.Add(partial(torch.optim.SGD, lr=1.0)),
    },
    # Pseudo-gradients come too late, in outer steps that are due and in those of `synchronize`.
    "outer reject": {"consistency": "asp:reject=0", "steps": STEPS, "optimizer": OUTER},
    "outer backup": {"consistency": "bsp:backup=1", "steps": (7, 7, 7), "optimizer": OUTER},
    "outer backup, one has moved": {
        "consistency": "bsp:backup=1",
        "steps": (0, 0, 3),
        "optimizer": OUTER,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_worker_has_every_step_of_all(clients: list[ps.Client], kind: str) -> None:
    options = dict(KINDS[kind])
    counts: tuple[int, ...] = options.pop("steps")
    histories = together(
        [
            partial(train, client, f"common {kind}", count, **options)
            for client, count in zip(clients, counts, strict=True)
        ]
    )
    for more in (0, 1):
        total = sum((count + more) * 10.0**rank for rank, count in enumerate(counts))
        for found in histories:
            assert torch.equal(found[more], torch.full((2, FEATURES), -total))


def test_loops_by_the_clock_meet_with_backup_workers() -> None:
    """By the number of their steps one that left out clocks would wait for those that are here."""
    others_are_ahead = threading.Event()

    def run(client: ps.Client) -> tuple[int, torch.Tensor]:
        model, count = zeroed(), 0
        optimizer = optimizer_for(client, model, "by the clock", consistency="bsp:backup=1")
        while optimizer.clock < 8:
            if client.rank == 2 and count == 1:
                assert others_are_ahead.wait(DEADLINE_S)
            step(optimizer, model, 1.0)
            count += 1
            if client.rank == 0 and optimizer.clock == 5:
                others_are_ahead.set()
        optimizer.synchronize()
        return count, model.weight.detach()

    with ps.local_cluster(servers=1, workers=WORKERS) as cluster, ExitStack() as stack:
        own = [
            stack.enter_context(
                ps.connect(cluster.address, rank=rank, request_deadline_s=DEADLINE_S)
            )
            for rank in range(WORKERS)
        ]
        found = together([partial(run, client) for client in own])
    assert [count for count, _ in found[:2]] == [8, 8]
    assert found[2][0] < 8, "it left out clocks"
    for _, weight in found[1:]:
        assert torch.equal(weight, found[0][1])


def test_sums_that_workers_apply_themselves_are_the_same_anyway(clients: list[ps.Client]) -> None:
    aggregate = ps.Aggregate(partial(torch.optim.SGD, lr=1.0))
    histories = together(
        [partial(train, client, "aggregate", 3, optimizer=aggregate) for client in clients]
    )
    for found in histories:
        assert torch.equal(found[1], torch.full((2, FEATURES), -4.0 * 111))


def test_a_step_after_one_that_expired_ends_it_first_and_counts_once(
    clients: list[ps.Client],
) -> None:
    """Else the others would have that step of the first worker, or lack it, as it happens."""
    models = [zeroed() for _ in clients]
    optimizers = together(
        [
            partial(optimizer_for, client, model, "expired", consistency="asp")
            for client, model in zip(clients, models, strict=True)
        ]
    )
    for rank in range(WORKERS):
        step(optimizers[rank], models[rank], 10.0**rank)
    optimizers[0].zero_grad()
    models[0](torch.ones(1, FEATURES)).sum().backward()  # it has left, and stays what it is
    with pytest.raises(ps.WaitExpired):
        optimizers[0].synchronize(0.1)

    def meet(rank: int) -> float:
        if rank == 0:
            optimizers[0].step()
            return 0.0
        optimizers[rank].synchronize()
        return float(models[rank].weight.detach().min())

    assert together([partial(meet, rank) for rank in range(WORKERS)]) == [0.0, -111.0, -111.0]
    together([optimizer.synchronize for optimizer in optimizers])
    for model in models:
        assert torch.equal(model.weight, torch.full((2, FEATURES), -112.0))


def test_what_changes_after_one_that_expired_is_not_written_over(clients: list[ps.Client]) -> None:
    models = [zeroed() for _ in clients]
    optimizers = together(
        [
            partial(optimizer_for, client, model, "changed later")
            for client, model in zip(clients, models, strict=True)
        ]
    )
    with pytest.raises(ps.WaitExpired):
        optimizers[0].synchronize(0.1)
    models[0].weight.data.fill_(5.0)

    def meet(rank: int) -> str:
        try:
            optimizers[rank].synchronize()
        except ps.EditRefused as error:
            return error.message
        return ""

    told = together([partial(meet, rank) for rank in range(WORKERS)])
    assert "'weight'" in told[0]
    assert told[1:] == ["", ""]
    assert float(models[0].weight.detach().min()) == 5.0


def test_moves_after_one_that_expired_and_then_failed_are_no_changes_of_the_script(
    clients: list[ps.Client],
) -> None:
    """The next outer step gives its worker the servers' values: half of how far it has moved."""
    outer = ps.Outer(OUTER.factory, inner_steps=2, lr=0.5, momentum=0.0, nesterov=False)
    models = [zeroed() for _ in clients]
    optimizers = together(
        [
            partial(optimizer_for, client, model, "failed", optimizer=outer, consistency="asp")
            for client, model in zip(clients, models, strict=True)
        ]
    )
    with pytest.raises(ps.WaitExpired):
        optimizers[0].synchronize(0.1)

    def meet(rank: int) -> None:
        with pytest.raises(ps.InvalidConfig, match="different collective calls"):
            clients[rank].barrier("other") if rank else optimizers[0].synchronize()

    together([partial(meet, rank) for rank in range(WORKERS)])
    for expected in (-1.0, -1.0, -2.0, -2.0):
        step(optimizers[0], models[0], 1.0)
        assert torch.equal(models[0].weight, torch.full((2, FEATURES), expected))


@pytest.mark.thorough
def test_nobody_steps_on_before_all_have_pulled(clients: list[ps.Client]) -> None:
    """The second worker makes the calls by hand, and takes its time between them."""
    models = [zeroed() for _ in clients]
    optimizers = together(
        [
            partial(optimizer_for, client, model, "slow", consistency="asp")
            for client, model in zip(clients, models, strict=True)
        ]
    )
    for rank in range(WORKERS):
        step(optimizers[rank], models[rank], 1.0)

    def hasty(rank: int) -> str:
        with pytest.raises(ps.WaitExpired) as late:
            optimizers[rank].synchronize(timeout_s=1.0)
        return str(late.value)

    found = together([partial(hasty, 0), partial(hasty, 2), partial(clients[1].barrier, MEETING)])
    for words in found[:2]:
        assert re.search("barrier 'synchronized slow' is not over .* worker 1 ", words)
    for rank in (0, 2):
        assert torch.equal(models[rank].weight, torch.full((2, FEATURES), -3.0))
    together(
        [
            optimizers[0].synchronize,
            optimizers[2].synchronize,
            partial(clients[1].barrier, "synchronized slow"),
        ]
    )


def test_a_worker_that_is_missing_is_named_and_the_call_goes_on(clients: list[ps.Client]) -> None:
    models = [zeroed() for _ in clients]
    optimizers = together(
        [
            partial(optimizer_for, client, model, "late", consistency="asp")
            for client, model in zip(clients, models, strict=True)
        ]
    )
    step(optimizers[0], models[0], 1.0)
    with pytest.raises(ps.WaitExpired, match=r"synchronize late.*worker 1 .*worker 2 "):
        optimizers[0].synchronize(timeout_s=0.2)
    for rank in (1, 2):
        step(optimizers[rank], models[rank], 10.0**rank)
    together([optimizer.synchronize for optimizer in optimizers])
    for model in models:
        assert torch.equal(model.weight, torch.full((2, FEATURES), -111.0))


@pytest.mark.thorough
def test_a_parameter_that_was_changed_is_not_overwritten(clients: list[ps.Client]) -> None:
    models = [zeroed() for _ in clients]
    optimizers = together(
        [
            partial(optimizer_for, client, model, "changed", consistency="asp")
            for client, model in zip(clients, models, strict=True)
        ]
    )
    for rank in range(WORKERS):
        step(optimizers[rank], models[rank], 1.0)
    kept = models[1].weight.detach().clone()
    models[1].weight.data.fill_(5.0)
    with pytest.raises(ps.EditRefused, match="'weight' of 'changed' was changed"):
        optimizers[1].synchronize()
    models[1].weight.data.copy_(kept)
    together([optimizer.synchronize for optimizer in optimizers])
    assert torch.equal(models[1].weight, torch.full((2, FEATURES), -3.0))
