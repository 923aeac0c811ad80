"""One server that keeps an update log, without its process: it can be left at any byte of the log,
and another goes on from there.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry

from ps_core.cluster_view import ClusterView, RangeAssignment, Role, Session
from ps_core.consistency import parsed
from ps_core.keys import AssignmentEpoch, Incarnation, NodeId, RangeId, TableId, key_ranges
from ps_core.ledger import Outcome
from ps_core.tables.elements import Codec, DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_runtime.observe.metrics import ServerMetrics
from ps_runtime.system.disk import DISK, Disk
from ps_server.lane.lane_socket import SharedLanes
from ps_server.peers.node_replication import ReplicationSetting
from ps_server.ranges.events import Place, PushEvent, ReplyTo, SealEvent, SealTerms, Sender
from ps_server.service.node import ParameterNode
from ps_server.stores import Shards
from ps_server.update_log.directory import LogDirectory
from ps_server.update_log.recovery import RecoveredLog, read_log
from ps_server.update_log.writer import LogSetting, UpdateLog, Written

MODEL = TableId(1)
BLOCKS, LENGTH, RANGES = 3, 64, 2
TIMELINE = b"t" * 16
KERNELS = "kernels"
WORKER = Incarnation(50)

Values = dict[int, bytes]
"""By block: values, optimizer state and version."""


def a_table() -> Table:
    """Every rounding of it is its own."""
    spec = TableSpec(
        "model",
        DType.FLOAT32,
        BLOCKS * LENGTH,
        OptimizerSpec(OptimizerKind.ADAM, (("lr", 0.01),)),
        block_elements=LENGTH,
        consistency=parsed("asp"),
    )
    return Table(MODEL, 0, spec.validated())


@dataclass
class Setting:
    """How a log is kept."""

    bound_bytes: int = 1_000_000_000
    is_synced: bool = False
    disk: Disk = field(default_factory=lambda: DISK)
    kernels: str = KERNELS


class LoggedServer:
    """A server, its log, and its only worker, who pushes block by block. Made by `started`."""

    def __init__(self, path: Path, number: int, setting: Setting) -> None:
        self.path = path
        self.table = a_table()
        self.answered: list[tuple[int, int]] = []  # (range, sequence), in the order of the answers
        self.history: list[Values] = []  # after each update
        session = Session("c", TIMELINE, NodeId(number), Incarnation(100 + number), Role.SERVER)
        shards = Shards(SharedLanes(), {})
        self.recovered_log: RecoveredLog = read_log(
            LogDirectory(path, setting.disk), shards, setting.kernels
        )
        metrics = ServerMetrics(CollectorRegistry())
        self.node = ParameterNode(session, b"k" * 16, 1, metrics, lambda: 5.0, shards)
        log_setting = LogSetting(setting.bound_bytes, setting.is_synced)
        self.log: UpdateLog = self.recovered_log.begin(session, RANGES, log_setting)
        replicas = self.node.replicate(ReplicationSetting(3.0), self.log)
        replicas.recover(self.recovered_log.replicas, self.recovered_log.withheld)
        self._release = self.log.on_written
        self.log.on_written = self._written
        self._news = asyncio.Event()
        self.stream = self.node.open_stream(Session("c", TIMELINE, NodeId(90), WORKER, Role.WORKER))
        self.epoch = AssignmentEpoch(1 + number)
        ranges = tuple(
            RangeAssignment(
                RangeId(index),
                slots,
                self.epoch,
                NodeId(number),
                initial_holders=() if index in self.recovered_log.replicas else (NodeId(number),),
            )
            for index, slots in enumerate(key_ranges(RANGES))
        )
        self.view = ClusterView(number, "c", 1, 1, (), ranges, (self.table,))
        self.node.observe(self.view)
        self.node.works.finish()
        self.sequences = {
            range_id: self._low_water(range_id) for range_id in map(RangeId, range(RANGES))
        }

    def _low_water(self, range_id: RangeId) -> int:
        part = self.node.machine.shards.get((MODEL, range_id))
        worker = None if part is None else part.state.workers.get(WORKER)
        return 0 if worker is None else worker.ledger.low_water

    def _written(self, written: Written) -> None:
        self._release(written)
        self.node.works.finish()
        for reply in self.stream._replies.values():
            self._note(reply)
        self.stream._replies.clear()
        self._news.set()

    def _note(self, reply: ReplyTo) -> None:
        if reply.ending is not None and reply.ending.outcome is Outcome.APPLIED:
            self.answered.append((reply.range_id, reply.sequence))
            self.history.append(self.values)

    @property
    def values(self) -> Values:
        """All that it has."""
        return values_of(self.node.shards)

    @property
    def byte_count(self) -> int:
        """Of its newest segment, as the system has it."""
        return self.path.joinpath(f"{self.log.segments.newest:08d}.log").stat().st_size

    async def push(self, step: int, *, waits: bool = True) -> None:
        """The worker's step: each block is pushed, and each range sealed; until all is answered."""
        clock, expected = step, len(self.answered) + BLOCKS + RANGES
        draw = np.random.default_rng(step)
        sender = Sender(WORKER, 0, self.stream.origin)
        for range_id, blocks in self.table.blocks_by_range(RANGES).items():
            place = Place(MODEL, range_id, self.epoch)
            for block in blocks:
                gradient = memoryview(draw.standard_normal(LENGTH, np.float32).tobytes())
                payload = self.node.shards.decode(place, block, Codec.FP32, gradient, b"")
                event = PushEvent(
                    place, sender, self._next(range_id), clock, block, LENGTH * 4, payload,
                    eager=(),
                )  # fmt: skip
                self.node.entries(self.stream, [event])
            seal = SealEvent(place, sender, self._next(range_id), SealTerms(clock, ()))
            self.node.entries(self.stream, [seal])
        while waits and len(self.answered) < expected:
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), 30.0)

    async def written(self) -> None:
        """Until all that was appended is written."""
        while self.log.queued_bytes:
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), 30.0)

    def _next(self, range_id: RangeId) -> int:
        self.sequences[range_id] += 1
        return self.sequences[range_id]

    async def end(self) -> None:
        """All that was decided is in the log, and the directory is free."""
        assert self.node.replicas is not None
        await self.node.replicas.close()


def values_of(shards: Shards) -> Values:
    """What stores have, in bytes."""
    found: Values = {}
    for store in shards.stores.values():
        for block in store.snapshot().blocks:
            parts = [bytes(block.values), *(bytes(slot) for _, slot in block.slots)]
            found[block.block] = b"".join(parts) + repr((block.version, block.steps)).encode()
    return found


@dataclass(frozen=True)
class Recovered:
    """What a log gave back."""

    recovered_log: RecoveredLog
    values: Values

    def has(self, range_id: int, sequence: int) -> bool:
        """Whether the entry has ended."""
        replica = self.recovered_log.replicas.get(RangeId(range_id))
        copy = None if replica is None else replica.copies.get(MODEL)
        worker = None if copy is None else copy.workers.get(WORKER)
        return worker is not None and worker.ledger.has_ended(sequence)


def recovered(path: Path) -> Recovered:
    """Read a log as a server does, and let go of it."""
    shards = Shards(SharedLanes(), {})
    with LogDirectory(path) as directory:
        recovered_log = read_log(directory, shards, KERNELS)
    return Recovered(replace(recovered_log), values_of(shards))
