"""What options of `pushpull train` and `up` make of checkpoints, on the way to the scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from ps_cli.train_options import TrainOptions
from ps_cli.up_options import UpOptions
from ps_core.errors import InvalidConfig
from ps_runtime.cluster_shape import CheckpointPlan
from scheduler.__main__ import SchedulerConfig, cluster_settings


def test_how_many_are_full_reaches_the_scheduler() -> None:
    options = UpOptions(checkpoint_url="runs/7", checkpoint_every="5m", checkpoint_full_every=4)
    assert options.checkpoints.scheduler_arguments == (
        "--checkpoint-url=runs/7", "--checkpoint-every-s=300", "--checkpoint-full-every=4",
    )  # fmt: skip
    train = TrainOptions(script=Path("x.py"), checkpoint_full_every=4)
    assert train.checkpoints.full_every == 4
    assert CheckpointPlan("runs/7").scheduler_arguments == ("--checkpoint-url=runs/7",)
    settings = cluster_settings(SchedulerConfig(workers=1, servers=1, checkpoint_full_every=4))
    assert settings.checkpoint_full_every == 4


def test_that_none_is_full_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="a full checkpoint every 0; expected 1"):
        CheckpointPlan("runs/7", full_every=0)
