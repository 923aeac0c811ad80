"""The gate's memory of one table: two workers' whole steps fit, since a sum is what was staged of
the first of them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core.cluster_view import Node, NodeState, Role
from ps_core.consistency import Consistency, Mode
from ps_core.keys import Incarnation, NodeId
from ps_core.ledger import ReplyKind
from ps_core.tables.table import Table
from ps_server.ranges.events import Effect
from ps_server.ranges.staging_memory import TableStaging
from tests.unit.machine_harness import Bench, applied, kinds, make_table

BLOCK_COUNT = 4
STEP_BYTES = BLOCK_COUNT * 256


class Gate:
    """One range with the smallest gate."""

    def __init__(self, workers: int, consistency: Consistency) -> None:
        table = make_table(consistency, blocks=BLOCK_COUNT)
        table = Table(table.table_id, 0, replace(table.spec, gate_bytes=1))
        self.staging = TableStaging(table)
        self.bench = Bench(table, workers, staging=self.staging)  # type: ignore[arg-type]
        self.staging.add(self.bench.machine)

    def push(self, rank: int, clock: int = 1) -> set[ReplyKind]:
        """All blocks of a step; what was answered."""
        self.staging.heard(self.bench.sender(rank))
        first = (clock - 1) * (BLOCK_COUNT + 1) + 1
        effects: list[Effect] = []
        for block in range(BLOCK_COUNT):
            effects += self.bench.push(rank, first + block, clock, block)
        return set(kinds(effects))

    def seal(self, rank: int, clock: int = 1, *, clip_scale: float | None = None) -> list[Effect]:
        """The end of a step; and who is given credit."""
        sequence = clock * (BLOCK_COUNT + 1)
        out = self.bench.seal(rank, sequence, clock, clip_scale=clip_scale)
        self.staging.credits(out)
        return out


@pytest.mark.parametrize("backup_workers", [0, 1])
def test_two_whole_steps_fit_and_the_sum_is_what_the_first_was(backup_workers: int) -> None:
    workers = 2 + backup_workers
    gate = Gate(workers, Consistency(Mode.BSP, backup_workers=backup_workers))
    for clock in (1, 2):
        assert gate.push(1, clock) == {ReplyKind.RECEIVED}
        assert gate.push(0, clock) == {ReplyKind.RECEIVED}
        assert gate.staging.held_bytes == 2 * STEP_BYTES
        assert not applied(gate.seal(0, clock))
        assert gate.staging.held_bytes == 2 * STEP_BYTES
        assert len(applied(gate.seal(1, clock))) == 1
        assert gate.staging.held_bytes == 0


def test_what_a_sum_takes_is_not_given_to_others() -> None:
    gate = Gate(3, Consistency(Mode.BSP))
    gate.push(0)
    gate.seal(0)
    gate.push(1)
    assert gate.push(2) == {ReplyKind.REFUSED}
    assert ReplyKind.CREDIT in kinds(gate.seal(1))  # it is added to the sum
    assert gate.push(2) == {ReplyKind.RECEIVED}
    assert len(applied(gate.seal(2))) == 1
    assert gate.staging.held_bytes == 0


@pytest.mark.parametrize("is_replaced", [False, True])
def test_who_has_ended_is_given_no_credit_and_its_replacement_is(is_replaced: bool) -> None:
    gate = Gate(3, Consistency(Mode.BSP))
    for rank in (0, 1, 2):
        gate.push(rank)
    last = gate.bench.sender(2)
    ended = Incarnation(last.incarnation - is_replaced)
    gate.staging.forget(Node(NodeId(9), ended, Role.WORKER, 2, "", NodeState.LEFT))
    gate.seal(0)
    assert (ReplyKind.CREDIT in kinds(gate.seal(1))) == is_replaced


def test_a_sum_that_waits_for_its_scale_counts_until_it_has_it() -> None:
    gate = Gate(1, Consistency(Mode.BSP))
    gate.push(0)
    gate.seal(0, clip_scale=1.0)
    assert gate.staging.held_bytes == STEP_BYTES
    gate.bench.scale(0, BLOCK_COUNT + 2, 1, 0.5)
    assert gate.staging.held_bytes == 0


def test_entries_that_come_again_are_counted() -> None:
    gate = Gate(1, Consistency(Mode.BSP))
    gate.push(0)
    gate.seal(0)
    assert gate.bench.machine.resent_count == 0
    gate.push(0)
    gate.seal(0)
    assert gate.bench.machine.resent_count == BLOCK_COUNT + 1


def test_a_sum_that_is_given_up_counts_no_more() -> None:
    gate = Gate(2, Consistency(Mode.BSP))
    gate.push(0)
    gate.seal(0)
    assert gate.staging.held_bytes == STEP_BYTES
    gate.staging.remove(gate.bench.machine)
    assert gate.staging.held_bytes == 0
