"""What goes through a push window: entries on their way, and what is said about them.

Values and records only; `push_window` has the rules. What is made for every block is a named tuple:
that costs a third of a frozen dataclass, and its hash a fifth.

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


class EntryKey(NamedTuple):
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
    """What a seal says, beside its place. `clip_scale`: what the worker's own gradient needs where
    it is clipped; `update_scale`: this is no seal, but what follows one that asked for it; `edit`:
    names the edit that the step is; empty: it is none; `array`: what it is of, as in the protocol.
    """

    hyperparameters: Hyperparameters = ()
    contribution_scale: float = 1.0
    skip: bool = False
    last: bool = False
    clip_scale: float | None = None
    update_scale: float | None = None
    edit: bytes = b""
    array: str = ""


@dataclass(slots=True, eq=False)
class Entry:
    """A push (`block` says of what) or a seal (`block` is None) without an outcome.

    `number` counts all entries of the window; `body` is kept for a resend; `carried` is the seal
    that travels with this push, and `carrier` the push that this seal travels with; `given_up`:
    replaced or refused, so a resend is a withdrawal.
    """

    key: EntryKey
    step: WindowStep
    number: int
    block: int | None = None
    byte_count: int = 0
    body: object = None
    replaces: int = 0
    priority: int = 0
    state: EntryState = EntryState.QUEUED
    sent_s: float = 0.0
    sent_count: int = 0
    retry_s: float | None = None
    carried: Entry | None = None
    carrier: Entry | None = None
    given_up: bool = False

    @property
    def pushed_block(self) -> int:
        """The block of a push."""
        if self.block is None:
            raise InvariantViolation("PW-5", f"{self.key} is a seal; a push was meant")
        return self.block

    @property
    def travels_along(self) -> bool:
        """A seal: whether its carrier will bring it, now or by a resend. One that was received, and
        with it the seal, is not sent again before the seal has ended.
        """
        push = self.carrier
        if push is None or push.given_up:
            return False
        return push.state in (EntryState.QUEUED, EntryState.SENT)


class Numbering:
    """The numbers of one (table, range): given out from 1 without gap, open until they end."""

    __slots__ = ("_given", "_low_water", "open")

    def __init__(self) -> None:
        self._given = 0
        self._low_water = 0
        self.open: dict[int, Entry] = {}

    @property
    def low_water(self) -> int:
        """Every number up to it has ended."""
        return self._low_water

    def number(self) -> int:
        """The next number; its entry goes into `open` at once."""
        self._given += 1
        return self._given

    def end(self, number: int) -> None:
        """The number has its outcome."""
        del self.open[number]
        while self._low_water < self._given and self._low_water + 1 not in self.open:
            self._low_water += 1


@dataclass(slots=True, eq=False)
class WindowStep:
    """One step of one table until all its entries have ended.

    `blocks` has the newest push of each block. `awaited` are its pushes that were neither received
    nor ended: no seal leaves before they are.
    """

    table_id: TableId
    clock: int
    blocks: dict[int, Entry] = field(default_factory=dict)
    awaited: set[Entry] = field(default_factory=set)
    seals: list[Entry] = field(default_factory=list)
    terms: SealTerms | None = None
    seals_released: bool = False
    open_count: int = 0
    problems: list[tuple[int | None, PushpullError]] = field(default_factory=list)
    invalid: set[Entry] = field(default_factory=set)
    skipped: bool = False
    staleness: int = 0
    rejected: list[int] = field(default_factory=list)
    discarded: bool = False
    squares: dict[RangeId, tuple[float, ...]] = field(default_factory=dict)

    @property
    def sealed_with(self) -> SealTerms:
        """The terms of a step that was sealed."""
        if self.terms is None:
            raise InvariantViolation("PW-6", f"clock {self.clock} is not sealed")
        return self.terms

    def forget_entries(self) -> None:
        """All have ended: entries that point to a step that points to them would be kept until
        Python's collector comes by.
        """
        for entry in (*self.blocks.values(), *self.seals):
            entry.carried = entry.carrier = None
        self.blocks.clear()
        self.seals.clear()


class SendPush(NamedTuple):
    """Send this push to `server` now."""

    server: NodeId
    key: EntryKey
    clock: int
    block: int
    replaces: int
    confirmed_sequence: int
    body: object
    inline_seal: tuple[int, SealTerms] | None


class SendWithdrawal(NamedTuple):
    """Tell `server` that this number is given up."""

    server: NodeId
    key: EntryKey


class SealPart(NamedTuple):
    """One range's place in a seal."""

    range_id: RangeId
    sequence: int
    confirmed_sequence: int


class SendSeal(NamedTuple):
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
    seals. `rejected` are the blocks that were too stale; `discarded`: an update of some range has
    formed without the step. `squares`: what ranges told whose updates wait for their scale.
    """

    table_id: TableId
    clock: int
    applied: bool
    problems: tuple[tuple[int | None, PushpullError], ...]
    staleness: int
    rejected: tuple[int, ...] = ()
    discarded: bool = False
    squares: tuple[tuple[RangeId, tuple[float, ...]], ...] = ()


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


class Reply(NamedTuple):
    """A server's word about one entry (`ending` with COMMITTED, `error` with the refusals)."""

    kind: ReplyKind
    table_id: TableId
    range_id: RangeId
    sequence: int
    ending: Ending | None = None
    error: PushpullError | None = None
