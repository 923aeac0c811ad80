"""Facts, outcomes and decisions, to messages of `pushpull.v1` and back, exactly.

The hot path has one record a block, and each has all facts. So workers and outcomes go as packed
lists, defaults stay out, and settings, which hardly ever change, are translated once.

Rules:
    - Messages come from outside: unequal lists, bad indexes and unknown numbers are InvalidConfig.
    - A decision that a message names several times is in it once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from functools import lru_cache
from typing import TypeVar

from ps_core.consistency import Consistency
from ps_core.errors import InvalidConfig, PushpullError, UpdateFailed
from ps_core.keys import Incarnation, RangeId, TableId
from ps_core.ledger import Ending, Outcome
from ps_runtime.cluster.wire import consistency_from_proto, consistency_to_proto
from ps_runtime.grpc import errors
from ps_server.ranges.events import Contributor, Record
from ps_server.ranges.range_copy import RangeFacts, WorkerFacts
from ps_server.ranges.range_state import UpdateScale
from pushpull.v1 import parameters_pb2, replication_pb2, types_pb2

ItemT = TypeVar("ItemT")

Ended = tuple[Incarnation, int, Ending]

_OUTCOMES = {each: parameters_pb2.Outcome.Value(f"OUTCOME_{each.name}") for each in Outcome}
_PLAIN = {number: Ending(outcome) for outcome, number in _OUTCOMES.items()}
"""Endings without an error or a value, by number."""

_CACHED_SETTINGS_COUNT = 1024
"""Settings whose translation is cached: a table has one, and two during a change."""


class RecordTable:
    """The decisions of one message, each once, by identity, which costs less than equality."""

    __slots__ = ("_records", "messages")

    def __init__(self) -> None:
        self._records: list[Record] = []
        self.messages: list[replication_pb2.DecisionRecord] = []

    def index(self, record: Record) -> int:
        for index, known in enumerate(self._records):
            if known is record:
                return index
        self._records.append(record)
        self.messages.append(record_to_proto(record))
        return len(self._records) - 1


def at(items: Sequence[ItemT], index: int, what: str) -> ItemT:
    """The item at a received index."""
    if not 0 <= index < len(items):
        raise InvalidConfig(f"{what} is number {index}; expected one of {len(items)} from 0")
    return items[index]


def check_lengths(what: str, *lists: Sequence[object]) -> None:
    if len({len(each) for each in lists}) > 1:
        lengths = ", ".join(str(len(each)) for each in lists)
        raise InvalidConfig(f"{what} come as lists of {lengths}; expected them equally long")


# --- decisions


def record_to_proto(record: Record) -> replication_pb2.DecisionRecord:
    message = replication_pb2.DecisionRecord(
        number=record.number,
        clock=record.clock,
        is_assign=record.is_assign,
        contributors=[_contributor_to_proto(each) for each in record.contributors],
        hyperparameters=_hyperparameters_to_proto(record.hyperparameters),
        blocks=record.blocks,
        gone_count=record.gone_count,
    )
    if record.update_scale != 1.0:
        message.update_scale = record.update_scale
    if record.array:
        message.array, message.edit = record.array, record.edit
    if record.summed_by:
        message.summed_by.extend(_contributor_to_proto(each) for each in record.summed_by)
    return message


def record_from_proto(
    message: replication_pb2.DecisionRecord, table_id: TableId, range_id: RangeId
) -> Record:
    return Record(
        table_id,
        range_id,
        message.number,
        message.clock,
        message.is_assign,
        tuple([_contributor_from_proto(each) for each in message.contributors]),
        tuple([(each.name, each.value) for each in message.hyperparameters]),
        tuple(message.blocks),
        message.gone_count,
        message.update_scale if message.HasField("update_scale") else 1.0,
        tuple([_contributor_from_proto(each) for each in message.summed_by]),
        message.array,
        message.edit,
    )


@lru_cache(maxsize=_CACHED_SETTINGS_COUNT)
def _hyperparameters_to_proto(
    values: tuple[tuple[str, float], ...],
) -> list[types_pb2.Hyperparameter]:
    return [types_pb2.Hyperparameter(name=name, value=value) for name, value in values]


def _contributor_to_proto(contributor: Contributor) -> replication_pb2.RecordContributor:
    rank, incarnation, sequences, skip = contributor
    return replication_pb2.RecordContributor(
        rank=rank, incarnation=incarnation, sequences=sequences, skip=skip
    )


def _contributor_from_proto(message: replication_pb2.RecordContributor) -> Contributor:
    return Contributor(
        message.rank, Incarnation(message.incarnation), tuple(message.sequences), message.skip
    )


# --- outcomes


def endings_to_proto(endings: Iterable[Ended], *, named: bool) -> replication_pb2.EndedEntries:
    """Entries that ended: whose (if `named`), which, and how."""
    incarnations: list[int] = []
    sequences: list[int] = []
    outcomes: list[int] = []
    stalenesses: list[int] = []
    details: list[replication_pb2.EndingDetail] = []
    for index, (incarnation, sequence, ending) in enumerate(endings):
        incarnations.append(incarnation)
        sequences.append(sequence)
        outcomes.append(_OUTCOMES[ending.outcome])
        stalenesses.append(ending.staleness)
        if ending.error is not None or ending.squares:
            error = None if ending.error is None else errors.error_to_proto(ending.error)
            details.append(
                replication_pb2.EndingDetail(index=index, error=error, squares=ending.squares)
            )
    return replication_pb2.EndedEntries(
        incarnations=incarnations if named else (),
        sequences=sequences,
        outcomes=outcomes,  # type: ignore[arg-type]
        stalenesses=stalenesses if any(stalenesses) else (),
        details=details,
    )


def endings_from_proto(
    message: replication_pb2.EndedEntries, incarnation: Incarnation | None = None
) -> list[Ended]:
    """Entries that ended; of `incarnation`, if the message does not say whose they are."""
    sequences = message.sequences
    found = [_PLAIN.get(number) for number in message.outcomes]
    if None in found:
        number = message.outcomes[found.index(None)]
        raise InvalidConfig(f"outcome is {number}; expected one of {sorted(_PLAIN)}")
    endings: list[Ending] = found  # type: ignore[assignment]
    whose = message.incarnations if incarnation is None else [incarnation] * len(sequences)
    check_lengths("entries that ended", whose, sequences, endings)
    if message.stalenesses:
        check_lengths("entries that ended", sequences, message.stalenesses)
        for index, staleness in enumerate(message.stalenesses):
            if staleness:
                endings[index] = Ending(endings[index].outcome, None, staleness)
    for detail in message.details:
        plain = at(endings, detail.index, "an entry with details")
        error = errors.error_from_proto(detail.error) if detail.HasField("error") else None
        endings[detail.index] = Ending(plain.outcome, error, plain.staleness, tuple(detail.squares))
    return list(zip(map(Incarnation, whose), sequences, endings, strict=True))


# --- facts


def workers_to_proto(workers: Sequence[WorkerFacts]) -> replication_pb2.WorkersFacts:
    if not workers:
        return replication_pb2.WorkersFacts()
    incarnations, ranks, sealed, done, left, joined, confirmed, final_seals, predecessors = zip(
        *workers, strict=True
    )
    message = replication_pb2.WorkersFacts(
        incarnations=incarnations,
        ranks=ranks,
        sealed_clocks=sealed,
        done_clocks=done,
        confirmed_sequences=confirmed,
    )
    if any(joined):
        message.joined_clocks.extend(joined)
    _add_some(left, message.left, message.left_clocks)
    _add_some(final_seals, message.final_seals, message.final_seal_clocks)
    _add_some(predecessors, message.successors, message.predecessors)
    return message


def _add_some(
    values: Sequence[int | None], indexes: MutableSequence[int], found: MutableSequence[int]
) -> None:
    """Add the items that are not None, with their indexes."""
    for index, value in enumerate(values):
        if value is not None:
            indexes.append(index)
            found.append(value)


def _some(what: str, count: int, indexes: Sequence[int], values: Sequence[int]) -> list[int | None]:
    """The inverse of `_add_some`."""
    found: list[int | None] = [None] * count
    if indexes or values:
        check_lengths(f"workers that {what}", indexes, values)
        for index, value in zip(indexes, values, strict=True):
            at(found, index, f"a worker that {what}")
            found[index] = value
    return found


def workers_from_proto(message: replication_pb2.WorkersFacts) -> tuple[WorkerFacts, ...]:
    count = len(message.incarnations)
    joined = message.joined_clocks or (0,) * count
    left = _some("left", count, message.left, message.left_clocks)
    final_seals = _some("said goodbye", count, message.final_seals, message.final_seal_clocks)
    predecessors = _some("replaced one", count, message.successors, message.predecessors)
    columns = (
        message.incarnations,
        message.ranks,
        message.sealed_clocks,
        message.done_clocks,
        left,
        joined,
        message.confirmed_sequences,
        final_seals,
        predecessors,
    )
    check_lengths("facts of workers", *columns)
    return tuple(map(WorkerFacts._make, zip(*columns, strict=True)))


def facts_to_proto(facts: RangeFacts, records: RecordTable) -> replication_pb2.PartFacts:
    message = replication_pb2.PartFacts(
        clock=facts.clock,
        formed_clock=facts.formed_clock,
        changed_clock=facts.changed_clock,
        newest_join_clock=facts.newest_join_clock,
        update_count=facts.update_count,
        record_count=facts.record_count,
        initialized=facts.initialized,
        settings=_settings_to_proto(facts.settings),
        change_number=facts.change_number,
        promised=facts.prepared,
        hold_point=facts.hold_point,
        minds_reads=facts.minds_reads,
        past_reached_clock=facts.past_reached_clock,
        past_stepped_clock=facts.past_stepped_clock,
        taken=facts.taken[0],
        taken_clock=facts.taken[1],
        is_for_join=facts.is_for_join,
    )
    if facts.unscaled is not None:
        message.unscaled = records.index(facts.unscaled)
    for clock, squares in facts.squares:
        message.squares.add(clock=clock, squares=squares)
    if facts.said is not None:
        clock, scale, rank = facts.said
        message.said.CopyFrom(replication_pb2.SaidScale(clock=clock, scale=scale, rank=rank))
    if facts.failure is not None:
        message.failure.CopyFrom(errors.error_to_proto(facts.failure))
    return message


def facts_from_proto(message: replication_pb2.PartFacts, records: Sequence[Record]) -> RangeFacts:
    said = None
    if message.HasField("said"):
        said = UpdateScale(message.said.clock, message.said.scale, message.said.rank)
    has_unscaled = message.HasField("unscaled")
    return RangeFacts(
        message.clock,
        message.formed_clock,
        message.changed_clock,
        message.newest_join_clock,
        message.update_count,
        message.record_count,
        message.initialized,
        at(records, message.unscaled, "the decision without a scale") if has_unscaled else None,
        tuple([(each.clock, tuple(each.squares)) for each in message.squares]),
        said,
        tuple(map(_setting_from_proto, _serialized_settings(message.settings))),
        message.change_number,
        message.promised,
        message.hold_point if message.HasField("hold_point") else None,
        message.minds_reads,
        _failure(message),
        message.past_reached_clock,
        message.past_stepped_clock,
        (message.taken, message.taken_clock),
        message.is_for_join,
    )


@lru_cache(maxsize=_CACHED_SETTINGS_COUNT)
def _settings_to_proto(
    settings: tuple[tuple[int, Consistency], ...],
) -> list[replication_pb2.SettingFrom]:
    return [
        replication_pb2.SettingFrom(
            after_clock=after_clock, consistency=consistency_to_proto(consistency)
        )
        for after_clock, consistency in settings
    ]


def _serialized_settings(messages: Sequence[replication_pb2.SettingFrom]) -> Iterator[bytes]:
    if not messages:
        raise InvalidConfig("the facts of a table have no setting; expected at least one")
    for message in messages:
        yield message.SerializeToString(deterministic=True)


@lru_cache(maxsize=_CACHED_SETTINGS_COUNT)
def _setting_from_proto(serialized: bytes) -> tuple[int, Consistency]:
    message = replication_pb2.SettingFrom.FromString(serialized)
    return message.after_clock, consistency_from_proto(message.consistency)


def _failure(message: replication_pb2.PartFacts) -> UpdateFailed | None:
    if not message.HasField("failure"):
        return None
    error: PushpullError = errors.error_from_proto(message.failure)
    if not isinstance(error, UpdateFailed):
        raise InvalidConfig(f"a table failed with {error.code}; expected {UpdateFailed.code}")
    return error
