"""A sampler for `torch.utils.data.DataLoader` that follows its client.

    sampler = ps.DistributedSampler(client, dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=2)
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for examples, labels in sampler.follow(loader):
            ...

Rules:
    - A batch is seen once this worker has taken a step after the script got it: batches that a
      loader fetched ahead, or that the script still trains on, do not count.
    - A worker's place is its rank. A worker beyond the number that the cluster was started for
      shares another's place: it sees the same samples in another order.
    - An epoch is not distributed anew while it runs, because under BSP all workers must take
      equally many steps, and a joining worker could not know how many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any, TypeVar

import torch.utils.data

from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_runtime.observe import logs
from ps_worker.client.client import Client
from ps_worker.client.handed_batches import CountedBatches, HandedBatches, batch_size_of
from ps_worker.training.epoch_plan import (
    Epoch,
    Position,
    epoch_of,
    share_count,
    share_of,
    stage_of,
)

BatchT = TypeVar("BatchT")

_FIELDS = ("epoch", "length", "place", "places", "seed", "shuffle", "stages", "taken")
_OTHER_ORDER = 1_000_003
"""The distance of the seeds of workers at the same place."""


class DistributedSampler(torch.utils.data.Sampler[int]):
    """torch's DistributedSampler, with a client in the place of `num_replicas` and `rank`, and with
    its position in checkpoints.

    Every worker sees equally many samples of an epoch, as many as with torch's sampler; each sample
    is seen once, except those that make the numbers equal. In a cluster that was started from a
    checkpoint, the present workers share the samples of the epoch that no worker had seen.

    Args:
        client: the worker's.
        dataset: the data set, or the number of its samples.
        shuffle: draw a new order for every epoch.
        seed: the seed of the orders; the same at every worker.
        drop_last: leave out the last samples if they do not divide evenly; else some are seen
            twice.
        name: the name of its position in checkpoints, unique in this worker; None keeps it out of
            checkpoints, as for validation.

    Attributes:
        epoch: the next or running epoch.

    Blocking: reads the positions of the checkpoint's workers, if there are any.

    Raises:
        InvalidConfig: the name is taken; the data set is empty or has another length than in the
            checkpoint.
        NotPermitted: the client is not a worker's.
    """

    def __init__(
        self,
        client: Client,
        dataset: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        name: str | None = "sampler",
    ) -> None:
        client.connection.check_may_push("sample")
        length = dataset if isinstance(dataset, int) else len(dataset)
        if length < 1:
            raise InvalidConfig(f"the data set has {length} samples; expected 1 or more")
        self._client = client
        self.drop_last = drop_last
        self.num_replicas = client.engine.view.worker_count
        self.rank = client.rank
        self._place = client.rank % self.num_replicas
        own_order = client.rank // self.num_replicas * _OTHER_ORDER
        self._plan = Epoch(length, 0, seed + own_order, shuffle)
        self._seed = seed
        self._begun = 0  # samples of this worker's share of the stage, before `follow`
        self._batches = HandedBatches(self._steps_mark)  # those since
        self._batch_size = 0
        self._is_placed = False  # the position was loaded, or sought
        if name is not None:
            client.checkpoints.save_points.attach(name, self)
            states = client.checkpoints.restored_states(name)
            if states:
                self._load([states[rank] for rank in sorted(states)], alike=False)
                client.checkpoints.save_points.loaded(name)

    # --- torch's

    @property
    def epoch(self) -> int:
        """The next or running epoch."""
        return self._plan.number

    @property
    def seed(self) -> int:
        """The seed of the orders."""
        return self._seed

    @property
    def shuffle(self) -> bool:
        """True if each epoch has a new order."""
        return self._plan.is_shuffled

    def set_epoch(self, number: int) -> None:
        """Set the next epoch. The running epoch, or the checkpoint's, goes on; another begins at
        its first sample. A warning says so if that drops a position in a later epoch that was
        loaded, or sought.
        """
        if number < self._plan.number and self._is_placed:
            logs.warning(
                "sampler_position_dropped",
                position_in=self._plan.number,
                begins=number,
                remedy="begin with sampler.epoch; with Accelerate give it to loader.set_epoch",
            )
        if number != self._plan.number:
            self._begin(number)

    def __len__(self) -> int:
        """The number of samples that this worker has left in the epoch, when `follow` begins."""
        return max(self._share_count - self._begun, 0)

    def __iter__(self) -> Iterator[int]:
        """The indexes of these samples."""
        share = share_of(
            self._plan.left(), self._place, self.num_replicas, drop_last=self.drop_last
        )
        return iter(share[self._begun :].tolist())

    # --- the position

    def follow(self, loader: Iterable[BatchT], batch_size: int | None = None) -> Iterator[BatchT]:
        """The batches of a loader with this sampler, counted as they are trained on; at the end the
        next epoch begins.

        Args:
            loader: a `DataLoader`, or any iterable of batches of this sampler's samples in order.
            batch_size: samples of a batch; None means the loader's.

        Raises:
            InvalidConfig: the loader has no batch size.
        """
        return CountedBatches(self._followed(loader, batch_size), "sampler.follow")

    def _followed(self, loader: Iterable[BatchT], batch_size: int | None) -> Iterator[BatchT]:
        size = batch_size_of(loader, batch_size)
        self._begun, self._batch_size = self._taken, size
        self._batches = HandedBatches(self._steps_mark)
        for batch in loader:
            self._batches.hand()
            yield batch
        self._begin(self._plan.number + 1)

    def seek(self, batch_count: int, batch_size: int, *, drop_last: bool = False) -> None:
        """Go to the position of a worker that has seen so many batches since the first epoch began:
        for a late joiner, `sampler.seek(optimizer.clock, batch_size)`.

        That is the other workers' position if they take a step for every batch under BSP, and all
        epochs had as many batches: not in a run that goes on from a checkpoint that was made within
        an epoch, or by another number of workers.

        Args:
            batch_count: the batches.
            batch_size: samples of a batch.
            drop_last: as the loader's: it leaves out a last batch that is not full.
        """
        self._begin(0)
        of_epoch = len(self) // batch_size if drop_last else -(-len(self) // batch_size)
        number, batches = divmod(batch_count, max(of_epoch, 1))
        self._begin(number)
        self._begun, self._is_placed = batches * batch_size, True

    @property
    def _share_count(self) -> int:
        return share_count(self._plan.left_count, self.num_replicas, drop_last=self.drop_last)

    def _steps_mark(self) -> object:
        """Another one after each step; inner steps count, because checkpoints have them, too."""
        return self._client.engine.steps.mark

    @property
    def _taken(self) -> int:
        """The samples of this worker's share of the stage that have been seen."""
        return self._begun + self._batches.trained_count * self._batch_size

    def _begin(self, number: int) -> None:
        self._plan = replace(self._plan, number=number, stages=())
        self._is_placed = False
        self._begun, self._batches = 0, HandedBatches(self._steps_mark)

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """This worker's position in the epoch."""
        plan = self._plan
        return {
            "epoch": plan.number,
            "length": plan.length,
            "seed": self._seed,
            "shuffle": plan.is_shuffled,
            "stages": [list(stage) for stage in plan.stages],
            "places": self.num_replicas,
            "place": self._place if self.rank < self.num_replicas else None,
            "taken": min(self._taken, self._share_count),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from one worker's state, if all others have seen as many samples, as under BSP. A
        cluster's checkpoint, which has all workers' states, needs no call.

        Raises:
            InvalidCheckpoint: it is not a sampler's state.
            InvalidConfig: it is of another data set, seed or shuffle.
        """
        self._load([state_dict], alike=True)

    def _load(self, states: list[Mapping[str, Any]], *, alike: bool) -> None:
        for state in states:
            self._check(state)
        running = epoch_of([_position_in(state) for state in states])
        number, places, stages = running.number, running.places, running.stages
        plan = replace(self._plan, number=number, stages=stages)
        taken: list[int | None] = [None] * places
        for state in states:
            if state["place"] is None or state["place"] >= places:
                continue
            if state["epoch"] > number:  # it had seen all of this one
                if state["taken"]:
                    logs.warning("samples_come_again", epoch=state["epoch"], count=state["taken"])
                taken[state["place"]] = plan.length
            elif _position_in(state).stages == stages and state["places"] == places:
                taken[state["place"]] = state["taken"]
        if alike:
            taken = [states[0]["taken"]] * places
        self._begin(number)
        ended = (stage_of(taken),) if any(taken) else ()
        self._plan = replace(plan, stages=(*stages, *ended))
        if not self._plan.left_count:
            self._begin(number + 1)
        self._is_placed = True

    def _check(self, state: Mapping[str, Any]) -> None:
        if set(state) != set(_FIELDS):
            raise InvalidCheckpoint(f"a sampler's state of other fields than {', '.join(_FIELDS)}")
        integers = ("epoch", "length", "places", "seed", "taken")
        if not all(isinstance(state[name], int) for name in integers) or state["places"] < 1:
            raise InvalidCheckpoint("a sampler's state has fields that are not integers")
        own = {"length": self._plan.length, "seed": self._seed, "shuffle": self._plan.is_shuffled}
        for name, value in own.items():
            if state[name] != value:
                raise InvalidConfig(
                    f"the sampler's {name} is {value}, and was {state[name]} in the checkpoint; "
                    "the rest of that epoch would be another's: give it as it was"
                )


def _position_in(state: Mapping[str, Any]) -> Position:
    stages = tuple(map(tuple, state["stages"]))
    return Position(state["epoch"], state["place"], state["places"], stages)
