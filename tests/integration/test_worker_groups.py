"""Four workers, each a process, that push and pull in groups (`aggregate_within`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ps_worker as ps
from tests.integration import group_jobs as jobs
from tests.integration.replicated_cluster import replicated_cluster
from tests.integration.training_jobs import Values
from tests.integration.training_models import Branched, batches, differing, seeded, values
from tests.integration.worker_pool import Pool, WorkerFailed, Workers
from tests.unit.package_folder import install

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

WORKERS, STEPS = 4, jobs.STEPS
IMPORTED = "tests.integration.group_jobs", "torch._dynamo"

NONE: tuple[str, ...] = ()
PAIRS = "a", "b", "b", "a"
ONE = "a", "a", "a", "a"
UNEQUAL = "a", "b", "a", "a"
GROUPS = pytest.mark.parametrize("groups", [PAIRS, ONE, UNEQUAL], ids="".join)


# --- one process with the same arithmetic


def mean_of(gradients: Sequence[torch.Tensor | None], groups: Sequence[str]) -> torch.Tensor | None:
    """Of all workers: the sum of each group is a mean, times its members, before sums are added."""
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return None
    total = torch.zeros_like(present[0])
    for group in dict.fromkeys(groups):
        of_group = torch.zeros_like(total)
        for gradient, name in zip(gradients, groups, strict=True):
            if name == group and gradient is not None:
                of_group += gradient
        count = groups.count(group)
        total += of_group * (1.0 / count) * count
    return total * (1.0 / len(groups))


def in_one_process(
    groups: Sequence[str],
    *,
    without: dict[int, Sequence[int]] | None = None,
    clip_norm: float | None = None,
) -> list[Values]:
    """The parameters after each step; the step `without` has these ranks not."""
    model = seeded(Branched)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = [list(batches(STEPS, rank=rank)) for rank in range(WORKERS)]
    history = []
    for step in range(STEPS):
        left_out = (without or {}).get(step, ())
        ranks = [rank for rank in range(WORKERS) if rank not in left_out]
        found = []
        for rank in ranks:
            model.zero_grad()
            model(inputs[rank][step], is_long=jobs.is_long(step, rank)).square().mean().backward()
            found.append([p.grad for p in model.parameters()])
        names = [groups[rank] for rank in ranks]
        for parameter, *gradients in zip(model.parameters(), *found, strict=True):
            parameter.grad = mean_of(gradients, names)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        history.append(values(model))
    return history


def assert_bits(found: Sequence[Values], expected: Sequence[Values]) -> None:
    assert [differing(*pair) for pair in zip(found, expected, strict=True)] == [[]] * len(expected)


def assert_alike(all_found: Sequence[Values]) -> None:
    """Bit for bit."""
    assert_bits(all_found, [all_found[0]] * len(all_found))


# --- what is trained


@GROUPS
def test_groups_train_as_one_process(workers: Workers, groups: Sequence[str]) -> None:
    runs = workers.run(jobs.train, name="".join(groups), groups=groups, steps=STEPS)
    for run in runs:
        assert_bits(run.history, in_one_process(groups))
    for rank, run in enumerate(runs):
        is_leader = groups.index(groups[rank]) == rank
        assert [count > 0 for count in run.moved_bytes] == [is_leader] * 2
    without = workers.run(jobs.train, name=f"no {''.join(groups)}", groups=NONE, steps=STEPS)
    for ours, theirs in zip(runs[0].history, without[0].history, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("groups", [PAIRS, ONE], ids="".join)
def test_batches_follow_the_speed_of_members(workers: Workers, groups: Sequence[str]) -> None:
    """A member that waits for another of its group does not compute."""
    name = f"shares {''.join(groups)}"
    for sizes in workers.run(jobs.share_out, name=name, groups=groups):
        assert sizes[WORKERS - 1] < 5, sizes


@pytest.mark.thorough
def test_large_gradients_are_all_reduced_alike_in_each_run(workers: Workers) -> None:
    options: dict[str, Any] = {"groups": UNEQUAL, "steps": STEPS, "is_direct": False}
    runs = [workers.run(jobs.train, name=f"large {each}", **options) for each in range(2)]
    assert_alike([run.history[-1] for run in (*runs[0], *runs[1])])
    torch.testing.assert_close(
        runs[0][0].history[-1], in_one_process(UNEQUAL)[-1], rtol=1e-5, atol=1e-7
    )


@pytest.mark.thorough
def test_the_workers_of_one_machine_are_a_group(workers: Workers) -> None:
    runs = workers.run(jobs.train, name="host", groups=["host"] * WORKERS, steps=STEPS)
    assert_bits(runs[3].history, in_one_process(ONE))
    assert [run.moved_bytes[0] > 0 for run in runs] == [True, False, False, False]


@pytest.mark.thorough
def test_sums_are_not_divided(workers: Workers) -> None:
    sgd = ps.SGD(lr=0.1 / WORKERS, momentum=0.9)
    options: dict[str, Any] = {"optimizer": sgd, "reduction": "sum"}
    runs = workers.run(jobs.train, name="sums", groups=UNEQUAL, steps=STEPS, **options)
    assert_alike([run.history[-1] for run in runs])
    torch.testing.assert_close(runs[0].history[-1], in_one_process(UNEQUAL)[-1])


@pytest.mark.thorough
def test_the_reduced_gradient_is_clipped(workers: Workers) -> None:
    runs = workers.run(jobs.train, name="clip", groups=UNEQUAL, steps=STEPS, clip_norm=0.1)
    assert_alike([run.history[-1] for run in runs])
    torch.testing.assert_close(
        runs[0].history[-1], in_one_process(UNEQUAL, clip_norm=0.1)[-1], rtol=1e-4, atol=1e-6
    )


HEAVY = """
class Heavy:
    hyperparameters = {"lr": 0.1}
    slots = {"speed": 0.0}

    def update(self, values, state, gradient, numbers, step):
        speed = state["speed"].mul_(0.9).add_(gradient)
        return values.sub_(speed, alpha=numbers["lr"]), {"speed": speed}
"""


@pytest.mark.thorough
def test_a_custom_update_gets_the_mean_of_all(pool: Pool, tmp_path: Path) -> None:
    updates = {"heavy": "heavy_updates:Heavy"}
    install(tmp_path / "heavy", "heavy-updates", "1.0", {"heavy_updates": HEAVY}, updates)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", f"{tmp_path / 'heavy'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        )
        cluster = ps.local_cluster(servers=2, workers=WORKERS)
    with cluster, pool.connected(cluster.address, WORKERS) as workers:
        heavy = ps.Custom("heavy")
        runs = workers.run(jobs.train, name="heavy", groups=UNEQUAL, steps=STEPS, optimizer=heavy)
    assert_alike([run.history[-1] for run in runs])
    for ours, expected in zip(runs[0].history, in_one_process(UNEQUAL), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("buffers", ["rank0", "mean"])
def test_buffers_are_shared_as_ever(workers: Workers, buffers: str) -> None:
    found = workers.run(jobs.train_normed, name=f"g {buffers}", groups=PAIRS, buffers=buffers)
    ungrouped = workers.run(jobs.train_normed, name=f"n {buffers}", groups=NONE, buffers=buffers)
    assert_alike(found)
    torch.testing.assert_close(found[0], ungrouped[0], rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_parameters_that_are_unfrozen_and_groups_that_come_later(workers: Workers) -> None:
    found = workers.run(jobs.unfreeze, name="unfrozen", groups=PAIRS)
    ungrouped = workers.run(jobs.unfreeze, name="unfrozen alone", groups=NONE)
    assert_alike(found)
    torch.testing.assert_close(found[0], ungrouped[0], rtol=1e-5, atol=1e-6)


# --- steps that one worker would not take


@pytest.mark.thorough
@pytest.mark.parametrize("groups", [PAIRS, UNEQUAL], ids="".join)
def test_a_nan_of_one_member_leaves_its_group_out(workers: Workers, groups: Sequence[str]) -> None:
    bad = 2
    runs = workers.run(jobs.train_with_nan, name=f"nan {groups}", groups=groups, bad_rank=bad)
    members = [rank for rank in range(WORKERS) if groups[rank] == groups[bad]]
    for rank, (told, found) in enumerate(runs):
        assert_bits([found], [in_one_process(groups, without={1: members})[2]])
        if rank == bad:
            assert "the gradient of 'last.weight' has an infinity or a NaN at step 2" in told
        elif rank in members:
            assert told.startswith("worker 2, of the same group, has a gradient with an infinity")
        else:
            assert told == ""


def test_an_overflow_of_one_member_leaves_its_group_out(workers: Workers) -> None:
    runs = workers.run(jobs.train_with_scaler, name="scaler", groups=PAIRS, bad_rank=2)
    expected = in_one_process(PAIRS, without={1: (1, 2)})[2]
    assert_bits([found for found, _ in runs], [expected] * WORKERS)
    assert [scale for _, scale in runs] == [2.0**8, 2.0**9, 2.0**9, 2.0**11]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_refused_step_with_loss_scales_is_taken_again_as_it_was(
    workers: Workers, dtype: torch.dtype
) -> None:
    """With gradients that float16 cannot have without them."""
    runs = workers.run(
        jobs.take_again_with_scaler, name=f"again {dtype}", groups=PAIRS, dtype=dtype
    )
    for told, found in runs:
        assert "was changed" in told
        assert torch.equal(found, torch.full((64,), -2.5 * 2.0**-7))


def test_a_mean_that_float16_cannot_hold_leaves_its_group_out(workers: Workers) -> None:
    runs = workers.run(jobs.train_beyond_half, name="beyond", groups=PAIRS, bad_group="a")
    for rank, (told, found) in enumerate(runs):
        first, second, third, refused, again, anew = told
        assert (first, third, anew) == ("", "", "")
        assert ("beyond what push_codec fp16 can hold" in second) == (PAIRS[rank] == "a")
        assert refused.startswith("EditRefused")
        assert again.startswith("InvalidConfig: the gradients are those of a step that was not")
        assert torch.equal(found, torch.full((64,), -1.0 - 2.0 - 8.0 - 8.0))


@pytest.mark.thorough
@pytest.mark.parametrize("edited", [(0, 1, 2, 3), (0,), (2,), (1, 2)], ids=str)
def test_edits_are_taken_by_all_or_refused(workers: Workers, edited: Sequence[int]) -> None:
    """Whoever of a group makes them."""
    runs = workers.run(jobs.edit, name=f"edit {edited}", groups=PAIRS, edited=edited)
    is_refused = len(edited) < WORKERS
    assert [("was changed" in told) for told, _ in runs] == [is_refused] * WORKERS, runs[0][0]
    assert_alike([found for _, found in runs])
    if is_refused:
        assert_bits([runs[0][1]], in_one_process(PAIRS)[-1:])


@pytest.mark.thorough
def test_loaded_state_is_taken_by_all(workers: Workers) -> None:
    found = workers.run(jobs.load, name="load", groups=PAIRS)
    straight = workers.run(
        jobs.train, name="straight", groups=PAIRS, steps=3, optimizer=ps.Adam(lr=0.01)
    )
    assert_bits(found, [run.history[-1] for run in straight])


def test_a_pull_is_shared_once(workers: Workers) -> None:
    found = workers.run(jobs.share_again, name="again", groups=PAIRS)
    assert_bits(found, [in_one_process(PAIRS)[-1]] * WORKERS)


def test_members_that_disagree_with_the_servers_are_told_why(pool: Pool) -> None:
    """The last is no leader; its seal, or another's read, is refused."""
    with (
        ps.local_cluster(servers=1, workers=WORKERS) as cluster,
        pool.connected(cluster.address, WORKERS, leave=False, deadline_s=10.0) as workers,
    ):
        told = workers.outcomes(jobs.disagree, name="rates", groups=PAIRS)
    for each in told:
        assert isinstance(each, WorkerFailed)
        assert "InvalidConfig" in str(each)
        assert "disagree about clock 1" in str(each)


@pytest.mark.thorough
@pytest.mark.parametrize("groups", [PAIRS, UNEQUAL], ids="".join)
def test_a_change_of_the_consistency_from_outside_is_refused_until_it_is_set_back(
    workers: Workers, groups: Sequence[str]
) -> None:
    name = f"outside {''.join(groups)}"
    runs = workers.run(jobs.change_from_outside, name=name, groups=groups)
    for told, found in runs:
        assert f"table '{name}/0/float32' is under asp now, and aggregate_within needs BSP" in told
        assert_bits([found], in_one_process(groups)[1:2])


@pytest.mark.thorough
def test_what_does_not_fit_is_refused(workers: Workers) -> None:
    for said in workers.run(jobs.refuse):
        stale, backup, eager, late, add, rows, nameless, changed, hybrid = said
        for each in (stale, backup, changed):
            assert "where workers are not at one step; expected BSP without backup" in each
        assert "aggregate_within is 'host' in 'eager' mode" in eager
        assert "with overlap_pull, but the group gets its values together" in late
        assert "aggregate_within is 'host' with Add, which each worker pushes for itself" in add
        assert "with Embeddings" in rows
        assert "aggregate_within is ''; expected 'host'" in nameless
        assert "HybridOptimizer has no aggregate_within=" in hybrid


# --- faults, and checkpoints


def test_a_killed_server_changes_no_bit(pool: Pool) -> None:
    with (
        replicated_cluster(servers=3, workers=WORKERS) as cluster,
        pool.connected(cluster.address, WORKERS) as workers,
    ):
        workers.run(jobs.go_on, name="failover", groups=UNEQUAL, steps=range(2))
        cluster.healed()
        dying = cluster.a_primary()
        cluster.kill(dying)
        found = workers.run(jobs.go_on, name="failover", steps=range(2, STEPS))
    assert_bits(found, [in_one_process(UNEQUAL)[-1]] * WORKERS)


@pytest.mark.thorough
def test_a_run_is_resumed_exactly(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> None:
    """With what a codec has left at the leaders."""
    url = str(tmp_path_factory.mktemp("checkpoints"))
    with (
        ps.local_cluster(2, WORKERS, checkpoint_url=url) as cluster,
        pool.connected(cluster.address, WORKERS) as workers,
    ):
        runs = workers.run(jobs.kept, name="kept", groups=PAIRS, ends=[2, 4], is_saved=True)
    with (
        ps.local_cluster(3, WORKERS, resume=url) as cluster,
        pool.connected(cluster.address, WORKERS) as workers,
    ):
        went_on = workers.run(jobs.kept, name="kept", groups=PAIRS, ends=[4])
    assert_alike([first for first, _ in went_on] + [run[1] for run in runs])
    assert_alike([after for _, after in went_on] + [run[2] for run in runs])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "runs",
    [
        ["....", "abba"],
        pytest.param(["aabb", "abb", "..", "abca"], marks=pytest.mark.thorough),
        pytest.param(["abca", "aaaa", "aa", "...."], marks=pytest.mark.thorough),
    ],
    ids=" then ".join,
)
def test_what_codecs_have_left_is_pushed_by_those_who_lead_in_the_next_run(
    pool: Pool, tmp_path: Path, runs: Sequence[str]
) -> None:
    """Each letter is a worker's group; dots have none."""
    root, left = str(tmp_path), [torch.zeros(64)] * WORKERS
    whole = torch.stack([jobs.gradient_of(rank) for rank in range(len(runs[0]))]).sum(0)
    for number, run in enumerate(runs):
        groups = NONE if "." in run else tuple(run)
        leaders = [groups.index(name) for name in groups] or [*range(len(run))]
        steps, resume = (20 if number == len(runs) - 1 else 2), root if number else ""
        with (
            ps.local_cluster(1, len(run), checkpoint_url=root, resume=resume) as cluster,
            processes(pool, len(run)) as own,
            own.connected(cluster.address, len(run)) as workers,
        ):
            found = workers.run(jobs.push_in_part, name="kept", groups=groups, steps=steps)
        taken = [torch.zeros(64) for _ in run]
        for rank, each in enumerate(left):
            taken[leaders[rank] if rank < len(run) else 0] += each
        torch.testing.assert_close([first for first, _, _ in found], taken)
        left = [last for _, last, _ in found]
        for rank, each in enumerate(left):
            assert (steps == 2 and rank in leaders) or not each.any()
        for _, _, parameters in found:
            torch.testing.assert_close(torch.stack(left).sum(0) - parameters, whole)


@contextmanager
def processes(pool: Pool, count: int) -> Iterator[Pool]:
    """The pool, or another, where the pool's processes have a process group of another size."""
    own = pool if count == WORKERS else Pool(count, IMPORTED)
    try:
        yield own
    finally:
        if own is not pool:
            own.stop()
