"""A parameter server on torch.distributed.rpc, as PyTorch's tutorial has it, and at its best.

The tutorial's way ("Implementing Batch RPC Processing"): one call takes all gradients, adds them to
the parameters' own, divides by the batch, steps `torch.optim.SGD`, zeroes the gradients and returns
all parameters; here with batches of one, and without the tutorial's momentum. At its best: a call
for each 4 MiB tensor, which takes its gradient, steps and returns it, several in flight at once.
Nothing that a call returns is copied. Both processes have the allocator settings of pushpull's. A
call computes with one torch thread or on all cores; each is measured, and the better one counts.

On one machine torch RPC chooses shared memory and reads the other process's memory; with TCP only,
it works as between machines. Both are measured.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Iterator
from functools import partial

import torch
from torch.distributed import rpc

from ps_cli.bench.contenders.child import Actions
from ps_cli.bench.instruments.sampling import MIB, call_latencies
from ps_core.errors import Internal
from ps_runtime.grpc.channels import tune_allocator
from ps_runtime.system.capacity import usable_core_count

TENSOR_BYTES = 4 * MIB
SERVER = "server"

IN_FLIGHT_COUNT = 4
"""Calls in flight at once, at its best: of 1, 2, 4, 8 and 16, on 2 cores, 4 was as good as any over
shared memory and the best over TCP, when a tensor took two calls."""

FIRST_VALUE, GRADIENT = 2.0**-10, 2.0**-10
LEARNING_RATE = 2.0**-3
"""Powers of two, so that all steps are exact."""

TUTORIAL_BATCH_COUNT = 1
"""Trainers whose gradients make one step of the tutorial's server."""

ONE_THREAD, ALL_CORES = "one thread", "all cores"
THREAD_COUNTS = {ONE_THREAD: 1, ALL_CORES: usable_core_count()}
"""Torch threads of a call, by name."""

OWN_LANE, TCP_LANE = "own", "tcp"
"""Torch RPC's own choice, and TCP only."""

_parameters: list[torch.Tensor] = []
_optimizers: list[torch.optim.Optimizer] = []


def tensors(byte_count: int, value: float) -> list[torch.Tensor]:
    """A model of 4 MiB tensors, or of one smaller one."""
    sizes = [min(TENSOR_BYTES, byte_count - at) for at in range(0, byte_count, TENSOR_BYTES)]
    return [torch.full((size // 4,), value) for size in sizes]


def update_and_fetch(gradients: list[torch.Tensor], thread_count: int) -> list[torch.Tensor]:
    """On the server: the tutorial's one call."""
    torch.set_num_threads(thread_count)  # of the thread that answers it
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


def update_and_fetch_one(index: int, gradient: torch.Tensor, thread_count: int) -> torch.Tensor:
    """On the server: the call of one tensor."""
    torch.set_num_threads(thread_count)
    parameter = _parameters[index]
    # The tutorial goes on with its own gradient, of zeros.
    tutorial_s, parameter.grad = parameter.grad, gradient
    _optimizers[index].step()
    parameter.grad = tutorial_s
    return parameter.detach()


class _Trainer:
    def __init__(self, byte_count: int, call_count: int) -> None:
        self._gradients = tensors(byte_count, GRADIENT)
        self._fetched: list[torch.Tensor] = []
        self._call_count = call_count
        self._step_count = 0

    def tutorial_round(self, thread_count: int) -> None:
        """Send all gradients and get all parameters, in one call."""
        self._fetched = rpc.rpc_sync(SERVER, update_and_fetch, args=(self._gradients, thread_count))
        self._step_count += 1

    def best_round(self, thread_count: int) -> None:
        """Send each gradient and get its parameters, several calls at once."""
        under_way: deque[torch.futures.Future[torch.Tensor]] = deque()
        fetched = []
        for index, gradient in enumerate(self._gradients):
            if len(under_way) == IN_FLIGHT_COUNT:
                fetched.append(under_way.popleft().wait())
            call = rpc.rpc_async(SERVER, update_and_fetch_one, args=(index, gradient, thread_count))
            under_way.append(call)
        self._fetched = fetched + [call.wait() for call in under_way]
        self._step_count += 1

    def exchange(self) -> dict[str, float]:
        return call_latencies(partial(self.tutorial_round, 1), self._call_count)

    def check(self) -> None:
        """Raise Internal unless the newest parameters are those after all rounds."""
        expected = FIRST_VALUE - self._step_count * LEARNING_RATE * GRADIENT
        for index, parameter in enumerate(self._fetched):
            if not bool((parameter == expected).all()):
                raise Internal(
                    f"torch RPC's tensor {index} is {parameter.min():g} to {parameter.max():g} "
                    f"after {self._step_count} steps; expected {expected:g}"
                )


@contextlib.contextmanager
def joined(name: str, rank: int, lane: str, store: str) -> Iterator[None]:
    """One of two processes, which meet at the file `store`."""
    tune_allocator()
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
    for parameter in tensors(int(size), FIRST_VALUE):
        _parameters.append(parameter.requires_grad_())
        _optimizers.append(torch.optim.SGD([parameter], lr=LEARNING_RATE))
    with joined(SERVER, 0, lane, store):
        yield {}


@contextlib.contextmanager
def client(lane: str, size: str, store: str, calls: str) -> Iterator[Actions]:
    with joined("trainer", 1, lane, store):
        trainer = _Trainer(int(size), int(calls))
        yield {
            **{
                f"{name} {threads}": partial(act, count)
                for name, act in (
                    ("tutorial", trainer.tutorial_round),
                    ("best", trainer.best_round),
                )
                for threads, count in THREAD_COUNTS.items()
            },
            "exchange": trainer.exchange,
            "check": trainer.check,
        }
