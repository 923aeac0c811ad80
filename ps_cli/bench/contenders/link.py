"""Processes at the ends of a link: a cluster, and a worker that counts what its device sends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial

import ps_worker as ps
from ps_cli.bench.contenders.child import Actions
from ps_cli.bench.contenders.planned import EmulatedModel
from ps_cli.bench.contenders.worker import (
    ELEMENT_BYTES,
    OPTIMIZERS,
    Buffers,
    Moves,
    pull_codec_of,
)
from ps_cli.bench.instruments.shaped_link import HEADER_BYTES, traffic
from ps_cli.bench.lanes import GRPC
from ps_core.limits import DEFAULT_BLOCK_ELEMENTS
from ps_runtime.launch.cluster_shape import ClusterShape
from ps_worker.client.local_cluster import LocalCluster

DEADLINE_S = 240.0

WAITS, OVERLAPS = "training that waits", "training that overlaps"
TRAINED_STEPS = 4
BACKWARD_SHARE = 2 / 3
_FEWEST_BLOCKS = 16


@contextlib.contextmanager
def cluster(address: str) -> Iterator[Actions]:
    """A scheduler and a server that listen on this address, for one worker."""
    shape = ClusterShape(1, 1, listen=f"{address}:0", server_listen=f"{address}:0")
    with LocalCluster.of(shape) as roles:
        yield {"address": lambda: roles.address}


@contextlib.contextmanager
def worker(
    scheduler: str, device: str, size: str, compute_s: str, *codecs: str
) -> Iterator[Actions]:
    """A worker with a table for each codec, and two emulated models of that size. The action of a
    codec is a round, and returns its seconds, the bytes that the device sent and received, and
    those of both without headers; WAITS and OVERLAPS are steps of a model whose computation takes
    `compute_s`, and return the seconds of one.
    """
    buffers = Buffers(int(size))
    with ps.connect(scheduler, lane=GRPC, request_deadline_s=DEADLINE_S) as client:
        rounds: dict[str, Callable[[], object]] = {}
        for codec in codecs:
            table = client.create_table(
                codec,
                buffers.element_count,
                optimizer=OPTIMIZERS["sgd"],
                push_codec=codec,
                pull_codec=pull_codec_of(codec),
            )
            rounds[codec] = partial(_counted, Moves(client, table, buffers).round, device)
        for overlaps in (False, True):
            training = _Training(client, int(size), float(compute_s), overlaps=overlaps)
            rounds[OVERLAPS if overlaps else WAITS] = training.step_s
        yield rounds


class _Training:
    """Steps of an emulated model whose computation takes `compute_s`."""

    def __init__(self, client: ps.Client, size: int, compute_s: float, *, overlaps: bool) -> None:
        self._model = EmulatedModel(size // ELEMENT_BYTES, BACKWARD_SHARE)
        self._compute_s = compute_s
        share = size // ELEMENT_BYTES // _FEWEST_BLOCKS // 64 * 64
        self._optimizer = ps.DistributedOptimizer(
            client,
            self._model,
            ps.SGD(lr=0.1),
            name=OVERLAPS if overlaps else WAITS,
            overlap_pull=overlaps,
            block_elements=min(share, DEFAULT_BLOCK_ELEMENTS),
        )

    def step_s(self) -> float:
        """Take a few steps; the seconds of one."""
        began_s = time.perf_counter()
        for _ in range(TRAINED_STEPS):
            self._model.begin(self._compute_s)
            self._optimizer.zero_grad()
            self._model().backward()
            self._optimizer.step()
        self._optimizer.wait()
        return (time.perf_counter() - began_s) / TRAINED_STEPS


def _counted(move: Callable[[], None], device: str) -> tuple[float, int, int, int]:
    before = traffic(device)
    began_s = time.perf_counter()
    move()
    taken_s = time.perf_counter() - began_s
    sent, received, packets = (
        late - early for early, late in zip(before, traffic(device), strict=True)
    )
    return taken_s, sent, received, sent + received - packets * HEADER_BYTES
