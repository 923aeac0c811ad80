"""A virtual clock and a network that delays, reorders, duplicates and loses, all from one seed."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial

Link = tuple[Hashable, Hashable]
"""From whom to whom; messages the other way have another."""
NEVER_S = 1e9
WINDOW_BYTES = 4 * 1024 * 1024
PAUSED_SHARES = (0.0, 0.0, 0.0, 0.02, 0.1, 0.4)
"""Of the steps of servers' works: after so many others have their turns, in a seed."""
PAUSES_LAST_S = (0.005, 0.05, 0.4)
"""At most."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What the network does to a message, and how often connections break.

    Streams between servers are others: what is lost on them is sent again by the system, until the
    stream breaks; and then some of it comes up to `late_s` later.
    """

    delay_s: float
    jitter_s: float
    lose: float
    duplicate: float
    reset_every_s: float
    peer_reset_every_s: float = NEVER_S
    late_s: float = 0.0

    @classmethod
    def drawn(cls, draw: random.Random) -> Faults:
        """Faults from mild to rough."""
        return cls(
            delay_s=draw.choice((0.001, 0.01, 0.05)),
            jitter_s=draw.choice((0.001, 0.05, 0.2)),
            lose=draw.choice((0.02, 0.05, 0.15)),
            duplicate=draw.choice((0.02, 0.1)),
            reset_every_s=draw.choice((1.0, 5.0, 20.0)),
        )

    def with_peers(self, draw: random.Random) -> Faults:
        """The same, and those of streams between servers."""
        return replace(
            self,
            peer_reset_every_s=draw.choice((1.0, 5.0, 20.0, NEVER_S)),
            late_s=draw.choice((0.0, 0.5, 5.0, 15.0)),
        )

    @classmethod
    def none(cls) -> Faults:
        """A network that does its duty."""
        return cls(0.001, 0.001, 0.0, 0.0, NEVER_S)


class Pauses:
    """When servers leave a work for a while, in one simulation; with draws of its own."""

    def __init__(self, seed: object) -> None:
        self.draw = random.Random(f"pauses of {seed}")
        self._share = self.draw.choice(PAUSED_SHARES)
        self._lasts_s = self.draw.choice(PAUSES_LAST_S)
        self.are_none = self._share == 0.0

    def begins(self) -> bool:
        """Whether there is one now."""
        return self._share > 0.0 and self.draw.random() < self._share

    def lasts_s(self) -> float:
        """How long."""
        return self.draw.random() * self._lasts_s


class World:
    """Runs callbacks at their virtual times; counts what happens; writes a transcript."""

    def __init__(self, seed: int, *, narrate: bool = False) -> None:
        self.seed = seed
        self.draw = random.Random(seed)
        self.pauses = Pauses(seed)
        self.faults = Faults.drawn(self.draw)
        self.now_s = 0.0
        self.counts: Counter[str] = Counter()
        self.transcript: list[str] = []
        self.cut: Counter[Link] = Counter()
        """Links that carry nothing, by how many faults."""
        self.slow: dict[Link, float] = {}
        """By how much messages may come later, in seconds."""
        self.window_bytes = WINDOW_BYTES
        """So much may be on its way on a stream between servers before its receiver takes it."""
        self.has_batches = False
        """Whether what a worker sends to a server at once comes in one message."""
        self.window_blocks = 2
        """So many may be on their way from a worker to a server."""
        self.narrates = narrate
        self._numbers = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` in `delay_s`."""
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._numbers), action))

    def send(self, what: str, deliver: Callable[[], None], link: Link | None = None) -> None:
        """Carry a message, or not."""
        self.counts["messages"] += 1
        faults, draw = self.faults, self.draw.random
        if draw() < faults.lose:
            self.counts["lost"] += 1
            self.say(f"LOST {what}")
            return
        copies = 1
        if draw() < faults.duplicate:
            self.counts["duplicated"] += 1
            copies = 2
        arrive = deliver if link is None else partial(self.arrive, link, deliver)
        for _ in range(copies):
            delay_s = faults.delay_s + draw() * faults.jitter_s
            if link in self.slow:
                self.counts["slowed"] += 1
                delay_s += draw() * self.slow[link]
            self.after(delay_s, arrive)

    def arrive(self, link: Link, deliver: Callable[[], None]) -> None:
        """A message is at the end of its link, unless that is cut."""
        if self.cut.get(link):
            self.counts["cut"] += 1
        else:
            deliver()

    def say(self, line: str) -> None:
        """Add a line to the transcript of a replayed seed."""
        if self.narrates:
            self.transcript.append(f"{self.now_s:9.3f} {line}")

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Run until the condition holds; False if the virtual limit came first."""
        queue, pop = self._queue, heapq.heappop
        while queue and not until():
            self.now_s, _, action = pop(queue)
            if self.now_s > limit_s:
                return False
            action()
        return until()
