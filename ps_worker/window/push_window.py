"""The push window: sends a worker's entries, sends them again, and bounds them (SEMANTICS S2-S4).

A pure machine. `submit` and `seal` number the entries of a step; `poll` gives the entries to send
now; replies, connections and ticks come in as events. An entry is kept until its outcome has come,
so a resend carries identical bytes.

    queued --poll--> sent --RECEIVED--> received --COMMITTED--> ended
       ^               |                   |
       +--- REFUSED ---+---- GIVEN_BACK ---+      (and: the connection broke, or no answer in time)

Rules:
    - Payload bytes sent to a server and not answered stay within `window_bytes`; one entry may
      always be sent. A server that is slow or paused holds up no push to another.
    - An entry whose answer is late is sent again; a slow stream makes none late (`SentMessages`).
    - After REFUSED or GIVEN_BACK, that (server, table) waits for CREDIT or the retry time.
    - The seals of a step are sent when each of its pushes is received or invalid on every server;
      all of them with skip if one push is invalid. Steps of several tables that are sealed
      together do so as one.

Invariants:
    PW-1  Sequence numbers of a (range, table) begin at 1 and have no gap.
    PW-2  The bytes in flight to a server are the sum over entries in state SENT that it was sent.
    PW-3  A seal is never sent before every push of its step was received or ended, and of those
          that are sealed together with it.
    PW-4  COMMITTED carries an outcome.
    PW-5  Only a push has a block.
    PW-6  Only a sealed step has terms.

Values that are made for every block are named tuples: one costs a third of a frozen dataclass, and
its hash a fifth. The window does not touch payloads: `body` is opaque.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from ps_core.errors import EditRefused, Fenced, InvalidConfig, InvariantViolation, PushpullError
from ps_core.keys import NodeId, RangeId, TableId
from ps_core.ledger import Ending, Outcome, ReplyKind
from ps_core.tables.optimizers import Hyperparameters
from ps_worker.window.sent_messages import SentMessages


class EntryState(Enum):
    """The state of an entry; see the diagram above."""

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
    """The table and the range of a block."""

    table_id: TableId
    range_id: RangeId
    block: int


class StepTerms(NamedTuple):
    """The terms of a step's seals, alike on all ranges.

    Attributes:
        clip_scale: the factor of the worker's own gradient, which is clipped.
        update_scale: the factor of an update that waits for it: the entries are no seals.
        edit: the name of the step's edit; empty: it is none.
        array: the array of optimizer state that the edit replaces; empty: the values.
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
class PushEntry:
    """A push of a block, or a seal (`block` is None), without an outcome.

    Attributes:
        carried: the seal that travels with this push.
        carrier: the push that this seal travels with.
        given_up: replaced or refused, so a resend is a withdrawal.
        server: to which it was sent last.
        messages: its messages on this stream, oldest first, by their numbers (`SentMessages`).
        answer_count: the number of these that were answered; a stream is first in, first out.
        was_received: a server has received it, perhaps one that is gone.
    """

    key: EntryKey
    step: WindowStep
    number: int
    block: int | None = None
    byte_count: int = 0
    body: object = None
    replaces: int = 0
    state: EntryState = EntryState.QUEUED
    server: NodeId | None = None
    sent_s: float = 0.0
    sent_count: int = 0
    messages: tuple[int, ...] = ()
    answer_count: int = 0
    retry_s: float | None = None
    carried: PushEntry | None = None
    carrier: PushEntry | None = None
    given_up: bool = False
    was_received: bool = False

    @property
    def pushed_block(self) -> int:
        if self.block is None:
            raise InvariantViolation("PW-5", f"{self.key} is a seal; a push was meant")
        return self.block

    @property
    def travels_along(self) -> bool:
        """True for a seal that its carrier will bring, now or by a resend. A carrier that was
        received, with its seal, is not sent again before the seal has ended.
        """
        push = self.carrier
        if push is None or push.given_up:
            return False
        return push.state in (EntryState.QUEUED, EntryState.SENT)


class SequenceNumbers:
    """The sequence numbers of one (table, range), from 1 without gap, and their open entries."""

    __slots__ = ("_last", "low_water", "open")

    def __init__(self) -> None:
        self._last = 0
        self.low_water = 0  # the highest number up to which all have ended
        self.open: dict[int, PushEntry] = {}

    def next(self) -> int:
        self._last += 1
        return self._last

    def end(self, sequence: int) -> None:
        del self.open[sequence]
        while self.low_water < self._last and self.low_water + 1 not in self.open:
            self.low_water += 1


@dataclass(slots=True, eq=False)
class WindowStep:
    """A step of a table until all its entries end.

    Attributes:
        awaited: pushes neither received nor ended.
        together: the steps that are sealed as one, this one among them; empty: it is alone.
    """

    table_id: TableId
    clock: int
    blocks: dict[int, PushEntry] = field(default_factory=dict)  # the newest push of each
    awaited: set[PushEntry] = field(default_factory=set)
    seals: list[PushEntry] = field(default_factory=list)
    terms: StepTerms | None = None
    seals_released: bool = False
    open_count: int = 0
    problems: list[tuple[int | None, PushpullError]] = field(default_factory=list)
    invalid: set[PushEntry] = field(default_factory=set)
    skipped: bool = False
    staleness: int = 0
    rejected: list[int] = field(default_factory=list)
    discarded: bool = False
    discarded_blocks: set[int] = field(default_factory=set)
    squares: dict[RangeId, tuple[float, ...]] = field(default_factory=dict)
    together: Sequence[WindowStep] = ()

    @property
    def may_be_sealed(self) -> bool:
        """True if it is sealed, and every push of it has been received or refused."""
        return self.terms is not None and not self.awaited

    @property
    def sealed_with(self) -> StepTerms:
        if self.terms is None:
            raise InvariantViolation("PW-6", f"clock {self.clock} is not sealed")
        return self.terms

    def forget_entries(self) -> None:
        """Break the reference cycles of an ended step, so that no collector has to."""
        for entry in (*self.blocks.values(), *self.seals):
            entry.carried = entry.carrier = None
        self.blocks.clear()
        self.seals.clear()
        self.together = ()


class SendPush(NamedTuple):
    """Send a push to `server` now."""

    server: NodeId
    key: EntryKey
    clock: int
    block: int
    replaces: int
    confirmed_sequence: int
    body: Any  # as it was submitted
    inline_seal: tuple[int, StepTerms] | None
    was_received: bool


class SendWithdrawal(NamedTuple):
    """Tell `server` that an entry is given up."""

    server: NodeId
    key: EntryKey


class SealRange(NamedTuple):
    """One range of a seal."""

    range_id: RangeId
    sequence: int
    confirmed_sequence: int


class SendSeal(NamedTuple):
    """Send one seal for these ranges to `server` now."""

    server: NodeId
    table_id: TableId
    clock: int
    ranges: tuple[SealRange, ...]
    terms: StepTerms


class StepEnded(NamedTuple):
    """Every entry of the step has its outcome.

    Attributes:
        problems: (block, error) of every entry that was refused for good; block is None for seals.
        rejected: the blocks that were too stale.
        discarded: some range was updated without the step.
        discarded_blocks: the step's blocks in such ranges.
        squares: of ranges whose updates wait for their scale: the sums of squares.
    """

    table_id: TableId
    clock: int
    applied: bool
    problems: tuple[tuple[int | None, PushpullError], ...]
    staleness: int
    rejected: tuple[int, ...] = ()
    discarded: bool = False
    discarded_blocks: tuple[int, ...] = ()
    squares: tuple[tuple[RangeId, tuple[float, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class StepRefused:
    """A range refused the step's seal for good, so the step cannot end there."""

    table_id: TableId
    clock: int
    error: PushpullError


Effect = SendPush | SendSeal | SendWithdrawal | StepEnded | StepRefused


class Reply(NamedTuple):
    """A server's reply to one entry; COMMITTED has `ending`, a refusal `error`."""

    kind: ReplyKind
    table_id: TableId
    range_id: RangeId
    sequence: int
    ending: Ending | None = None
    error: PushpullError | None = None


_RETRYABLE = frozenset({"STALE_ASSIGNMENT", "NOT_OWNER", "RECOVERING", "DRAINING", "OVERLOADED"})


# In Python 3.11 a member looked up through its class costs ten times as much as a module's name,
# and every block needs twenty.
_QUEUED, _SENT, _RECEIVED, _ENDED = EntryState
_SAYS_RECEIVED, _SAYS_COMMITTED = ReplyKind.RECEIVED, ReplyKind.COMMITTED
_SAYS_CREDIT, _APPLIED = ReplyKind.CREDIT, Outcome.APPLIED
_SAID_LATER = (_SAYS_COMMITTED, ReplyKind.GIVEN_BACK)  # once more, to a message that was answered

POLLED_COUNT = 256
"""Entries of a server that one `poll` sends: building their messages takes some milliseconds."""

_NONE_UNWRITTEN: Mapping[NodeId, int] = {}

_Queued = tuple[int, PushEntry]
"""Number, entry. Numbers differ between entries, so entries are never compared."""


class PushWindow:
    """All pushes and seals of one worker, over all tables and servers, with at most `window_bytes`
    of payload in flight to each server. An answer is late after `resend_after_s`.
    """

    def __init__(self, window_bytes: int, resend_after_s: float = 10.0) -> None:
        if window_bytes <= 0:
            raise InvalidConfig(f"window_bytes is {window_bytes}; expected more than 0")
        self._window_bytes = window_bytes
        self._resend_after_s = resend_after_s
        self._in_flight_bytes: dict[NodeId, int] = defaultdict(int)  # PW-2
        self._owner: dict[RangeId, NodeId] = {}
        self._connected: set[NodeId] = set()
        self._blocked: dict[tuple[NodeId, TableId], float] = {}
        self._messages: dict[NodeId, SentMessages] = defaultdict(
            partial(SentMessages, resend_after_s)
        )
        self._numbers: dict[tuple[TableId, RangeId], SequenceNumbers] = defaultdict(SequenceNumbers)
        self._steps: dict[tuple[TableId, int], WindowStep] = {}
        # The heads of some wait for their server. Without an owner, an entry has None's.
        self._queues: dict[NodeId | None, list[_Queued]] = defaultdict(list)
        self._held_back: list[_Queued] = []
        self._waiting_seals: set[PushEntry] = set()
        self._submitted_count = 0
        self._due_s = -math.inf

    @property
    def has_steps(self) -> bool:
        """True if a step has not ended; else there is nothing to send."""
        return bool(self._steps)

    @property
    def in_flight_bytes(self) -> int:
        """To all servers together. Any thread."""
        return sum(list(self._in_flight_bytes.values()))

    # --- events of the training loop

    def submit(self, at: BlockPlace, clock: int, body: object, *, byte_count: int) -> EntryKey:
        """Queue a push of a block, which replaces the step's earlier one."""
        step = self._open_step(at.table_id, clock)
        previous = step.blocks.get(at.block)
        if previous is not None and previous.sent_count == 0:
            previous.body, previous.byte_count = body, byte_count
            return previous.key
        entry = self._new_entry(step, at.range_id)
        entry.block, entry.body, entry.byte_count = at.block, body, byte_count
        if previous is not None:
            entry.replaces = previous.key.sequence
            self._give_up(previous)
        step.blocks[at.block] = entry
        step.awaited.add(entry)
        self._enqueue(entry)
        return entry.key

    def withdraw(self, table_id: TableId, clock: int, *, but: Collection[int]) -> None:
        """Withdraw all blocks of an open step except `but`."""
        step = self._open_step(table_id, clock)
        for block in [block for block in step.blocks if block not in but]:
            entry = step.blocks.pop(block)
            self._give_up(entry)
            if entry.state is not _ENDED:
                self._requeue(entry)

    def seal(
        self, table_id: TableId, clock: int, ranges: Iterable[RangeId], terms: StepTerms
    ) -> None:
        """End the step on all `ranges` of the table; `poll` sends the seals in time. The scale of
        an update is a step of its own, of seals alone.
        """
        step = self._open_step(table_id, clock)
        step.terms = terms
        range_ids = sorted(ranges)
        carrier = self._carrier(step, range_ids)
        for range_id in range_ids:
            entry = self._new_entry(step, range_id)
            step.seals.append(entry)
            if carrier is not None:
                carrier.carried, entry.carrier = entry, carrier
        step.seals_released = carrier is not None

    def together(self, steps: Iterable[tuple[TableId, int]]) -> None:
        """Have steps of several tables, each open, sealed as one: none takes part in an update if a
        push of one is invalid.
        """
        opened = tuple(self._open_step(table_id, clock) for table_id, clock in steps)
        for step in opened:
            step.together = opened

    @staticmethod
    def _carrier(step: WindowStep, range_ids: Sequence[RangeId]) -> PushEntry | None:
        """The push that may carry the seal: the step's only message, not sent yet."""
        if len(range_ids) != 1 or len(step.blocks) != 1 or step.together:
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

    def _new_entry(self, step: WindowStep, range_id: RangeId) -> PushEntry:
        """A seal, unless the caller makes it a push."""
        numbers = self._numbers[step.table_id, range_id]
        sequence = numbers.next()
        self._submitted_count += 1
        key = EntryKey(step.table_id, range_id, sequence)
        entry = numbers.open[sequence] = PushEntry(key, step, self._submitted_count)
        step.open_count += 1
        return entry

    def _give_up(self, entry: PushEntry) -> None:
        """Give up an entry that another replaces; it stays open until the server has ended it."""
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

    # --- events of the network

    def assign(self, owner: Mapping[RangeId, NodeId]) -> None:
        """Take the primaries of a view; what was sent to a range that has moved is sent again, to
        nobody while it has none.
        """
        before, self._owner = self._owner, dict(owner)
        moved = {r for r in before.keys() | owner.keys() if before.get(r) != owner.get(r)}
        for entry in list(self._open()) if moved else ():
            if entry.key.range_id in moved:
                entry.messages, entry.answer_count = (), 0
                if entry.state in (_SENT, _RECEIVED):
                    self._requeue(entry)
        if moved:
            queued, self._queues = self._queues, defaultdict(list)
            self._held_back += itertools.chain.from_iterable(queued.values())
        self._let_go()

    def connected(self, server: NodeId) -> None:
        self._connected.add(server)
        self._let_go()

    def disconnected(self, server: NodeId) -> int:
        """The stream broke: its entries without an outcome are sent again; RECEIVED is volatile.
        Returns their number.
        """
        self._connected.discard(server)
        for place in [place for place in self._blocked if place[0] == server]:
            del self._blocked[place]
        lost: list[PushEntry] = []
        for entry in self._open():
            if entry.server == server:
                entry.messages, entry.answer_count = (), 0
            if self._owner.get(entry.key.range_id) == server and entry.state in (_SENT, _RECEIVED):
                lost.append(entry)
        for entry in lost:
            self._requeue(entry)
        return len(lost)

    def reply(self, server: NodeId, reply: Reply, now_s: float) -> list[Effect]:
        """Take a server's reply. For an entry that is queued again, or whose range has moved, only
        an outcome counts; for an entry that has ended, or is unknown, no reply does.
        """
        kind = reply.kind
        if kind is _SAYS_CREDIT:
            self._blocked.pop((server, reply.table_id), None)
            self._let_go()
            return []
        numbers = self._numbers.get((reply.table_id, reply.range_id))
        entry = numbers.open.get(reply.sequence) if numbers is not None else None
        if entry is None:
            return []
        count, sent = entry.answer_count, entry.messages
        if entry.server == server and count < len(sent) and not (count and kind in _SAID_LATER):
            entry.answer_count = count + 1
            messages = self._messages[server]
            if sent[count] > messages.answered:
                messages.answered = sent[count]
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
        return self._failed(entry, reply.error, now_s)

    def tick(self, now_s: float, unwritten: Mapping[NodeId, int] = _NONE_UNWRITTEN) -> None:
        """Take the time, and how many of the newest messages to a server its stream has not taken
        yet.
        """
        for server, messages in self._messages.items():
            messages.look(now_s, unwritten.get(server, 0))
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
                if entry.server is None or self._messages[entry.server].is_late(entry.messages):
                    self._requeue(entry)
            elif entry.state is _RECEIVED and entry.sent_s <= overdue_s:
                self._probe(entry, now_s)
            self._due_s = min(self._due_s, self._entry_due_s(entry, now_s))

    def _entry_due_s(self, entry: PushEntry, now_s: float) -> float:
        if entry.retry_s is not None:
            return entry.retry_s
        if entry.state is _QUEUED:  # not before it has been sent
            return math.inf
        # All entries are looked at, so not for each of many that were sent one after the other.
        return max(entry.sent_s, now_s - 0.9 * self._resend_after_s) + self._resend_after_s

    def _open(self) -> Iterator[PushEntry]:
        for numbers in self._numbers.values():
            yield from numbers.open.values()

    def _probe(self, entry: PushEntry, now_s: float) -> None:
        """Ask again, of an entry that was received long ago, for a seal, and for a push whose seals
        have ended, because its answer is lost.
        """
        seals = entry.step.seals
        seals_ended = bool(seals) and all(s.state is _ENDED for s in seals)
        if entry.block is None or seals_ended or entry.given_up:
            self._requeue(entry)
        else:
            entry.sent_s = now_s

    def _received(self, entry: PushEntry) -> None:
        self._leave_flight(entry)
        entry.was_received = True
        if entry.state is _SENT:
            entry.state = _RECEIVED
            entry.step.awaited.discard(entry)
        self._carried_arrived(entry)

    @staticmethod
    def _carried_arrived(push: PushEntry) -> None:
        """The push was received, and so was the seal that it carried."""
        seal = push.carried
        if seal is not None and seal.state is _QUEUED:
            seal.state = _RECEIVED
            seal.sent_s = push.sent_s

    def _failed(self, entry: PushEntry, error: PushpullError | None, now_s: float) -> list[Effect]:
        problem = error or PushpullError("the server refused an entry without saying why")
        if problem.code in _RETRYABLE:
            self._requeue(entry)
            entry.retry_s = now_s + max(problem.retry_after_ms, 50) / 1000
            self._due_s = min(self._due_s, entry.retry_s)
            return []
        if entry.block is None or entry.given_up:
            return self._end(entry, Ending(Outcome.INVALID, problem))
        # The server did not count the refused entry: withdraw it, or its seal would wait for it.
        entry.step.problems.append((entry.block, problem))
        entry.step.invalid.add(entry)
        entry.step.awaited.discard(entry)
        entry.given_up, entry.body = True, None
        self._requeue(entry)
        entry.byte_count = 0
        return []

    # --- moving entries

    def _enqueue(self, entry: PushEntry) -> None:
        queue = self._queues[self._owner.get(entry.key.range_id)]
        heapq.heappush(queue, (entry.number, entry))

    def _let_go(self) -> None:
        """Queue again what was held back; `poll` may hold it back once more."""
        for _, entry in self._held_back:
            self._enqueue(entry)
        self._held_back.clear()

    def _requeue(self, entry: PushEntry) -> None:
        self._leave_flight(entry)
        entry.state = _QUEUED
        if entry.block is None:
            # A seal whose carrier does not bring it again travels alone from now on.
            if not entry.travels_along:
                self._waiting_seals.add(entry)
        else:
            if not entry.given_up:
                entry.step.awaited.add(entry)
            self._enqueue(entry)

    def _leave_flight(self, entry: PushEntry) -> None:
        if entry.state is _SENT and entry.server is not None:
            self._in_flight_bytes[entry.server] -= entry.byte_count

    def _end(self, entry: PushEntry, ending: Ending) -> list[Effect]:
        self._leave_flight(entry)
        entry.state = _ENDED
        entry.body = None
        key, step = entry.key, entry.step
        self._carried_arrived(entry)
        self._waiting_seals.discard(entry)
        self._numbers[(key.table_id, key.range_id)].end(key.sequence)
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
    def _ended_otherwise(entry: PushEntry, ending: Ending) -> list[Effect]:
        step = entry.step
        if ending.outcome is Outcome.SKIPPED:
            step.skipped = True
        elif ending.outcome is Outcome.DISCARDED:
            step.discarded = True
            if entry.block is not None:
                step.discarded_blocks.add(entry.block)
        elif ending.outcome is Outcome.REJECTED and entry.block is not None:
            step.rejected.append(entry.block)
        elif ending.outcome is Outcome.WITHDRAWN and entry.block is None:
            words = (
                f"clock {step.clock} of table {step.table_id} did not take effect in range "
                f"{entry.key.range_id}: this worker's membership had ended. Register again as a "
                "new worker"
            )
            ending = Ending(Outcome.INVALID, Fenced(words))
        if ending.outcome is not Outcome.INVALID or entry.given_up:
            return []
        problem = ending.error or PushpullError("refused without saying why")
        step.problems.append((entry.block, problem))
        step.invalid.add(entry)
        if entry.block is not None or isinstance(problem, EditRefused):  # a refused edit ends too
            return []
        return [StepRefused(step.table_id, step.clock, problem)]

    def _end_step(self, step: WindowStep, terms: StepTerms) -> StepEnded:
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
            tuple(sorted(step.discarded_blocks)),
            tuple(step.squares.items()),
        )

    # --- effects

    def poll(self, now_s: float) -> list[Effect]:
        """Send entries that may be sent now, oldest first, at most POLLED_COUNT to each server, and
        count them as sent. Another call sends more, if there were so many.
        """
        effects: list[Effect] = []
        for server, queue in self._queues.items():
            if queue and server is not None and server in self._connected:
                self._poll_pushes(server, queue, now_s, effects)
        for step in self._steps.values():
            if not step.seals_released and step.may_be_sealed:
                self._release(step.together or (step,))
        if self._waiting_seals:
            self._poll_seals(now_s, effects)
        return effects

    def _release(self, steps: Sequence[WindowStep]) -> None:
        """Let the seals of steps go that are sealed together, if those of all may (PW-3)."""
        if not all(step.may_be_sealed for step in steps):
            return
        is_invalid = any(step.invalid for step in steps)
        for step in steps:
            step.seals_released = True
            step.skipped = step.skipped or is_invalid
            self._waiting_seals.update(step.seals)

    def _poll_pushes(
        self, server: NodeId, queue: list[_Queued], now_s: float, effects: list[Effect]
    ) -> None:
        messages = self._messages[server]
        enough = len(effects) + POLLED_COUNT
        while queue and len(effects) < enough:
            entry = queue[0][1]
            if entry.state is not _QUEUED:
                heapq.heappop(queue)  # ended, or queued twice and sent already
                continue
            if entry.retry_s is not None or (server, entry.key.table_id) in self._blocked:
                self._held_back.append(heapq.heappop(queue))
                continue
            before_bytes = self._in_flight_bytes[server]
            in_flight_bytes = before_bytes + entry.byte_count
            if in_flight_bytes > self._window_bytes and before_bytes:
                return
            heapq.heappop(queue)
            entry.state = _SENT
            entry.server = server
            entry.sent_s = now_s
            entry.sent_count += 1
            messages.count += 1
            entry.messages += (messages.count,)
            self._in_flight_bytes[server] = in_flight_bytes
            if entry.given_up:
                effects.append(SendWithdrawal(server, entry.key))
            else:
                effects.append(self._send_push(server, entry))

    def _send_push(self, server: NodeId, entry: PushEntry) -> SendPush:
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
            entry.was_received,
        )

    def _poll_seals(self, now_s: float, effects: list[Effect]) -> None:
        grouped: dict[tuple[NodeId, TableId, int], list[PushEntry]] = {}
        for entry in sorted(self._waiting_seals, key=lambda seal: seal.key):
            key = entry.key
            server = self._owner.get(key.range_id)
            if server in self._connected and entry.retry_s is None and server is not None:
                grouped.setdefault((server, key.table_id, entry.step.clock), []).append(entry)
        for (server, _, _), entries in grouped.items():
            effects.append(self._send_seal(server, entries, now_s))

    def _send_seal(self, server: NodeId, entries: list[PushEntry], now_s: float) -> SendSeal:
        step = entries[0].step
        terms = step.sealed_with
        # A seal that travelled with its push did not wait for the push's answer.
        is_skipped = step.skipped or (entries[0].carrier is not None and bool(step.invalid))
        if is_skipped and not terms.skip:
            terms = terms._replace(skip=True, edit=b"", array="")
        messages = self._messages[server]
        messages.count += 1
        for entry in entries:
            entry.state = _SENT
            entry.sent_s = now_s
            entry.server = server
            entry.messages += (messages.count,)
            self._waiting_seals.discard(entry)
        ranges = tuple(
            SealRange(e.key.range_id, e.key.sequence, self._confirmed(e.key)) for e in entries
        )
        return SendSeal(server, step.table_id, step.clock, ranges, terms)

    def _confirmed(self, key: EntryKey) -> int:
        return self._numbers[(key.table_id, key.range_id)].low_water

    def open_entries(self) -> tuple[tuple[EntryKey, EntryState], ...]:
        return tuple((entry.key, entry.state) for entry in self._open())
