"""A model that is in torch's DistributedDataParallel, too: torchrun has started the workers, and a
framework has taken its variables for its own.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from ps_core.errors import InvalidConfig


def check_reduces_alone(parameters: Iterable[torch.Tensor], worker_count: int) -> None:
    """Refuse parameters whose gradients another reduces among the workers as well.

    Args:
        parameters: the optimizer's.
        worker_count: how many workers there are.

    Blocking: looks at all objects of the process, where it is in a process group of several.

    Raises:
        InvalidConfig: they are a module's that is in DistributedDataParallel with other processes.
    """
    if worker_count == 1 or not distributed.is_available() or not distributed.is_initialized():
        return
    if distributed.get_world_size() == 1:
        return
    ours = {id(parameter) for parameter in parameters}
    for found in gc.get_objects():
        # `type`, since `isinstance` asks proxies, which may import or answer anything.
        if not issubclass(type(found), DistributedDataParallel):
            continue
        process_count = found.process_group.size()
        if process_count > 1 and any(id(parameter) in ours for parameter in found.parameters()):
            raise InvalidConfig(
                f"the model is in DistributedDataParallel with {process_count} processes, and this "
                f"is one of {worker_count} workers: gradients would be reduced twice, and a "
                "framework deals out the data twice. Train the module itself; where a framework "
                "has wrapped it, remove RANK, WORLD_SIZE and LOCAL_RANK from os.environ after "
                "ps.connect(), before the framework is set up"
            )
