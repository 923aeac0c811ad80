"""Three workers, each a process: the same bits whatever the servers, and equal to one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ps_worker as ps
from tests.integration import training_jobs as jobs
from tests.integration.training_models import Branched, batches, differing, seeded, values
from tests.integration.worker_pool import Pool, WorkerFailed, Workers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

WORKERS = 3
Values = dict[str, torch.Tensor]
Gradient = Callable[[Any, int, int, torch.Tensor], None]


def in_one_process(
    steps: int,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    gradient: Gradient,
    takes_part: Callable[[int, int], bool] = lambda *_: True,
) -> list[Values]:
    """One process that sums the workers' gradients in rank order, then multiplies once."""
    model = seeded(Branched)
    reference = optimizer(model.parameters())
    inputs = [list(batches(steps, rank=rank)) for rank in range(WORKERS)]
    history = []
    for step in range(steps):
        ranks = [rank for rank in range(WORKERS) if takes_part(step, rank)]
        sums: dict[torch.Tensor, torch.Tensor] = {}
        for rank in ranks:
            model.zero_grad()
            gradient(model, step, rank, inputs[rank][step])
            for p in model.parameters():
                if p.grad is not None:
                    sums[p] = sums[p] + p.grad if p in sums else p.grad.clone()
        for p in model.parameters():
            factor = torch.tensor(1.0 / len(ranks)) if ranks else 0.0
            p.grad = sums[p] * factor if p in sums else None
        reference.step()
        history.append(values(model))
    return history


def plain(model: Any, step: int, rank: int, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def branched(model: Any, step: int, rank: int, x: torch.Tensor) -> None:
    model(x, is_long=(step * rank) % 2 == 0).square().mean().backward()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def check_all_equal(results: list[Values], expected: Values) -> None:
    assert len(results) in (WORKERS, 3 * WORKERS)
    for rank, result in enumerate(results):
        assert differing(result, expected) == [], f"rank {rank}"


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_any_number_of_servers_gives_the_bits_of_one_process(pool: Pool, workers: Workers) -> None:
    expected = in_one_process(4, lambda p: torch.optim.AdamW(p, lr=0.01), branched)
    fast: list[list[Values]] = []

    def check(workers: Workers) -> None:
        exact = workers.run(jobs.train_branched, name="exact", steps=4, optimizer=ps.AdamW(lr=0.01))
        for step in range(4):
            check_all_equal([history[step] for history in exact], expected[step])
        fast.extend(
            workers.run(
                jobs.train_branched, name="fast", steps=4, kernels="fast",
                optimizer=ps.AdamW(lr=0.01),
            )
        )  # fmt: skip

    check(workers)  # two servers
    for servers in (1, 3):
        with (
            ps.local_cluster(servers=servers, workers=WORKERS) as cluster,
            pool.connected(cluster.address, WORKERS) as others,
        ):
            check(others)
    check_all_equal([history[3] for history in fast], fast[0][3])


@pytest.mark.parametrize("mode", ["sealed", "eager"])
def test_momentum_with_sometimes_unused_parameters(workers: Workers, mode: str) -> None:
    expected = in_one_process(4, momentum, branched)
    histories = workers.run(jobs.train_branched, name=f"momentum-{mode}", steps=4, mode=mode)
    for step in range(4):
        check_all_equal([history[step] for history in histories], expected[step])


def test_sum_is_not_divided(workers: Workers) -> None:
    def summed(model: Any, step: int, rank: int, x: torch.Tensor) -> None:
        branched(model, step, rank, x)

    expected = in_one_process(1, lambda p: torch.optim.SGD(p, lr=0.3), summed)
    histories = workers.run(
        jobs.train_branched, name="sum", steps=1, reduction="sum", optimizer=ps.SGD(lr=0.1)
    )
    for history in histories:
        for name, value in history[0].items():
            torch.testing.assert_close(value, expected[0][name])
    check_all_equal([history[0] for history in histories], histories[0][0])


@pytest.mark.thorough
def test_aggregate_runs_any_torch_optimizer_alike_on_all(workers: Workers) -> None:
    expected = in_one_process(4, lambda p: torch.optim.NAdam(p, lr=0.05), branched)
    histories = workers.run(jobs.train_aggregate, name="aggregate", steps=4)
    for step in range(4):
        check_all_equal([history[step] for history in histories], expected[step])


def test_a_worker_without_gradients_counts_as_zero(workers: Workers) -> None:
    def idle(model: Any, step: int, rank: int, x: torch.Tensor) -> None:
        if rank != 1:
            plain(model, step, rank, x)

    expected = in_one_process(2, momentum, idle)
    check_all_equal(
        workers.run(jobs.train_without_gradient, name="idle", idle_rank=1), expected[-1]
    )


def test_an_overflow_of_one_worker_leaves_it_out(workers: Workers) -> None:
    expected = in_one_process(3, momentum, plain, lambda step, rank: (step, rank) != (1, 2))
    answers = workers.run(jobs.train_with_scaler, name="overflow", overflow_rank=2)
    check_all_equal([result for result, _ in answers], expected[-1])
    assert [scale for _, scale in answers] == [2.0**10, 2.0**10, 2.0**9]


def test_a_nan_of_one_worker_leaves_it_out_and_is_told_to_it_alone(workers: Workers) -> None:
    expected = in_one_process(3, momentum, plain, lambda step, rank: (step, rank) != (1, 0))
    answers = workers.run(jobs.train_with_nan, name="nan", bad_rank=0)
    check_all_equal([result for _, result in answers], expected[-1])
    assert "'last.weight' has an infinity or a NaN at step 2" in answers[0][0]
    assert [message for message, _ in answers[1:]] == ["", ""]


@pytest.mark.thorough
@pytest.mark.parametrize("buffers", ["rank0", "mean", None])
def test_buffers(workers: Workers, buffers: str | None) -> None:
    histories = workers.run(jobs.train_normed, name=f"buffers-{buffers}", buffers=buffers)
    for before, after in ((0, 1), (2, 3)):
        own = [history[before] for history in histories]
        shared = [history[after] for history in histories]
        counts = [int(state["1.num_batches_tracked"]) for state in own]
        means = [state["1.running_mean"] for state in own]
        for rank, state in enumerate(shared):
            if buffers == "mean":
                count = round(sum(counts) / 3)
                mean = (means[0] + means[1] + means[2]) * torch.tensor(1 / 3)
            else:
                source = 0 if buffers == "rank0" else rank
                count, mean = counts[source], means[source]
            assert int(state["1.num_batches_tracked"]) == count
            assert torch.equal(state["1.running_mean"], mean)
            assert state["seen"].tolist() == [True, False]
            assert torch.equal(state["0.weight"], shared[0]["0.weight"])


def test_a_buffer_that_was_removed_is_refused_at_every_worker(workers: Workers) -> None:
    """Before anything is sealed, so that none waits for another."""
    answers = workers.run(jobs.train_without_buffers, name="no buffers")
    for message, _ in answers:
        assert message.startswith("the module has no buffer '1.num_batches_tracked' any more")
        assert "buffers=None" in message
    check_all_equal([result for _, result in answers], answers[0][1])


@pytest.mark.timeout(120)
def test_uneven_data_ends_no_run(pool: Pool) -> None:
    expected = in_one_process(3, momentum, plain, lambda step, rank: step <= rank)
    with (
        ps.local_cluster(servers=1, workers=WORKERS) as cluster,
        pool.connected(cluster.address, WORKERS) as workers,
    ):
        answers = workers.run(jobs.train_uneven, name="uneven")
    for rank, answer in enumerate(answers):
        assert differing(answer, expected[rank]) == []


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_workers_that_disagree_are_both_named(pool: Pool) -> None:
    with (
        ps.local_cluster(servers=1, workers=2) as cluster,
        pool.connected(cluster.address, 2, leave=False, deadline_s=5.0) as workers,
    ):
        shapes = [str(answer) for answer in workers.outcomes(jobs.train_another_model, name="net")]
        answers = workers.outcomes(jobs.disagree, name="rates")
    # Whoever came second brought another model; if that was rank 0, the first waits for its values.
    assert any("TableExists" in answer and "differs" in answer for answer in shapes), shapes
    messages = [str(answer) for answer in answers if isinstance(answer, WorkerFailed)]
    told = [message for message in messages if message.startswith("InvalidConfig")]
    assert told, messages
    for message in told:
        assert "workers 0 and 1 disagree about clock 1" in message
        assert "lr: 0.1 and 0.2" in message
        assert "If a schedule steps only where GradScaler did not skip" in message
    assert len(told) == 2, messages  # the one that sealed first learns it from its read


def test_asynchronous_steps_are_applied_exactly_once(workers: Workers) -> None:
    workers.run(jobs.count_down, name="countdown", steps=7)
    for result in workers.run(jobs.pulled, name="countdown", make=Branched):
        for value in result.values():
            assert torch.equal(value, torch.full_like(value, -7.0 * WORKERS))


def test_buffers_of_asynchronous_workers_are_those_of_rank_zero(workers: Workers) -> None:
    histories = workers.run(jobs.train_normed, name="async-buffers", consistency=ps.ASP())
    last = histories[0][-1]
    for result in workers.run(jobs.pulled, name="async-buffers", make=jobs.normed):
        for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked", "seen"):
            assert torch.equal(result[name], last[name]), name


@pytest.mark.thorough
@pytest.mark.parametrize("is_late", [False, True], ids=["module", "wrapped later"])
def test_a_model_in_data_parallel_with_other_processes_is_refused(
    workers: Workers, tmp_path: Path, is_late: bool
) -> None:
    """As frameworks do it that torchrun has started: its gradients would be reduced twice."""
    found = workers.run(
        jobs.train_in_data_parallel,
        name=f"data parallel {is_late}",
        file=str(tmp_path / "meeting"),
        is_late=is_late,
    )
    for told, clock in found:
        assert told.startswith(
            f"the model is in DistributedDataParallel with {WORKERS} processes, and this is one of"
        )
        assert "remove RANK, WORLD_SIZE and LOCAL_RANK" in told
        assert clock == 0
