"""Whatever a primary may say to a backup, drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from ps_core.consistency import Consistency, Mode, StalePolicy
from ps_core.errors import CATALOGUE, PushpullError, UpdateFailed
from ps_core.keys import AssignmentEpoch, Incarnation, RangeId, TableId
from ps_core.ledger import Ending, Ledger, Outcome
from ps_server.ranges.events import Contributor, Record
from ps_server.ranges.range_copy import RangeDelta, RangeFacts, ShardCopy, WorkerCopy, WorkerFacts
from ps_server.ranges.range_state import UpdateScale
from ps_server.replication.messages import Ack, Beat, Grant, LogRecord, RangeCopy, Snapshot
from ps_server.values.mutations import (
    Assigned,
    Dropped,
    Elements,
    KeptSum,
    Mutation,
    Put,
    SentAccumulator,
)
from ps_server.values.store_copy import BlockCopy, StoreCopy, SumCopy

COUNTS = st.one_of(st.integers(0, 200), st.integers(0, 2**63))
SMALL = st.integers(0, 200)
CLOCKS = st.integers(-1, 2**40)
DOUBLES = st.floats(allow_nan=False)
RANGE_IDS = st.builds(RangeId, st.integers(0, 255))
TABLE_IDS = st.builds(TableId, st.integers(1, 10_000))
EPOCHS = st.builds(AssignmentEpoch, st.integers(1, 2**40))
INCARNATIONS = st.builds(Incarnation, st.integers(1, 2**63))
PAYLOADS = st.binary(max_size=400)

ERRORS: st.SearchStrategy[PushpullError] = st.builds(
    lambda kind, text, retry, clock: kind(text, retry_after_ms=retry, clock=clock),
    st.sampled_from(list(CATALOGUE.values())), st.text(max_size=30), SMALL, SMALL,
)  # fmt: skip
ENDINGS = st.one_of(
    st.builds(Ending, st.sampled_from(Outcome)),
    st.builds(
        Ending, st.sampled_from(Outcome), st.none() | ERRORS, SMALL,
        st.lists(DOUBLES, max_size=3).map(tuple),
    ),
)  # fmt: skip
CONSISTENCIES = st.sampled_from(
    [
        Consistency(),
        Consistency(backup_workers=2, grace_ms=50),
        Consistency(Mode.SSP, staleness=4),
        Consistency(Mode.SSP, staleness=5, least=2, most=8),
        Consistency(Mode.ASP),
        Consistency(Mode.ASP, policy=StalePolicy.REJECT, bound=3),
        Consistency(Mode.ASP, policy=StalePolicy.DAMP, alpha=0.1),
        Consistency(Mode.ASP, policy=StalePolicy.DIVIDE),
        Consistency(Mode.ASP, policy=StalePolicy.COMPENSATE, strength=1 / 3, adaptive=True),
    ]
)
WORKERS = st.builds(
    WorkerFacts, INCARNATIONS, SMALL, CLOCKS, CLOCKS, st.none() | CLOCKS,
    st.sampled_from([0, 0, 7]), COUNTS, st.none() | CLOCKS,
    st.sampled_from([None, None, Incarnation(0), Incarnation(9)]),
)  # fmt: skip
CONTRIBUTORS = st.lists(
    st.builds(
        Contributor, SMALL, INCARNATIONS, st.lists(COUNTS, max_size=4).map(tuple), st.booleans()
    ),
    max_size=4,
).map(tuple)
ELEMENTS = st.builds(Elements, COUNTS, st.binary(max_size=3), PAYLOADS)
TOTALS = st.builds(
    SentAccumulator, st.lists(ELEMENTS, max_size=3).map(tuple), st.booleans(), st.just(())
)
"""Without running means, which only what is put has."""
MEANS = st.one_of(st.just(()), st.lists(ELEMENTS, max_size=3).map(tuple))


@st.composite
def records(draw: st.DrawFn, table_id: TableId, range_id: RangeId) -> Record:
    names = draw(st.sets(st.text(min_size=1, max_size=8), max_size=4))
    return Record(
        table_id,
        range_id,
        draw(COUNTS),
        draw(COUNTS),
        draw(st.booleans()),
        draw(CONTRIBUTORS),
        tuple((name, draw(DOUBLES)) for name in sorted(names)),
        draw(st.lists(COUNTS, max_size=4).map(tuple)),
        draw(SMALL),
        draw(st.sampled_from([1.0, 0.0, 1 / 3, float("inf")])),
        draw(st.one_of(st.just(()), CONTRIBUTORS)),
        *draw(st.sampled_from([("", b""), ("exp_avg", b"\1\2"), ("step", b"x")])),
    )


@st.composite
def changes(draw: st.DrawFn, record: Record) -> Mutation:
    accumulator, means = draw(TOTALS), draw(MEANS)
    kinds: list[Callable[[], Mutation]] = [
        lambda: Put(record, None),
        lambda: Put(record, accumulator._replace(means=means)),
        lambda: KeptSum(record, accumulator._replace(is_reduced=True)),
        lambda: Dropped(record),
        lambda: Assigned(record, accumulator.blocks),
    ]
    kind: Callable[[], Mutation] = draw(st.sampled_from(kinds))
    return kind()


@st.composite
def facts(draw: st.DrawFn, known: st.SearchStrategy[Record]) -> RangeFacts:
    squares = st.tuples(SMALL, st.lists(DOUBLES, max_size=3).map(tuple))
    settings = st.tuples(CLOCKS, CONSISTENCIES)
    return RangeFacts(
        draw(COUNTS),
        draw(COUNTS),
        draw(COUNTS),
        draw(COUNTS),
        draw(COUNTS),
        draw(COUNTS),
        draw(st.booleans()),
        draw(st.none() | known),
        draw(st.lists(squares, max_size=2).map(tuple)),
        draw(st.none() | st.builds(UpdateScale, SMALL, DOUBLES, SMALL)),
        draw(st.lists(settings, min_size=1, max_size=3).map(tuple)),
        draw(SMALL),
        draw(SMALL),
        draw(st.none() | COUNTS),
        draw(st.booleans()),
        draw(st.none() | st.builds(UpdateFailed, st.text(max_size=20))),
        draw(COUNTS),
        draw(COUNTS),
        draw(st.tuples(SMALL, COUNTS)),
        draw(st.booleans()),
    )


@st.composite
def log_records(draw: st.DrawFn) -> LogRecord:
    range_id, table_id = draw(RANGE_IDS), draw(TABLE_IDS)
    known = draw(st.lists(records(table_id, range_id), min_size=1, max_size=3))
    some = st.sampled_from(known)
    ended = st.tuples(INCARNATIONS, COUNTS, ENDINGS)
    delta = RangeDelta(
        draw(facts(some)),
        draw(st.lists(WORKERS, max_size=4).map(tuple)),
        draw(st.lists(ended, max_size=5).map(tuple)),
        draw(st.lists(some, max_size=2).map(tuple)),
    )
    made = draw(st.lists(some.flatmap(changes), max_size=3).map(tuple))
    return LogRecord(range_id, draw(EPOCHS), draw(EPOCHS), draw(COUNTS), table_id, delta, made)


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    ledger = Ledger()
    for sequence in draw(st.permutations(range(1, draw(st.integers(1, 8))))):
        ledger.end(sequence, draw(ENDINGS))
    ledger.confirm(draw(st.integers(0, 8)))
    for sequence in draw(st.sets(st.integers(ledger.low_water + 2, ledger.low_water + 9))):
        ledger.end(sequence, draw(ENDINGS))
    return ledger


@st.composite
def part_copies(draw: st.DrawFn, table_id: TableId, range_id: RangeId) -> ShardCopy:
    numbers = st.dictionaries(COUNTS, COUNTS, max_size=3)
    workers = {
        each.incarnation: WorkerCopy(each, draw(ledgers()), draw(numbers))
        for each in draw(st.lists(WORKERS, max_size=3))
    }
    return ShardCopy(draw(facts(records(table_id, range_id))), draw(numbers), workers)


STEPS = st.lists(COUNTS, min_size=1, max_size=3).map(tuple)
SLOTS = st.lists(st.tuples(st.text(max_size=5), PAYLOADS), max_size=3).map(tuple)
BLOCKS = st.builds(BlockCopy, COUNTS, COUNTS, STEPS, PAYLOADS, SLOTS)
SUMS = st.builds(
    SumCopy, COUNTS, st.booleans(), TOTALS.map(lambda t: t._replace(is_reduced=True))
)  # fmt: skip
STORES = st.builds(
    StoreCopy, st.lists(BLOCKS, max_size=2).map(tuple), st.lists(SUMS, max_size=2).map(tuple)
)


@st.composite
def range_copies(draw: st.DrawFn) -> RangeCopy:
    range_id = draw(RANGE_IDS)
    tables = sorted(draw(st.sets(TABLE_IDS, max_size=3)))
    copies = {table_id: draw(part_copies(table_id, range_id)) for table_id in tables}
    held = [
        draw(changes(draw(records(table_id, range_id))))
        for table_id in tables
        for _ in range(draw(st.integers(0, 2)))
    ]
    epochs = draw(EPOCHS), draw(EPOCHS)
    snapshot = Snapshot(range_id, *epochs, draw(COUNTS), copies, tuple(held))
    return RangeCopy(snapshot, {table_id: draw(STORES) for table_id in tables})


BEATS = st.builds(Beat, DOUBLES, st.lists(st.tuples(RANGE_IDS, EPOCHS), max_size=5).map(tuple))
ANSWERS = st.one_of(
    st.builds(Ack, RANGE_IDS, COUNTS, EPOCHS),
    st.builds(Grant, DOUBLES, st.lists(RANGE_IDS, max_size=4).map(tuple)),
)


def plain(value: Any) -> Any:
    """The value with errors, ledgers and views as what they say, to be compared."""
    if isinstance(value, PushpullError):
        return type(value), value.message, value.retry_after_ms, value.clock
    if isinstance(value, Ending):
        return value.outcome, plain(value.error), value.staleness, value.squares
    if isinstance(value, Ledger):
        return value.low_water, value.confirmed, plain(dict(value.kept))
    if isinstance(value, ShardCopy):
        return plain(value.facts), value.versions, plain(value.workers)
    if isinstance(value, WorkerCopy):
        return value.facts, plain(value.ledger), value.own_updates
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return type(value), tuple(plain(each) for each in value)
    return value
