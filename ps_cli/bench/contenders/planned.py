"""Processes: workers that move tables and train models as `pushpull plan` imagines them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ps_worker as ps
from ps_cli.bench.contenders.child import Actions
from ps_cli.bench.contenders.worker import ELEMENT_BYTES, Buffers, Moves, pull_codec_of
from ps_cli.bench.instruments.sampling import call_latencies
from ps_core.limits import DEFAULT_BLOCK_ELEMENTS
from ps_runtime.grpc.channels import tune_allocator

SMALL_BLOCKS = "small blocks"
"""A table of as many blocks as the others, each of so few elements that its bytes hardly count."""

SMALL_BLOCK_ELEMENTS, SMALL_MOVE_COUNT = 1024, 50
CALL_COUNT = 300
LAYER_COUNT = 16


class EmulatedModel(nn.Module):
    """Layers that take time and compute nothing; gradients have the size of the parameters.

    Each step takes `compute.seconds`, from the end of the step before; the gradients become ready
    one after the other in the last `backward_share` of it.
    """

    def __init__(self, element_count: int, backward_share: float) -> None:
        super().__init__()
        self.layers = nn.ParameterList(
            torch.zeros(element_count // LAYER_COUNT) for _ in range(LAYER_COUNT)
        )
        self.gradient = torch.full((element_count // LAYER_COUNT,), 1e-3)
        self._backward_share = backward_share
        self._began_s = self._compute_s = 0.0

    def begin(self, compute_s: float) -> None:
        self._began_s, self._compute_s = time.perf_counter(), compute_s

    def forward(self) -> Tensor:
        self.wait_until(1 - self._backward_share)
        passed = torch.zeros(1)
        for number, layer in enumerate(self.layers):
            passed = _Layer.apply(passed, layer, self, number)
        return passed

    def wait_until(self, share: float) -> None:
        """Sleep until this share of the step's time is over."""
        left_s = self._began_s + share * self._compute_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)

    def ready_share(self, number: int) -> float:
        """The share of a step's time after which the layer's gradient is ready: the last one's is
        the first.
        """
        return 1 - self._backward_share * number / LAYER_COUNT


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passed: Tensor, _: Tensor, model: EmulatedModel, number: int) -> Any:
        ctx.model, ctx.number = model, number
        return passed.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.model.wait_until(ctx.model.ready_share(ctx.number))
        return gradients[0], ctx.model.gradient, None, None


class Training:
    """Steps of an emulated model in one mode: a consistency, and codecs of pushes and pulls."""

    def __init__(
        self, client: ps.Client, mode: str, model: EmulatedModel, compute: ps.ComputeTime
    ) -> None:
        consistency, push, pull = mode.split("|")
        self._client, self._model, self._compute = client, model, compute
        self._clock = 0
        self._optimizer = ps.DistributedOptimizer(
            client,
            model,
            ps.SGD(lr=0.1),
            name=mode,
            consistency=consistency,
            push_codec=push,
            pull_codec=pull,
        )

    def steps(self, count: int) -> float:
        """Take the steps; the seconds of one."""
        began_s = time.perf_counter()
        for _ in range(count):
            self._clock += 1
            client = self._client
            self._model.begin(self._compute.seconds(client.rank, client.world_size, self._clock))
            self._optimizer.zero_grad()
            self._model().sum().backward()
            self._optimizer.step()
        return (time.perf_counter() - began_s) / count


@contextlib.contextmanager
def trainer(scheduler: str, lane: str, rank: str, size: str, *schedule: str) -> Iterator[Actions]:
    """A worker that trains an emulated model in each mode; the schedule is the computation's time,
    the share of it in which gradients leave, the steps of an action, and the modes.
    """
    compute, backward_share, count, *modes = schedule
    torch.set_num_threads(1)
    tune_allocator()
    with ps.connect(scheduler, rank=int(rank), lane=lane) as client:
        yield {
            mode: partial(
                Training(
                    client,
                    mode,
                    EmulatedModel(int(size) // ELEMENT_BYTES, float(backward_share)),
                    ps.ComputeTime.parsed(compute),
                ).steps,
                int(count),
            )
            for mode in modes
        }


@contextlib.contextmanager
def mover(scheduler: str, lane: str, rank: str, size: str, *codecs: str) -> Iterator[Actions]:
    """A worker with a table for each codec, and one of SMALL_BLOCKS."""
    buffers = Buffers(int(size))
    block_count = buffers.element_count // DEFAULT_BLOCK_ELEMENTS
    small = Buffers(block_count * SMALL_BLOCK_ELEMENTS * ELEMENT_BYTES)
    with ps.connect(scheduler, rank=int(rank), lane=lane) as client:
        make = partial(client.create_table, optimizer=ps.SGD(lr=0.1))
        actions: dict[str, Any] = {}
        for codec in codecs:
            pull_codec = pull_codec_of(codec)
            table = make(codec, buffers.element_count, push_codec=codec, pull_codec=pull_codec)
            for move, act in Moves(client, table, buffers).by_name().items():
                actions[f"{codec} {move}"] = act
        table = make(SMALL_BLOCKS, small.element_count, block_elements=SMALL_BLOCK_ELEMENTS)
        for move, act in Moves(client, table, small).by_name().items():
            actions[f"{SMALL_BLOCKS} {move}"] = partial(_repeated, act)
        value = Buffers(ELEMENT_BYTES)
        single = Moves(client, make("value", 1), value)
        actions["call"] = partial(call_latencies, single.pull, CALL_COUNT)
        yield actions


def _repeated(act: Any) -> None:
    for _ in range(SMALL_MOVE_COUNT):
        act()
