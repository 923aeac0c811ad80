"""The streams on which a simulation's workers get views, with draws of their own.

a view --taken, as the product does, where it is newer
   |---lost, or the worker is cut off--> it asks anew, until it is sent the newest
   +---late--> it comes after newer ones, and is none
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from ps_core.cluster_view import ClusterView
from ps_worker.window.primaries import take_primaries
from tests.sim.actors import SimWorker
from tests.sim.calamities import Calamities
from tests.sim.replicated import LEASE_S
from tests.sim.scheduled import SCHEDULER, VIEW_DELAY_S
from tests.sim.world import World

STEADY = 0.5
"""Of the seeds: views come within `VIEW_DELAY_S`."""
LOST_SHARES = (0.0, 0.3, 0.7)
"""Of the views on their way to a worker, in another seed."""
CUTS_AFTER_S = (30.0, 15.0, 5.0)
"""A worker sees nothing after so long, on average."""
CUTS_LAST_S = (LEASE_S, 3 * LEASE_S, 8 * LEASE_S)
LATE_S = (0.0, 2 * LEASE_S)
"""At most."""


class WorkerViews:
    """How views come to the workers of one simulation, until it is calm."""

    def __init__(self, world: World, seed: object, calamities: Calamities) -> None:
        self._world, self._calamities = world, calamities
        self._draw = draw = random.Random(f"views of workers in {seed}")
        self._is_steady = draw.random() < STEADY
        self._lost_share, self._late_s = draw.choice(LOST_SHARES), draw.choice(LATE_S)
        self._cut_after_s = draw.choice(CUTS_AFTER_S)
        self._asking: dict[SimWorker, None] = {}

    def send(self, worker: SimWorker, view: ClusterView) -> None:
        """A view is on its way to a worker."""
        self._carry(worker, view, self._world.draw.random() * VIEW_DELAY_S)

    def remind(self, view: ClusterView) -> None:
        """Workers whose streams broke are sent the newest."""
        asking, self._asking = self._asking, {}
        for worker in asking:
            self._carry(worker, view, self._draw.random() * VIEW_DELAY_S)

    def _carry(self, worker: SimWorker, view: ClusterView, delay_s: float) -> None:
        has_faults = not self._is_steady and not self._calamities.is_calm
        if has_faults and self._draw.random() < self._lost_share:
            self._world.counts["views lost"] += 1
            self._asking[worker] = None
            return
        late_s = self._draw.random() * self._late_s if has_faults else 0.0
        self._world.after(delay_s + late_s, lambda: self._arrive(worker, view))

    def _arrive(self, worker: SimWorker, view: ClusterView) -> None:
        if self._world.cut.get((SCHEDULER, worker.end)):
            self._world.counts["views cut"] += 1
            self._asking[worker] = None
        else:
            take(worker, view)

    def blind(self, workers: Sequence[SimWorker]) -> None:
        """One of the workers sees nothing for some leases, now and then."""
        if not self._is_steady:
            self._world.after(self._draw.expovariate(1 / self._cut_after_s), self._cut_one(workers))

    def _cut_one(self, workers: Sequence[SimWorker]) -> Callable[[], None]:
        def cut() -> None:
            if self._calamities.is_calm:
                return
            found = [worker for worker in workers if not worker.finished and not worker.is_down]
            if found:
                worker = self._draw.choice(found)
                for_s = self._draw.choice(CUTS_LAST_S) * (0.5 + self._draw.random())
                self._world.counts["workers blind"] += 1
                self._calamities._cut([(SCHEDULER, worker.end)], for_s)
            self.blind(workers)

        return cut


def take(worker: SimWorker, view: ClusterView) -> None:
    """A view comes to a worker."""
    if view.view_number <= worker.view_number:
        return
    worker.view_number = view.view_number
    known, owner = worker.layout.epoch, worker.layout.owner
    before = dict(owner)
    epochs = {r.range_id: int(r.assignment_epoch) for r in view.ranges}
    assert all(known[range_id] <= epoch for range_id, epoch in epochs.items()), "S8: epochs go back"
    returned = take_primaries(worker.window, known, view.ranges)
    known.update(epochs)
    owner.update({r.range_id: r.primary for r in view.ranges if r.primary is not None})
    worker.world.counts["perhaps back in views that were missed"] += sum(
        owner[range_id] == before.get(range_id) for range_id in returned
    )
