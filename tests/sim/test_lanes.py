"""Values that are shared where they lie, while servers update, copy and lose them (S5).

Some reads are made a second time as a session on the server's host makes them: what was shared with
an answer is copied later, in two halves between which the cluster goes on. Oracle:

    LENT  A copy that counts is, bit for bit, what the answer said that is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

from ps_core import sequence_locks
from ps_core.keys import NodeId
from ps_core.sequence_locks import Bytes, SequenceLocks, Shared
from ps_server.lane.lane_socket import SharedLanes
from ps_server.lane.value_segments import SharedValues
from ps_server.ranges.events import AnswerPull
from tests.sim.arithmetic import Numbers, Reading
from tests.sim.grads import Grad
from tests.sim.replicated import Place, ReplicatedServer
from tests.sim.test_failover import FailoverSimulation
from tests.sim.test_simulation import QUICK_SEEDS, WORKERS, run_seeds

pytestmark = pytest.mark.slow

SHARE = 0.05
"""Of all blocks that are read."""


class OpenLanes(SharedLanes):
    """Sessions on this host, none of which is connected."""

    @property
    def is_open(self) -> bool:
        """There might be one any time."""
        return True


class Slow:
    """Memory that takes a while to be copied."""

    def __init__(self, memory: Bytes, go_on: Callable[[], None]) -> None:
        self._memory, self._go_on = memory, go_on

    def __array__(self, dtype: object = None, copy: object = None) -> Bytes:
        """What a reader has of it in the end."""
        half = len(self._memory) // 2
        first = self._memory[:half].copy()
        self._go_on()
        return np.concatenate((first, self._memory[half:]))


class SlowStamps:
    """Locks that are looked at a while after what was done before."""

    def __init__(self, memory: SequenceLocks, go_on: Callable[[], None]) -> None:
        self._memory, self._go_on = memory, go_on

    def __getitem__(self, number: int) -> Any:
        """The sequence lock, in the end."""
        self._go_on()
        return self._memory[number]


class LendingServer(ReplicatedServer):
    """A server whose values lie where sessions may read them."""

    is_copying: ClassVar[bool] = False

    def lend(self) -> None:
        """Before it holds anything."""
        self.numbers = Numbers(f"{self.world.seed} {self.node_id}", OpenLanes())

    def reading(self, effect: AnswerPull, block: int) -> tuple[list[Grad], Reading]:
        """A block, as it is read; some is read again where it lies."""
        found = super().reading(effect, block)
        shared = self.numbers.shards.segments.find((effect.table_id, effect.range_id))
        if shared is not None and self.world.draw.random() < SHARE:
            place, stamp = shared.place(block)
            said = shared.segment.array[place.offset_bytes :][: place.byte_count].copy()
            delay_s = self.world.draw.random()
            self.world.after(delay_s, lambda: self._copy(shared, block, stamp, said))
        return found

    def _copy(self, shared: SharedValues, block: int, stamp: int, said: Bytes) -> None:
        """As `Puller._copy`, by a reader that is slow."""
        place = shared._places[block]
        values = shared.segment.array[place.offset_bytes :][: place.byte_count]
        target = np.empty_like(said)
        slow = Shared(
            Slow(values, self._go_on),  # type: ignore[arg-type]
            target,
            SlowStamps(shared._locks, self._go_on),  # type: ignore[arg-type]
            place.lock_number,
            stamp,
        )
        (counts_now,) = sequence_locks.copied([slow])
        self.world.counts["copies that count" if counts_now else "copies of what changed"] += 1
        assert not counts_now or np.array_equal(target, said), (
            f"LENT: a copy of block {block} of server {self.node_id} counts: {target}; it was "
            f"shared as {said}"
        )

    def _go_on(self) -> None:
        """Time passes, unless it passes within another copy already."""
        world = self.world
        if not LendingServer.is_copying:
            LendingServer.is_copying = True
            past: list[bool] = []
            world.after(world.draw.random() * 0.1, lambda: past.append(True))
            try:
                world.run(lambda: bool(past), math.inf)
            finally:
                LendingServer.is_copying = False


class LaneSimulation(FailoverSimulation):
    """One seed in which sessions on the servers' hosts read what is shared."""

    may_sum = False
    often: ClassVar[frozenset[str]] = frozenset({
        "copies that count", "copies of what changed", "failovers", "joined ranges",
        "ranges given up",
    })  # fmt: skip
    medians: ClassVar[dict[str, int]] = {"messages": 2_000, "copies that count": 5}

    def made(self, node_id: NodeId, place: Place) -> ReplicatedServer:
        """A server at that place."""
        made = LendingServer(self.world, node_id, self.layout.settings, WORKERS, place)
        made.lend()
        return made

    def run(self) -> Any:
        """As ever; nothing is left open."""
        try:
            return super().run()
        finally:
            for server in self.servers.values():
                server.numbers.shards.segments.close()


@pytest.mark.timeout(300)
def test_what_is_lent_is_as_it_was_when_it_was_lent(sim_seeds: tuple[int, ...]) -> None:
    """Whatever its server has done to it since, and whoever is primary by then."""
    run_seeds(LaneSimulation, sim_seeds[:QUICK_SEEDS])
