"""The classes of what calls return, for annotations; nobody makes one by hand."""

from ps_core.consistency import Consistency
from ps_runtime.checkpoint.calls import MadeCheckpoint
from ps_worker import (
    ComputeTime,
    LocalCluster,
    Progress,
    Pulled,
    PullTicket,
    PushTicket,
    RayCluster,
    RayRole,
    StepResult,
    TableHandle,
)
from ps_worker.client.checkpoints import CheckpointTicket
from ps_worker.client.data_shards import DataShards

__all__ = [
    "CheckpointTicket",
    "ComputeTime",
    "Consistency",
    "DataShards",
    "LocalCluster",
    "MadeCheckpoint",
    "Progress",
    "PullTicket",
    "Pulled",
    "PushTicket",
    "RayCluster",
    "RayRole",
    "StepResult",
    "TableHandle",
]
