"""A worker waits for a checkpoint, and another one in the reduction of its next step for it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ps_worker as ps
from tests.integration import group_jobs, hybrid_jobs
from tests.integration.lane_cluster import lane_cluster, until
from tests.integration.ordered_workers import PATIENCE, begun, ordered_workers

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(120)]

WORKERS = 2
DEADLINE_S = 20.0


class Marking:
    """A trainer whose worker makes a file when its backward pass has ended."""

    def __init__(self, client: ps.Client, trainer: Any, path: Path) -> None:
        self._trainer = trainer
        self._path = path / f"in-step-{client.rank}"
        self.optimizer = trainer.optimizer

    def train(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self._backward(step)
            self._path.touch()
            self.optimizer.step()
            self._path.unlink()

    def _backward(self, step: int) -> None:
        trainer = self._trainer
        if isinstance(trainer, hybrid_jobs.Trainer):
            hybrid_jobs.loss_of(trainer.module, step, trainer.client.rank).backward()
        else:
            trainer.loss(step).backward()


def marking(client: ps.Client, kind: str, path: Path) -> Marking:
    if kind == "hybrid":
        return Marking(client, hybrid_jobs.Trainer(client, "plain", "model"), path)
    return Marking(client, group_jobs.Trainer(client, "model", ("a",) * WORKERS), path)


@pytest.mark.parametrize("kind", ["hybrid", "group"])
def test_who_waits_before_a_step_that_another_reduces_is_told_to_take_it(
    kind: str, tmp_path: Path
) -> None:
    environment = {**PATIENCE, "PUSHPULL_CHECKPOINT_URL": str(tmp_path / "checkpoints")}
    make = partial(marking, kind=kind, path=tmp_path)
    with (
        lane_cluster(servers=1, workers=WORKERS, environment=environment) as cluster,
        ordered_workers(cluster, "", make, WORKERS, DEADLINE_S) as (waiting, other),
    ):
        begun(other)
        until((tmp_path / "in-step-1").exists, "the other is in its next step")
        waiting.pipe.send("checkpoint")
        name, said = waiting.hear()
        assert name == "WaitExpired", said
        assert said.startswith("checkpoint 1 is of step 2 of table ")
        assert "others were further. Take that step, then wait" in said
        begun(waiting)
        assert [waiting.hear(), other.hear()] == [2, 2]
        begun(other)  # whose save point comes first
        waiting.pipe.send("wait for it")
        assert waiting.hear() == 1
