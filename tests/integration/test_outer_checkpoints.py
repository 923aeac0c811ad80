"""Outer in checkpoints: a run goes on bit for bit, between two outer steps as well."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ps_worker as ps
from ps_runtime.checkpoint.store import resolve
from tests.integration import resumed_training
from tests.integration.outer_training import (
    INNER_STEPS,
    Trainer,
    Values,
    adamw,
    differences,
    is_same,
    values_of,
)
from tests.integration.resumed_training import Position

END = 10
WAIT_S = 30.0


class Run:
    """Workers that train together, with a sampler and a schedule, and ask for a checkpoint."""

    def __init__(self, consistency: str, **options: Any) -> None:
        self.options = {"consistency": consistency, **options}
        self.clocks: list[int] = []

    def train(self, client: ps.Client, until: int, save_at: int = 0) -> list[Values]:
        """The parameters and buffers after each step, from where the checkpoint was made."""
        trainer = Trainer(client, "model", adamw(), **self.options)
        schedule = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2, 0.5)
        client.attach_state("schedule", schedule)
        sampler = ps.DistributedSampler(client, 2 * END, shuffle=False)
        history: list[Values] = []
        for number in sampler.follow(list(sampler), batch_size=1):
            trainer.step_count = number // 2
            history.append([*trainer.step(), trainer.model.get_buffer("seen").clone()])
            schedule.step()
            client.save_point()
            if trainer.step_count == save_at:
                ticket = client.checkpoint()
                ticket.wait(WAIT_S)
            if trainer.step_count == until:
                break
        self.clocks.append(trainer.optimizer.clock)
        return history

    def on_cluster(self, root: str, resume: str, until: int, save_at: int = 0) -> list[Any]:
        work = partial(self.train, until=until, save_at=save_at)
        with ps.local_cluster(1, 2, checkpoint_url=root, resume=resume) as cluster:
            return resumed_training.together(cluster.address, 2, work)


@pytest.mark.thorough
def test_fewer_workers_say_whose_inner_steps_are_dropped_and_keep_what_codecs_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, at = str(tmp_path), 2 * INNER_STEPS - 1

    def left(client: ps.Client) -> torch.Tensor:
        trainer = Trainer(client, "model", adamw())
        if not client.restored_from:
            for _ in range(at):
                trainer.step()
            client.checkpoint().wait(WAIT_S)
        residuals = trainer.optimizer.trained_model.tables[0].handle.steps.residuals
        assert residuals is not None
        found: torch.Tensor = residuals.state_dict()["residuals"]
        if client.restored_from:
            assert trainer.optimizer.trained_model.inner_steps.at(1) == at
            trainer.step()  # an outer step, of this worker alone
            assert trainer.optimizer.clock == 2
        return found

    def of(count: int, resume: str) -> list[torch.Tensor]:
        with ps.local_cluster(1, count, checkpoint_url=root, resume=resume) as cluster:
            return resumed_training.together(cluster.address, count, left, push_codec="int8")

    first, second = of(2, "")
    assert second.any()
    (found,) = of(1, root)
    torch.testing.assert_close(found, (first + second) / 2)  # of a mean of two
    (told,) = [r.message for r in caplog.records if "absent_workers" in r.message]
    assert "name=inner_steps/model" in told
    assert "ranks=1 " in told


@pytest.mark.thorough
@pytest.mark.timeout(180)  # four clusters, one after the other
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.thorough),
        {"push_codec": "int8", "pull_codec": "bf16"},
    ],
    ids=["whole", "int8"],
)
def test_bsp_goes_on_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    """From one step after an outer step, and from two; and from right after one."""
    run, root = Run("bsp", **options), str(tmp_path / "run")
    expected = run.on_cluster(str(tmp_path / "whole"), "", END)
    found: list[list[Values]] = [[], []]
    for begin, end, resume in ((4, 5, ""), (8, 8, root), (9, 9, root), (0, END, root)):
        before = len(found[0])
        for rank, history in enumerate(run.on_cluster(root, resume, end, begin)):
            found[rank] += history[: begin - before] if begin else history
        if begin:
            with resolve(root).reader as reader:
                clocks = {table.clock for table in reader.manifest.tables}
                assert clocks == {begin // INNER_STEPS}, "it needs no further outer step"
                assert not any(table.is_torn for table in reader.manifest.tables)
    for rank in range(2):
        for step, (own, theirs) in enumerate(zip(found[rank], expected[rank], strict=True)):
            assert not differences(own, theirs), f"{rank=} {step=}"


@pytest.mark.thorough
def test_one_that_comes_within_a_step_has_the_state_after_it(tmp_path: Path) -> None:
    """Both workers are in the forward pass after inner step 4, whose buffers are not the step's."""
    root = str(tmp_path)

    def train(client: ps.Client, within: Callable[[], object]) -> tuple[int, list[Values]]:
        trainer, position = Trainer(client, "model", adamw()), Position()
        client.attach_state("position", position, per_rank=True)
        begun, history = position.seen, []
        for step in range(begun, 8):
            trainer.optimizer.zero_grad()
            loss = trainer.model.loss(client.rank, step)
            if step == 4 and not begun:
                within()
                client.tables.await_view(
                    lambda view: view.checkpoint is not None and view.checkpoint.is_cut,
                    "the cut", WAIT_S,
                )  # fmt: skip
            loss.backward()
            trainer.optimizer.step()
            position.seen += 1
            history.append([*values_of(trainer.model), trainer.model.get_buffer("seen").clone()])
        return begun, history

    with (
        ps.local_cluster(1, 2, checkpoint_url=root) as cluster,
        ps.connect(cluster.address, role="operator") as operator,
    ):
        tickets: list[Any] = []
        meeting = threading.Barrier(2, lambda: tickets.append(operator.checkpoint()))
        work = partial(train, within=meeting.wait)
        whole = resumed_training.together(cluster.address, 2, work)
        tickets[0].wait(WAIT_S)
    with ps.local_cluster(1, 2, resume=root) as cluster:
        resumed = resumed_training.together(cluster.address, 2, partial(train, within=int))
    for (_, expected), (begun, found) in zip(whole, resumed, strict=True):
        assert begun == 5
        assert len(found) == 3
        for own, theirs in zip(found, expected[begun:], strict=True):
            assert is_same(own, theirs)


@pytest.mark.thorough
def test_after_a_resume_between_two_outer_steps_a_cut_is_no_outer_step_further(
    tmp_path: Path,
) -> None:
    """The worker is within its first step, and its next save point is at the same clock."""
    root = str(tmp_path)

    def train(client: ps.Client, address: str) -> int | None:
        trainer = Trainer(client, "model", adamw(4))
        if not client.restored_from:
            for _ in range(2):
                trainer.step()
            client.checkpoint().wait(WAIT_S)
            return None
        trainer.optimizer.zero_grad()
        with ps.connect(address, role="operator") as operator:
            operator.checkpoint()
            client.tables.await_view(
                lambda view: view.checkpoint is not None and view.checkpoint.is_cut,
                "the cut", WAIT_S,
            )  # fmt: skip
        (table,) = (t for t in client.engine.view.tables if t.spec.name == "model/0/float32")
        trainer.model.loss(client.rank, 2).backward()
        trainer.optimizer.step()
        return table.cut_step

    for resume in ("", root):
        with ps.local_cluster(1, 1, checkpoint_url=root, resume=resume) as cluster:
            work = partial(train, address=cluster.address)
            (cut,) = resumed_training.together(cluster.address, 1, work)
    assert cut == 0


@pytest.mark.thorough
def test_a_pseudo_gradient_counts_from_what_its_worker_pulled(tmp_path: Path) -> None:
    """ASP: the checkpoint has what another worker pushed meanwhile. Each inner step moves every
    parameter by -1: two of this worker, and two of the other.
    """
    sgd = ps.Outer(partial(torch.optim.SGD, lr=1.0), 2, lr=1.0, momentum=0.0, nesterov=False)
    root = str(tmp_path)

    def train(client: ps.Client, steps: int) -> torch.Tensor:
        model = torch.nn.Linear(100, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = ps.DistributedOptimizer(client, model, sgd, consistency="asp")
        for _ in range(steps if client.rank else 1):
            optimizer.zero_grad()
            model.weight.sum().backward()
            optimizer.step()
        client.barrier("trained")
        client.checkpoint().wait(WAIT_S)
        optimizer.synchronize()
        return model.weight.detach()

    for resume, steps in (("", 2), (root, 0)):
        with ps.local_cluster(1, 2, checkpoint_url=root, resume=resume) as cluster:
            work = partial(train, steps=steps)
            weights = resumed_training.together(cluster.address, 2, work)
        assert all(weight.eq(-3.0 - bool(resume)).all() for weight in weights)
