"""The processor's costs of steps, for `pushpull plan`, and steps of emulated models to check it by.

CPU seconds are those of processes, with all of their threads. A difference of two measurements
counts as 0 if noise made it negative.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

from ps_cli.bench.contenders import contenders
from ps_cli.bench.contenders.child import started, together
from ps_cli.bench.contenders.contenders import MeasuredCluster, Servers
from ps_cli.bench.contenders.planned import SMALL_BLOCKS, SMALL_MOVE_COUNT
from ps_cli.bench.instruments.environment import environment
from ps_cli.bench.instruments.sampling import (
    GB,
    MIB,
    Measured,
    Operation,
    measured_in_turns,
    process_cpu_s,
    processor_s,
    rounded,
    take_turns,
)
from ps_cli.bench.lanes import GRPC
from ps_cli.bench.measurements.optimizers import OPTIMIZERS
from ps_core.codecs.choices import NONE, PULL_CHOICES

BLOCK_BYTES = MIB
ROUND_COUNT = 5
STEP_COUNT = 4
"""Steps of an action."""

CODECS = (NONE, "bf16", "fp16", "int8", "sign", "topk", "lowrank")
_PULL_CODECS = tuple(codec for codec in CODECS if codec in PULL_CHOICES)
_PLAIN = "bsp|none|none|0"


def step_costs(table_bytes: int, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """The costs as `ps_cli.plan.costs` reads them.

    Args:
        table_bytes: of the tables that are moved.
        on_progress: is called with a phrase about each round.

    Blocking: for a minute or two at 64 MiB.
    """
    machine = environment()
    with ExitStack() as stack:
        clusters = contenders.enter_all(
            stack,
            [
                contenders.cluster(GRPC, _movers(1, table_bytes, CODECS)),
                contenders.cluster(GRPC, _movers(2, table_bytes, [NONE])),
                contenders.cluster(
                    GRPC, _movers(1, table_bytes, [NONE]), Servers(2, replica_count=2)
                ),
                contenders.cluster(GRPC, _trainers(1, table_bytes, "0ms", 0.0, [_PLAIN])),
            ],
        )
        (kernels,) = stack.enter_context(started(("kernels:kernels", str(table_bytes))))
        alone, pair, mirrored, training = clusters
        # An action on small blocks counts as the bytes of as many large ones.
        small_bytes = table_bytes * SMALL_MOVE_COUNT
        operations = [
            *(_moved(alone, f"{codec} push", table_bytes) for codec in CODECS),
            *(_moved(alone, f"{codec} pull", table_bytes) for codec in _PULL_CODECS),
            *(_moved(alone, f"{SMALL_BLOCKS} {way}", small_bytes) for way in ("push", "pull")),
            _moved(pair, f"{NONE} push", 2 * table_bytes),
            _moved(mirrored, f"{NONE} push", table_bytes),
            _moved(training, _PLAIN, STEP_COUNT * table_bytes),
            *(
                Operation(name, kernels.timed(f"{name} fast store"), table_bytes)
                for name in OPTIMIZERS
            ),
        ]
        measured = measured_in_turns(operations, ROUND_COUNT, on_progress)
        call_s = alone.workers[0].do("call").result["p50_s"]
        trained = training.workers[0].do(_PLAIN).result
    name = f"{machine['cpu']}, {machine['core_count']} cores, load {machine['load_average']}"
    costs = _costs(measured, clusters)
    # Both include a part of the push and the pull, so their ratio is taken alone.
    staged_share = trained["backward_cpu_s"] / (trained["backward_cpu_s"] + trained["step_cpu_s"])
    training_s = costs.pop("training_s")
    return {
        "machine": name,
        **costs,
        "staged_s": rounded(training_s * staged_share),
        "loaded_s": rounded(training_s * (1 - staged_share)),
        "call_s": rounded(call_s),
    }


def _costs(measured: dict[str, Measured], clusters: Sequence[MeasuredCluster]) -> dict[str, Any]:
    alone, pair, mirrored, training = clusters

    def cpu_s(cluster: MeasuredCluster, action: str, pids: tuple[int, ...]) -> float:
        """CPU seconds of the processes for a GB of float32, or for as many small blocks."""
        found = measured[_name(cluster, action)]
        return sum(map(found.cpu_s, pids)) / found.gb

    def ends(action: str) -> tuple[float, float]:
        return (
            cpu_s(alone, action, alone.worker_pids),
            cpu_s(alone, action, alone.server_pids),
        )

    plain_push, plain_pull = ends(f"{NONE} push"), ends(f"{NONE} pull")
    kernels_s = {name: 1 / measured[name].gb_s for name in OPTIMIZERS}
    # An update of two workers' steps is applied once; all else is done for each of them.
    applied_s = 2 * (plain_push[1] - cpu_s(pair, f"{NONE} push", pair.server_pids))
    applied_s = min(max(0.0, applied_s), kernels_s["sgd"])
    costs: dict[str, Any] = {}
    for way, codecs, update_s in (("push", CODECS, applied_s), ("pull", _PULL_CODECS, 0.0)):
        block = ends(f"{SMALL_BLOCKS} {way}")
        costs[f"{way}_block"] = _ends(*(each * BLOCK_BYTES / GB for each in block))
        costs[way] = {}
        for codec in codecs:
            worker_s, server_s = ends(f"{codec} {way}")
            costs[way][codec] = _ends(worker_s - block[0], server_s - block[1] - update_s)
    trained_s = cpu_s(training, _PLAIN, training.worker_pids)
    return costs | {
        "update_s": {
            name: _positive(applied_s + kernel_s - kernels_s["sgd"])
            for name, kernel_s in kernels_s.items()
        },
        "replica_s": _positive(
            cpu_s(mirrored, f"{NONE} push", mirrored.server_pids) - plain_push[1]
        ),
        "training_s": _positive(trained_s - plain_push[0] - plain_pull[0]),
    }


def _ends(worker_s: float, server_s: float) -> dict[str, float]:
    return {"worker_s": _positive(worker_s), "server_s": _positive(server_s)}


def _positive(figure: float) -> float:
    return rounded(max(0.0, figure))


def _name(cluster: MeasuredCluster, action: str) -> str:
    return f"{len(cluster.workers)} workers, {len(cluster.server_pids)} servers: {action}"


def _moved(cluster: MeasuredCluster, action: str, byte_count: int) -> Operation:
    return Operation(
        _name(cluster, action), lambda: together(cluster.workers, action), byte_count, cluster.pids
    )


def _movers(count: int, table_bytes: int, codecs: Sequence[str]) -> list[tuple[str, ...]]:
    return [("planned:mover", str(rank), str(table_bytes), *codecs) for rank in range(count)]


def _trainers(
    count: int, model_bytes: int, compute: str, backward_share: float, modes: Sequence[str]
) -> list[tuple[str, ...]]:
    given = (str(model_bytes), compute, str(backward_share), str(STEP_COUNT), *modes)
    return [("planned:trainer", str(rank), *given) for rank in range(count)]


class EmulatedStep(NamedTuple):
    """Seconds of a step, and the share of this machine's processor that others used meanwhile."""

    step_s: float
    others_share: float


def emulated_steps(
    worker_count: int,
    model_bytes: int,
    compute: str,
    backward_share: float,
    modes: Sequence[tuple[str, str, str, int]],
) -> list[EmulatedStep]:
    """Steps of real workers with one server on this host, in each of the modes: the mean of the
    workers, in the round that others disturbed least.

    Args:
        worker_count: workers that train.
        model_bytes: of the model's float32 parameters.
        compute: the time that they emulate to compute, as `ps_worker.ComputeTime` reads it.
        backward_share: the last part of it, in which gradients leave.
        modes: each a consistency, a codec of pushes, one of pulls, and the inner steps of an outer
            one, or 0.

    Blocking: for about a minute at 64 MiB.
    """
    names = ["|".join(map(str, mode)) for mode in modes]
    commands = _trainers(worker_count, model_bytes, compute, backward_share, names)
    with contenders.cluster(GRPC, commands) as cluster:
        runs = {name: partial(_emulated_step, cluster, name) for name in names}
        samples = take_turns(runs, ROUND_COUNT, lambda _: None)
    return [min(samples[name], key=lambda one: one.others_share) for name in names]


def _emulated_step(cluster: MeasuredCluster, mode: str) -> EmulatedStep:
    began_s, before_s = time.perf_counter(), _others_s(cluster)
    for worker in cluster.workers:
        worker.tell(mode)
    step_s = statistics.fmean(worker.answer().result["step_s"] for worker in cluster.workers)
    others_s = _others_s(cluster) - before_s
    available_s = (time.perf_counter() - began_s) * (os.cpu_count() or 1)
    return EmulatedStep(step_s, max(0.0, others_s / available_s))


def _others_s(cluster: MeasuredCluster) -> float:
    """CPU seconds of the machine that are not the cluster's workers' and servers'."""
    return processor_s() - sum(map(process_cpu_s, cluster.pids))
