"""A parameter server on torch.distributed.rpc, as PyTorch's tutorial has it, and at its best.

The tutorial's way ("Implementing Batch RPC Processing"): one call takes all gradients, adds them to
the parameters' own, divides by the batch, steps `torch.optim.SGD`, zeroes the gradients and returns
all parameters; here with batches of one, and without the tutorial's momentum. At its best: a call
for each 4 MiB tensor, several in flight at once. Nothing that a call returns is copied.

On one machine torch RPC chooses shared memory and reads the other process's memory; with TCP only,
it works as between machines. Both are measured.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Iterator

import torch
from torch.distributed import rpc

from ps_cli.bench.contenders.child import Actions
from ps_cli.bench.instruments.sampling import MIB, call_latencies

TENSOR_BYTES = 4 * MIB
SERVER = "server"

IN_FLIGHT_COUNT = 4
"""Calls in flight at once, at its best: of 1, 2, 4, 8 and 16, on 2 cores, 4 was as good as any over
shared memory and the best over TCP."""

LEARNING_RATE = 0.1
TUTORIAL_BATCH_COUNT = 1
"""Trainers whose gradients make one step of the tutorial's server."""

OWN_LANE, TCP_LANE = "own", "tcp"
"""Torch RPC's own choice, and TCP only."""

_parameters: list[torch.Tensor] = []
_optimizers: list[torch.optim.Optimizer] = []


def tensors(byte_count: int) -> list[torch.Tensor]:
    """A model of 4 MiB tensors, or of one smaller one."""
    sizes = [min(TENSOR_BYTES, byte_count - at) for at in range(0, byte_count, TENSOR_BYTES)]
    return [torch.full((size // 4,), 1e-3) for size in sizes]


def update_and_fetch(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """On the server: the tutorial's one call."""
    for parameter, gradient in zip(_parameters, gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad += gradient
    for parameter, optimizer in zip(_parameters, _optimizers, strict=True):
        if parameter.grad is not None:
            parameter.grad /= TUTORIAL_BATCH_COUNT
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return [parameter.detach() for parameter in _parameters]


def update(index: int, gradient: torch.Tensor) -> None:
    """On the server: one tensor's gradient."""
    _parameters[index].grad = gradient
    _optimizers[index].step()


def fetch(index: int) -> torch.Tensor:
    """On the server: one tensor."""
    return _parameters[index].detach()


class _Trainer:
    def __init__(self, byte_count: int, call_count: int) -> None:
        self._gradients = tensors(byte_count)
        self._fetched: list[torch.Tensor] = []
        self._call_count = call_count

    def tutorial_round(self) -> None:
        """Send all gradients and get all parameters, in one call."""
        self._fetched = rpc.rpc_sync(SERVER, update_and_fetch, args=(self._gradients,))

    def best_round(self) -> None:
        """Send all gradients, then get all parameters, several calls at once."""
        sent: deque[torch.futures.Future[None]] = deque()
        for index, gradient in enumerate(self._gradients):
            if len(sent) == IN_FLIGHT_COUNT:
                sent.popleft().wait()
            sent.append(rpc.rpc_async(SERVER, update, args=(index, gradient)))
        for call in sent:
            call.wait()
        asked: deque[torch.futures.Future[torch.Tensor]] = deque()
        fetched = []
        for index in range(len(self._gradients)):
            if len(asked) == IN_FLIGHT_COUNT:
                fetched.append(asked.popleft().wait())
            asked.append(rpc.rpc_async(SERVER, fetch, args=(index,)))
        self._fetched = fetched + [call.wait() for call in asked]

    def exchange(self) -> dict[str, float]:
        return call_latencies(self.tutorial_round, self._call_count)


@contextlib.contextmanager
def joined(name: str, rank: int, lane: str, store: str) -> Iterator[None]:
    """One of two processes, which meet at the file `store`."""
    # Torch warns of its own deprecated calls.
    warnings.simplefilter("ignore")
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{store}",
        _transports=["uv"] if lane == TCP_LANE else None,
        _channels=["basic"] if lane == TCP_LANE else None,
    )
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    yield
    rpc.shutdown(graceful=False)


@contextlib.contextmanager
def server(lane: str, size: str, store: str) -> Iterator[Actions]:
    for parameter in tensors(int(size)):
        _parameters.append(parameter.requires_grad_())
        _optimizers.append(torch.optim.SGD([parameter], lr=LEARNING_RATE))
    with joined(SERVER, 0, lane, store):
        yield {}


@contextlib.contextmanager
def client(lane: str, size: str, store: str, calls: str) -> Iterator[Actions]:
    with joined("trainer", 1, lane, store):
        trainer = _Trainer(int(size), int(calls))
        yield {
            "tutorial": trainer.tutorial_round,
            "best": trainer.best_round,
            "exchange": trainer.exchange,
        }
