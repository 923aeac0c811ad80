"""A push window on streams that are slow, held up, or lose an entry: what goes again, and when."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection

import pytest

from ps_core.keys import NodeId, RangeId, TableId
from ps_core.ledger import Ending, Outcome, ReplyKind
from ps_core.limits import DEFAULT_WINDOW_BYTES
from ps_worker.window.push_window import (
    BlockPlace,
    PushWindow,
    Reply,
    SendPush,
    SendSeal,
    StepTerms,
)

SERVER, TABLE, RANGE = NodeId(1), TableId(1), RangeId(0)
MIB = 1 << 20
BLOCK_COUNT = 96
TICK_S = 0.05


def window_of(block_count: int, *, byte_count: int = MIB) -> PushWindow:
    """With a sealed step of so many blocks, to one server."""
    window = PushWindow(DEFAULT_WINDOW_BYTES)
    window.assign({RANGE: SERVER})
    window.connected(SERVER)
    for block in range(block_count):
        window.submit(BlockPlace(TABLE, RANGE, block), 1, None, byte_count=byte_count)
    window.seal(TABLE, 1, [RANGE], StepTerms())
    return window


def received(sequence: int, range_id: RangeId = RANGE) -> Reply:
    return Reply(ReplyKind.RECEIVED, TABLE, range_id, sequence)


class SlowLink:
    """A stream with buffers of some bytes, over a link of some bytes a second, to a server that
    answers each block at once; the first copies of some are lost. Nothing arrives for `stall_s`
    after `stalls_at_s`.
    """

    stalls_at_s = math.inf
    stall_s = 0.0

    def __init__(self, bytes_per_s: float, buffer_bytes: int, lost: Collection[int] = ()) -> None:
        self.window = window_of(BLOCK_COUNT)
        self.block_s = MIB / bytes_per_s
        self.buffer_count = buffer_bytes // MIB
        self.lost = set(lost)
        self.outbox: deque[int] = deque()
        self.buffers: deque[int] = deque()
        self.carried: list[int] = []
        self.now_s = 0.0
        self.arrives_s = self.block_s
        self.is_sealed = False

    def run(self, until_s: float) -> None:
        """Until the seal leaves."""
        while not self.is_sealed and self.now_s < until_s:
            self._poll()
            if self.now_s >= self.stalls_at_s:
                self.arrives_s += self.stall_s
                self.stalls_at_s = math.inf
            while self.buffers and self.arrives_s <= self.now_s:
                self._arrived(self.buffers.popleft(), self.arrives_s)
                self.arrives_s += self.block_s
                self._poll()
            self.window.tick(self.now_s, {SERVER: len(self.outbox)})
            self.now_s += TICK_S

    def breaks(self) -> None:
        """The stream breaks, and another takes its place."""
        self.outbox.clear()
        self.buffers.clear()
        self.carried.clear()
        self.window.disconnected(SERVER)
        self.window.connected(SERVER)
        self.arrives_s = self.now_s + self.block_s

    def _poll(self) -> None:
        for effect in self.window.poll(self.now_s):
            if isinstance(effect, SendPush):
                self.outbox.append(effect.key.sequence)
            else:
                self.is_sealed = self.is_sealed or isinstance(effect, SendSeal)
        while self.outbox and len(self.buffers) < self.buffer_count:
            self.buffers.append(self.outbox.popleft())

    def _arrived(self, sequence: int, at_s: float) -> None:
        self.carried.append(sequence)
        if sequence in self.lost:
            self.lost.discard(sequence)
        else:
            self.window.reply(SERVER, received(sequence), at_s)


@pytest.mark.parametrize("buffer_bytes", [MIB, 8 * MIB])
@pytest.mark.parametrize("mbit_per_s", [1, 5, 10, 25])
def test_a_slow_link_carries_each_block_once(mbit_per_s: float, buffer_bytes: int) -> None:
    """Each copy that left after 10 s came behind all others, and made the next ones later: a link
    of 10 Mbit/s had a step of 256 MiB for ever.
    """
    link = SlowLink(mbit_per_s * 1e6 / 8, buffer_bytes)
    link.run(2 * BLOCK_COUNT * link.block_s)
    assert link.is_sealed
    assert sorted(link.carried) == list(range(1, BLOCK_COUNT + 1))


@pytest.mark.parametrize("buffer_bytes", [MIB, 8 * MIB])
def test_a_link_on_which_a_block_travels_for_longer_carries_none_more_than_twice(
    buffer_bytes: int,
) -> None:
    link = SlowLink(0.8e6 / 8, buffer_bytes)
    link.run(3 * BLOCK_COUNT * link.block_s)
    assert link.is_sealed
    assert max(Counter([*link.carried, *link.buffers, *link.outbox]).values()) == 2


@pytest.mark.parametrize("mbit_per_s", [1, 2, 5, 10])
def test_after_a_stall_only_what_the_stream_had_taken_goes_again(mbit_per_s: float) -> None:
    """The answers to the first copies counted as those to the second: all in between was late."""
    link = SlowLink(mbit_per_s * 1e6 / 8, 8 * MIB)
    link.stalls_at_s, link.stall_s = 20.0, 15.0
    link.run(3 * BLOCK_COUNT * link.block_s)
    assert link.is_sealed
    assert not link.outbox
    assert not link.buffers
    assert len(link.carried) <= BLOCK_COUNT + link.buffer_count


def test_a_slow_stream_that_takes_the_place_of_one_that_broke_carries_each_block_once() -> None:
    link = SlowLink(5e6 / 8, 8 * MIB)
    link.run(BLOCK_COUNT // 3 * link.block_s)
    link.breaks()
    link.run(3 * BLOCK_COUNT * link.block_s)
    assert link.is_sealed
    assert sorted(link.carried) == list(range(1, BLOCK_COUNT + 1))


def test_what_a_busy_server_passed_over_goes_again() -> None:
    link = SlowLink(2 * MIB, MIB, lost={3})
    link.run(BLOCK_COUNT)
    assert link.is_sealed
    assert link.carried.count(3) == 2
    assert len(link.carried) == BLOCK_COUNT + 1
    again_s = (len(link.carried) - 1 - link.carried[::-1].index(3)) * link.block_s
    window_s = DEFAULT_WINDOW_BYTES / MIB * link.block_s
    assert again_s < 10.0 + window_s + 5.0, "10 s after it left, and behind a full window"


def test_a_server_that_is_held_up_is_sent_again_only_what_its_stream_took() -> None:
    window = window_of(8)
    sent = [e.key.sequence for e in window.poll(0.0) if isinstance(e, SendPush)]
    again: list[int] = []
    for tick in range(1, 60 * 20):
        unwritten_count = len(sent) + len(again) - 3
        window.tick(tick * TICK_S, {SERVER: unwritten_count})
        again += [e.key.sequence for e in window.poll(tick * TICK_S) if isinstance(e, SendPush)]
    assert again == sent[:3]


def test_a_stream_that_took_all_and_says_nothing_is_sent_all_again() -> None:
    window = window_of(4)
    sent = [e.key for e in window.poll(0.0) if isinstance(e, SendPush)]
    window.tick(4.0, {SERVER: 4})
    window.tick(5.0, {SERVER: 2})
    for now_s, expected in ((13.9, []), (14.0, []), (15.0, sent)):
        window.tick(now_s)
        assert [e.key for e in window.poll(now_s) if isinstance(e, SendPush)] == expected


def sending_times(window: PushWindow, times_s: Collection[float]) -> list[float]:
    """Those of the times at which something is sent."""
    sent: list[float] = []
    for now_s in times_s:
        window.tick(now_s)
        if window.poll(now_s):
            sent.append(now_s)
    return sent


def test_a_range_that_moved_is_late_by_the_answers_of_its_new_server() -> None:
    """And not by the numbers of the messages that the old one had of it."""
    other, moved = NodeId(2), RangeId(1)
    window = PushWindow(DEFAULT_WINDOW_BYTES)
    window.assign({RANGE: SERVER, moved: SERVER})
    window.connected(SERVER)
    window.connected(other)
    for block in range(8):
        range_id = moved if block == 7 else RANGE
        window.submit(BlockPlace(TABLE, range_id, block), 1, None, byte_count=1)
    window.poll(0.0)
    for sequence in range(1, 8):
        window.reply(SERVER, received(sequence), 0.0)
    window.tick(0.0)
    window.tick(10.0)  # late, and so queued already when its range moves
    window.assign({RANGE: SERVER, moved: other})
    for block in range(4):
        window.submit(BlockPlace(TABLE, moved, block), 2, None, byte_count=1)
    assert len(window.poll(10.0)) == 5
    for sequence, now_s in ((1, 15.0), (2, 19.0)):
        window.reply(other, received(sequence, moved), now_s)
        window.tick(now_s)
    assert sending_times(window, (26.0, 28.5, 30.0)) == [30.0]


def test_an_outcome_that_nobody_asked_for_is_no_answer_to_the_newest_copy() -> None:
    """A seal is asked for every 10 s while its update waits for other workers. Its outcome comes by
    itself, before the copy has arrived behind the next step's blocks.
    """
    window = window_of(2)
    window.poll(0.0)
    for sequence in (1, 2):
        window.reply(SERVER, received(sequence), 0.0)
    assert [type(e) for e in window.poll(0.0)] == [SendSeal]
    window.reply(SERVER, received(3), 0.0)
    for block in range(4):
        window.submit(BlockPlace(TABLE, RANGE, block), 2, None, byte_count=1)
    window.poll(5.0)
    window.tick(10.0)
    assert [type(e) for e in window.poll(10.0)] == [SendSeal]
    window.reply(SERVER, received(4), 12.0)
    for sequence in (1, 2, 3):
        ending = Ending(Outcome.APPLIED)
        window.reply(SERVER, Reply(ReplyKind.COMMITTED, TABLE, RANGE, sequence, ending), 12.0)
    window.tick(12.0)
    window.reply(SERVER, received(5), 18.0)
    assert sending_times(window, (18.0, 22.5, 27.5, 29.0)) == [29.0]


def test_a_seal_that_its_stream_has_not_taken_is_not_sending_times() -> None:
    window = window_of(2)
    window.poll(0.0)
    for sequence in (1, 2):
        ending = Ending(Outcome.APPLIED)
        window.reply(SERVER, Reply(ReplyKind.COMMITTED, TABLE, RANGE, sequence, ending), 0.0)
    assert [type(e) for e in window.poll(0.0)] == [SendSeal]
    window.tick(5.0, {SERVER: 1})
    for now_s, expected in ((10.0, []), (16.0, [SendSeal])):
        window.tick(now_s)
        assert [type(e) for e in window.poll(now_s)] == expected
