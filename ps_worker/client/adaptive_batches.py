"""Batches whose sizes follow the speed of their workers, for steps that all workers take together.

    batches = client.adaptive_batches(dataset, 64)
    loader = DataLoader(dataset, batch_sampler=batches, num_workers=2)
    for number in range(batches.pass_number, passes):
        for examples, labels in batches.over(loader):
            loss = batches.weight * loss_of(model(examples), labels)  # the mean over its samples
            ...

Rules:
    - A worker's speed is the samples of a window of steps over the time that it did not wait for
      servers or other workers. Workers exchange their speeds at the end of each window.
    - A batch is trained on once its worker has taken a step after the script got it
      (`HandedBatches`). Under BSP all workers are equally far, so a checkpoint has one position.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np

from ps_core.cluster_view import Role
from ps_core.consistency import Mode
from ps_core.errors import InvalidCheckpoint, InvalidConfig, JoinRefused, check_config
from ps_runtime.system.clock import now_s
from ps_worker.client.checkpoints import ClientCheckpoints
from ps_worker.client.collectives import CollectiveCalls
from ps_worker.client.connection import ClientConnection
from ps_worker.client.handed_batches import CountedBatches, HandedBatches, check_order
from ps_worker.client.tables import ClientTables
from ps_worker.spec.batch_sizes import BatchPlan, BatchSpec, dealt

BatchT = TypeVar("BatchT")

_SHORTEST_S = 1e-6
"""A window's computation takes no less, whatever the clock says."""


class AdaptiveBatches:
    """A worker's batches of a data set; `client.adaptive_batches` makes it. It is the
    `batch_sampler` of a `DataLoader`, and iterating it gives lists of indexes.
    """

    def __init__(
        self,
        connection: ClientConnection,
        tables: ClientTables,
        collectives: CollectiveCalls,
        spec: BatchSpec,
    ) -> None:
        connection.check_may_push("share a data set out")
        engine = connection.engine
        self._rank, count = engine.session.rank, engine.view.worker_count
        spec.check(count)
        if engine.is_late_joiner:
            raise JoinRefused(
                f"worker {self._rank} joins others that train, and does not know their adaptive "
                "batches: start all workers again, together, from the last checkpoint (pushpull "
                "train --resume). For workers that come later there is ps.DistributedSampler, or "
                "client.data_shards under ASP"
            )
        self._weight = 1.0
        self._is_weight_read = True
        self._connection = connection
        self._tables = tables
        self._collectives = collectives
        self._spec = spec
        self._total = spec.batch_size * count
        self._speeds: dict[int, float] = dict.fromkeys(range(count), 1.0)
        self._pass_number = self._begun = 0
        self._batches = HandedBatches(self._mark)
        self._plan: BatchPlan | None = None
        self._agreed_step, self._began_s = 0, 0.0  # of the present window

    def attach(self, checkpoints: ClientCheckpoints, name: str) -> None:
        """Have checkpoints keep the position under this name; blocks while it reads the one of the
        checkpoint that the cluster was started from. Raises InvalidConfig as `client.attach_state`.
        """
        checkpoints.save_points.attach(name, self)
        states = checkpoints.restored_states(name)
        if states:
            self.load_state_dict(min(states.values(), key=lambda one: (one["pass"], one["begun"])))
            checkpoints.save_points.loaded(name)

    @property
    def pass_number(self) -> int:
        """The next or running pass, from 0 on."""
        return self._pass_number

    @property
    def weight(self) -> float:
        """The factor for the mean loss of the batch in hand, such that the mean over all workers is
        that over all their samples.
        """
        self._is_weight_read = True
        return self._weight

    @property
    def sizes(self) -> dict[int, int]:
        """The newest batch sizes of all workers, by rank."""
        least, most = self._spec.least, self._spec.most
        total = min(self._total, most * len(self._speeds))
        return dealt(total, self._speeds, least, most)

    def over(self, loader: Iterable[BatchT]) -> Iterator[BatchT]:
        """The batches of one pass that this worker trains on, one for each step. After a loop that
        was left early the next goes on with the batches that were not trained on.

        Args:
            loader: a `DataLoader` with this object as its batch_sampler, or this object.

        Blocking: at the first batch, and after every `every`-th, until all workers are there.

        Raises:
            InvalidConfig: a table is not under BSP, or has backup workers or `ps.Outer`; workers
                gave other values; the script does not read `weight` though batches differ; or the
                loader fetches further ahead than `every` batches, or has `in_order=False`.
            WaitExpired: a worker is missing, named by the message. Iterate what `over` returned
                again to go on.
        """
        return _PassBatches(self, loader)

    def begin(self) -> None:
        """Begin a pass, or go on with it, at all workers."""
        self._check_tables()
        self._begun = self._position
        self._check_alike()
        self._plan = BatchPlan(self._spec, self._begun, self.sizes)
        self._batches = HandedBatches(self._mark)
        self._agreed_step, self._began_s = 0, self._computing_s

    def agree(self) -> None:
        """At the end of a window, exchange speeds with all workers, and set the sizes of a later
        one.
        """
        step, plan = self._batches.count, self._plan
        if plan is None or step % self._spec.every or step == self._agreed_step:
            return
        steps = range(step - self._spec.every, step)
        sample_count = sum(len(plan.batch(each, self._rank) or ()) for each in steps)
        speed = sample_count / max(self._computing_s - self._began_s, _SHORTEST_S)
        self._speeds = dict(self._collectives.gather((self._rank, speed), name="batch sizes"))
        plan.agree(self.sizes)
        self._agreed_step, self._began_s = step, self._computing_s

    def hand(self) -> None:
        """The script gets the next batch."""
        assert self._plan is not None  # noqa: S101 - the pass has begun
        check_config(
            self._is_weight_read or self._weight == 1.0,
            f"the script did not read `weight` for its last batch, which is {self._weight:g}: its "
            "samples count more or less than those of others; expected batches.weight * loss",
        )
        nodes = self._connection.engine.view.nodes
        members = {n.rank for n in nodes if n.role is Role.WORKER and n.state.is_member}
        self._weight = self._plan.weight(self._batches.count, self._rank, members)
        self._is_weight_read = False
        self._batches.hand()

    def end(self) -> None:
        """The pass has ended."""
        self._plan = None
        self._pass_number += 1
        self._begun = 0

    def __iter__(self) -> Iterator[list[int]]:
        """The indexes of this worker's batches, in an order drawn for each pass.

        Raises:
            InvalidConfig: the loader is not iterated by `over`, or fetches too far ahead.
        """
        plan = self._plan
        if plan is None:
            raise InvalidConfig(
                "a loader draws from adaptive batches outside of `over`, which alone knows their "
                "sizes: iterate batches.over(loader)"
            )
        generator = np.random.default_rng([self._spec.seed, self._pass_number])
        order = generator.permutation(self._spec.length)
        step = 0
        while (places := plan.batch(step, self._rank)) is not None:
            yield order[places.start : places.stop].tolist()
            step += 1

    @property
    def _computing_s(self) -> float:
        """The seconds for which this process has not waited, counted from some moment."""
        computing_s: float = now_s() - self._connection.waited_s
        return computing_s

    def _check_alike(self) -> None:
        own = {**asdict(self._spec), "pass": self._pass_number, "position": self._begun}
        theirs = self._collectives.gather(own, name="batches")
        differing = [key for key in own if any(each[key] != own[key] for each in theirs)]
        if differing:
            key = differing[0]
            raise InvalidConfig(
                f"workers differ in the {key} of their adaptive batches: "
                + ", ".join(str(each[key]) for each in theirs)
            )

    def _check_tables(self) -> None:
        for handle in self._tables.handles:
            setting, spec = self._tables.consistency_of(handle), handle.spec
            check_config(
                spec.rows is not None
                or (
                    setting.mode is Mode.BSP
                    and not setting.backup_workers
                    and not spec.optimizer.inner_steps
                ),
                f"table '{handle.name}' is {setting} with {spec.optimizer.inner_steps} inner "
                "steps, and adaptive batches are for steps that all workers take together; "
                "expected BSP without backup workers and without ps.Outer. Under ASP, "
                "client.data_shards has fast workers train more",
            )

    def _mark(self) -> object:
        return self._connection.engine.steps.mark

    @property
    def _position(self) -> int:
        """The samples of the pass that have been trained on by all workers."""
        return self._begun if self._plan is None else self._plan.begun(self._batches.trained_count)

    # --- checkpoints

    def state_dict(self) -> dict[str, int]:
        """The position in the pass."""
        return {
            "pass": self._pass_number,
            "begun": self._position,
            "length": self._spec.length,
            "seed": self._spec.seed,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a position, with as many workers as there are now.

        Raises:
            InvalidCheckpoint: it is not the position of adaptive batches.
            InvalidConfig: it is of another data set or seed.
        """
        if set(state_dict) != {"pass", "begun", "length", "seed"}:
            raise InvalidCheckpoint("not a position of adaptive batches")
        for name in ("length", "seed"):
            value = getattr(self._spec, name)
            check_config(
                state_dict[name] == value,
                f"the {name} of adaptive batches is {value}, and was {state_dict[name]} in the "
                "checkpoint; give it as it was",
            )
        self._plan = None
        self._pass_number, self._begun = state_dict["pass"], state_dict["begun"]


class _PassBatches(CountedBatches[BatchT]):
    """The batches of one pass, for `over`. A call that raises WaitExpired may be repeated."""

    def __init__(self, batches: AdaptiveBatches, loader: Iterable[BatchT]) -> None:
        super().__init__(iter(()), "batches.over")
        self._owner = batches
        self._loader = loader
        self._has_begun = False

    def __next__(self) -> BatchT:
        if not self._has_begun:
            check_order(self._loader)
            self._owner.begin()
            self._batches, self._has_begun = iter(self._loader), True
        self._owner.agree()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._owner.end()
            raise
        self._owner.hand()
        return batch
