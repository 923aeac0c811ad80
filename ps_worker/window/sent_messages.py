"""Decides whether the answer to a message is late, on a stream that may be slow (SEMANTICS S3).

Rules:
    - No answer is late while the stream has not taken the message.
    - A stream is first in, first out: while the server answers older messages, no answer to a newer
      one is late.
    - The answer to a message is late after some time in which neither was so. A message that the
      server passes over, or lost, is so sent again, however busy the stream is. So is each message
      that alone travels for longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class SentMessages:
    """The messages to one server, numbered from 1 as they are sent. A stream begins where the one
    before it ended.

    Attributes:
        count: the number of the newest message.
        answered: the number of the newest message that was answered.
    """

    __slots__ = ("_late_after_s", "_seen", "_waiting", "answered", "count")

    def __init__(self, late_after_s: float) -> None:
        self.count = 0
        self.answered = 0
        self._late_after_s = late_after_s
        self._seen = 0
        # Times of the last `late_after_s`, and the oldest message that had to wait then. Both grow:
        # an earlier time at which no older message waited says no more.
        self._waiting: deque[tuple[float, int]] = deque()

    def look(self, now_s: float, unwritten_count: int) -> None:
        """Note which messages have to wait: the newest `unwritten_count`, which the stream has not
        taken, and those behind the newest one that was answered since the last look.
        """
        if self.answered > self._seen:
            self._seen = self.answered
            self._note(now_s, self.answered + 1)
        if unwritten_count:
            self._note(now_s, self.count - unwritten_count + 1)
        while self._waiting and self._waiting[0][0] <= now_s - self._late_after_s:
            self._waiting.popleft()

    def _note(self, now_s: float, first: int) -> None:
        while self._waiting and self._waiting[-1][1] >= first:
            self._waiting.pop()
        self._waiting.append((now_s, first))

    def is_late(self, numbers: Sequence[int]) -> bool:
        """True if an answer to the newest of these messages, all copies of one entry, should have
        come. It was sent longer ago.
        """
        return not self._waiting or max(numbers, default=0) < self._waiting[0][1]
