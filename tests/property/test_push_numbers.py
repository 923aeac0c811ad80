"""A push window, whatever its servers say: its numbers have no gap, its payload is counted."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ps_core.errors import InvalidTensor, Overloaded, PushpullError
from ps_core.keys import NodeId, RangeId, TableId
from ps_core.ledger import Ending, Outcome, ReplyKind
from ps_worker.window.push_window import (
    BlockPlace,
    EntryKey,
    EntryState,
    PushWindow,
    Reply,
    StepTerms,
)
from tests.examples import examples

TABLE = TableId(1)
SERVERS = (NodeId(1), NodeId(2))
RANGES = (RangeId(0), RangeId(1))
WINDOW_BYTES = 500
WRONG, FULL = InvalidTensor("wrong"), Overloaded("full", retry_after_ms=500)


class Numbers(RuleBasedStateMachine):
    """Pushes and seals of two ranges on two servers, which answer in any order, move and go."""

    @initialize()
    def begin(self) -> None:
        self.window = PushWindow(WINDOW_BYTES, resend_after_s=2.0)
        self.owner = dict(zip(RANGES, SERVERS, strict=True))
        self.window.assign(self.owner)
        for server in SERVERS:
            self.window.connected(server)
        self.now_s, self.clock = 0.0, 1
        self.newest: dict[int, EntryKey] = {}
        self.sizes: dict[EntryKey, int] = {}
        self.given: defaultdict[RangeId, set[int]] = defaultdict(set)

    @rule(block=st.integers(0, 3), byte_count=st.integers(1, 300), waits=st.booleans())
    def push(self, block: int, byte_count: int, waits: bool) -> None:
        at = BlockPlace(TABLE, RANGES[block % 2], block)
        key = self.window.submit(at, self.clock, b"body", byte_count=byte_count)
        before = self.newest.get(block)
        if before is not None:
            self.sizes[before] = 0  # it is given up, or the same
        self.newest[block], self.sizes[key] = key, byte_count
        if not waits:
            self.window.poll(self.now_s)

    @rule(kept=st.sets(st.integers(0, 3)))
    def withdraw(self, kept: set[int]) -> None:
        self.window.withdraw(TABLE, self.clock, but=kept)
        for block in self.newest.keys() - kept:
            self.sizes[self.newest.pop(block)] = 0

    @rule(ranges=st.sampled_from([RANGES, RANGES[:1]]))
    def seal(self, ranges: tuple[RangeId, ...]) -> None:
        self.window.seal(TABLE, self.clock, ranges, StepTerms())
        self.clock += 1
        self.newest.clear()

    @rule()
    def poll(self) -> None:
        self.window.poll(self.now_s)

    @precondition(lambda self: self.sent())
    @rule(choice=st.data(), kind=st.sampled_from(list(ReplyKind)))
    def answer(self, choice: st.DataObject, kind: ReplyKind) -> None:
        self.hear(choice, kind, choice.draw(st.sampled_from(self.sent())), EntryState.SENT)

    @precondition(lambda self: self.window.open_entries())
    @rule(choice=st.data(), kind=st.sampled_from(list(ReplyKind)))
    def answer_late(self, choice: st.DataObject, kind: ReplyKind) -> None:
        self.hear(choice, kind, *choice.draw(st.sampled_from(self.window.open_entries())))

    def hear(
        self, choice: st.DataObject, kind: ReplyKind, key: EntryKey, state: EntryState
    ) -> None:
        ending, error = None, None
        if kind is ReplyKind.COMMITTED:
            ending = Ending(choice.draw(st.sampled_from([Outcome.APPLIED, Outcome.INVALID])))
        elif kind is not ReplyKind.RECEIVED:
            options: list[PushpullError] = [WRONG, FULL] if kind is ReplyKind.ERROR else [FULL]
            error = choice.draw(st.sampled_from(options))
        reply = Reply(kind, *key, ending=ending, error=error)
        self.window.reply(self.owner[key.range_id], reply, self.now_s)
        if kind is ReplyKind.ERROR and error is WRONG and state is not EntryState.QUEUED:
            self.sizes[key] = 0  # its number is left, and to be given up

    @rule(server=st.sampled_from(SERVERS), comes_back=st.booleans())
    def break_off(self, server: NodeId, comes_back: bool) -> None:
        self.window.disconnected(server)
        if comes_back:
            self.window.connected(server)

    @rule(owners=st.permutations(SERVERS), have_one=st.sets(st.sampled_from(RANGES)))
    def move(self, owners: list[NodeId], have_one: set[RangeId]) -> None:
        self.owner = dict(zip(RANGES, owners, strict=True))
        owner = {each: server for each, server in self.owner.items() if each in have_one}
        self.window.assign(owner)
        assert all(key.range_id in have_one for key in self.sent()), "nobody has been sent it"

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.window.tick(self.now_s)

    def sent(self) -> list[EntryKey]:
        return [key for key, state in self.window.open_entries() if state is EntryState.SENT]

    @invariant()
    def numbers_have_no_gap(self) -> None:
        """PW-1."""
        for key, _ in self.window.open_entries():
            self.given[key.range_id].add(key.sequence)
        for numbers in self.given.values():
            assert numbers == set(range(1, len(numbers) + 1))

    @invariant()
    def payload_in_flight_is_that_of_what_is_sent(self) -> None:
        """PW-2."""
        expected = dict.fromkeys(SERVERS, 0)
        for key in self.sent():
            expected[self.owner[key.range_id]] += self.sizes.get(key, 0)
        assert {s: self.window._in_flight_bytes[s] for s in SERVERS} == expected
        assert max(expected.values()) <= WINDOW_BYTES


TestNumbers = Numbers.TestCase
TestNumbers.settings = settings(max_examples=examples(600), stateful_step_count=40, deadline=None)
