"""The worker's side: what is behind `import pushpull as ps`, which is the API.

`connect` joins a cluster; `Client` has the verbs (create_table, push, pull, push_pull, wait);
`DistributedOptimizer` trains a torch module; `local_cluster` starts a cluster of child processes.
"""

from typing import TYPE_CHECKING

from ps_core.consistency import Consistency
from ps_core.errors import (
    AlreadyPast,
    Draining,
    EditRefused,
    Fenced,
    GradientChangedAfterPush,
    Internal,
    InvalidCheckpoint,
    InvalidConfig,
    InvalidKeys,
    InvalidTensor,
    NotOwner,
    NotPermitted,
    Overloaded,
    PushpullError,
    Recovering,
    StaleAssignment,
    TableExists,
    TableNotFound,
    Unauthenticated,
    UpdateFailed,
    ValuesLost,
    WaitExpired,
)
from ps_worker.client import Client, connect
from ps_worker.counters import Progress
from ps_worker.local_cluster import LocalCluster, local_cluster
from ps_worker.optimizers import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Add,
    Aggregate,
    Assign,
    Custom,
    RMSprop,
)
from ps_worker.settings import ASP, BSP, SSP, Constant, FromRank0, Inline, Zeros
from ps_worker.shared_buffers import empty_shared
from ps_worker.straggler import ComputeTime
from ps_worker.table_handle import TableHandle
from ps_worker.tickets import Pulled, PullTicket, PushTicket, StepResult

if TYPE_CHECKING:
    from ps_worker.distributed_optimizer import DistributedOptimizer
    from ps_worker.distributed_sampler import DistributedSampler
    from ps_worker.model_pull import pull_model
    from ps_worker.on_ray import RayCluster, RayRole, ray_cluster
    from ps_worker.random_state import RandomState

__all__ = [
    "ASP",
    "BSP",
    "SGD",
    "SSP",
    "Adagrad",
    "Adam",
    "AdamW",
    "Add",
    "Aggregate",
    "AlreadyPast",
    "Assign",
    "Client",
    "ComputeTime",
    "Consistency",
    "Constant",
    "Custom",
    "DistributedOptimizer",
    "DistributedSampler",
    "Draining",
    "EditRefused",
    "Fenced",
    "FromRank0",
    "GradientChangedAfterPush",
    "Inline",
    "Internal",
    "InvalidCheckpoint",
    "InvalidConfig",
    "InvalidKeys",
    "InvalidTensor",
    "LocalCluster",
    "NotOwner",
    "NotPermitted",
    "Overloaded",
    "Progress",
    "PullTicket",
    "Pulled",
    "PushTicket",
    "PushpullError",
    "RMSprop",
    "RandomState",
    "RayCluster",
    "RayRole",
    "Recovering",
    "StaleAssignment",
    "StepResult",
    "TableExists",
    "TableHandle",
    "TableNotFound",
    "Unauthenticated",
    "UpdateFailed",
    "ValuesLost",
    "WaitExpired",
    "Zeros",
    "connect",
    "empty_shared",
    "local_cluster",
    "pull_model",
    "ray_cluster",
]

_IMPORTED_ON_USE = {
    # torch takes seconds to import; a process that only reads or only starts a cluster need not
    "DistributedOptimizer": "ps_worker.distributed_optimizer",
    "DistributedSampler": "ps_worker.distributed_sampler",
    "RandomState": "ps_worker.random_state",
    "RayCluster": "ps_worker.on_ray",
    "RayRole": "ps_worker.on_ray",
    "pull_model": "ps_worker.model_pull",
    "ray_cluster": "ps_worker.on_ray",
}


def __getattr__(name: str) -> object:
    if name not in _IMPORTED_ON_USE:
        raise AttributeError(f"module 'ps_worker' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_IMPORTED_ON_USE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
