"""Two stores of one table: a primary's, and a backup's that is told what the primary decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st

from ps_core.keys import AssignmentEpoch, Incarnation, RangeId, TableId
from ps_core.sliced_work import at_once
from ps_core.tables.elements import DType, Initializer, InitializerKind
from ps_core.tables.optimizers import Hyperparameters, Kernels, OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import Reduction
from ps_server.ranges.events import Contributor, Record
from ps_server.ranges.range_copy import RangeDelta, fresh_copy
from ps_server.replication.messages import LogRecord
from ps_server.stores import for_backup
from ps_server.values.mutations import KeptSum, Mutation, Put
from ps_server.values.shard_store import ShardStore
from ps_server.values.update_arithmetic import Terms
from ps_server.wire.replication_reader import ReplicationReader
from ps_server.wire.replication_wire import log_record_messages
from pushpull.v1.replication_pb2 import ReplicateRequest
from tests.property.shard_twin import table

TABLE = TableId(1)
RANGE = RangeId(3)
EPOCH = AssignmentEpoch(2)
HEADER = ReplicateRequest(header={"session": {}}).SerializeToString()

SPECS = [
    OptimizerSpec(OptimizerKind.AGGREGATE),
    OptimizerSpec(OptimizerKind.ASSIGN),
    OptimizerSpec(OptimizerKind.ADD),
    *(
        replace(spec, kernels=kernels)
        for kernels in Kernels
        for spec in (
            OptimizerSpec(OptimizerKind.SGD, (("lr", 0.1),)),
            OptimizerSpec(OptimizerKind.SGD, (("lr", 0.1), ("momentum", 0.9)), nesterov=True),
            OptimizerSpec(OptimizerKind.ADAM, (("lr", 0.01),), amsgrad=True),
            OptimizerSpec(OptimizerKind.ADAMW, (("lr", 0.01), ("weight_decay", 0.1))),
            OptimizerSpec(OptimizerKind.ADAGRAD, (("initial_accumulator_value", 0.5),)),
            OptimizerSpec(OptimizerKind.RMSPROP, (("momentum", 0.9),), centered=True),
        )
    ),
]
"""Every kind but CUSTOM, with all the state that it can have."""


@st.composite
def any_tables(draw: st.DrawFn) -> Table:
    constant = Initializer(InitializerKind.CONSTANT, draw(st.sampled_from([1.5, -2.0])))
    return table(
        draw(st.lists(st.integers(0, 150), min_size=1, max_size=6).filter(any)),
        draw(st.sampled_from([64, 128])),
        draw(st.sampled_from(SPECS)),
        draw(st.sampled_from(list(DType))),
        reduction=draw(st.sampled_from(list(Reduction))),
        initializer=draw(st.sampled_from([Initializer(), constant])),
    )


def record_of(
    clock: int, blocks: Sequence[int], contributor_count: int, update_scale: float = 1.0,
    hyperparameters: Hyperparameters = (),
) -> Record:  # fmt: skip
    contributors = tuple(
        Contributor(rank, Incarnation(10 + rank), (clock,), skip=False)
        for rank in range(contributor_count)
    )
    return Record(
        TABLE, RANGE, clock, clock, False, contributors, hyperparameters, tuple(blocks),
        update_scale=update_scale,
    )  # fmt: skip


def over_the_wire(change: Mutation, small_bytes: int) -> Mutation:
    """The change as a backup reads it from what its primary wrote."""
    facts = fresh_copy(table([64]), range(1)).facts
    changes = (for_backup(change),)
    log_record = LogRecord(RANGE, EPOCH, EPOCH, 1, TABLE, RangeDelta(facts, (), (), ()), changes)
    reader = ReplicationReader(small_bytes)
    reader.read(HEADER)
    (message,) = log_record_messages(log_record)
    found = reader.read(message)
    assert isinstance(found, LogRecord)
    made: Mutation = found.changes[0]
    return made


def told(store: ShardStore, change: Mutation) -> None:
    """What a backup makes of a change, as `ps_server.stores` does."""
    record = change.record
    if isinstance(change, KeptSum):
        store.put_accumulator(record.clock, at_once(store.receiving(change.accumulator)))
    elif isinstance(change, Put):
        accumulator = change.accumulator
        is_kept = accumulator is None
        taken = store.take(record.clock) if is_kept else at_once(store.receiving(accumulator))
        terms = record.hyperparameters, record.contributor_count, record.update_scale
        at_once(store.applying(taken, Terms(record.clock, *terms)))
    else:
        store.drop(record.clock)


def check_equal(one: ShardStore, other: ShardStore) -> None:
    """Bit for bit: values, state, steps, versions, kept sums."""
    assert one._states.keys() == other._states.keys()
    assert one._versions == other._versions
    for block, state in one._states.items():
        twin = other._states[block]
        assert _same(state.values, twin.values)
        assert state.slots.keys() == twin.slots.keys()
        assert all(_same(slot, twin.slots[name]) for name, slot in state.slots.items())
        assert type(state.steps) is type(twin.steps)
        assert np.array_equal(state.steps, twin.steps)
    assert one._sums._sums.keys() == other._sums._sums.keys()
    for clock in one._sums._sums:
        for block in one._states:
            assert one.read(block, None, clock) == other.read(block, None, clock)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and one.numpy().tobytes() == other.numpy().tobytes()
