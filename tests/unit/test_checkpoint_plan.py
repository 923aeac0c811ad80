"""What a local cluster's scheduler is told of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from ps_cli.__main__ import app
from ps_cli.train.train import TrainOptions
from ps_cli.train.up import UpOptions
from ps_core.errors import InvalidConfig
from ps_runtime.launch.cluster_shape import (
    NO_CHECKPOINTS,
    CheckpointPlan,
    ClusterShape,
    checkpoints_of,
)
from ps_runtime.settings.config import from_command_line
from scheduler.config import SchedulerConfig, parser
from scheduler.start import cluster_settings

PLACE = ("--checkpoint-url=/place", "--checkpoint-last-s=0")
"""Who starts a local cluster makes the last one."""


@pytest.mark.parametrize(
    ("every", "argument"),
    [
        ("100", "clocks=100"),
        ("1234567", "clocks=1234567"),  # not 1.23457e+06, which is no number of steps
        ("60s", "s=60"),
        ("1.5s", "s=1.5"),
        ("5m", "s=300"),
        ("1 h", "s=3600"),
        ("1234567s", "s=1234567"),
    ],
)
def test_how_often_is_said_exactly(every: str, argument: str) -> None:
    told = CheckpointPlan("/place", every).scheduler_arguments
    assert told == (*PLACE, f"--checkpoint-every-{argument}")


def test_auto_needs_a_place_to_look() -> None:
    with pytest.raises(InvalidConfig, match="resume is 'auto' without a place to look"):
        CheckpointPlan(resume="auto")
    assert "--resume=auto" in CheckpointPlan("/place", resume="auto").scheduler_arguments


@pytest.mark.parametrize(
    "every", ["0", "0s", "1.5", "-1", "s", "1d", "1e3", "1s2", "nan", "9" * 400, "9" * 20 + "h"]
)
def test_how_often_is_a_number_of_steps_or_a_time(every: str) -> None:
    with pytest.raises(InvalidConfig, match="expected a number of steps such as 100, or a time"):
        CheckpointPlan("/place", every)


def test_what_has_no_place_to_go_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="has no place to go; give --checkpoint-url"):
        CheckpointPlan(every="60s")
    with pytest.raises(InvalidConfig, match="keep is -1 checkpoints; expected 0"):
        CheckpointPlan("/place", keep=-1)


def test_a_cluster_may_start_from_one_without_making_any() -> None:
    assert CheckpointPlan(resume="/place").scheduler_arguments[-1] == "--resume=/place"
    assert not [each for each in NO_CHECKPOINTS.scheduler_arguments if "url" in each]


def test_a_local_cluster_without_a_place_starts_where_the_environment_has_an_interval() -> None:
    """As `compare` does, beside a `train` that makes checkpoints."""
    told = ClusterShape(1, 2, checkpoints=NO_CHECKPOINTS).scheduler_arguments
    env = {"PUSHPULL_CHECKPOINT_EVERY_S": "60", "PUSHPULL_CHECKPOINT_EVERY_CLOCKS": "10"}
    settings = from_command_line(SchedulerConfig, parser(), told, env)
    assert (settings.checkpoint_every_s, settings.checkpoint_every_clocks) == (0, 0)


def test_the_scheduler_is_told_all_of_it() -> None:
    shape = ClusterShape(1, 2, checkpoints=CheckpointPlan("/place", "10", 3, "/place/00000001-c"))
    told = shape.scheduler_arguments
    assert told[-5:] == (
        *PLACE, "--checkpoint-every-clocks=10", "--checkpoint-keep=3", "--resume=/place/00000001-c",
    )  # fmt: skip
    names = {argument.removeprefix("--").partition("=")[0].replace("-", "_") for argument in told}
    assert names <= SchedulerConfig.__dataclass_fields__.keys()


def test_how_many_are_full_reaches_the_scheduler() -> None:
    options = UpOptions(checkpoint_url="runs/7", checkpoint_every="5m", checkpoint_full_every=4)
    assert options.shape.checkpoints.scheduler_arguments[2:] == (
        "--checkpoint-every-s=300", "--checkpoint-keep=0", "--checkpoint-full-every=4",
    )  # fmt: skip
    train = TrainOptions(script=Path("x.py"), checkpoint_full_every=4)
    assert train.shape.checkpoints.full_every == 4
    assert CheckpointPlan("/place").scheduler_arguments == PLACE
    settings = cluster_settings(SchedulerConfig(workers=1, servers=1, checkpoint_full_every=4))
    assert settings.checkpoint_full_every == 4


def options_of(command: str, *arguments: str, script: Path) -> TrainOptions | UpOptions:
    """The options of a command line, and of the variables."""
    tool = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    kind, given = (TrainOptions, (str(script),)) if command == "train" else (UpOptions, ())
    with tool.make_context(command, [*given, *arguments]) as context:
        return kind(**context.params)


@pytest.mark.parametrize("command", ["train", "up"])
def test_variables_are_read_where_the_last_checkpoint_is_made(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    for name, value in {
        "CHECKPOINT_URL": "runs/7",
        "CHECKPOINT_KEEP": "3",
        "CHECKPOINT_FULL_EVERY": "4",
        "CHECKPOINT_LAST_S": "1800",
        "RESUME": "auto",
        "UPDATE_LOG": "runs/log",
    }.items():
        monkeypatch.setenv(f"PUSHPULL_{name}", value)
    options = options_of(command, script=script)
    assert options.checkpoint_last_s == 1800
    found = options.shape
    assert found.checkpoints == CheckpointPlan("runs/7", "", 3, "auto", 4)
    assert found.update_log.path == "runs/log"
    flags = ("--checkpoint-url=runs/8", "--resume=runs/8", "--checkpoint-keep=0")
    options = options_of(
        command, *flags, "--update-log=other", "--checkpoint-last-s=0", script=script
    )
    assert options.checkpoint_last_s == 0
    found = options.shape
    assert found.checkpoints == CheckpointPlan("runs/8", "", 0, "runs/8", 4)
    assert "--checkpoint-keep=0" in found.checkpoints.scheduler_arguments, "3 would be inherited"
    assert found.update_log.path == "other"


def test_a_program_s_arguments_go_before_the_variables() -> None:
    env = {"PUSHPULL_CHECKPOINT_URL": "runs/7", "PUSHPULL_RESUME": "auto"}
    assert checkpoints_of("", "", env) == CheckpointPlan("runs/7", resume="auto")
    assert checkpoints_of("runs/8", "runs/6", env) == CheckpointPlan("runs/8", resume="runs/6")
    assert checkpoints_of("", "", {}) == NO_CHECKPOINTS


def test_that_none_is_full_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="a full checkpoint every 0; expected 1"):
        CheckpointPlan("runs/7", full_every=0)
