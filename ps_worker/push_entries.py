"""What goes through a push window: entries on their way, and what is said about them.

Values and records only; `push_window` has the rules.

Invariants:
    PW-5  Only a push has a block.
    PW-6  Only a sealed step has terms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ps_core.errors import InvariantViolation, PushpullError
from ps_core.keys import NodeId, RangeId, TableId
from ps_core.ledger import Ending, ReplyKind
from ps_core.tables import Hyperparameters


class EntryState(Enum):
    """Where an entry is on its way."""

    QUEUED = "queued"
    SENT = "sent"
    RECEIVED = "received"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class EntryKey:
    """The name of an entry: its number in the sequence of (table, range)."""

    table_id: TableId
    range_id: RangeId
    sequence: int


class BlockPlace(NamedTuple):
    """Where a block lives."""

    table_id: TableId
    range_id: RangeId
    block: int


@dataclass(frozen=True, slots=True)
class SealTerms:
    """What a seal says, beside its place."""

    hyperparameters: Hyperparameters = ()
    contribution_scale: float = 1.0
    skip: bool = False
    last: bool = False


@dataclass(slots=True, eq=False)
class Entry:
    """A push (`block` says of what) or a seal (`block` is None) without an outcome.

    `body` is kept for a resend; `order` is (priority, submission); `inline_seal` is the sequence of
    the seal that travels with this push; `given_up`: replaced, so a resend is a withdrawal.
    """

    key: EntryKey
    clock: int
    block: int | None
    byte_count: int
    body: object
    order: tuple[int, int]
    replaces: int = 0
    state: EntryState = EntryState.QUEUED
    sent_s: float = 0.0
    sent_count: int = 0
    retry_s: float | None = None
    inline_seal: int = 0
    given_up: bool = False

    @property
    def pushed_block(self) -> int:
        """The block of a push."""
        if self.block is None:
            raise InvariantViolation("PW-5", f"{self.key} is a seal; a push was meant")
        return self.block


@dataclass(slots=True, eq=False)
class WindowStep:
    """One step of one table until all its entries have ended.

    `awaited` are its pushes that were neither received nor ended: no seal leaves before they are.
    """

    table_id: TableId
    clock: int
    pushes: dict[EntryKey, Entry] = field(default_factory=dict)
    blocks: dict[int, Entry] = field(default_factory=dict)
    awaited: set[EntryKey] = field(default_factory=set)
    seals: dict[EntryKey, Entry] = field(default_factory=dict)
    terms: SealTerms | None = None
    seals_released: bool = False
    open_count: int = 0
    problems: list[tuple[int | None, PushpullError]] = field(default_factory=list)
    invalid: set[EntryKey] = field(default_factory=set)
    skipped: bool = False
    staleness: int = 0

    @property
    def sealed_with(self) -> SealTerms:
        """The terms of a step that was sealed."""
        if self.terms is None:
            raise InvariantViolation("PW-6", f"clock {self.clock} is not sealed")
        return self.terms


@dataclass(frozen=True, slots=True)
class SendPush:
    """Send this push to `server` now."""

    server: NodeId
    key: EntryKey
    clock: int
    block: int
    replaces: int
    confirmed_sequence: int
    body: object
    inline_seal: tuple[int, SealTerms] | None


@dataclass(frozen=True, slots=True)
class SendWithdrawal:
    """Tell `server` that this number is given up."""

    server: NodeId
    key: EntryKey


@dataclass(frozen=True, slots=True)
class SealPart:
    """One range's place in a seal."""

    range_id: RangeId
    sequence: int
    confirmed_sequence: int


@dataclass(frozen=True, slots=True)
class SendSeal:
    """Send one seal for these ranges to `server` now."""

    server: NodeId
    table_id: TableId
    clock: int
    parts: tuple[SealPart, ...]
    terms: SealTerms


@dataclass(frozen=True, slots=True)
class StepEnded:
    """Every entry of the step has its outcome; nothing of it will be sent again.

    `problems` holds (block, error) for every entry that was refused for good; block is None for
    seals.
    """

    table_id: TableId
    clock: int
    applied: bool
    problems: tuple[tuple[int | None, PushpullError], ...]
    staleness: int


@dataclass(frozen=True, slots=True)
class StepRefused:
    """A range refused the step's seal for good: the step cannot end there."""

    table_id: TableId
    clock: int
    error: PushpullError


@dataclass(frozen=True, slots=True)
class ViewNeeded:
    """A server said that the assignment is another: a newer view is needed."""

    server: NodeId


Effect = SendPush | SendSeal | SendWithdrawal | StepEnded | StepRefused | ViewNeeded


@dataclass(frozen=True, slots=True)
class Reply:
    """A server's word about one entry (`ending` with COMMITTED, `error` with the refusals)."""

    kind: ReplyKind
    table_id: TableId
    range_id: RangeId
    sequence: int
    ending: Ending | None = None
    error: PushpullError | None = None
