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

What it deliberately does not do: touch payloads (`body` is opaque), know addresses, or wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from ps_core.errors import InvalidConfig, InvariantViolation, PushpullError
from ps_core.keys import NodeId, RangeId, TableId
from ps_core.ledger import Ending, Ledger, Outcome, ReplyKind
from ps_worker.push_entries import (
    BlockPlace,
    Effect,
    Entry,
    EntryKey,
    EntryState,
    Reply,
    SealPart,
    SealTerms,
    SendPush,
    SendSeal,
    SendWithdrawal,
    StepEnded,
    StepRefused,
    ViewNeeded,
    WindowStep,
)

_RETRYABLE = frozenset({"STALE_ASSIGNMENT", "NOT_OWNER", "RECOVERING", "DRAINING", "OVERLOADED"})


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
        self._next_sequence: dict[tuple[TableId, RangeId], int] = {}
        self._seen: dict[tuple[TableId, RangeId], Ledger] = {}
        self._steps: dict[tuple[TableId, int], WindowStep] = {}
        self._open: dict[EntryKey, Entry] = {}
        self._queue: list[tuple[tuple[int, int], int, Entry]] = []
        self._waiting_seals: set[EntryKey] = set()
        self._submitted = 0

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
        entry = self._new_entry(step, at.range_id, clock)
        entry.block, entry.body, entry.byte_count = at.block, body, byte_count
        entry.order = (priority, entry.order[1])
        if previous is not None:
            entry.replaces = previous.key.sequence
            self._give_up(previous, step)
        step.blocks[at.block] = entry
        step.pushes[entry.key] = entry
        step.awaited.add(entry.key)
        self._enqueue(entry)
        return entry.key

    def seal(
        self, table_id: TableId, clock: int, ranges: Iterable[RangeId], terms: SealTerms
    ) -> None:
        """End the step on all `ranges` that hold blocks of the table; `poll` sends the seals in
        time.

        Raises:
            InvalidConfig: the step has been sealed.
        """
        step = self._open_step(table_id, clock)
        step.terms = terms
        places = sorted(ranges)
        carrier = self._carrier(step, places)
        for range_id in places:
            entry = self._new_entry(step, range_id, clock)
            step.seals[entry.key] = entry
            if carrier is not None:
                carrier.inline_seal = entry.key.sequence
        step.seals_released = carrier is not None

    def is_sealed(self, table_id: TableId, clock: int) -> bool:
        """Whether the step has been sealed, or has ended."""
        step = self._steps.get((table_id, clock))
        return step is None or step.terms is not None

    @staticmethod
    def _carrier(step: WindowStep, places: Sequence[RangeId]) -> Entry | None:
        """The push that may carry the seal: the only message of the step, and not sent yet."""
        if len(places) != 1 or len(step.pushes) != 1:
            return None
        (push,) = step.pushes.values()
        return push if push.sent_count == 0 else None

    def _open_step(self, table_id: TableId, clock: int) -> WindowStep:
        step = self._steps.setdefault((table_id, clock), WindowStep(table_id, clock))
        if step.terms is not None:
            raise InvalidConfig(f"step {clock} of table {table_id} has been sealed")
        return step

    def _new_entry(self, step: WindowStep, range_id: RangeId, clock: int) -> Entry:
        """A seal, unless the caller makes it a push."""
        place = (step.table_id, range_id)
        sequence = self._next_sequence.get(place, 1)
        self._next_sequence[place] = sequence + 1
        key = EntryKey(step.table_id, range_id, sequence)
        self._submitted += 1
        entry = Entry(key, clock, None, 0, None, (0, self._submitted))
        self._open[key] = entry
        step.open_count += 1
        return entry

    def _give_up(self, entry: Entry, step: WindowStep) -> None:
        """Another entry replaces this one; its number stays open until the server has ended it."""
        entry.given_up = True
        entry.body = None
        self._leave_flight(entry)
        entry.byte_count = 0
        if entry.state is EntryState.SENT:
            entry.state = EntryState.RECEIVED
        step.awaited.discard(entry.key)
        step.invalid.discard(entry.key)
        step.problems = [p for p in step.problems if p[0] != entry.block]
        step.pushes.pop(entry.key, None)

    # --- what the network does

    def assign(self, owner: Mapping[RangeId, NodeId]) -> None:
        """A view says who serves which range; what was refused for it goes again."""
        self._owner = dict(owner)

    def connected(self, server: NodeId) -> None:
        """A stream to `server` is there."""
        self._connected.add(server)

    def disconnected(self, server: NodeId) -> None:
        """The stream to `server` broke: all that has no outcome there goes again (RECEIVED is
        volatile).
        """
        self._connected.discard(server)
        for place in [place for place in self._blocked if place[0] == server]:
            del self._blocked[place]
        for entry in list(self._open.values()):
            if self._owner.get(entry.key.range_id) == server and entry.state in (
                EntryState.SENT,
                EntryState.RECEIVED,
            ):
                self._requeue(entry)

    def reply(self, server: NodeId, reply: Reply, now_s: float) -> list[Effect]:
        """A server answered. Answers to entries that have ended, or are unknown, change nothing."""
        if reply.kind is ReplyKind.CREDIT:
            self._blocked.pop((server, reply.table_id), None)
            return []
        entry = self._open.get(EntryKey(reply.table_id, reply.range_id, reply.sequence))
        if entry is None:
            return []
        if reply.kind is ReplyKind.RECEIVED:
            self._received(entry)
            return []
        if reply.kind is ReplyKind.COMMITTED:
            return self._committed(entry, reply.ending)
        if reply.kind in (ReplyKind.REFUSED, ReplyKind.GIVEN_BACK):
            delay_s = reply.error.retry_after_ms / 1000 if reply.error else self._resend_after_s
            self._blocked[(server, reply.table_id)] = now_s + delay_s
            self._requeue(entry)
            return []
        return self._failed(server, entry, reply.error, now_s)

    def tick(self, now_s: float) -> None:
        """Time passed: blocked tables whose retry time has come, and unanswered entries, go
        again.
        """
        for place in [place for place, until_s in self._blocked.items() if until_s <= now_s]:
            del self._blocked[place]
        overdue_s = now_s - self._resend_after_s
        for entry in list(self._open.values()):
            if entry.retry_s is not None and entry.retry_s <= now_s:
                entry.retry_s = None
                self._requeue(entry)
            elif entry.state is EntryState.SENT and entry.sent_s <= overdue_s:
                self._requeue(entry)
            elif entry.state is EntryState.RECEIVED and entry.sent_s <= overdue_s:
                self._probe(entry, now_s)

    def _probe(self, entry: Entry, now_s: float) -> None:
        """Held for long: a seal asks again (no payload); a push only once its seal has ended, since
        only then is an answer surely missing.
        """
        step = self._steps[(entry.key.table_id, entry.clock)]
        seals_ended = bool(step.seals) and all(
            s.state is EntryState.ENDED for s in step.seals.values()
        )
        if entry.block is None or seals_ended or entry.given_up:
            self._requeue(entry)
        else:
            entry.sent_s = now_s

    def _received(self, entry: Entry) -> None:
        if entry.state is EntryState.SENT:
            self._leave_flight(entry)
            entry.state = EntryState.RECEIVED
            self._steps[(entry.key.table_id, entry.clock)].awaited.discard(entry.key)
        self._carried(entry)

    def _carried(self, entry: Entry) -> None:
        """The push arrived, and so did the seal that it carried."""
        seal = self._open.get(EntryKey(entry.key.table_id, entry.key.range_id, entry.inline_seal))
        if seal is not None and seal.state is EntryState.QUEUED:
            seal.state = EntryState.RECEIVED
            seal.sent_s = entry.sent_s

    def _committed(self, entry: Entry, ending: Ending | None) -> list[Effect]:
        if ending is None:
            raise InvariantViolation("PW-4", f"{entry.key} is COMMITTED without an outcome")
        step = self._steps[(entry.key.table_id, entry.clock)]
        return self._end(entry, ending, step)

    def _failed(
        self, server: NodeId, entry: Entry, error: PushpullError | None, now_s: float
    ) -> list[Effect]:
        problem = error or PushpullError("the server refused an entry without saying why")
        if problem.code in _RETRYABLE:
            self._requeue(entry)
            entry.retry_s = now_s + max(problem.retry_after_ms, 50) / 1000
            return [ViewNeeded(server)]
        step = self._steps[(entry.key.table_id, entry.clock)]
        if entry.block is None or entry.given_up:
            return self._end(entry, Ending(Outcome.INVALID, problem), step)
        # The refusal consumed no number: it is given up, or the step's seal would wait for it.
        step.problems.append((entry.block, problem))
        step.invalid.add(entry.key)
        step.pushes.pop(entry.key)
        step.awaited.discard(entry.key)
        entry.given_up, entry.body = True, None
        self._requeue(entry)
        entry.byte_count = 0
        return []

    # --- moving entries

    def _enqueue(self, entry: Entry) -> None:
        heapq.heappush(self._queue, (entry.order, id(entry), entry))

    def _requeue(self, entry: Entry) -> None:
        self._leave_flight(entry)
        entry.state = EntryState.QUEUED
        if entry.block is None:
            step = self._steps[(entry.key.table_id, entry.clock)]
            carried = any(push.inline_seal == entry.key.sequence for push in step.pushes.values())
            # A seal that lost its carrier's answer travels alone from now on.
            if not carried or all(p.state is EntryState.ENDED for p in step.pushes.values()):
                self._waiting_seals.add(entry.key)
        else:
            if not entry.given_up:
                self._steps[(entry.key.table_id, entry.clock)].awaited.add(entry.key)
            self._enqueue(entry)

    def _leave_flight(self, entry: Entry) -> None:
        if entry.state is EntryState.SENT:
            self._in_flight_bytes -= entry.byte_count

    def _end(self, entry: Entry, ending: Ending, step: WindowStep) -> list[Effect]:
        self._leave_flight(entry)
        entry.state = EntryState.ENDED
        entry.body = None
        del self._open[entry.key]
        self._carried(entry)
        self._waiting_seals.discard(entry.key)
        seen = self._ledger(entry.key)
        seen.end(entry.key.sequence, ending)
        seen.confirm(seen.low_water)  # nobody asks this side again: only the mark is kept
        step.open_count -= 1
        step.awaited.discard(entry.key)
        step.staleness = max(step.staleness, ending.staleness)
        refused: list[Effect] = []
        if ending.outcome is Outcome.INVALID and not entry.given_up:
            problem = ending.error or PushpullError("refused without saying why")
            step.problems.append((entry.block, problem))
            step.invalid.add(entry.key)
            if entry.block is None:
                refused.append(StepRefused(step.table_id, step.clock, problem))
        if ending.outcome is Outcome.SKIPPED:
            step.skipped = True
        if step.terms is None or step.open_count:
            return refused
        del self._steps[(step.table_id, step.clock)]
        skipped = step.skipped or step.terms.skip or bool(step.invalid)
        ended = StepEnded(
            step.table_id, step.clock, not skipped, tuple(step.problems), step.staleness
        )
        return [*refused, ended]

    def _ledger(self, key: EntryKey) -> Ledger:
        return self._seen.setdefault((key.table_id, key.range_id), Ledger())

    # --- what to send

    def poll(self, now_s: float) -> list[Effect]:
        """What may be sent now, in order of priority; each entry counts as sent when it is
        returned.
        """
        effects: list[Effect] = list(self._poll_pushes(now_s))
        effects += self._poll_seals(now_s)
        return effects

    def _poll_pushes(self, now_s: float) -> list[SendPush | SendWithdrawal]:
        found: list[SendPush | SendWithdrawal] = []
        held_back = []
        while self._queue:
            item = heapq.heappop(self._queue)
            entry = item[2]
            if entry.state is not EntryState.QUEUED:
                continue  # ended, or queued twice and sent by the other item
            server = self._owner.get(entry.key.range_id)
            if (
                server is None
                or server not in self._connected
                or entry.retry_s is not None
                or (server, entry.key.table_id) in self._blocked
            ):
                held_back.append(item)
                continue
            if self._in_flight_bytes and (
                self._in_flight_bytes + entry.byte_count > self._window_bytes
            ):
                held_back.append(item)
                break
            entry.state = EntryState.SENT
            entry.sent_s = now_s
            entry.sent_count += 1
            self._in_flight_bytes += entry.byte_count
            if entry.given_up:
                found.append(SendWithdrawal(server, entry.key))
            else:
                found.append(self._send_push(server, entry))
        for item in held_back:
            heapq.heappush(self._queue, item)
        return found

    def _send_push(self, server: NodeId, entry: Entry) -> SendPush:
        step = self._steps[(entry.key.table_id, entry.clock)]
        inline = None
        if entry.inline_seal and step.terms is not None:
            inline = (entry.inline_seal, step.terms)
        return SendPush(
            server,
            entry.key,
            entry.clock,
            entry.pushed_block,
            entry.replaces,
            self._ledger(entry.key).low_water,
            entry.body,
            inline,
        )

    def _poll_seals(self, now_s: float) -> list[SendSeal]:
        for step in self._steps.values():
            if step.terms is not None and not step.seals_released and not step.awaited:  # PW-3
                step.seals_released = True
                if step.invalid:
                    step.skipped = True
                self._waiting_seals.update(step.seals)
        grouped: dict[tuple[NodeId, TableId, int], list[Entry]] = {}
        for key in sorted(self._waiting_seals, key=lambda k: (k.table_id, k.range_id, k.sequence)):
            entry = self._open[key]
            server = self._owner.get(key.range_id)
            if server in self._connected and entry.retry_s is None and server is not None:
                grouped.setdefault((server, key.table_id, entry.clock), []).append(entry)
        return [
            self._send_seal(server, entries, now_s) for (server, _, _), entries in grouped.items()
        ]

    def _send_seal(self, server: NodeId, entries: list[Entry], now_s: float) -> SendSeal:
        first = entries[0]
        step = self._steps[(first.key.table_id, first.clock)]
        terms = step.sealed_with
        if step.skipped and not terms.skip:
            terms = SealTerms(terms.hyperparameters, terms.contribution_scale, True, terms.last)
        for entry in entries:
            entry.state = EntryState.SENT
            entry.sent_s = now_s
            self._waiting_seals.discard(entry.key)
        parts = tuple(
            SealPart(e.key.range_id, e.key.sequence, self._ledger(e.key).low_water) for e in entries
        )
        return SendSeal(server, first.key.table_id, first.clock, parts, terms)

    # --- what it is waiting for

    @property
    def in_flight_bytes(self) -> int:
        """Payload bytes sent and not yet answered (PW-2)."""
        return self._in_flight_bytes

    def open_entries(self) -> tuple[tuple[EntryKey, EntryState], ...]:
        """Every entry without an outcome, for error messages and tests."""
        return tuple((entry.key, entry.state) for entry in self._open.values())
