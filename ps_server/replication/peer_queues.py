"""Queues of messages to other servers, and the progress of each.

    put --stream is open--> waits --taken--> written
     |                        |
     +--no stream--> lost <---+ the stream ends

Nothing waits for a stream that is not open: `PeerPacing.opened` says what it begins with. Beats are
in no queue: the lease must not wait for values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Generic, TypeVar

from ps_core.keys import NodeId

MessageT = TypeVar("MessageT")

_BUSY_BYTES = 8 * 1024 * 1024
"""No range is copied for a server while more bytes than these wait for it."""


class Backlog:
    """Bytes that wait to be written to one stream.

    Attributes:
        is_slow: some waited already at the last but one `look`; under load, a queue is refilled as
            fast as it drains.
        is_moving: the stream has taken some between the last two.
    """

    def __init__(self) -> None:
        self.queued_bytes = 0
        self.is_slow = self.is_moving = False
        self._put_bytes = 0
        self._taken_bytes = 0
        self._mark_bytes = 0

    def put(self, byte_count: int) -> None:
        self._put_bytes += byte_count
        self.queued_bytes += byte_count

    def taken(self, byte_count: int) -> None:
        self.queued_bytes -= byte_count

    def look(self) -> None:
        """Judge the progress since the last call; to be called now and then."""
        taken_bytes = self._put_bytes - self.queued_bytes
        self.is_slow = taken_bytes < self._mark_bytes
        self.is_moving = taken_bytes > self._taken_bytes
        self._mark_bytes, self._taken_bytes = self._put_bytes, taken_bytes


class PeerQueue(Generic[MessageT]):
    """Messages that wait for the stream to one server."""

    def __init__(self) -> None:
        self.is_open = False
        self.backlog = Backlog()
        self._waiting: deque[tuple[MessageT, int]] = deque()

    def end(self) -> None:
        """End the stream; messages that wait for it are lost."""
        self.is_open = False
        self.backlog = Backlog()
        self._waiting.clear()

    def put(self, message: MessageT, byte_count: int) -> None:
        """Queue a message; it is lost if there is no stream."""
        if self.is_open:
            self._waiting.append((message, byte_count))
            self.backlog.put(byte_count)

    def take(self) -> MessageT | None:
        """The next message to write; None if none waits."""
        if not self._waiting:
            return None
        message, byte_count = self._waiting.popleft()
        self.backlog.taken(byte_count)
        return message


class PeerQueues(Generic[MessageT]):
    """Queues for all other servers of the newest view."""

    def __init__(self) -> None:
        self._queues: dict[NodeId, PeerQueue[MessageT]] = {}

    def add(self, peer: NodeId) -> PeerQueue[MessageT]:
        """Make a queue for a new server."""
        queue = self._queues[peer] = PeerQueue()
        return queue

    def remove(self, peer: NodeId) -> None:
        del self._queues[peer]

    def is_idle(self, peer: NodeId) -> bool:
        """True if a stream to the server is open and takes what it is given."""
        queue = self._queues.get(peer)
        return queue is not None and queue.is_open and not queue.backlog.is_slow

    def has_space(self, peer: NodeId) -> bool:
        """True if a stream to the server is open and has space for a snapshot."""
        queue = self._queues.get(peer)
        return queue is not None and queue.is_open and queue.backlog.queued_bytes < _BUSY_BYTES

    def look(self) -> None:
        """Judge the progress of all streams; to be called now and then."""
        for queue in self._queues.values():
            queue.backlog.look()

    @property
    def busy(self) -> set[NodeId]:
        """Servers whose streams are slow."""
        return {peer for peer, queue in self._queues.items() if queue.backlog.is_slow}

    @property
    def moving(self) -> set[NodeId]:
        """Servers whose streams have taken something between the last two looks."""
        return {peer for peer, queue in self._queues.items() if queue.backlog.is_moving}

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be written to all servers."""
        return sum(queue.backlog.queued_bytes for queue in self._queues.values())

    def useless(self, holders: Collection[NodeId]) -> list[NodeId]:
        """Servers with waiting messages that back up no range any more."""
        waiting = {peer for peer, queue in self._queues.items() if queue.backlog.queued_bytes}
        return sorted(waiting.difference(holders))
