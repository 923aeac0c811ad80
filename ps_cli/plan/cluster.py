"""A cluster that is planned, and the bytes and the work of one step in it."""

from __future__ import annotations

from dataclasses import dataclass

import ps_worker
from ps_cli.compare.modes import ComparedMode
from ps_cli.plan.costs import Costs
from ps_core import limits
from ps_core.codecs.choices import NONE, PushCodec
from ps_core.errors import InvalidConfig
from ps_core.keys import range_count_for
from ps_core.tables.elements import NATIVE_CODEC, Codec, DType

GB = 1e9
FLOAT32_BYTES = Codec.FP32.element_bytes

MOST_NODES = limits.MAX_NODE_COUNT // 2
"""Workers of a cluster, and its servers: the scheduler refuses to begin with more."""

_OUTER_OPTIMIZER = "sgd"
"""On the servers, where workers have optimizers of their own, whose time is in the computation."""


@dataclass(frozen=True, slots=True)
class PlannedCluster:
    """The nodes, the network and the model.

    Attributes:
        bytes_per_s: of each node's link, each way.
        latency_s: a message there and back in the network.
        element_count: the model's parameters.
        dtype: the model's.
        optimizer: on the servers, unless there are outer steps.
        compute: the time of forward and backward in each step, by worker and clock; with outer
            steps also that of the worker's optimizer.
        backward_share: the last part of it, in which the gradients leave, evenly.
        replica_count: servers that hold each range.
        host_cores: cores of the one host on which all roles are; 0: each has a host of its own.
        has_gpus: workers compute beside that host's cores.
    """

    worker_count: int
    server_count: int
    bytes_per_s: float
    latency_s: float
    element_count: int
    dtype: DType
    optimizer: str
    compute: ps_worker.ComputeTime
    backward_share: float
    replica_count: int = 1
    host_cores: int = 0
    has_gpus: bool = False

    def validated(self) -> PlannedCluster:
        """The cluster itself, if there can be such a one; else InvalidConfig."""
        for name, count in (("workers", self.worker_count), ("servers", self.server_count)):
            if not 1 <= count <= MOST_NODES:
                raise InvalidConfig(f"{name} is {count}; expected 1 to {MOST_NODES}")
        if self.block_elements > limits.MAX_BLOCK_ELEMENTS:
            most = limits.MAX_TABLE_BLOCK_COUNT * limits.MAX_BLOCK_ELEMENTS
            raise InvalidConfig(
                f"model is {self.element_count}; expected at most {most}, the elements of one table"
            )
        self.compute.check_fits(self.worker_count)
        if self.replica_count > self.server_count:
            raise InvalidConfig(
                f"replicas is {self.replica_count}; expected at most {self.server_count}, the "
                "number of servers"
            )
        if self.replica_count > 2:
            raise InvalidConfig(f"replicas is {self.replica_count}; a plan knows 1 and 2")
        if not 0 <= self.backward_share <= 1:
            raise InvalidConfig(f"backward is {self.backward_share:g}; expected a share, 0 to 1")
        return self

    @property
    def block_elements(self) -> int:
        """Elements of a block: the default, or the fewest with which one table has the model."""
        unit = limits.BLOCK_ALIGNMENT_ELEMENTS
        enough = -(-self.element_count // (limits.MAX_TABLE_BLOCK_COUNT * unit)) * unit
        return max(limits.DEFAULT_BLOCK_ELEMENTS, enough)

    @property
    def remarks(self) -> list[str]:
        """Sentences about this cluster for who plans it."""
        found, idle_count = [], self.server_count - len(self.shares)
        if idle_count:
            found.append(
                f"{idle_count} of {self.server_count} servers have nothing to do: the model fills "
                f"{len(self.shares)} key ranges, and each is on one server"
            )
        if self.block_elements > limits.DEFAULT_BLOCK_ELEMENTS:
            found.append(
                f"planned with block_elements={self.block_elements}: with the default of "
                f"{limits.DEFAULT_BLOCK_ELEMENTS} the scheduler refuses a table of so many blocks"
            )
        return found

    @property
    def shares(self) -> list[float]:
        """The share of the model that each server has, the fullest one's first: whole key ranges,
        of whole blocks. Servers that have none are left out.
        """
        blocks = -(-self.element_count // self.block_elements)
        ranges = min(blocks, range_count_for(self.server_count))
        fewest, rest = divmod(ranges, self.server_count)
        counts = [fewest + (number < rest) for number in range(min(self.server_count, ranges))]
        return [count / ranges for count in counts]


@dataclass(frozen=True, slots=True)
class StepLoad:
    """A step of one worker: bytes of payload, and CPU seconds at the worker and, as if one server
    had the whole model, at the server.
    """

    pushed_bytes: float
    pulled_bytes: float
    worker_push_s: float
    worker_pull_s: float
    server_push_s: float
    server_pull_s: float
    update_s: float
    replica_s: float
    replica_bytes: float


def load_of(cluster: PlannedCluster, mode: ComparedMode, costs: Costs) -> StepLoad:
    """The load of a step under `mode`, or of an outer step; InvalidConfig if the costs lack its
    codec or optimizer.
    """
    native = NATIVE_CODEC[cluster.dtype]
    push, pull = PushCodec(native), native
    if mode.push_codec != NONE and PushCodec.parsed(mode.push_codec).saves(native):
        push = PushCodec.parsed(mode.push_codec)
    if mode.pull_codec != NONE and Codec(mode.pull_codec).element_bits < native.element_bits:
        pull = Codec(mode.pull_codec)
    count = cluster.element_count
    gb = count * FLOAT32_BYTES / GB
    blocks = count / cluster.block_elements
    pushing, pulling = costs.of("push", push.codec), costs.of("pull", pull)
    backup_count = cluster.replica_count - 1
    return StepLoad(
        pushed_bytes=push.payload_bytes(count, push.warm_up_count + 1),
        pulled_bytes=pull.payload_bytes(count),
        worker_push_s=(pushing.worker_s + costs.staged_s) * gb + costs.push_block.worker_s * blocks,
        worker_pull_s=(pulling.worker_s + costs.loaded_s) * gb + costs.pull_block.worker_s * blocks,
        server_push_s=pushing.server_s * gb + costs.push_block.server_s * blocks,
        server_pull_s=pulling.server_s * gb + costs.pull_block.server_s * blocks,
        update_s=costs.update_of(_OUTER_OPTIMIZER if mode.outer_steps else cluster.optimizer) * gb,
        replica_s=costs.replica_s * gb * backup_count,
        replica_bytes=count * FLOAT32_BYTES * backup_count,
    )
