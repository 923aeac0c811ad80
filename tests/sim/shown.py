"""What servers decide and show by effects, and of which ranges."""

from __future__ import annotations

from collections.abc import Iterable

from ps_core.keys import RangeId, TableId
from ps_core.ledger import ReplyKind
from ps_server.ranges.events import (
    Accumulate,
    AnswerPull,
    Apply,
    Effect,
    Forget,
    ReplyTo,
    place_of,
)
from ps_server.replication.output_commit import CommittedEffect
from ps_server.values.mutations import Assigned, Put


def places(effects: Iterable[Effect]) -> Iterable[tuple[TableId, RangeId]]:
    """Where something is decided by these effects; credit and receipts decide nothing."""
    for effect in effects:
        is_said_at_once = isinstance(effect, ReplyTo) and effect.ending is None
        if not is_said_at_once and not isinstance(effect, Accumulate | Forget):
            yield place_of(effect)


def shows(effect: CommittedEffect) -> RangeId | None:
    """Of which range somebody sees something by this, if so."""
    match effect:
        case Put(record) | Assigned(record) | Apply(record):
            return record.range_id
        case AnswerPull():
            return effect.range_id
        case ReplyTo(kind=ReplyKind.COMMITTED):
            return effect.range_id
        case _:
            return None
