"""Streams between the servers of a simulation, as real ones are: in order, while they last.

    none --greeted--> open --breaks--> none --after a moment--> ...
                        |
                        +-- what is on its way: the first of it comes, late; the rest is lost

A server whose peer has broken off a stream hears what came of it beside the next one: then two of
one peer are at work at once. What waits for a stream, and what it begins with, is decided by the
real `PeerQueue` and `PeerPacing`. Beats and grants have a stream of their own beside it, which
lasts as long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ps_core.keys import NodeId
from ps_server.replication.messages import Beat, Grant, LogRecord, Snapshot
from ps_server.replication.peer_queues import PeerQueue
from tests.sim.world import NEVER_S, Link, World

if TYPE_CHECKING:
    from tests.sim.replicated import ReplicatedServer

AGAIN_S = 0.3
"""What was lost on the way is sent again by the system after so long."""
GREETING_S = 3.0
"""Who has not answered by then is tried anew."""
BACKOFF_S = 0.5
SOON_S = 1.0
STUCK = 0.03
"""How likely a stream that cannot get through is given up, each time that it is tried."""
PIECES = 3
"""Messages of one snapshot."""
RECORD_BYTES = 64 * 1024
_PIECE_BYTES = 2 * 1024 * 1024
_SMALL_BYTES = 100


class Greeting(NamedTuple):
    """Whoever opens a stream begins with it."""


class Welcome(NamedTuple):
    """The answer."""


class CopyPiece(NamedTuple):
    """A part of a snapshot; `whole` is in the last. `has_waited`: for the view that it is of."""

    whole: tuple[Snapshot, dict[str, dict]] | None  # type: ignore[type-arg]
    has_waited: bool = False


_BYTES: dict[type, int] = {LogRecord: RECORD_BYTES, CopyPiece: _PIECE_BYTES}


def size_of(message: object) -> int:
    """In bytes, about."""
    return _BYTES.get(type(message), _SMALL_BYTES)


class Pipe:
    """One direction of a stream: what is on its way, in its order."""

    def __init__(
        self,
        world: World,
        link: Link,
        deliver: Callable[[object], None],
        on_stuck: Callable[[], None],
    ) -> None:
        self._world, self._link, self._deliver = world, link, deliver
        self._on_stuck = on_stuck
        self._items: deque[tuple[float, object]] = deque()
        self.newest_s = 0.0
        self._is_due = False

    def put(self, message: object) -> None:
        """Carry it after what was put before."""
        world = self._world
        world.counts["messages"] += 1
        faults, draw = world.faults, world.draw
        delay_s = faults.delay_s + draw.random() * faults.jitter_s
        if draw.random() < faults.lose:
            delay_s += AGAIN_S
        if self._link in world.slow:
            world.counts["slowed"] += 1
            delay_s += draw.random() * world.slow[self._link]
        self.newest_s = max(self.newest_s, world.now_s + delay_s)
        self._items.append((self.newest_s, message))
        self._wait()

    def _wait(self) -> None:
        if self._items and not self._is_due:
            self._is_due = True
            self._world.after(max(0.0, self._items[0][0] - self._world.now_s), self._arrive)

    def _arrive(self) -> None:
        world = self._world
        self._is_due = False
        if self._items and world.cut[self._link]:
            world.counts["cut"] += 1
            self._is_due = True
            world.after(AGAIN_S, self._arrive)
            if world.draw.random() < STUCK:
                self._on_stuck()
            return
        while self._items and self._items[0][0] <= world.now_s:
            self._deliver(self._items.popleft()[1])
        self._wait()

    def break_off(self, kept_count: int, late_s: float) -> int:
        """All but so many are lost; these come so much later. How many are lost."""
        lost_count = len(self._items) - kept_count
        kept = list(self._items)[:kept_count]
        self._items = deque((at_s + late_s, message) for at_s, message in kept)
        return lost_count

    @property
    def count(self) -> int:
        """What is on its way."""
        return len(self._items)


class Stream:
    """One stream, at both of its ends."""

    def __init__(self, link: SimLink, sender: ReplicatedServer, receiver: ReplicatedServer) -> None:
        self.world, self._link = sender.world, link
        self._sender, self._receiver = sender, receiver
        self.is_broken = False
        self.on_its_way_bytes = 0
        ends = sender.node_id, receiver.node_id
        self._there = Pipe(self.world, ends, self._came, self._is_stuck)
        self._back = Pipe(self.world, ends[::-1], self._said, self._is_stuck)
        self._beats = Pipe(self.world, ends, self._came, self._is_stuck)
        self._grants = Pipe(self.world, ends[::-1], self._said, self._is_stuck)
        self._parked: deque[object] | None = None

    @property
    def is_followed(self) -> bool:
        """Whether its sender has opened another since."""
        return self.is_broken and self._link.is_open

    @property
    def delay_s(self) -> float:
        """Until all has come that is on its way."""
        return max(self._there.newest_s, self._back.newest_s) - self.world.now_s

    # --- at its sender

    def write(self, message: object) -> None:
        """Put it on its way."""
        self.on_its_way_bytes += size_of(message)
        self._there.put(message)

    def beat(self, message: Beat) -> None:
        """Put a beat on its way, which waits for nothing that was written."""
        self._beats.put(message)

    def break_off(self) -> None:
        """For its sender it is over. What its receiver has heard of it, or may yet, is as it is."""
        draw = self.world.draw
        self.is_broken = True
        kept_count = draw.randint(0, self._there.count)
        late_s = draw.random() * self.world.faults.late_s
        self.world.counts["lost with a stream"] += self._there.break_off(kept_count, late_s)
        self._beats.break_off(draw.randint(0, self._beats.count), late_s)
        self._back.break_off(0, 0.0)
        self._grants.break_off(0, 0.0)

    def _is_stuck(self) -> None:
        self._link.break_off(self)

    def _said(self, message: object) -> None:
        self._sender.hear(self._receiver.node_id, message, self)

    # --- at its receiver

    def _came(self, message: object) -> None:
        self._receiver.hear(self._sender.node_id, message, self)

    def taken(self, message: object) -> None:
        """Its receiver begins to handle it."""
        if isinstance(message, Beat):
            return
        self.on_its_way_bytes -= size_of(message)
        self._link.pump()

    def answer(self, message: object) -> None:
        """Say it to the sender."""
        if not self.is_broken:
            (self._grants if isinstance(message, Grant) else self._back).put(message)

    def waits(self, message: object) -> bool:
        """Whether it comes after what waits for a view; then it waits too. Beats do not."""
        if self._parked is None or isinstance(message, Beat):
            return False
        self._parked.append(message)
        return True

    def wait(self, piece: CopyPiece, for_s: float) -> None:
        """The piece, and what comes after it, is handled when there is a newer view, or then."""
        parked = self._parked = deque([piece._replace(has_waited=True)])
        self._receiver.on_view_once(lambda: self._go_on(parked))
        self.world.after(for_s, lambda: self._go_on(parked))

    def hold(self) -> Callable[[], None]:
        """What comes from now on waits until what is returned is called."""
        parked: deque[object] = deque()
        self._parked = parked
        return lambda: self._go_on(parked)

    def _go_on(self, parked: deque[object]) -> None:
        """When its receiver's loop gets to it: what comes until then is behind these."""
        self._receiver.in_turn(lambda: self._handle(parked))

    def _handle(self, parked: deque[object]) -> None:
        if self._parked is parked:
            self._parked = None
            for message in parked:
                self._came(message)


class SimLink:
    """The stream of one server to another, which is kept open; see `PeerLink`."""

    def __init__(self, owner: ReplicatedServer, peer: NodeId, queue: PeerQueue[object]) -> None:
        self._owner, self._peer, self._queue = owner, peer, queue
        self._world = owner.world
        self._stream: Stream | None = None
        self._attempt: Stream | None = None
        self._has_begun = self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether there is a stream."""
        return self._stream is not None

    @property
    def is_clear(self) -> bool:
        """Whether there is one, and what is put to it comes soon."""
        ends = self._owner.node_id, self._peer
        troubles = (self._world.cut[ends], self._world.cut[ends[::-1]], *self._world.slow)
        stream = self._stream
        return (
            stream is not None
            and not any(troubles)
            and not self._queue.backlog.is_slow
            and stream.delay_s < SOON_S
        )

    def begin(self) -> None:
        """Open it, if that has not begun."""
        if not self._has_begun:
            self._has_begun = True
            self._connect()

    def send(self, *messages: object) -> None:
        """See `PeerLink.send`."""
        self.begin()
        for message in messages:
            self._queue.put(message, size_of(message))
        self.pump()

    def send_beat(self, beat: Beat) -> None:
        """See `PeerLink.send_beat`."""
        self.begin()
        if self._stream is not None and not (self._owner.is_paused or self._owner.is_dead):
            self._stream.beat(beat)

    def pump(self) -> None:
        """Write what waits, as far as the stream takes it."""
        stream = self._stream
        if stream is None or self._owner.is_paused or self._owner.is_dead:
            return
        while stream.on_its_way_bytes < self._world.window_bytes:
            message = self._queue.take()
            if message is None:
                return
            stream.write(message)

    def reset(self) -> None:
        """See `PeerLink.reset`."""
        if self._stream is not None:
            self._world.counts["streams reset"] += 1
            self.break_off(self._stream)

    def close(self) -> None:
        """The peer has left."""
        self._is_closed = True
        if self._stream is not None:
            self._stream.break_off()

    def _connect(self) -> None:
        if self._is_closed or self._owner.is_dead:
            return
        receiver = self._owner.peers.get(self._peer)
        attempt = None
        if receiver is not None and not receiver.is_dead:
            attempt = self._attempt = Stream(self, self._owner, receiver)
            attempt.write(Greeting())
        self._world.after(GREETING_S, lambda: self._look_again(attempt))

    def _look_again(self, attempt: Stream | None) -> None:
        if self._stream is None and self._attempt is attempt:
            if attempt is not None:
                attempt.break_off()
            self._connect()

    def greeted(self, stream: Stream) -> bool:
        """The peer answers on it: whether it is open from now on."""
        if self._stream is not None or self._attempt is not stream or self._is_closed:
            return False
        self._world.counts["streams"] += 1
        self._stream, self._attempt = stream, None
        self._queue.is_open = True
        lasts_s = self._world.draw.expovariate(1 / self._world.faults.peer_reset_every_s)
        self._world.after(lasts_s, lambda: self._break_by_chance(stream))
        return True

    def _break_by_chance(self, stream: Stream) -> None:
        if self._world.faults.peer_reset_every_s < NEVER_S:
            self.break_off(stream)

    def peer_died(self) -> None:
        """Its system says so, or nobody does for a while."""
        stream = self._stream
        if stream is not None:
            self._world.after(self._world.draw.random(), lambda: self.break_off(stream))

    def break_off(self, stream: Stream) -> None:
        """The stream is over, if it is still the one."""
        if stream is self._stream and not stream.is_broken and not self._owner.is_dead:
            self._world.counts["streams broken"] += 1
            stream.break_off()
            self._owner.in_turn(lambda: self._ended(stream))

    def _ended(self, stream: Stream) -> None:
        if stream is self._stream:
            self._stream = None
            self._queue.end()
            self._world.after(self._world.draw.random() * BACKOFF_S, self._connect)
