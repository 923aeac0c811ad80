"""The ledger: ended sequences of one (range, table, incarnation), and their outcomes.

It makes a retry safe: a sequence ends once, and a resend gets the original answer.

Rules:
    - Sequences start at 1 and have no gap once everything has arrived.
    - An outcome that was not sent yet may be overturned, when a decided update cannot be computed.
    - An outcome is stored until the sender has confirmed it, or it lies MAX_LEDGER_GAP_COUNT below
      the low-water mark: a sender that never confirms costs no more, and one that waits for an
      older outcome is out of its own reach anyway.
    - Ended sequences are stored one by one, because "highest sequence seen" would lose a parked
      push at 5 beside an applied one at 6.

Invariants:
    LED-1  A sequence ends at most once.
    LED-2  low_water is the largest number such that every sequence up to it has ended.
    LED-3  Sequences whose endings are kept are at most MAX_LEDGER_GAP_COUNT away from low_water.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from ps_core.errors import InvalidConfig, InvalidKeys, InvariantViolation, PushpullError
from ps_core.limits import MAX_LEDGER_GAP_COUNT


class Outcome(Enum):
    """Outcome of a sequence."""

    APPLIED = "applied"
    INVALID = "invalid"
    REPLACED = "replaced"
    WITHDRAWN = "withdrawn"
    SKIPPED = "skipped"
    REJECTED = "rejected"
    DISCARDED = "discarded"

    __hash__ = object.__hash__  # members are single: Enum's own hash costs a Python call


class ReplyKind(Enum):
    """A server's reply to an entry (`pushpull.v1.ReplyKind`)."""

    RECEIVED = "received"
    COMMITTED = "committed"
    REFUSED = "refused"
    GIVEN_BACK = "given_back"
    CREDIT = "credit"
    ERROR = "error"

    __hash__ = object.__hash__  # as Outcome's


@dataclass(frozen=True, slots=True)
class Ending:
    """An outcome, with the rest of its reply. `squares` has, for each block of the range, the sum
    of the squares of the reduced gradient.
    """

    outcome: Outcome
    error: PushpullError | None = None
    staleness: int = 0
    squares: tuple[float, ...] = ()


class Ledger:
    """Endings of one sequence space: all have ended up to `low_water`, and the sender has seen the
    outcomes up to `confirmed`.
    """

    __slots__ = ("_endings", "confirmed", "low_water")

    def __init__(self) -> None:
        self.low_water = 0
        self.confirmed = 0
        self._endings: dict[int, Ending] = {}

    def copy(self) -> Ledger:
        twin = Ledger()
        twin.low_water, twin.confirmed = self.low_water, self.confirmed
        twin._endings = dict(self._endings)
        return twin

    @classmethod
    def of(cls, low_water: int, confirmed: int, kept: Mapping[int, Ending]) -> Ledger:
        """The ledger of another server; InvalidConfig if no ledger has these outcomes."""
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
        twin.low_water, twin.confirmed, twin._endings = low_water, confirmed, dict(kept)
        return twin

    @property
    def kept(self) -> Mapping[int, Ending]:
        """Outcomes for a resend, by sequence."""
        return MappingProxyType(self._endings)

    def has_ended(self, sequence: int) -> bool:
        """True if `sequence` has ended; 0 and below are no sequences."""
        return 0 < sequence <= self.low_water or sequence in self._endings

    def ending(self, sequence: int) -> Ending:
        """The ending of `sequence`; InvalidKeys if confirmed, or MAX_LEDGER_GAP_COUNT below."""
        found = self._endings.get(sequence)
        if found is None:
            raise InvalidKeys(
                f"sequence {sequence} was sent again; outcomes up to {self.confirmed} are "
                f"forgotten: they were confirmed as seen, or lie over {MAX_LEDGER_GAP_COUNT} back"
            )
        return found

    def outcome(self, sequence: int) -> Outcome | None:
        """The outcome of `sequence`, or None if it has not ended or was dropped."""
        found = self._endings.get(sequence)
        return None if found is None else found.outcome

    def end(self, sequence: int, ending: Ending) -> None:
        """Record the ending of `sequence` (LED-1)."""
        self.end_all((sequence,), ending)

    def end_all(self, sequences: Iterable[int], ending: Ending) -> None:
        """`end` for each sequence."""
        endings, low_water = self._endings, self.low_water
        for sequence in sequences:
            if 0 < sequence <= low_water or sequence in endings:
                raise InvariantViolation("LED-1", f"sequence {sequence} ends twice")
            endings[sequence] = ending
            while low_water + 1 in endings:
                low_water += 1
        self.low_water = low_water
        if low_water - MAX_LEDGER_GAP_COUNT > self.confirmed:
            self.confirm(low_water - MAX_LEDGER_GAP_COUNT)

    def overturn(self, sequence: int, ending: Ending) -> None:
        """Replace an outcome that was not sent yet; no effect on one that the sender confirmed."""
        if sequence in self._endings:
            self._endings[sequence] = ending

    def confirm(self, sequence: int) -> None:
        """Drop endings up to `sequence`, as far as they have ended; going back has no effect."""
        if sequence <= self.confirmed:
            return
        upto = min(sequence, self.low_water)
        for seen in range(self.confirmed + 1, upto + 1):
            del self._endings[seen]
        self.confirmed = max(self.confirmed, upto)

    def check_in_reach(self, sequence: int) -> None:
        """Raise InvalidKeys for a sequence below 1, or too far above the low-water mark (LED-3)."""
        if not 1 <= sequence <= self.low_water + MAX_LEDGER_GAP_COUNT:
            raise InvalidKeys(
                f"sequence is {sequence}; expected 1 to {self.low_water + MAX_LEDGER_GAP_COUNT}"
            )
