"""The worker's side, and the API of `import pushpull as ps`.

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
    TableFull,
    TableNotFound,
    Unauthenticated,
    UpdateFailed,
    ValuesLost,
    WaitExpired,
    WorkerLost,
)
from ps_worker.client.client import Client
from ps_worker.client.connect import connect
from ps_worker.client.local_cluster import LocalCluster, local_cluster
from ps_worker.spec.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Add,
    Aggregate,
    Assign,
    Custom,
    Outer,
    RMSprop,
    RowwiseAdagrad,
)
from ps_worker.spec.settings import (
    ASP,
    BSP,
    SSP,
    Constant,
    FromRank0,
    Inline,
    Normal,
    Uniform,
    Zeros,
)
from ps_worker.spec.straggler import ComputeTime
from ps_worker.steps.counters import Progress
from ps_worker.steps.steps import Pulled, PullTicket, PushTicket, StepResult, TableHandle
from ps_worker.transport.lane import empty_shared

if TYPE_CHECKING:
    from ps_worker.checkpoint.random_state import RandomState
    from ps_worker.client.on_ray import RayCluster, RayRole, ray_cluster
    from ps_worker.training.bags.collection import EmbeddingBagCollection
    from ps_worker.training.distributed_optimizer import DistributedOptimizer
    from ps_worker.training.distributed_sampler import DistributedSampler
    from ps_worker.training.embedding import Embedding, EmbeddingBag
    from ps_worker.training.hybrid.hybrid_optimizer import HybridOptimizer
    from ps_worker.training.model_pull import pull_model
    from ps_worker.training.prefetch import prefetch

__all__ = [
    "ASP",
    "BSP",
    "FTRL",
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
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "Fenced",
    "FromRank0",
    "GradientChangedAfterPush",
    "HybridOptimizer",
    "Inline",
    "Internal",
    "InvalidCheckpoint",
    "InvalidConfig",
    "InvalidKeys",
    "InvalidTensor",
    "LocalCluster",
    "Normal",
    "NotOwner",
    "NotPermitted",
    "Outer",
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
    "RowwiseAdagrad",
    "StaleAssignment",
    "StepResult",
    "TableExists",
    "TableFull",
    "TableHandle",
    "TableNotFound",
    "Unauthenticated",
    "Uniform",
    "UpdateFailed",
    "ValuesLost",
    "WaitExpired",
    "WorkerLost",
    "Zeros",
    "connect",
    "empty_shared",
    "local_cluster",
    "prefetch",
    "pull_model",
    "ray_cluster",
]

_IMPORTED_ON_USE = {
    # torch takes seconds to import; a process that only pulls or only starts a cluster need not
    "DistributedOptimizer": "ps_worker.training.distributed_optimizer",
    "DistributedSampler": "ps_worker.training.distributed_sampler",
    "Embedding": "ps_worker.training.embedding",
    "EmbeddingBag": "ps_worker.training.embedding",
    "EmbeddingBagCollection": "ps_worker.training.bags.collection",
    "HybridOptimizer": "ps_worker.training.hybrid.hybrid_optimizer",
    "RandomState": "ps_worker.checkpoint.random_state",
    "RayCluster": "ps_worker.client.on_ray",
    "RayRole": "ps_worker.client.on_ray",
    "prefetch": "ps_worker.training.prefetch",
    "pull_model": "ps_worker.training.model_pull",
    "ray_cluster": "ps_worker.client.on_ray",
}


def __getattr__(name: str) -> object:
    if name not in _IMPORTED_ON_USE:
        raise AttributeError(f"module 'ps_worker' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_IMPORTED_ON_USE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
