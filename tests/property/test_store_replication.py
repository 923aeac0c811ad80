"""A backup's store that is told of sums ends up bit for bit as the primary's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_core.errors import InvalidKeys, InvalidTensor
from ps_core.tables import Codec, OptimizerKind
from ps_server.changes import Dropped, Elements, Kept, Put
from ps_server.shard_store import ShardStore
from ps_server.sums import Total
from tests.property.shard_twin import PoisonedPool, decoded, table, worker_steps
from tests.property.store_pair import any_tables, check_equal, copied, record_of, told


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_backup_is_bit_equal_to_its_primary(data: st.DataObject) -> None:
    """Updates are applied at the primary later than at the backup, as they are when it waits."""
    subject = data.draw(any_tables())
    blocks = range(subject.block_count)
    pools = PoisonedPool(), PoisonedPool()
    primary, backup = (ShardStore(subject, blocks, pool) for pool in pools)
    waiting: list[tuple[Put, Total]] = []
    for clock in range(1, data.draw(st.integers(1, 5)) + 1):
        steps = data.draw(st.lists(worker_steps(subject), max_size=3))
        for parts, scale in steps:
            primary.fold(clock, [decoded(primary, part) for part in parts], scale)
        count = max(len(steps), 1) + data.draw(st.integers(0, 1))
        scale = 1.0
        is_kept = data.draw(st.booleans())
        if is_kept:
            scale = data.draw(st.sampled_from([1.0, 0.0, 0.375, 1 / 3]))
            primary.reduce(clock, count)
            kept = Kept(
                record_of(clock, blocks, count), copied(primary.kept_total(clock).elements())
            )
            told(backup, kept)
        if data.draw(st.integers(0, 4)) == 0:
            primary.drop(clock)
            told(backup, Dropped(record_of(clock, blocks, count)))
            continue
        total = primary.take(clock)
        put = Put(
            record_of(clock, blocks, count, scale),
            None if is_kept else copied(total.elements()),
        )
        told(backup, put)
        waiting.append((put, total))
        for _ in range(data.draw(st.integers(0, len(waiting)))):
            apply(primary, *waiting.pop(0))
    for put, total in waiting:
        apply(primary, put, total)
    check_equal(primary, backup)
    if subject.spec.optimizer.kind is not OptimizerKind.AGGREGATE:
        assert not pools[0].out
        assert not pools[1].out


def apply(store: ShardStore, put: Put, total: Total) -> None:
    record = put.record
    store.apply_total(
        record.clock, total, (), record.contributor_count, record.update_scale
    )  # fmt: skip


def test_what_is_folded_after_a_sum_was_taken_is_another_sum() -> None:
    store = ShardStore(table([64]), range(1))
    one = b"\0\0\x80\x3f" * 64
    store.fold(1, [(0, store.decode(0, Codec.FP32, one, b""))], 1.0)
    first = store.take(1)
    store.fold(1, [(0, store.decode(0, Codec.FP32, one, b""))], 3.0)
    store.apply_total(1, first, (), 1)
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
        ShardStore(table([64, 64]), [0]).received(elements)


def test_a_received_sum_is_read_where_it_lies() -> None:
    store = ShardStore(table([64]), range(1))
    payload = bytes(256)
    part = store.received((Elements(0, b"", payload),)).parts[0]
    assert not part.is_owned

    assert part.values.data_ptr() == np.frombuffer(payload, np.uint8).ctypes.data
