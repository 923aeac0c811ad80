"""The push window: what a worker sends, sends again, and holds back (SEMANTICS S2-S4).

A pure machine. `submit` and `seal` number the entries of a step; `poll` says what to send now;
replies, connections and ticks come in as events. Everything that an entry needs to be sent again is
kept until its outcome has come, so a resend carries identical bytes.

    queued --poll--> sent --RECEIVED--> received --COMMITTED--> ended
       ^               |                   |
       +--- REFUSED ---+---- GIVEN_BACK ---+      (and: the connection broke, or no answer in time)

Rules:
    - Payload bytes sent and not yet answered stay within `window_bytes`; one entry may always go.
    - After REFUSED or GIVEN_BACK nothing of that (server, table) is sent before CREDIT or the
      retry time.
    - The seals of a step leave when each of its pushes is received or invalid on every server; all
      of them with skip if one push is invalid.

Invariants:
    PW-1  Sequences of a (range, table) are given out from 1 without gap.
    PW-2  in_flight_bytes is the sum over entries in state SENT.
    PW-3  A seal is never sent before every push of its step was received or ended.
    PW-4  COMMITTED carries an outcome.
    PW-5  Only a push has a block.
    PW-6  Only a sealed step has terms.

What is made for every block is a named tuple: that costs a third of a frozen dataclass, and its
hash a fifth.

What it deliberately does not do: touch payloads (`body` is opaque), know addresses, or wait.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from ps_core.errors import EditRefused, InvalidConfig, InvariantViolation, PushpullError
from ps_core.keys import NodeId, RangeId, TableId
from ps_core.ledger import Ending, Outcome, ReplyKind
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


_RETRYABLE = frozenset({"STALE_ASSIGNMENT", "NOT_OWNER", "RECOVERING", "DRAINING", "OVERLOADED"})


# To find a member through its class costs Python 3.11 ten times as much as a name of the module
# does, and every block needs a score of them.
_QUEUED, _SENT, _RECEIVED, _ENDED = EntryState
_SAYS_RECEIVED, _SAYS_COMMITTED = ReplyKind.RECEIVED, ReplyKind.COMMITTED
_SAYS_CREDIT, _APPLIED = ReplyKind.CREDIT, Outcome.APPLIED

_Queued = tuple[int, int, Entry]
"""Priority, number, entry. Two of one entry compare as equal, so entries need no order."""


class PushWindow:
    """All pushes and seals of one worker, over all tables and servers."""

    def __init__(self, window_bytes: int, resend_after_s: float = 10.0) -> None:
        """Args:
            window_bytes: payload bytes in flight, over all servers; above 0.
            resend_after_s: an entry without an answer for that long is sent again.

        Raises:
            InvalidConfig: `window_bytes` is not above 0.
        """
        if window_bytes <= 0:
            raise InvalidConfig(f"window_bytes is {window_bytes}; expected more than 0")
        self._window_bytes = window_bytes
        self._resend_after_s = resend_after_s
        self._in_flight_bytes = 0
        self._owner: dict[RangeId, NodeId] = {}
        self._connected: set[NodeId] = set()
        self._blocked: dict[tuple[NodeId, TableId], float] = {}
        self._numberings: dict[tuple[TableId, RangeId], Numbering] = {}
        self._steps: dict[tuple[TableId, int], WindowStep] = {}
        self._queue: list[_Queued] = []
        self._held_back: list[_Queued] = []
        self._waiting_seals: set[Entry] = set()
        self._submitted_count = 0
        self._due_s = -math.inf

    # --- what the training loop does

    def submit(
        self, at: BlockPlace, clock: int, body: object, *, byte_count: int, priority: int = 0
    ) -> EntryKey:
        """Queue a push of a block; a second push of it in the same step replaces the first.

        Lower `priority` goes first. `body` is kept until the entry has ended.

        Raises:
            InvalidConfig: the step has been sealed.
        """
        step = self._open_step(at.table_id, clock)
        previous = step.blocks.get(at.block)
        if previous is not None and previous.sent_count == 0:
            previous.body, previous.byte_count = body, byte_count
            return previous.key
        entry = self._new_entry(step, at.range_id)
        entry.block, entry.body, entry.byte_count = at.block, body, byte_count
        entry.priority = priority
        if previous is not None:
            entry.replaces = previous.key.sequence
            self._give_up(previous)
        step.blocks[at.block] = entry
        step.awaited.add(entry)
        self._enqueue(entry)
        return entry.key

    def withdraw(self, table_id: TableId, clock: int, *, but: Collection[int]) -> None:
        """Of the step, which is open, nothing takes part but these blocks."""
        step = self._open_step(table_id, clock)
        for block in [block for block in step.blocks if block not in but]:
            entry = step.blocks.pop(block)
            self._give_up(entry)
            if entry.state is not _ENDED:
                self._requeue(entry)

    def seal(
        self, table_id: TableId, clock: int, ranges: Iterable[RangeId], terms: SealTerms
    ) -> None:
        """End the step on all `ranges` that hold blocks of the table; `poll` sends the seals in
        time. The scale of its update is a step of its own, of seals alone.

        Raises:
            InvalidConfig: the step has been sealed.
        """
        step = self._open_step(table_id, clock)
        step.terms = terms
        places = sorted(ranges)
        carrier = self._carrier(step, places)
        for range_id in places:
            entry = self._new_entry(step, range_id)
            step.seals.append(entry)
            if carrier is not None:
                carrier.carried, entry.carrier = entry, carrier
        step.seals_released = carrier is not None

    @staticmethod
    def _carrier(step: WindowStep, places: Sequence[RangeId]) -> Entry | None:
        """The push that may carry the seal: the step's only message, not sent yet."""
        if len(places) != 1 or len(step.blocks) != 1:
            return None
        (push,) = step.blocks.values()
        return push if push.sent_count == 0 else None

    def _open_step(self, table_id: TableId, clock: int) -> WindowStep:
        step = self._steps.get((table_id, clock))
        if step is None:
            step = self._steps[(table_id, clock)] = WindowStep(table_id, clock)
        if step.terms is not None:
            raise InvalidConfig(f"step {clock} of table {table_id} has been sealed")
        return step

    def _new_entry(self, step: WindowStep, range_id: RangeId) -> Entry:
        """A seal, unless the caller makes it a push."""
        place = (step.table_id, range_id)
        numbering = self._numberings.get(place)
        if numbering is None:
            numbering = self._numberings[place] = Numbering()
        sequence = numbering.number()
        self._submitted_count += 1
        key = EntryKey(step.table_id, range_id, sequence)
        entry = numbering.open[sequence] = Entry(key, step, self._submitted_count)
        step.open_count += 1
        return entry

    def _give_up(self, entry: Entry) -> None:
        """Another entry replaces this one; its number stays open until the server has ended it."""
        entry.given_up = True
        entry.body = None
        self._leave_flight(entry)
        entry.byte_count = 0
        if entry.state is _SENT:
            entry.state = _RECEIVED
        step = entry.step
        step.awaited.discard(entry)
        step.invalid.discard(entry)
        step.problems = [p for p in step.problems if p[0] != entry.block]

    # --- what the network does

    def assign(self, owner: Mapping[RangeId, NodeId]) -> None:
        """A view says who serves which range: what was refused, or is elsewhere, goes again."""
        before, self._owner = self._owner, dict(owner)
        moved = {r for r, server in self._owner.items() if before.get(r, server) != server}
        for entry in list(self._open()) if moved else ():
            if entry.key.range_id in moved and entry.state in (_SENT, _RECEIVED):
                self._requeue(entry)
        self._let_go()

    def connected(self, server: NodeId) -> None:
        """A stream to `server` is there."""
        self._connected.add(server)
        self._let_go()

    def disconnected(self, server: NodeId) -> None:
        """The stream to `server` broke: all that has no outcome there goes again (RECEIVED is
        volatile).
        """
        self._connected.discard(server)
        for place in [place for place in self._blocked if place[0] == server]:
            del self._blocked[place]
        for entry in list(self._open()):
            is_there = self._owner.get(entry.key.range_id) == server
            if is_there and entry.state in (_SENT, _RECEIVED):
                self._requeue(entry)

    def reply(self, server: NodeId, reply: Reply, now_s: float) -> list[Effect]:
        """A server answered. To an entry that is queued again, or has another owner by now, nothing
        but an outcome counts; to one that has ended, or is unknown, nothing.
        """
        kind = reply.kind
        if kind is _SAYS_CREDIT:
            self._blocked.pop((server, reply.table_id), None)
            self._let_go()
            return []
        numbering = self._numberings.get((reply.table_id, reply.range_id))
        entry = numbering.open.get(reply.sequence) if numbering is not None else None
        if entry is None:
            return []
        if kind is _SAYS_COMMITTED:
            if reply.ending is None:
                raise InvariantViolation("PW-4", f"{entry.key} is COMMITTED without an outcome")
            return self._end(entry, reply.ending)
        if entry.state is _QUEUED or self._owner.get(reply.range_id) != server:
            return []
        if kind is _SAYS_RECEIVED:
            self._received(entry)
            return []
        if kind in (ReplyKind.REFUSED, ReplyKind.GIVEN_BACK):
            delay_s = reply.error.retry_after_ms / 1000 if reply.error else self._resend_after_s
            self._blocked[(server, reply.table_id)] = now_s + delay_s
            self._requeue(entry)
            return []
        return self._failed(server, entry, reply.error, now_s)

    def tick(self, now_s: float) -> None:
        """Time passed: blocked tables whose time has come, and unanswered entries, go again."""
        for place in [place for place, until_s in self._blocked.items() if until_s <= now_s]:
            del self._blocked[place]
            self._let_go()
        if now_s < self._due_s:
            return
        overdue_s = now_s - self._resend_after_s
        self._due_s = now_s + self._resend_after_s
        for entry in list(self._open()):
            if entry.retry_s is not None and entry.retry_s <= now_s:
                entry.retry_s = None
                self._requeue(entry)
                self._let_go()
            elif entry.state is _SENT and entry.sent_s <= overdue_s:
                self._requeue(entry)
            elif entry.state is _RECEIVED and entry.sent_s <= overdue_s:
                self._probe(entry, now_s)
            self._due_s = min(self._due_s, self._entry_due_s(entry))

    def _entry_due_s(self, entry: Entry) -> float:
        if entry.retry_s is not None:
            return entry.retry_s
        if entry.state is _QUEUED:  # not before it has been sent
            return math.inf
        return entry.sent_s + self._resend_after_s

    def _open(self) -> Iterator[Entry]:
        """Every entry without an outcome."""
        for numbering in self._numberings.values():
            yield from numbering.open.values()

    def _probe(self, entry: Entry, now_s: float) -> None:
        """Held for long: a seal asks again, a push once its seal has ended: an answer is lost."""
        seals = entry.step.seals
        seals_ended = bool(seals) and all(s.state is _ENDED for s in seals)
        if entry.block is None or seals_ended or entry.given_up:
            self._requeue(entry)
        else:
            entry.sent_s = now_s

    def _received(self, entry: Entry) -> None:
        if entry.state is _SENT:
            self._in_flight_bytes -= entry.byte_count
            entry.state = _RECEIVED
            entry.step.awaited.discard(entry)
        if entry.carried is not None:
            self._arrived_with(entry, entry.carried)

    @staticmethod
    def _arrived_with(push: Entry, seal: Entry) -> None:
        """The push arrived, and so did the seal that it carried."""
        if seal.state is _QUEUED:
            seal.state = _RECEIVED
            seal.sent_s = push.sent_s

    def _failed(
        self, server: NodeId, entry: Entry, error: PushpullError | None, now_s: float
    ) -> list[Effect]:
        problem = error or PushpullError("the server refused an entry without saying why")
        if problem.code in _RETRYABLE:
            self._requeue(entry)
            entry.retry_s = now_s + max(problem.retry_after_ms, 50) / 1000
            self._due_s = min(self._due_s, entry.retry_s)
            return [ViewNeeded(server)]
        if entry.block is None or entry.given_up:
            return self._end(entry, Ending(Outcome.INVALID, problem))
        # The refusal consumed no number: it is given up, or the step's seal would wait for it.
        entry.step.problems.append((entry.block, problem))
        entry.step.invalid.add(entry)
        entry.step.awaited.discard(entry)
        entry.given_up, entry.body = True, None
        self._requeue(entry)
        entry.byte_count = 0
        return []

    # --- moving entries

    def _enqueue(self, entry: Entry) -> None:
        heapq.heappush(self._queue, (entry.priority, entry.number, entry))

    def _let_go(self) -> None:
        """What was held back may go now, or be held back again."""
        for item in self._held_back:
            heapq.heappush(self._queue, item)
        self._held_back.clear()

    def _requeue(self, entry: Entry) -> None:
        self._leave_flight(entry)
        entry.state = _QUEUED
        if entry.block is None:
            # A seal that lost its carrier's answer travels alone from now on.
            if not entry.travels_along:
                self._waiting_seals.add(entry)
        else:
            if not entry.given_up:
                entry.step.awaited.add(entry)
            self._enqueue(entry)

    def _leave_flight(self, entry: Entry) -> None:
        if entry.state is _SENT:
            self._in_flight_bytes -= entry.byte_count

    def _end(self, entry: Entry, ending: Ending) -> list[Effect]:
        self._leave_flight(entry)
        entry.state = _ENDED
        entry.body = None
        key, step = entry.key, entry.step
        if entry.carried is not None:
            self._arrived_with(entry, entry.carried)
        self._waiting_seals.discard(entry)
        self._numberings[(key.table_id, key.range_id)].end(key.sequence)
        step.open_count -= 1
        step.awaited.discard(entry)
        refused: list[Effect] = []
        if ending.staleness > step.staleness:
            step.staleness = ending.staleness
        if ending.squares:
            step.squares[key.range_id] = ending.squares
        if ending.outcome is not _APPLIED:
            refused = self._ended_otherwise(entry, ending)
        if step.terms is None or step.open_count:
            return refused
        return [*refused, self._end_step(step, step.terms)]

    @staticmethod
    def _ended_otherwise(entry: Entry, ending: Ending) -> list[Effect]:
        """The entry is not in the parameters."""
        step = entry.step
        if ending.outcome is Outcome.SKIPPED:
            step.skipped = True
        elif ending.outcome is Outcome.DISCARDED:
            step.discarded = True
        elif ending.outcome is Outcome.REJECTED and entry.block is not None:
            step.rejected.append(entry.block)
        if ending.outcome is not Outcome.INVALID or entry.given_up:
            return []
        problem = ending.error or PushpullError("refused without saying why")
        step.problems.append((entry.block, problem))
        step.invalid.add(entry)
        if entry.block is not None or isinstance(problem, EditRefused):  # that ends the clock
            return []
        return [StepRefused(step.table_id, step.clock, problem)]

    def _end_step(self, step: WindowStep, terms: SealTerms) -> StepEnded:
        del self._steps[(step.table_id, step.clock)]
        step.forget_entries()
        skipped = step.skipped or terms.skip or bool(step.invalid)
        return StepEnded(
            step.table_id,
            step.clock,
            not skipped,
            tuple(step.problems),
            step.staleness,
            tuple(sorted(step.rejected)),
            step.discarded,
            tuple(step.squares.items()),
        )

    # --- what to send

    def poll(self, now_s: float) -> list[Effect]:
        """What may be sent now, in order of priority; each entry counts as sent when it is
        returned.
        """
        effects: list[Effect] = []
        if self._queue:
            self._poll_pushes(now_s, effects)
        for step in self._steps.values():
            if step.terms is not None and not step.seals_released and not step.awaited:  # PW-3
                step.seals_released = True
                step.skipped = step.skipped or bool(step.invalid)
                self._waiting_seals.update(step.seals)
        if self._waiting_seals:
            self._poll_seals(now_s, effects)
        return effects

    def _poll_pushes(self, now_s: float, effects: list[Effect]) -> None:
        queue = self._queue
        while queue:
            entry = queue[0][2]
            if entry.state is not _QUEUED:
                heapq.heappop(queue)  # ended, or queued twice and sent by the other item
                continue
            server = self._owner.get(entry.key.range_id)
            if (
                server is None
                or server not in self._connected
                or entry.retry_s is not None
                or (server, entry.key.table_id) in self._blocked
            ):
                self._held_back.append(heapq.heappop(queue))
                continue
            in_flight_bytes = self._in_flight_bytes + entry.byte_count
            if in_flight_bytes > self._window_bytes and self._in_flight_bytes:
                return
            heapq.heappop(queue)
            entry.state = _SENT
            entry.sent_s = now_s
            entry.sent_count += 1
            self._in_flight_bytes = in_flight_bytes
            if entry.given_up:
                effects.append(SendWithdrawal(server, entry.key))
            else:
                effects.append(self._send_push(server, entry))

    def _send_push(self, server: NodeId, entry: Entry) -> SendPush:
        inline = None
        if entry.carried is not None:
            inline = (entry.carried.key.sequence, entry.step.sealed_with)
        return SendPush(
            server,
            entry.key,
            entry.step.clock,
            entry.pushed_block,
            entry.replaces,
            self._confirmed(entry.key),
            entry.body,
            inline,
        )

    def _poll_seals(self, now_s: float, effects: list[Effect]) -> None:
        grouped: dict[tuple[NodeId, TableId, int], list[Entry]] = {}
        for entry in sorted(self._waiting_seals, key=lambda seal: seal.key):
            key = entry.key
            server = self._owner.get(key.range_id)
            if server in self._connected and entry.retry_s is None and server is not None:
                grouped.setdefault((server, key.table_id, entry.step.clock), []).append(entry)
        for (server, _, _), entries in grouped.items():
            effects.append(self._send_seal(server, entries, now_s))

    def _send_seal(self, server: NodeId, entries: list[Entry], now_s: float) -> SendSeal:
        step = entries[0].step
        terms = step.sealed_with
        # A seal that travelled with its push was not held until that was answered.
        is_skipped = step.skipped or (entries[0].carrier is not None and bool(step.invalid))
        if is_skipped and not terms.skip:
            terms = replace(terms, skip=True, edit=b"", array="")
        for entry in entries:
            entry.state = _SENT
            entry.sent_s = now_s
            self._waiting_seals.discard(entry)
        parts = tuple(
            SealPart(e.key.range_id, e.key.sequence, self._confirmed(e.key)) for e in entries
        )
        return SendSeal(server, step.table_id, step.clock, parts, terms)

    def _confirmed(self, key: EntryKey) -> int:
        """Up to where the outcomes of the key's place have been seen, without gap."""
        return self._numberings[(key.table_id, key.range_id)].low_water

    # --- what it is waiting for

    @property
    def in_flight_bytes(self) -> int:
        """Payload bytes sent and not yet answered (PW-2)."""
        return self._in_flight_bytes

    def open_entries(self) -> tuple[tuple[EntryKey, EntryState], ...]:
        """Every entry without an outcome, for error messages and tests."""
        return tuple((entry.key, entry.state) for entry in self._open())
