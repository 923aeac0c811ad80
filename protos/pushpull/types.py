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

__all__ = [
    "CheckpointTicket",
    "ComputeTime",
    "Consistency",
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
