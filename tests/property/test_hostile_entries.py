"""Workers that send anything at all: every number ends at most once and no invariant breaks.

One range under the smallest gate, two workers, entries that contradict each other in every way that
the contract's fields allow: numbers used twice for other things, replaced and withdrawn entries of
other steps, clocks and kinds that do not belong, seals that come first, last ones, eager ones.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_core.consistency import Mode
from ps_core.errors import InvalidTensor
from ps_core.keys import AssignmentEpoch, Incarnation, RangeId, TableId
from ps_core.ledger import Outcome
from ps_core.tables.table import Table
from ps_server.ranges.events import (
    Accumulate,
    Apply,
    AssignValues,
    Effect,
    Place,
    PushEvent,
    ReplyTo,
    SealEvent,
    SealTerms,
    Sender,
    WithdrawEvent,
)
from ps_server.ranges.range_machine import RangeMachine
from ps_server.ranges.range_state import RangeState
from ps_server.ranges.staging_memory import TableStaging
from tests.examples import examples
from tests.unit.machine_harness import make_table

pytestmark = pytest.mark.slow

Entry = PushEvent | SealEvent | WithdrawEvent

PLACE = Place(TableId(1), RangeId(0), AssignmentEpoch(1))
LR = (("lr", 0.5),)
SEQUENCES = st.integers(0, 9)
CLOCKS = st.sampled_from([0, 1, 1, 1, 2, 2, 3, 70])
SENDERS = st.builds(
    lambda rank, stream: Sender(Incarnation(1000 + rank), rank, 10 * rank + stream),
    st.integers(0, 1),
    st.integers(0, 1),
)
PUSHES = st.builds(
    PushEvent,
    place=st.just(PLACE),
    sender=SENDERS,
    sequence=SEQUENCES,
    clock=CLOCKS,
    block=st.sampled_from([0, 0, 1, 2, 9]),
    byte_count=st.just(256),
    payload=st.just("a gradient"),
    problem=st.sampled_from([None, None, None, InvalidTensor("wrong")]),
    is_assign=st.booleans(),
    replaces=st.sampled_from([0, 0, 0, 1, 2, 3, 4, 8]),
    confirmed=st.sampled_from([0, 0, 1, 99]),
    pulled_peer_version=st.sampled_from([None, 0, 7]),
    eager=st.sampled_from([None, None, LR, (("nonsense", 1.0),)]),
)
TERMS = st.builds(
    SealTerms,
    clock=CLOCKS,
    hyperparameters=st.sampled_from([(), (), LR, (("lr", float("nan")),)]),
    contribution_scale=st.sampled_from([1.0, 1.0, 0.5, -1.0]),
    skip=st.booleans(),
    last=st.sampled_from([False, False, False, True]),
)
SEALS = st.builds(
    SealEvent,
    place=st.just(PLACE),
    sender=SENDERS,
    sequence=SEQUENCES,
    terms=TERMS,
    confirmed=st.sampled_from([0, 1]),
    skip_if_invalid=st.booleans(),
)
WITHDRAWALS = st.builds(WithdrawEvent, st.just(PLACE), SENDERS, SEQUENCES)
ENTRIES = st.lists(st.one_of(PUSHES, PUSHES, SEALS, WITHDRAWALS), min_size=1, max_size=40)


def _machine(mode: Mode, *, from_rank_zero: bool) -> tuple[RangeMachine, TableStaging]:
    table = make_table(mode, blocks=3, from_rank_zero=from_rank_zero)
    table = Table(table.table_id, 0, replace(table.spec, gate_bytes=1))
    staging = TableStaging(table)
    machine = RangeMachine(RangeState(table, RangeId(0), (0, 1, 2), 2, staging))
    staging.add(machine)
    return machine, staging


def _check_parts(effects: list[Effect]) -> None:
    """What is accumulated or assigned has its payload (SH-1)."""
    for effect in effects:
        if isinstance(effect, Accumulate | AssignValues):
            assert all(payload is not None for _, payload in effect.parts)


def _check_state(machine: RangeMachine, staging: TableStaging) -> None:
    """RM-1, and that the gate counts exactly what is staged, and the sum."""
    staged = 0
    for worker in machine.state.by_rank.values():
        found: list[int] = []
        for step in worker.steps.values():
            assert step.clock <= max(worker.sealed_clock, 0) + 64
            found += [*step.pushes, *([step.seal.sequence] if step.seal is not None else [])]
            staged += sum(p.byte_count for p in step.pushes.values() if p.payload is not None)
            assert not any(worker.ledger.has_ended(sequence) for sequence in step.missing)
            assert not any(sequence in worker.held for sequence in step.missing)
        assert sorted(found) == sorted(worker.held)
        assert not any(worker.ledger.has_ended(sequence) for sequence in worker.held)
    assert staging.held_bytes == staged + machine.state.summed_bytes


@pytest.mark.thorough
@pytest.mark.parametrize("from_rank_zero", [False, True])
@pytest.mark.parametrize("mode", list(Mode))
@settings(max_examples=examples(150))
@given(ENTRIES)
def test_every_number_ends_at_most_once(
    mode: Mode, from_rank_zero: bool, entries: list[Entry]
) -> None:
    machine, staging = _machine(mode, from_rank_zero=from_rank_zero)
    endings: dict[tuple[int, int], Outcome] = {}
    applied_count = 0
    for event in entries:
        effects = machine.entry(event, 1.0)
        assert any(
            isinstance(e, ReplyTo)
            and (e.sender.rank, e.sequence) == (event.sender.rank, event.sequence)
            for e in effects
        )
        _check_parts(effects)
        _check_state(machine, staging)
        applied_count += sum(isinstance(effect, Apply) for effect in effects)
        for effect in effects:
            if isinstance(effect, ReplyTo) and effect.ending is not None:
                key = effect.sender.rank, effect.sequence
                assert endings.setdefault(key, effect.ending.outcome) is effect.ending.outcome
    assert machine.state.update_count == applied_count
