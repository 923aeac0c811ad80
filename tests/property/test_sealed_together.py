"""Steps of several tables that are sealed together, whatever their servers say: PW-3, and all take
part or none does.
"""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from ps_core.errors import Overloaded, PushpullError, TableFull
from ps_core.keys import NodeId, RangeId, TableId
from ps_core.ledger import Ending, Outcome, ReplyKind
from ps_worker.window.push_window import (
    BlockPlace,
    EntryKey,
    PushWindow,
    Reply,
    SendPush,
    SendSeal,
    SendWithdrawal,
    StepEnded,
    StepTerms,
)
from tests.examples import examples

SERVERS = (NodeId(1), NodeId(2))
RANGES = (RangeId(0), RangeId(1))
TABLES = (TableId(1), TableId(2), TableId(3))
FULL, BUSY = TableFull("full"), Overloaded("busy", retry_after_ms=500)


class Servers:
    """They answer in any order, move and go; what they refuse for good they refuse again."""

    def __init__(self, seed: int, full_share: float) -> None:
        self.draws, self.full_share = Random(seed), full_share
        self.window = PushWindow(500, resend_after_s=2.0)
        self.owner = dict(zip(RANGES, SERVERS, strict=True))
        self.window.assign(self.owner)
        for server in SERVERS:
            self.window.connected(server)
        self.now_s = 0.0
        self.asked: list[EntryKey] = []  # sent, and not answered
        self.withdrawn: set[EntryKey] = set()
        self.received: set[EntryKey] = set()
        self.refused: set[EntryKey] = set()
        self.pushes: set[EntryKey] = set()
        self.skips: list[bool] = []
        self.ended: list[StepEnded] = []

    def poll(self) -> None:
        for effect in self.window.poll(self.now_s):
            if isinstance(effect, SendSeal):
                told = self.received | self.refused
                assert self.pushes <= told, f"PW-3: {self.pushes - told} is not received"
                self.skips.append(effect.terms.skip)
                keys = [EntryKey(effect.table_id, r.range_id, r.sequence) for r in effect.ranges]
            elif isinstance(effect, SendPush):
                assert effect.inline_seal is None
                keys = [effect.key]
            else:
                assert isinstance(effect, SendWithdrawal)
                self.withdrawn.add(effect.key)
                keys = [effect.key]
            self.asked += [key for key in keys if key not in self.asked]

    def answer(self, *, is_last: bool) -> None:
        """Answer one of what was sent."""
        key = self.asked.pop(self.draws.randrange(len(self.asked)))
        kind, ending = ReplyKind.RECEIVED, None
        error: PushpullError | None = None
        is_refused = key in self.refused or self.draws.random() < self.full_share
        if key in self.withdrawn:
            kind, ending = ReplyKind.COMMITTED, Ending(Outcome.WITHDRAWN)
        elif key not in self.pushes:
            kind, ending = ReplyKind.COMMITTED, Ending(Outcome.APPLIED)
        elif key not in self.received and is_refused:
            kind, error = ReplyKind.ERROR, FULL
            self.refused.add(key)
        elif self.draws.random() < 0.3 and not is_last:
            kind, error = ReplyKind.REFUSED, BUSY
        else:
            self.received.add(key)
        reply = Reply(kind, *key, ending=ending, error=error)
        found = self.window.reply(self.owner[key.range_id], reply, self.now_s)
        self.ended += [each for each in found if isinstance(each, StepEnded)]

    def something(self) -> None:
        what = self.draws.random()
        if what < 0.6 and self.asked:
            self.answer(is_last=False)
        elif what < 0.7:
            server = self.draws.choice(SERVERS)
            self.window.disconnected(server)
            self.window.connected(server)
            self.asked = [key for key in self.asked if self.owner[key.range_id] != server]
        elif what < 0.8:
            moved = self.draws.sample(SERVERS, 2)
            self.owner = dict(zip(RANGES, moved, strict=True))
            self.window.assign(self.owner)
        elif what < 0.9:
            self.now_s += 1.0
            self.window.tick(self.now_s)
        if self.draws.random() < 0.7:
            self.poll()

    def end(self) -> None:
        """Answer everything."""
        while self.window.open_entries():
            self.poll()
            if self.asked:
                self.answer(is_last=True)
            else:
                ends = [key for key in self.pushes if key in self.received - self.withdrawn]
                for key in ends:
                    committed = Reply(ReplyKind.COMMITTED, *key, ending=Ending(Outcome.APPLIED))
                    self.ended += [
                        each
                        for each in self.window.reply(
                            self.owner[key.range_id], committed, self.now_s
                        )
                        if isinstance(each, StepEnded)
                    ]
                self.now_s += 3.0
                self.window.tick(self.now_s)


@given(
    st.integers(0, 9999),
    st.lists(st.lists(st.integers(0, 3), max_size=3, unique=True), min_size=2, max_size=3),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.booleans(),
)
@settings(max_examples=examples(400), deadline=None)
def test_steps_that_are_sealed_together_take_part_all_or_none(
    seed: int, blocks_of: list[list[int]], full_share: float, leave_early: bool
) -> None:
    """`leave_early`: pushes have left before it is said that the steps are sealed together."""
    servers = Servers(seed, full_share)
    window, tables = servers.window, TABLES[: len(blocks_of)]
    for table_id, blocks in zip(tables, blocks_of, strict=True):
        for block in blocks:
            at = BlockPlace(table_id, RANGES[block % 2], block)
            servers.pushes.add(window.submit(at, 1, b"body", byte_count=200))
    if leave_early:
        for _ in range(5):
            servers.something()
    window.together([(table_id, 1) for table_id in tables])
    for table_id in tables:
        window.seal(table_id, 1, RANGES[: 1 + table_id % 2], StepTerms())
        servers.poll()
    for _ in range(60):
        servers.something()
    servers.end()
    assert sorted(each.table_id for each in servers.ended) == sorted(tables)
    assert len({each.applied for each in servers.ended}) == 1
    assert len({*servers.skips}) == 1
    assert servers.skips[0] == bool(servers.refused)
    assert [bool(each.problems) for each in servers.ended].count(True) == len(
        {key.table_id for key in servers.refused}
    )
