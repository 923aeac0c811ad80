"""The ledger: which sequences of one (range, table, incarnation) have ended, and how.

It is what makes a retry safe: a sequence ends once, and a resend gets the original answer.

Rules:
    - Sequences start at 1 and have no gap once everything has arrived.
    - An outcome that nobody was told yet may be overturned: an update that was decided could not be
      computed, so what took part in it is not in the parameters.
    - An outcome is kept until the sender has confirmed seeing it, or until it lies
      MAX_LEDGER_GAP_COUNT below the low-water mark: a sender that never confirms costs so much and
      no more, and one that waits for an older outcome is beyond its own reach anyway.

Invariants:
    LED-1  A sequence ends at most once.
    LED-2  low_water is the largest number such that every sequence up to it has ended.
    LED-3  Sequences whose endings are kept are at most MAX_LEDGER_GAP_COUNT away from low_water.

What it deliberately does not do: hold payloads or entries that have not ended ("highest sequence
seen" is not enough: a parked push at 5 beside an applied one at 6 would be lost).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from ps_core.errors import InvalidConfig, InvalidKeys, InvariantViolation, PushpullError
from ps_core.limits import MAX_LEDGER_GAP_COUNT


class Outcome(Enum):
    """How a sequence ended."""

    APPLIED = "applied"
    INVALID = "invalid"
    REPLACED = "replaced"
    WITHDRAWN = "withdrawn"
    SKIPPED = "skipped"
    REJECTED = "rejected"
    DISCARDED = "discarded"

    __hash__ = object.__hash__  # members are single: Enum's own hash costs a Python call


class ReplyKind(Enum):
    """What a server says about an entry (`pushpull.v1.ReplyKind`)."""

    RECEIVED = "received"
    COMMITTED = "committed"
    REFUSED = "refused"
    GIVEN_BACK = "given_back"
    CREDIT = "credit"
    ERROR = "error"

    __hash__ = object.__hash__  # as Outcome's


@dataclass(frozen=True, slots=True)
class Ending:
    """An outcome with what its sender is told beside it. `squares`: of each block of the range, the
    sum of the squares of the reduced gradient.
    """

    outcome: Outcome
    error: PushpullError | None = None
    staleness: int = 0
    squares: tuple[float, ...] = ()


class Ledger:
    """Endings of one sequence space."""

    __slots__ = ("_confirmed", "_endings", "_low_water")

    def __init__(self) -> None:
        self._low_water = 0
        self._confirmed = 0
        self._endings: dict[int, Ending] = {}

    @property
    def low_water(self) -> int:
        """Every sequence up to it has ended."""
        return self._low_water

    @property
    def confirmed(self) -> int:
        """The sender has seen the outcomes of all up to it."""
        return self._confirmed

    def copy(self) -> Ledger:
        """The same, sharing nothing."""
        twin = Ledger()
        twin._low_water, twin._confirmed = self._low_water, self._confirmed
        twin._endings = dict(self._endings)
        return twin

    @classmethod
    def of(cls, low_water: int, confirmed: int, kept: Mapping[int, Ending]) -> Ledger:
        """The ledger that another server has.

        Raises:
            InvalidConfig: there is none that keeps these outcomes, and no others.
        """
        is_whole = all(map(kept.__contains__, range(confirmed + 1, low_water + 1)))
        first, last = min(kept, default=confirmed + 1), max(kept, default=low_water)
        if not (
            0 <= confirmed <= low_water <= confirmed + MAX_LEDGER_GAP_COUNT
            and is_whole
            and low_water + 1 not in kept
            and confirmed < first
            and last <= low_water + MAX_LEDGER_GAP_COUNT
        ):
            raise InvalidConfig(
                f"a ledger has ended up to {low_water}, was confirmed up to {confirmed} and keeps "
                f"{len(kept)} outcomes of {first} to {last}; expected all between the first two, "
                f"none before, and not the next"
            )
        twin = cls()
        twin._low_water, twin._confirmed, twin._endings = low_water, confirmed, dict(kept)
        return twin

    @property
    def kept(self) -> Mapping[int, Ending]:
        """The outcomes that are kept for a resend, by sequence."""
        return MappingProxyType(self._endings)

    def has_ended(self, sequence: int) -> bool:
        """Whether `sequence` has ended; 0 and below are no sequences."""
        return 0 < sequence <= self._low_water or sequence in self._endings

    def ending(self, sequence: int) -> Ending:
        """How `sequence` ended.

        Raises:
            InvalidKeys: its sender confirmed that it saw the outcome, or sent so much since that
                the outcome was forgotten.
        """
        found = self._endings.get(sequence)
        if found is None:
            raise InvalidKeys(
                f"sequence {sequence} was sent again; outcomes up to {self._confirmed} are "
                f"forgotten: they were confirmed as seen, or lie over {MAX_LEDGER_GAP_COUNT} back"
            )
        return found

    def outcome(self, sequence: int) -> Outcome | None:
        """How `sequence` ended, if it has, and that is kept."""
        found = self._endings.get(sequence)
        return None if found is None else found.outcome

    def end(self, sequence: int, ending: Ending) -> None:
        """Record how `sequence` ended (LED-1)."""
        if self.has_ended(sequence):
            raise InvariantViolation("LED-1", f"sequence {sequence} ends twice")
        self._endings[sequence] = ending
        while self._low_water + 1 in self._endings:
            self._low_water += 1
        self.confirm(self._low_water - MAX_LEDGER_GAP_COUNT)

    def end_all(self, sequences: Iterable[int], ending: Ending) -> None:
        """`end` for each of them."""
        endings, low_water = self._endings, self._low_water
        for sequence in sequences:
            if 0 < sequence <= low_water or sequence in endings:
                raise InvariantViolation("LED-1", f"sequence {sequence} ends twice")
            endings[sequence] = ending
            while low_water + 1 in endings:
                low_water += 1
        self._low_water = low_water
        self.confirm(low_water - MAX_LEDGER_GAP_COUNT)

    def overturn(self, sequence: int, ending: Ending) -> None:
        """`sequence` has ended otherwise than was recorded; its sender has not been told how.

        A sender that confirmed it all the same is told nothing.
        """
        if sequence in self._endings:
            self._endings[sequence] = ending

    def confirm(self, sequence: int) -> None:
        """Forget endings up to `sequence`, as far as they have ended; going back does nothing."""
        if sequence <= self._confirmed:
            return
        upto = min(sequence, self._low_water)
        for seen in range(self._confirmed + 1, upto + 1):
            del self._endings[seen]
        self._confirmed = max(self._confirmed, upto)

    def check_in_reach(self, sequence: int) -> None:
        """Refuse a sequence that is not one, or lies too far above what has ended (LED-3).

        Raises:
            InvalidKeys: it does.
        """
        if not 1 <= sequence <= self._low_water + MAX_LEDGER_GAP_COUNT:
            raise InvalidKeys(
                f"sequence is {sequence}; expected 1 to {self._low_water + MAX_LEDGER_GAP_COUNT}"
            )
