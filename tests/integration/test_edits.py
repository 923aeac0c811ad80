"""Parameters that a script changes between two steps: taken by all workers, or refused (S16)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ps_worker as ps
from tests.integration import edit_jobs as jobs
from tests.integration.training_jobs import Values
from tests.integration.training_models import Branched, batches, differing, seeded, values
from tests.integration.worker_pool import Pool, Workers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

WORKERS = 2


@pytest.fixture(scope="module")
def alone(pool: Pool) -> Iterator[Workers]:
    with (
        ps.local_cluster(servers=2, workers=1) as cluster,
        pool.connected(cluster.address, 1) as connected,
    ):
        yield connected


def in_one_process(
    edits: dict[int, str],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    late: bool = False,
    worker_count: int = WORKERS,
) -> list[Values]:
    """As `jobs.train_edited`, of all workers' gradients."""
    model = seeded(Branched)
    reference = optimizer(model.parameters())
    inputs = [list(batches(4, rank=rank)) for rank in range(worker_count)]
    history = []
    for step in range(4):
        if step in edits and not late:
            jobs.EDITS[edits[step]](model)
        sums: dict[torch.Tensor, torch.Tensor] = {}
        for rank in range(worker_count):
            model.zero_grad()
            model(inputs[rank][step], is_long=(step * rank) % 2 == 0).square().mean().backward()
            for p in model.parameters():
                if p.grad is not None:
                    sums[p] = sums[p] + p.grad if p in sums else p.grad.clone()
        for p in model.parameters():
            p.grad = sums[p] * torch.tensor(1.0 / worker_count) if p in sums else None
        if step in edits and late:
            jobs.EDITS[edits[step]](model)
        reference.step()
        history.append(values(model))
    return history


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def check_all_equal(histories: list[list[Values]], expected: list[Values]) -> None:
    for rank, history in enumerate(histories):
        for step, (ours, theirs) in enumerate(zip(history, expected, strict=True)):
            assert differing(ours, theirs) == [], f"rank {rank}, step {step}"


@pytest.mark.parametrize("edit", jobs.EDITS)
@pytest.mark.parametrize("late", [False, True], ids=["before forward", "after backward"])
def test_an_edit_of_all_workers_is_as_in_one_process(
    workers: Workers, edit: str, late: bool
) -> None:
    """Momentum goes on as it was; what had left of the gradients counts once."""
    histories = workers.run(
        jobs.train_edited, name=f"{edit} late={late}".replace("/", ""), edits={2: edit}, late=late
    )
    check_all_equal(histories, in_one_process({2: edit}, momentum, late=late))


def test_an_edit_before_the_first_step_needs_no_ceremony(workers: Workers) -> None:
    """At every rank, after the optimizer was made."""
    histories = workers.run(jobs.train_edited, name="first", edits={0: "load_state_dict"})
    check_all_equal(histories, in_one_process({0: "load_state_dict"}, momentum))


@pytest.mark.thorough
def test_workers_that_were_all_started_again_load_as_those_before_did(pool: Pool) -> None:
    """They go on with the servers' clocks, and with the model and the state that all of them load:
    so the second runs are as the first.
    """
    model = seeded(Branched)
    fresh = adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    fresh.step()
    state = fresh.state_dict()
    runs = []
    with ps.local_cluster(servers=2, workers=WORKERS) as cluster:
        for _ in range(2):
            with pool.connected(cluster.address, WORKERS) as connected:
                runs.append(connected.run(jobs.load_and_train, state=state))
    check_all_equal([*runs[0], *runs[1]], runs[0][0])


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"mode": "eager"}, {"kernels": "fast"}], ids=str)
def test_an_edit_in_every_step(workers: Workers, options: dict[str, Any]) -> None:
    edits = dict.fromkeys(range(4), "clamp_")
    histories = workers.run(
        jobs.train_edited, name=f"every {options}", edits=edits, late=False, **options
    )
    expected = in_one_process(edits, momentum)
    if options.get("kernels") == "fast":
        expected = histories[0]
    check_all_equal(histories, expected)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.bfloat16, {}), (torch.float32, {"pull_codec": "bf16"})],
    ids=["parameters in bfloat16", "pulls in bfloat16"],
)
def test_a_mask_in_every_step_leaves_the_rest_of_its_tensor_unrounded(
    workers: Workers, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Small updates of what the mask leaves alone add up, as without one."""
    update = ps.SGD(lr=1e-3)
    name = f"masked {dtype}".replace("torch.", "")
    found = workers.run(jobs.train_masked, name=name, dtype=dtype, update=update, **options)
    worker = seeded(Branched).to(dtype)
    master = seeded(Branched).to(dtype).float()
    reference = torch.optim.SGD(master.parameters(), lr=1e-3)
    pairs = [*zip(worker.parameters(), master.parameters(), strict=True)]
    inputs = [list(batches(20, rank=rank)) for rank in range(WORKERS)]
    for step in range(20):
        jobs.mask(master)
        for _, p in pairs:
            p.grad = None
        for rank in range(WORKERS):
            for w, p in pairs:
                w.data.copy_(p.data.bfloat16())
                w.grad = None
            worker(inputs[rank][step].to(dtype)).square().mean().backward()
            for w, p in pairs:
                if w.grad is not None:
                    p.grad = w.grad.float() if p.grad is None else p.grad + w.grad.float()
        for _, p in pairs:
            p.grad = None if p.grad is None else p.grad / WORKERS
        reference.step()
    for w, p in pairs:
        w.data.copy_(p.data.bfloat16())
    for rank in range(WORKERS):
        assert differing(found[rank], values(worker)) == []


def test_state_of_the_servers_stays_as_it_was(workers: Workers) -> None:
    edits = {1: "load_state_dict", 3: "nn.init"}
    histories = workers.run(
        jobs.train_edited, name="adamw", edits=edits, optimizer=ps.AdamW(lr=0.01)
    )
    check_all_equal(histories, in_one_process(edits, adam))


@pytest.mark.thorough
@pytest.mark.parametrize("remedy", ["undo", "load_state_dict"])
@pytest.mark.parametrize(
    "edits", [{0: "nn.init"}, {1: "nn.init"}, {0: "nn.init", 1: "data.fill_"}], ids=str
)
def test_ranks_that_differ_are_told_and_go_on(
    workers: Workers, edits: dict[int, str], remedy: str
) -> None:
    """Nobody takes the step, nobody waits; what was changed stays until it is undone or done by
    all.
    """
    found = workers.run(jobs.differ, name=f"{edits} {remedy}", edits=edits, remedy=remedy)
    parameter = {"nn.init": "'sometimes.weight'", "data.fill_": "'first.weight'"}
    for rank, (told, edited, after, later, _) in enumerate(found):
        assert "clock 2 of table" in told
        assert "worker" in told
        if rank in edits:
            assert f"{parameter[edits[rank]]}" in told
            assert "Do the same at every rank" in told
        assert differing(edited, after) == []
        assert later == ["", "", ""]
    assert differing(found[0][4], found[1][4]) == []


@pytest.mark.thorough
@pytest.mark.parametrize("consistency", ["asp", "ssp:2", "bsp:backup=1"])
def test_where_no_step_is_all_workers_an_edit_is_refused(
    workers: Workers, consistency: str
) -> None:
    found = workers.run(
        jobs.differ, name=f"refused {consistency}", edits={0: "nn.init"}, remedy="undo",
        consistency=consistency,
    )  # fmt: skip
    told, edited, after, later, _ = found[0]
    assert "'sometimes.weight', 'last.bias'" in told
    assert "set_consistency('bsp')" in told
    assert differing(edited, after) == []
    assert later == ["", "", ""]
    assert (found[1][0], found[1][3]) == ("", ["", "", ""])


@pytest.mark.thorough
@pytest.mark.parametrize("consistency", ["bsp", "ssp:2", "asp"])
@pytest.mark.parametrize("edit", jobs.EDITS)
def test_a_worker_alone_may_edit_in_every_setting(
    pool: Pool, alone: Workers, consistency: str, edit: str
) -> None:
    histories = alone.run(
        jobs.train_edited, name=f"{edit} {consistency}".replace("/", ""), edits={2: edit},
        consistency=consistency,
    )  # fmt: skip
    check_all_equal(histories, in_one_process({2: edit}, momentum, worker_count=1))


@pytest.mark.thorough
@pytest.mark.parametrize("consistency", ["bsp", "ssp:2", "asp"])
def test_a_clamp_of_the_servers_leaves_the_scripts_nothing_to_do(
    workers: Workers, alone: Workers, consistency: str
) -> None:
    """It is no edit: it takes no clock, and is refused nowhere."""
    optimizer = ps.SGD(lr=0.1, momentum=0.9, clamp=(-0.1, 0.1))
    name = f"clamped {consistency}"
    for history, clock in workers.run(
        jobs.train_clamped, name=name, optimizer=optimizer, consistency=consistency
    ):
        assert clock == 4
        assert all(v.abs().max() <= 0.1 for v in history[-1].values())
    ((history, _),) = alone.run(
        jobs.train_clamped, name=name, optimizer=optimizer, consistency=consistency
    )
    model, x = seeded(Branched), list(batches(4))
    reference = momentum(model.parameters())
    for step in range(4):
        reference.zero_grad()
        model(x[step]).square().mean().backward()
        reference.step()
        jobs.clamp(model)
        assert differing(history[step], values(model)) == []


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["load", "thaw", "meet"])
def test_frozen_parameters_are_taken_too(workers: Workers, how: str) -> None:
    """The servers have them: who joins, resumes or reads is given what was loaded."""
    for own, served, refused in workers.run(jobs.edit_frozen, name=f"frozen {how}", how=how):
        assert refused == ""
        assert differing(own, served) == []
    expected = seeded(Branched, seed=77) if how == "load" else None
    if expected is not None:
        assert torch.equal(own["first.weight"], values(expected)["first.weight"])
    if how == "meet":
        assert torch.all(own["first.weight"] == 0.25)


@pytest.mark.thorough
def test_frozen_parameters_that_one_rank_changed_are_refused(workers: Workers) -> None:
    """Nobody waits for a step on a table that sleeps at the others."""
    for _, _, refused in workers.run(jobs.edit_frozen, name="frozen apart", how="apart"):
        assert "worker 1" in refused or "first.weight" in refused, refused
        assert refused
