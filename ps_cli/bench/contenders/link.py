"""Processes at the ends of a link: a cluster, and a worker that counts what its device sends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial

import ps_worker as ps
from ps_cli.bench.contenders.child import Actions
from ps_cli.bench.contenders.worker import OPTIMIZERS, Buffers, Moves, pull_codec_of
from ps_cli.bench.instruments.shaped_link import device_bytes
from ps_cli.bench.lanes import GRPC
from ps_runtime.launch.cluster_shape import ClusterShape
from ps_worker.client.local_cluster import LocalCluster

DEADLINE_S = 240.0


@contextlib.contextmanager
def cluster(address: str) -> Iterator[Actions]:
    """A scheduler and a server that listen on this address, for one worker."""
    shape = ClusterShape(1, 1, listen=f"{address}:0", server_listen=f"{address}:0")
    with LocalCluster.of(shape) as roles:
        yield {"address": lambda: roles.address}


@contextlib.contextmanager
def worker(scheduler: str, device: str, size: str, *codecs: str) -> Iterator[Actions]:
    """A worker with a table for each codec; an action is a round, and returns its seconds and the
    bytes that the device sent and received.
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
        yield rounds


def _counted(move: Callable[[], None], device: str) -> tuple[float, int, int]:
    sent, received = device_bytes(device)
    began_s = time.perf_counter()
    move()
    taken_s = time.perf_counter() - began_s
    after = device_bytes(device)
    return taken_s, after[0] - sent, after[1] - received
