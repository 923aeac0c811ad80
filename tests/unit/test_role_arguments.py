"""What a local cluster's roles are told: their own command line reads it."""

from __future__ import annotations

import ps_server.config
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
