"""Push windows and the staging quota of a server, joined by a link that is first in, first out."""

from __future__ import annotations

from collections import deque

import pytest

from ps_core.errors import Overloaded
from ps_core.keys import NodeId, RangeId, TableId
from ps_core.ledger import ReplyKind
from ps_server.ranges.events import StepId
from ps_server.ranges.staging_memory import StagingQuota
from ps_worker.window.push_window import (
    BlockPlace,
    PushWindow,
    Reply,
    SendPush,
    SendSeal,
    StepTerms,
)

SERVER, TABLE, RANGE = NodeId(1), TableId(1), RangeId(0)
FULL = Overloaded("full", retry_after_ms=500)
WINDOW_COUNT = 32


class Workers:
    """A step of each, in blocks of one byte, and one server. No time passes, so nothing is sent
    again but what the server says.
    """

    def __init__(self, worker_count: int, block_count: int, capacity: int) -> None:
        self.block_count = block_count
        self.quota = StagingQuota(capacity, block_count)
        self.windows = [self._window() for _ in range(worker_count)]
        self.entries: list[deque[SendPush | SendSeal]] = [deque() for _ in self.windows]
        self.staged: list[set[int]] = [set() for _ in self.windows]
        self.sealed: set[int] = set()
        self.taken = 0
        self.sent_count = 0

    def _window(self) -> PushWindow:
        window = PushWindow(WINDOW_COUNT)
        window.assign({RANGE: SERVER})
        window.connected(SERVER)
        for block in range(self.block_count):
            window.submit(BlockPlace(TABLE, RANGE, block), 1, None, byte_count=1)
        window.seal(TABLE, 1, [RANGE], StepTerms())
        return window

    def run(self) -> None:
        """Until nobody has anything to send."""
        for rank in range(len(self.windows)):
            self._poll(rank)
        while any(self.entries):
            for rank, entries in enumerate(self.entries):
                if entries:
                    self._take(rank, entries.popleft())

    def _poll(self, rank: int) -> None:
        for effect in self.windows[rank].poll(0.0):
            assert isinstance(effect, SendPush | SendSeal)
            self.entries[rank].append(effect)

    def _say(self, rank: int, kind: ReplyKind, sequence: int) -> None:
        is_full = kind in (ReplyKind.REFUSED, ReplyKind.GIVEN_BACK)
        error = FULL if is_full else None
        self.windows[rank].reply(SERVER, Reply(kind, TABLE, RANGE, sequence, None, error), 0.0)
        self._poll(rank)

    def _take(self, rank: int, entry: SendPush | SendSeal) -> None:
        if isinstance(entry, SendSeal):
            self.sealed.add(rank)
        elif entry.key.sequence not in self.staged[rank]:
            self._stage(rank, entry.key.sequence)
        self._accumulate()
        for step in self.quota.credit():
            self._say(step.rank, ReplyKind.CREDIT, 0)

    def _stage(self, rank: int, sequence: int) -> None:
        self.sent_count += 1
        given_back = self.quota.admit(StepId(1, rank), 1)
        if given_back is None:
            self._say(rank, ReplyKind.REFUSED, sequence)
            return
        for step in given_back:
            back, self.staged[step.rank] = self.staged[step.rank], set()
            for each in sorted(back):
                self._say(step.rank, ReplyKind.GIVEN_BACK, each)
        self.staged[rank].add(sequence)
        self._say(rank, ReplyKind.RECEIVED, sequence)

    def _accumulate(self) -> None:
        """In rank order; the first payloads become the sum."""
        while self.taken in self.sealed and len(self.staged[self.taken]) == self.block_count:
            self.quota.release(StepId(1, self.taken), self.block_count)
            if not self.taken:
                self.quota.add_sum(self.block_count)
            self.taken += 1


@pytest.mark.parametrize(
    ("worker_count", "block_count", "capacity"), [(4, 40, 80), (8, 100, 356), (16, 50, 306)]
)
def test_turns_alone_bring_every_step_in(
    worker_count: int, block_count: int, capacity: int
) -> None:
    """The server forgot that a payload was refused when it took another of the same step: no CREDIT
    came, and the worker waited for its retry time, again and again.
    """
    workers = Workers(worker_count, block_count, capacity)
    workers.run()
    assert workers.taken == worker_count
