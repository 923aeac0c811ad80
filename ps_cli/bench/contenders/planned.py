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
    """Layers that take time and compute nothing. A step takes as long as `begin` was told. Forward
    reads one layer after the other; the gradients become ready one after the other, the last
    layer's first, in the last part of it.
    """

    def __init__(self, element_count: int, backward_share: float) -> None:
        super().__init__()
        self.layers = nn.ParameterList(
            torch.zeros(element_count // LAYER_COUNT) for _ in range(LAYER_COUNT)
        )
        for number, layer in enumerate(self.layers):
            ready_share = 1 - backward_share * number / LAYER_COUNT
            layer.register_hook(partial(self._wait_until, ready_share))
        self._forward_share = 1 - backward_share
        self._began_s = self._compute_s = 0.0

    def begin(self, compute_s: float) -> None:
        self._began_s, self._compute_s = time.perf_counter(), compute_s

    def forward(self) -> Tensor:
        passed = torch.zeros(())
        for number in range(LAYER_COUNT):
            passed = passed + self.layers[number][0]  # so backward takes one after the other
            self._wait_until(self._forward_share * (number + 1) / LAYER_COUNT)
        return passed

    def _wait_until(self, share: float, _: Tensor | None = None) -> None:
        """Sleep until this share of the step's time is over."""
        left_s = self._began_s + share * self._compute_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


class TimelessOptimizer(torch.optim.Optimizer):
    """The inner optimizer of an emulated worker, whose time is in that of its computation."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # takes none
        del closure


class Training:
    """Steps of an emulated model in one mode: a consistency, codecs of pushes and pulls, and the
    inner steps of an outer one, or 0.
    """

    def __init__(
        self, client: ps.Client, mode: str, model: EmulatedModel, compute: ps.ComputeTime
    ) -> None:
        consistency, push, pull, outer_steps = mode.split("|")
        self._client, self._model, self._compute = client, model, compute
        self._clock = 0
        self._optimizer = ps.DistributedOptimizer(
            client,
            model,
            ps.Outer(TimelessOptimizer, int(outer_steps)) if int(outer_steps) else ps.SGD(lr=0.1),
            name=mode,
            consistency=consistency,
            push_codec=push,
            pull_codec=pull,
        )

    def steps(self, count: int) -> dict[str, float]:
        """Take the steps; the seconds of one, and the CPU seconds of the script's thread in its
        backward and in its `step()`.
        """
        client, began_s = self._client, time.perf_counter()
        backward_cpu_s = step_cpu_s = 0.0
        for _ in range(count):
            self._clock += 1
            self._model.begin(self._compute.seconds(client.rank, client.world_size, self._clock))
            self._optimizer.zero_grad()
            cpu_s = [time.thread_time()]
            self._model().backward()
            cpu_s.append(time.thread_time())
            self._optimizer.step()
            backward_cpu_s += cpu_s[1] - cpu_s[0]
            step_cpu_s += time.thread_time() - cpu_s[1]
        return {
            "step_s": (time.perf_counter() - began_s) / count,
            "backward_cpu_s": backward_cpu_s / count,
            "step_cpu_s": step_cpu_s / count,
        }


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
