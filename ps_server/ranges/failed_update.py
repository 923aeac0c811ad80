"""Effects that remain when an update could not be computed.

A machine decides first; the effects are carried out afterwards, and only then does a custom update
raise. By that time entries have ended as APPLIED, pulls have been released, and perhaps later
updates were formed. None of that has left the server, so all of it can still be changed.

Rules:
    - Effects before the update stay. Later ones of its table, in any range, are dropped: sums,
      updates, values for readers.
    - The entries of a lost update end as INVALID, with the reason.
    - Other tables lose nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ps_core.errors import UpdateFailed
from ps_core.keys import TableId
from ps_core.ledger import Ending, Outcome
from ps_server.ranges.events import (
    AnswerPull,
    Apply,
    Assign,
    Drop,
    Effect,
    Record,
    Reduce,
    RefusePull,
    ReplyTo,
)


def lost_records(record: Record, rest: Sequence[Effect]) -> list[Record]:
    """The lost updates: that of `record`, and those of its table in `rest`."""
    later = [effect.record for effect in rest if isinstance(effect, Apply | Assign)]
    return [record, *(each for each in later if each.table_id == record.table_id)]


def instead(
    rest: Sequence[Effect], lost: Sequence[Record], error: UpdateFailed
) -> Iterator[Effect]:
    """The effects to carry out in place of `rest`, in its order."""
    table_id = lost[0].table_id
    entries = {
        (record.range_id, contributor.incarnation, sequence)
        for record in lost
        for contributor in record.contributors
        for sequence in contributor.sequences
    }
    ending = Ending(Outcome.INVALID, error)
    for effect in rest:
        if _table_of(effect) != table_id:
            yield effect
        elif isinstance(effect, ReplyTo):
            entry = effect.range_id, effect.sender.incarnation, effect.sequence
            is_lost = effect.ending is not None and entry in entries
            yield effect._replace(ending=ending) if is_lost else effect
        elif isinstance(effect, AnswerPull):
            yield RefusePull(effect.waiter, table_id, effect.range_id, error)
        elif isinstance(effect, RefusePull):
            yield effect


def _table_of(effect: Effect) -> TableId:
    if isinstance(effect, Apply | Assign | Reduce | Drop):
        return effect.record.table_id
    return effect.table_id
