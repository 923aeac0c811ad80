"""A backup's store that is told of sums ends up bit for bit as the primary's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_core.errors import InvalidKeys, InvalidTensor
from ps_core.keys import Incarnation
from ps_core.sliced_work import at_once
from ps_core.tables.elements import Codec
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_server.ranges.events import Compensation
from ps_server.values.mutations import Dropped, Elements, KeptSum, Put, SentAccumulator
from ps_server.values.shard_store import ShardStore
from ps_server.values.store_copy import StoreCopy, SumCopy
from ps_server.values.update_arithmetic import Accumulator, Terms
from ps_server.wire.replication_wire import SMALL_BYTES
from tests.examples import examples
from tests.property.shard_twin import PoisonedPool, decoded, table, worker_steps
from tests.property.store_pair import any_tables, check_equal, over_the_wire, record_of, told


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_a_backup_is_bit_equal_to_its_primary(data: st.DataObject) -> None:
    """Updates are applied at the primary later than at the backup, as they are when it waits."""
    subject = data.draw(any_tables())
    blocks = range(subject.block_count)
    pools = PoisonedPool(), PoisonedPool()
    primary, backup = (ShardStore(subject, blocks, pool) for pool in pools)
    waiting: list[tuple[Put, Accumulator]] = []
    small_bytes = data.draw(st.sampled_from([0, SMALL_BYTES]))
    for clock in range(1, data.draw(st.integers(1, 5)) + 1):
        steps = data.draw(st.lists(worker_steps(subject), max_size=3))
        for parts, scale in steps:
            primary.accumulate(clock, [decoded(primary, part) for part in parts], scale)
        count = max(len(steps), 1) + data.draw(st.integers(0, 1))
        scale = 1.0
        is_kept = data.draw(st.booleans())
        if is_kept:
            scale = data.draw(st.sampled_from([1.0, 0.0, 0.375, 1 / 3]))
            at_once(primary.reducing(clock, count))
            kept = KeptSum(record_of(clock, blocks, count), primary.kept_accumulator(clock))
            told(backup, over_the_wire(kept, small_bytes))
        if data.draw(st.integers(0, 4)) == 0:
            primary.drop(clock)
            told(backup, Dropped(record_of(clock, blocks, count)))
            continue
        accumulator = primary.take(clock)
        put = Put(record_of(clock, blocks, count, scale), None if is_kept else accumulator)
        told(backup, over_the_wire(put, small_bytes))
        waiting.append((put, accumulator))
        for _ in range(data.draw(st.integers(0, len(waiting)))):
            apply(primary, *waiting.pop(0))
    for put, accumulator in waiting:
        apply(primary, put, accumulator)
    check_equal(primary, backup)
    if subject.spec.optimizer.kind is not OptimizerKind.AGGREGATE:
        assert not pools[0].out
        assert not pools[1].out


READERS = Incarnation(7), Incarnation(8)


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_a_backup_has_the_running_mean_of_its_primary(data: st.DataObject) -> None:
    """Steps are accumulated, updates applied, backups told and joiners given a copy in any order:
    who was told the same has the same, and goes on alike. What comes to nothing is in no mean.
    """
    subject = data.draw(any_tables())
    blocks = range(subject.block_count)
    pools = PoisonedPool(), PoisonedPool()
    primary, backup = (ShardStore(subject, blocks, pool) for pool in pools)
    waiting: list[tuple[Put, Accumulator]] = []
    clock = 0
    for verb in data.draw(st.lists(st.sampled_from(["give", "step", "step", "apply"]), max_size=9)):
        reader = data.draw(st.sampled_from(READERS))
        if verb == "give":
            for block in blocks:
                primary.keep(reader, block)
        elif verb == "apply" and waiting:
            apply(primary, *waiting.pop(0))
        elif verb == "step":
            clock += 1
            compensated(data, primary, clock, reader)
            accumulator = primary.take(clock)
            put = Put(record_of(clock, blocks, 1), accumulator)
            told(backup, over_the_wire(put, data.draw(st.sampled_from([0, SMALL_BYTES]))))
            waiting.append((put, accumulator))
    compensated(data, primary, clock + 1, READERS[0])  # comes to nothing: its primary is lost
    joiner = ShardStore(subject, blocks, PoisonedPool())
    at_once(joiner.restoring(primary.snapshot()))
    for put, accumulator in waiting:
        told(joiner, over_the_wire(put, SMALL_BYTES))
        apply(primary, put, accumulator)
    primary.abandon()
    for store in (primary, joiner):
        check_equal(store, backup)
    check_goes_on_alike(data, clock, primary, backup, joiner)


def compensated(data: st.DataObject, store: ShardStore, clock: int, reader: Incarnation) -> None:
    parts, _ = data.draw(worker_steps(store.table))
    decoded_parts = [decoded(store, part) for part in parts]
    store.accumulate(clock, decoded_parts, 1.0, Compensation(reader, 0.5, adaptive=True))


def check_goes_on_alike(data: st.DataObject, clock: int, *stores: ShardStore) -> None:
    """Whoever serves next, the gradients are corrected alike."""
    parts, _ = data.draw(worker_steps(stores[0].table))
    for store in stores:
        for block in store.blocks:
            store.keep(READERS[1], block)
        for now, who in ((clock + 1, READERS[0]), (clock + 2, READERS[1])):
            decoded_parts = [decoded(store, part) for part in parts]
            store.accumulate(now, decoded_parts, 1.0, Compensation(who, 0.5, adaptive=True))
            store.apply(now, (), 1)
        check_equal(store, stores[0])


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_a_store_that_was_restored_goes_on_bit_for_bit(data: st.DataObject) -> None:
    """Sums in the making are lost, those that wait for their scale are not (COPY-1)."""
    subject = data.draw(any_tables())
    blocks = range(subject.block_count)
    first, other = (ShardStore(subject, blocks, PoisonedPool()) for _ in range(2))
    memory = {block: state.values.data_ptr() for block, state in other._states.items()}
    clock = train(data, first, 1, data.draw(st.integers(0, 4)))
    train(data, other, 1, data.draw(st.integers(0, 3)))
    is_waiting = data.draw(st.booleans())
    accumulate(data, first, clock)
    if is_waiting:
        at_once(first.reducing(clock, 2))
    copy = first.snapshot()
    if not is_waiting:
        first.drop(clock)
    train_a_copy(data, copy, first, other, clock)
    check_equal(first, other)
    assert memory == {block: state.values.data_ptr() for block, state in other._states.items()}


def train_a_copy(
    data: st.DataObject, copy: StoreCopy, first: ShardStore, other: ShardStore, clock: int
) -> None:
    """The store goes on while its copy is on its way; the restored one does the same later."""
    steps = data.draw(st.lists(worker_steps(first.table), max_size=4))
    scale = data.draw(st.sampled_from([1.0, 0.375]))
    for store in (first, other):
        if store is other:
            at_once(store.restoring(copy))
            assert store.snapshot() == copy
        store.apply(clock, (), 2, scale)
        for later, (parts, _) in enumerate(steps, clock + 1):
            store.accumulate(later, [decoded(store, part) for part in parts], 1.0)
            store.apply(later, (), 1)


def accumulate(data: st.DataObject, store: ShardStore, clock: int) -> None:
    parts, scale = data.draw(worker_steps(store.table))
    store.accumulate(clock, [decoded(store, part) for part in parts], scale)


def train(data: st.DataObject, store: ShardStore, clock: int, count: int) -> int:
    for now in range(clock, clock + count):
        accumulate(data, store, now)
        store.apply(now, (), 1)
    return clock + count


def spoiled(copy: StoreCopy, **changes: Any) -> StoreCopy:
    return copy._replace(blocks=(copy.blocks[0]._replace(**changes), *copy.blocks[1:]))


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (lambda c: c._replace(blocks=c.blocks[1:]), InvalidKeys, "has 1 blocks"),
        (lambda c: c._replace(blocks=c.blocks[:1] * 2), InvalidKeys, "has 2 blocks"),
        (lambda c: spoiled(c, block=5), InvalidKeys, "the first \\[5, 1\\]"),
        (lambda c: spoiled(c, values=bytes(8)), InvalidTensor, "values has 8 bytes; expected 256"),
        (lambda c: spoiled(c, slots=(("a", b""),)), InvalidTensor, "a has 0 bytes"),
        (lambda c: spoiled(c, slots=(("a", bytes(256)),) * 2), InvalidTensor, "a, a; expected"),
        (lambda c: spoiled(c, steps=()), InvalidTensor, "0 counts of steps"),
        (lambda c: spoiled(c, steps=(1, 2, 3)), InvalidTensor, "expected 1 or 2"),
        (lambda c: spoiled(c, steps=(1, 2**64)), InvalidTensor, "2 counts of steps"),
        (
            lambda c: c._replace(
                sums=(SumCopy(1, True, SentAccumulator((Elements(9, b"", bytes(256)),))),)
            ),
            InvalidKeys,
            "block 9",
        ),
    ],
)
def test_a_copy_of_another_store_is_refused_and_changes_nothing(
    spoil: Callable[[StoreCopy], StoreCopy], error: type[Exception], text: str
) -> None:
    adam = OptimizerSpec(OptimizerKind.ADAM)
    store = ShardStore(table([20, 108], optimizer=adam), range(2))
    store.accumulate(1, [(0, store.decode(0, Codec.FP32, b"\0\0\x80\x3f" * 64, b""))], 1.0)
    store.apply(1, (), 1)
    before = store.snapshot()
    other = ShardStore(table([20, 108], optimizer=adam), range(2)).snapshot()
    with pytest.raises(error, match=text):
        at_once(store.restoring(spoil(other)))
    assert store.snapshot() == before


def test_what_is_restored_is_not_what_was_kept_for_readers() -> None:
    """A gradient of somebody who was given values by another server is not compensated."""
    store = ShardStore(table([64]), range(1))
    store.keep(Incarnation(7), 0)
    at_once(store.restoring(ShardStore(table([64]), range(1)).snapshot()))
    assert not store._kept


def apply(store: ShardStore, put: Put, accumulator: Accumulator) -> None:
    record = put.record
    terms = record.contributor_count, record.update_scale
    at_once(store.applying(accumulator, Terms(record.clock, (), *terms)))


def test_what_is_folded_after_a_sum_was_taken_is_another_sum() -> None:
    """SUM-1."""
    store = ShardStore(table([64]), range(1))
    one = b"\0\0\x80\x3f" * 64
    store.accumulate(1, [(0, store.decode(0, Codec.FP32, one, b""))], 1.0)
    first = store.take(1)
    store.accumulate(1, [(0, store.decode(0, Codec.FP32, one, b""))], 3.0)
    at_once(store.applying(first, Terms(1, (), 1)))
    assert store.read(0, None, None)[0] == b"\0\0\x80\xbf" * 64
    store.apply(1, (), 1)
    assert store.read(0, None, None)[0] == b"\0\0\x80\xc0" * 64
    assert store.version(0) == 2


@pytest.mark.parametrize(
    ("elements", "error", "text"),
    [
        ((Elements(7, b"", bytes(256)),), InvalidKeys, "block 7"),
        ((Elements(0, b"", bytes(256)),) * 2, InvalidKeys, "twice"),
        ((Elements(0, b"\1\0", bytes(256)),), InvalidKeys, "presence has 2 bytes"),
        ((Elements(0, b"", bytes(255)),), InvalidTensor, "expected 256"),
        ((Elements(0, b"", b""),), InvalidTensor, "expected 256"),
    ],
)
def test_a_sum_that_is_none_is_refused(
    elements: tuple[Elements, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        at_once(ShardStore(table([64, 64]), [0]).receiving(SentAccumulator(elements)))


def test_a_received_sum_is_read_where_it_lies() -> None:
    store = ShardStore(table([64]), range(1))
    payload = bytes(256)
    sent = SentAccumulator((Elements(0, b"", payload),))
    part = at_once(store.receiving(sent)).parts[0]
    assert not part.is_owned

    assert part.values.data_ptr() == np.frombuffer(payload, np.uint8).ctypes.data
