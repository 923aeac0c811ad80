"""A block is refused before it is sent if it has another length than its place in the table."""

from __future__ import annotations

import numpy as np
import pytest

from ps_core.errors import InvalidKeys, InvalidTensor
from ps_core.keys import TableId
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_worker.spec.values import BlockValues
from ps_worker.steps.steps import TableSteps
from tests.unit.test_steps_together import Sealed

FULL, LAST = 64, 10


def push(block: int, element_count: int) -> None:
    spec = TableSpec(
        "w", DType.FLOAT32, 2 * FULL + LAST, OptimizerSpec(OptimizerKind.SGD), block_elements=FULL
    )
    steps = TableSteps(Table(TableId(1), 0, spec.validated()), Sealed())
    payload = np.zeros(element_count, np.float32).view(np.uint8).data
    steps.open_step().push_blocks([BlockValues(block, payload)])


@pytest.mark.parametrize(("block", "element_count"), [(0, FULL), (1, FULL), (2, LAST)])
def test_blocks_of_their_length_are_sent(block: int, element_count: int) -> None:
    push(block, element_count)


@pytest.mark.parametrize(
    ("block", "element_count"), [(0, LAST), (1, FULL - 1), (1, LAST), (2, FULL), (2, LAST + 1)]
)
def test_blocks_of_another_length_are_refused(block: int, element_count: int) -> None:
    with pytest.raises(InvalidTensor, match=f"payload has {4 * element_count} bytes"):
        push(block, element_count)


@pytest.mark.parametrize("block", [-1, 3])
def test_there_is_no_such_block(block: int) -> None:
    with pytest.raises(InvalidKeys):
        push(block, FULL)
