"""What waits for the streams to other servers, and which of these get on: the streams only take it.

    put --there is a stream--> waits --taken--> written
     |                           |
     +--there is none--> lost <--+ the stream ends

Rules:
    - Nothing is kept for a stream that is not there: when one opens, `PeerPacing.opened` says what
      it begins with.
    - A beat goes before whatever waits: the lease is not to wait for values.
    - Nothing large is begun for a server for which much waits already.

What it deliberately does not do: know streams, or what a message says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Generic, TypeVar

from ps_core.keys import NodeId

MessageT = TypeVar("MessageT")

_ROOM_BYTES = 8 * 1024 * 1024
"""No range is copied for a server that so much waits for."""


class Backlog:
    """What waits to be written to one stream, and whether any of it has waited for long.

    That something waits says little of a stream that takes all the time what comes all the time.

    Attributes:
        queued_bytes: what waits.
        is_slow: whether something waits that was there at the last but one `look`.
    """

    def __init__(self) -> None:
        self.queued_bytes = 0
        self.is_slow = False
        self._put_bytes = 0
        self._mark_bytes = 0

    def put(self, byte_count: int) -> None:
        """So much more waits."""
        self._put_bytes += byte_count
        self.queued_bytes += byte_count

    def taken(self, byte_count: int) -> None:
        """So much has left."""
        self.queued_bytes -= byte_count

    def look(self) -> None:
        """To be called now and then: how it has gone since the last time."""
        self.is_slow = self._put_bytes - self.queued_bytes < self._mark_bytes
        self._mark_bytes = self._put_bytes


class PeerQueue(Generic[MessageT]):
    """What waits for the stream to one server.

    Attributes:
        is_open: whether there is a stream, by which what is put now may come.
        backlog: of that stream.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.backlog = Backlog()
        self._waiting: deque[tuple[MessageT, int]] = deque()

    def open(self) -> None:
        """There is a stream, and nothing was put to it."""
        self.is_open = True

    def end(self) -> None:
        """There is none any more; what waits for it is lost."""
        self.is_open = False
        self.backlog = Backlog()
        self._waiting.clear()

    def put(self, message: MessageT, byte_count: int) -> None:
        """Let it wait for its turn; it is lost if there is no stream."""
        if self.is_open:
            self._waiting.append((message, byte_count))
            self.backlog.put(byte_count)

    def put_first(self, message: MessageT, byte_count: int) -> None:
        """As `put`, before what waits already."""
        if self.is_open:
            self._waiting.appendleft((message, byte_count))
            self.backlog.put(byte_count)

    def take(self) -> MessageT | None:
        """What is to be written next; None if nothing waits."""
        if not self._waiting:
            return None
        message, byte_count = self._waiting.popleft()
        self.backlog.taken(byte_count)
        return message


class PeerQueues(Generic[MessageT]):
    """What waits for all other servers of the present view."""

    def __init__(self) -> None:
        self._queues: dict[NodeId, PeerQueue[MessageT]] = {}

    def add(self, peer: NodeId) -> PeerQueue[MessageT]:
        """The queue for a server that there was none for."""
        queue = self._queues[peer] = PeerQueue()
        return queue

    def remove(self, peer: NodeId) -> None:
        """The server has left."""
        del self._queues[peer]

    def is_idle(self, peer: NodeId) -> bool:
        """Whether there is a stream to the server, and nothing has waited long for it."""
        queue = self._queues.get(peer)
        return queue is not None and queue.is_open and not queue.backlog.is_slow

    def has_room(self, peer: NodeId) -> bool:
        """Whether there is a stream to the server, and little waits for it."""
        queue = self._queues.get(peer)
        return queue is not None and queue.is_open and queue.backlog.queued_bytes < _ROOM_BYTES

    def look(self) -> None:
        """To be called now and then: see which streams take what is put to them."""
        for queue in self._queues.values():
            queue.backlog.look()

    @property
    def busy(self) -> set[NodeId]:
        """The servers to which something waits that their streams have long not taken."""
        return {peer for peer, queue in self._queues.items() if queue.backlog.is_slow}

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be written, to all of them."""
        return sum(queue.backlog.queued_bytes for queue in self._queues.values())

    def useless(self, holders: Collection[NodeId]) -> list[NodeId]:
        """For whom something waits that is for nothing any more: their streams are to be ended,
        with what these have taken.
        """
        waiting = {peer for peer, queue in self._queues.items() if queue.backlog.queued_bytes}
        return sorted(waiting.difference(holders))
