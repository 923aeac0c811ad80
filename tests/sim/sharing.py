"""Workers of a simulation that share a data set out, beside their steps (S20).

Each has shards, trains on them for a while, and reports them, over the faulty network: a call whose
answer does not come is made again. It does so while it lives, so it may be paused with shards, and
come back when they are another's.

Oracles, of one timeline:
    DS-1  Nobody is told to have a shard that another member was told to have, or that is done; and
          in the end only members have shards.
    DS-2  No report of a shard is taken from two workers in one pass, and a pass is over when each
          of its shards was trained on, or is done in the checkpoint that it began with.
    DS-3  What is done in a checkpoint was trained on before its cut.
    S20   Every lease that ended without a report is counted.
"""

from __future__ import annotations

import random
from collections import defaultdict
from functools import cached_property
from typing import TYPE_CHECKING

from ps_core.cluster_view import Session
from ps_core.errors import Fenced, InvalidConfig
from ps_core.keys import NodeId
from ps_core.manifest import DataSetSpec, SavedDataSet
from scheduler.machine.checkpoint_state import CheckpointCut, CheckpointWritten
from scheduler.machine.data_shards import DataSet, DataShardsReturned, ShardLease, ShardRequest
from scheduler.machine.state import Transition
from tests.sim.actors import SimWorker
from tests.sim.test_scheduler_restarts import RestartSimulation

if TYPE_CHECKING:
    pass

SPEC = DataSetSpec("data", 47, 4, seed=5)
ASKS_AGAIN_S = 1.0
TRAINS_S = (0.05, 0.5, 3.0)
"""On a shard, at most; of a worker."""

Shard = tuple[int, int]
"""The pass, and the number in it."""


class SharedData:
    """What is true of the data set in one timeline, which may begin with a checkpoint."""

    def __init__(self, saved: SavedDataSet | None) -> None:
        self.trained: set[Shard] = set()
        self.taken: dict[Shard, NodeId] = {}
        self.holders: defaultdict[Shard, set[NodeId]] = defaultdict(set)
        self.reissued_count = 0 if saved is None else saved.reissued_count
        self.restored = set() if saved is None else _done_in(saved)
        self.trained_at_cut: dict[int, set[Shard]] = {}


def _done_in(saved: SavedDataSet) -> set[Shard]:
    order = DataSet.restored(saved)
    issued = {order.shard_at(position) for position in range(saved.issued_count)}
    return {(saved.pass_number, shard) for shard in issued - set(saved.open_shards)}


class ShardReader:
    """A worker's shards, as `ps_worker.client.data_shards` has them."""

    def __init__(self, simulation: Sharing, session: Session, worker: SimWorker) -> None:
        self.session, self.worker = session, worker
        self._simulation, self._world = simulation, simulation.world
        self._draw = simulation.shard_draw
        self._trains_s = self._draw.choice(TRAINS_S)
        self._pass_number: int | None = None
        self._held: list[int] = []
        self._done: list[int] = []
        self._reporting: tuple[int, ...] = ()
        self.number = 0  # of the call that is open
        self._has_ended = self._is_training = False
        self._call()

    def _call(self) -> None:
        if self.worker.finished:  # its script has ended
            return
        if not self._reporting:
            self._reporting, self._done = tuple(self._done), []
        self.number += 1
        want_count = len(self._held) + len(self._done) + self._draw.choice((1, 1, 2))
        request = ShardRequest(SPEC, self._pass_number, self._reporting, want_count)
        self._send(self.number, request)

    def _send(self, number: int, request: ShardRequest) -> None:
        """Until it is answered."""
        if number != self.number or self._has_ended:
            return
        if not self.worker.is_down:
            name = f"worker {self.worker.rank} leases"
            arrive = lambda: self._simulation.lease(self, number, request)  # noqa: E731
            self._world.send(name, lambda: self._simulation._reach(arrive))
        self._world.after(ASKS_AGAIN_S, lambda: self._send(number, request))

    def answered(self, number: int, lease: ShardLease) -> None:
        """The scheduler has answered a call."""
        if number != self.number or self.worker.is_down or lease.waits_for:
            return  # what was lost, and who has to wait, asks again
        self.number += 1
        own = lease.pass_number if self._pass_number is None else self._pass_number
        self._simulation.check_taken(self, own, self._reporting)
        self._reporting, self._pass_number = (), own
        if lease.pass_number > own:
            self._simulation.check_over(own)
            assert not self._held
            assert not self._done
            self._pass_number = own + 1
        known = {*self._held, *self._done}
        for shard in lease.shards:
            if shard not in known:
                self._simulation.check_given(self, (own, shard))
                self._held.append(shard)
        self._go_on()

    def _go_on(self) -> None:
        if self._held and not self._is_training:
            self._is_training = True
            self._world.after(self._draw.random() * self._trains_s, self._has_trained)
        elif not self._held:
            self._call()

    def _has_trained(self) -> None:
        if self.worker.is_down:  # it may wake
            self._world.after(ASKS_AGAIN_S, self._has_trained)
            return
        self._is_training = False
        shard = self._held.pop(0)
        assert self._pass_number is not None
        self._simulation.shared.trained.add((self._pass_number, shard))
        self._done.append(shard)
        self._call()

    def fenced(self) -> None:
        """Its membership has ended."""
        self._has_ended = True


class Sharing(RestartSimulation):
    """A simulation whose workers share a data set out."""

    @cached_property
    def shard_draw(self) -> random.Random:
        """What decides about shards."""
        return random.Random(f"shards of {self.world.seed}")

    @cached_property
    def readers(self) -> dict[NodeId, ShardReader]:
        """By node."""
        return {}

    @cached_property
    def shared(self) -> SharedData:
        """What is true of the data set."""
        restored = self.scheduler.settings.restored
        saved = None if restored is None else next(iter(restored.data_sets), None)
        return SharedData(saved)

    def _beat(self, session: Session, worker: SimWorker | None) -> None:
        super()._beat(session, worker)
        if worker is not None and session.node_id not in self.readers:
            self.readers[session.node_id] = ShardReader(self, session, worker)

    # --- the scheduler

    def lease(self, reader: ShardReader, number: int, request: ShardRequest) -> None:
        """A call is there."""
        try:
            decision = self.scheduler.lease_data_shards(reader.session, request, self.world.now_s)
        except Fenced:
            reader.fenced()
            return
        except InvalidConfig:  # it comes late: the worker has reported others since
            assert number != reader.number, f"S20: refused: {request}"
            self.world.counts["late reports refused"] += 1
            return
        lease = decision.reply
        self._untold.decided((), is_news=False)
        if self._may_die("died before a lease was written"):
            return
        self._write()
        self.world.counts["shards issued"] += lease.issued_count
        self.world.counts["waits for shards"] += bool(lease.waits_for)
        self._answers.append((self._untold.newest, lambda: self._answer(reader, number, lease)))

    def _answer(self, reader: ShardReader, number: int, lease: ShardLease) -> None:
        self.world.send("shards", lambda: reader.answered(number, lease))

    def _publish(self, transitions: tuple[Transition, ...]) -> None:
        for transition in transitions:
            if isinstance(transition, CheckpointCut):
                self.shared.trained_at_cut[transition.number] = set(self.shared.trained)
        super()._publish(transitions)

    def _happened(self, transition: Transition) -> None:
        super()._happened(transition)
        if isinstance(transition, DataShardsReturned):
            self.shared.reissued_count += transition.shard_count
            self.world.counts["shards returned"] += transition.shard_count
        elif isinstance(transition, CheckpointWritten):
            for saved in transition.attempt.data_sets:
                number = transition.attempt.number
                new = _done_in(saved) - self.shared.restored
                early = new - self.shared.trained_at_cut[number]
                assert not early, f"DS-3: checkpoint {number} has {early}"
                self.world.counts["checkpoints of shards"] += 1

    # --- what is checked

    def check_given(self, reader: ShardReader, shard: Shard) -> None:
        """A worker was told that it has a shard."""
        shared, members = self.shared, self.scheduler._state.members
        assert shard not in shared.taken, f"DS-1: {shard} is issued, and done"
        assert shard not in shared.restored, f"DS-1: {shard} is issued, and done in the checkpoint"
        others = shared.holders[shard] - {reader.session.node_id}
        living = {each for each in others if members[each].node.state.is_member}
        assert not living, f"DS-1: {shard} is issued, and {living} have it"
        self.world.counts["issued again"] += bool(others)
        shared.holders[shard].add(reader.session.node_id)

    def check_taken(self, reader: ShardReader, number: int, shards: tuple[int, ...]) -> None:
        """A worker's report was taken."""
        for shard in shards:
            taken = self.shared.taken.setdefault((number, shard), reader.session.node_id)
            assert taken == reader.session.node_id, f"DS-2: {shard} of {number} is done twice"

    def check_over(self, number: int) -> None:
        """A worker was told that a pass is over."""
        done = self.shared.trained | self.shared.restored
        missing = [n for n in range(SPEC.shard_count) if (number, n) not in done]
        assert not missing, f"DS-2: pass {number} is over without {missing}"
        self.world.counts["passes seen over"] += 1

    def _check_end(self) -> None:
        super()._check_end()
        for data_set in self.scheduler.data_sets:
            members = self.scheduler._state.members
            states = {members[who].node.state for who in data_set.leases.values()}
            assert all(state.is_member for state in states), f"DS-1: {states} have shards"
            if not self._untold.newest:
                assert data_set.reissued_count == self.shared.reissued_count, "S20: miscounted"
