"""Sums of rows on their way to backups and the update log: whatever a primary has, they take."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from ps_core import limits
from ps_core.errors import InvalidKeys, InvalidTensor
from ps_core.keys import TableId
from ps_core.sliced_work import at_once
from ps_core.tables.elements import Codec, DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import Reduction, RowsSpec, TableSpec
from ps_server.values.mutations import Elements, SentAccumulator
from ps_server.values.row_gradients import RowAccumulator, payload_of
from ps_server.values.row_store import RowStore
from ps_server.values.update_arithmetic import Terms

LENGTH, WORKER_COUNT = 1, 2
ROW_BYTES = limits.ROW_ID_BYTES + 4 * LENGTH


def store() -> RowStore:
    optimizer = OptimizerSpec(OptimizerKind.SGD, (("lr", 1.0),))
    spec = TableSpec(
        "rows", DType.FLOAT32, LENGTH, optimizer, reduction=Reduction.SUM, rows=RowsSpec(1)
    )
    return RowStore(Table(TableId(1), 0, spec.validated()), (0,))


def kept(primary: RowStore, gradients: dict[int, npt.NDArray[np.uint64]], value: float) -> None:
    """Have the primary keep the reduced sum of workers' gradients, each of its ids."""
    for ids in gradients.values():
        payload = payload_of(ids, np.full((len(ids), LENGTH), value, np.float32))
        primary.accumulate(1, [(0, primary.decode(0, Codec.FP32, payload, b""))], 1.0)
    at_once(primary.reducing(1, len(gradients)))


def sent_of(primary: RowStore) -> SentAccumulator:
    return primary.kept_accumulator(1).sent().fixed()


def rows_of(backup: RowStore, sent: SentAccumulator, ids: npt.NDArray[np.uint64]) -> list[float]:
    """The rows of a backup that has taken the sum."""
    received = at_once(backup.receiving(sent))
    assert isinstance(received, RowAccumulator)
    backup.put_accumulator(1, received)
    at_once(backup.applying(backup.take(1), Terms(1, (), WORKER_COUNT)))
    found: list[float] = backup.rows(0, ids)[:, 0].tolist()
    return found


def test_a_merged_sum_may_have_more_rows_than_a_push() -> None:
    primary, count = store(), limits.MAX_ROW_COUNT - 1
    ids = np.arange(WORKER_COUNT * count, dtype=np.uint64)
    kept(primary, {0: ids[:count], 1: ids[count:]}, 1.0)
    sent = sent_of(primary)
    assert max(len(each.payload) for each in sent.blocks) <= limits.MAX_ROW_COUNT * ROW_BYTES
    assert set(rows_of(store(), sent, ids[-100:])) == {-1.0}
    whole = b"".join(bytes(each.payload)[: 8 * (len(each.payload) // 12)] for each in sent.blocks)
    assert np.array_equal(np.frombuffer(whole, np.uint64), ids)
    in_one = Elements(0, b"", payload_of(ids, np.ones((len(ids), LENGTH), np.float32)))
    assert set(rows_of(store(), SentAccumulator((in_one,), is_reduced=True), ids[:9])) == {-1.0}


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_sum_of_finite_gradients_may_be_infinite() -> None:
    primary, ids = store(), np.arange(4, dtype=np.uint64)
    kept(primary, {0: ids, 1: ids}, float(np.finfo(np.float32).max))
    sent = sent_of(primary)
    at_once(primary.applying(primary.take(1), Terms(1, (), WORKER_COUNT)))
    expected = primary.rows(0, ids)[:, 0].tolist()
    assert expected == [-np.inf] * len(ids)
    assert rows_of(store(), sent, ids) == expected


def test_a_sum_of_another_partition_or_of_no_whole_rows_is_refused() -> None:
    spec = store().table.spec
    of_two = Table(
        TableId(1),
        0,
        TableSpec("rows", DType.FLOAT32, LENGTH, spec.optimizer, rows=RowsSpec(2)).validated(),
    )
    backup = RowStore(of_two, (0,))
    good = payload_of(np.arange(9, dtype=np.uint64), np.ones((9, LENGTH), np.float32))
    wrong = (
        (Elements(0, b"", good), InvalidKeys, "lives in partition 1"),
        (Elements(0, b"", good[:-1]), InvalidTensor, "expected a multiple of 12"),
        (Elements(0, b"\1", good), InvalidKeys, "presence"),
        (Elements(1, b"", good), InvalidKeys, "is not in this range"),
    )
    for elements, error, words in wrong:
        with pytest.raises(error, match=words):
            at_once(backup.receiving(SentAccumulator((elements,))))
    assert backup.row_count == 0
