"""What a local cluster's roles are told: their own command line reads it."""

from __future__ import annotations

import types

import pytest

import ps_server.config
import ps_worker.transport.config
import scheduler.config
from ps_runtime.launch.cluster_shape import CheckpointPlan, ClusterShape, UpdateLogPlan
from ps_runtime.settings.config import from_command_line
from ps_server.config import ServerConfig
from scheduler.config import SchedulerConfig


def test_a_server_reads_all_that_it_is_told_of_its_update_log() -> None:
    told = UpdateLogPlan("logs", bound_mb=5, is_synced=True).server_arguments(3)
    reader = ps_server.config.parser()
    settings = from_command_line(ServerConfig, reader, ["--scheduler=a:1", *told], {})
    assert settings.update_log is not None
    assert settings.update_log.name == "server-3"
    assert (settings.update_log_mb, settings.update_log_sync) == (5, True)


def test_the_scheduler_reads_all_that_it_is_told_of_its_cluster() -> None:
    shape = ClusterShape(
        3, 2, max_workers=4, replica_count=2, min_in_sync=2, lease_s=1.5,
        checkpoints=CheckpointPlan("/place", "5m", 3, "/place/00000001-c", 4),
    )  # fmt: skip
    settings = from_command_line(
        SchedulerConfig, scheduler.config.parser(), shape.scheduler_arguments, {}
    )
    assert (settings.workers, settings.servers, settings.max_workers) == (2, 3, 4)
    assert (settings.replicas, settings.min_in_sync, settings.lease_s) == (2, 2, 1.5)
    assert (settings.checkpoint_every_s, settings.checkpoint_keep) == (300.0, 3)
    assert settings.checkpoint_full_every == 4


@pytest.mark.parametrize("name", ["checkpoint-every-s", "checkpoint-every-clocks"])
def test_checkpoints_that_would_have_no_place_are_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ("--workers=1", "--servers=1", f"--{name}=60")
    with pytest.raises(SystemExit):
        from_command_line(SchedulerConfig, scheduler.config.parser(), told, {})
    said = " ".join(capsys.readouterr().err.split())
    setting = name.replace("-", "_")
    assert f"{setting} is 60" in said
    assert "PUSHPULL_CHECKPOINT_URL" in said
    environment = {"PUSHPULL_CHECKPOINT_EVERY_S": "0", "PUSHPULL_CHECKPOINT_EVERY_CLOCKS": "0"}
    from_command_line(SchedulerConfig, scheduler.config.parser(), told[:2], environment)
    placed = (*told, "--checkpoint-url=runs")
    from_command_line(SchedulerConfig, scheduler.config.parser(), placed, {})


@pytest.mark.parametrize(
    "own",
    [
        ("--log", "out.txt"),
        ("--log=out.txt",),
        ("--l", "--c", "--p", "--r", "--w", "--h"),
        ("--help",),
        ("-h",),
        ("--rank", "4"),
        ("--rank=4", "other.py", "--", "-x"),
    ],
)
def test_a_scripts_arguments_are_its_own(own: tuple[str, ...]) -> None:
    reader = ps_worker.transport.config.parser()
    for before, rank in ((), None), (("--rank", "3"), "3"):
        given = reader.parse_args([*before, "s.py", *own])
        assert (str(given.script), given.arguments, given.rank) == ("s.py", list(own), rank)


@pytest.mark.parametrize("module", [ps_worker.transport.config, ps_server.config, scheduler.config])
def test_a_flag_is_given_whole(
    module: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that a new flag takes no meaning away from a command line that works."""
    with pytest.raises(SystemExit):
        module.parser().parse_args(["--log-lev", "info"])
    assert "--log-lev" in capsys.readouterr().err
    assert module.parser().parse_known_args(["--log-level", "info", "s.py"])[0].log_level == "info"
