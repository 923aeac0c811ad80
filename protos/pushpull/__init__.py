"""pushpull: a parameter server for PyTorch.

    import pushpull as ps

    client = ps.connect()                       # PUSHPULL_SCHEDULER, or ps.connect("host:port")
    optimizer = ps.DistributedOptimizer(client, model, ps.Adam(lr=1e-3))

`connect` joins a cluster as a worker; `DistributedOptimizer` trains a torch module on it. `Client`
has the verbs below that: `create_table`, `push`, `pull`, `wait`. `local_cluster` starts a cluster
of child processes. `pushpull.errors` has the errors, `pushpull.types` the classes of what calls
return, `pushpull.jagged` the batches of an `EmbeddingBagCollection`, `pushpull.v1` the stubs of the
gRPC contract. The command `pushpull` is also `python -m pushpull`.

A name is imported when it is used: the stubs alone, which every role needs, cost nothing more.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ps_worker import (
        ASP,
        BSP,
        FTRL,
        SGD,
        SSP,
        Adagrad,
        Adam,
        AdamW,
        Add,
        Aggregate,
        Assign,
        Client,
        Constant,
        Custom,
        DistributedOptimizer,
        DistributedSampler,
        Embedding,
        EmbeddingBag,
        EmbeddingBagCollection,
        FromRank0,
        HybridOptimizer,
        Inline,
        Normal,
        Outer,
        RandomState,
        RMSprop,
        RowwiseAdagrad,
        Uniform,
        Zeros,
        connect,
        empty_shared,
        local_cluster,
        prefetch,
        pull_model,
        ray_cluster,
    )
    from pushpull import errors as errors
    from pushpull import jagged as jagged
    from pushpull import types as types

    __version__: str

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
    "Assign",
    "Client",
    "Constant",
    "Custom",
    "DistributedOptimizer",
    "DistributedSampler",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "FromRank0",
    "HybridOptimizer",
    "Inline",
    "Normal",
    "Outer",
    "RMSprop",
    "RandomState",
    "RowwiseAdagrad",
    "Uniform",
    "Zeros",
    "connect",
    "empty_shared",
    "local_cluster",
    "prefetch",
    "pull_model",
    "ray_cluster",
]

_SUBMODULES = ("errors", "jagged", "types")


if not TYPE_CHECKING:  # to type checkers a name that there is not is an error

    def __getattr__(name: str) -> object:
        if name in __all__:
            found: object = getattr(import_module("ps_worker"), name)
        elif name in _SUBMODULES:
            found = import_module(f"pushpull.{name}")
        elif name == "__version__":
            found = import_module("importlib.metadata").version("pushpull")
        else:
            raise AttributeError(f"module 'pushpull' has no attribute '{name}'{_moved(name)}")
        globals()[name] = found
        return found


def _moved(name: str) -> str:
    """Where a name is that is not here; empty if nowhere."""
    for module in _SUBMODULES:
        if name in import_module(f"pushpull.{module}").__all__:
            return f"; it is pushpull.{module}.{name}"
    return ""


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES, "__version__"])
