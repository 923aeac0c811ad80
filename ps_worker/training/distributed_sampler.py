"""A sampler for `torch.utils.data.DataLoader` that follows its client.

    sampler = ps.DistributedSampler(client, dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=2)
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for examples, labels in sampler.follow(loader):
            ...

Rules:
    - A batch has been seen when this worker has sealed a step since it was handed to the script: a
      loader that fetches ahead, and a batch that is in the script's hands when a checkpoint is
      made, do not count.
    - A worker's place is its rank. One that comes beyond the number that the cluster was started
      for has no place of its own: it sees what others see, too, in another order.

What it deliberately does not do: deal an epoch out anew while it runs. Under BSP all workers must
take equally many steps, and one that joins could not know how many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any, TypeVar

import torch.utils.data

from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_runtime.observe import logs
from ps_worker.client.client import Client
from ps_worker.training.epoch_plan import Epoch, Stage, share_count, share_of, stage_of

BatchT = TypeVar("BatchT")

_FIELDS = ("epoch", "length", "place", "places", "seed", "shuffle", "stages", "taken")
_OTHER_ORDER = 1_000_003
"""Between the seeds of workers that have the same place."""


class DistributedSampler(torch.utils.data.Sampler[int]):
    """torch's DistributedSampler, with a client in the place of `num_replicas` and `rank`, and with
    its position in checkpoints.

    Every worker has equally many samples of an epoch, as many as torch's would give it; each sample
    is seen once, but for those that make it come out even. In a cluster that was started from a
    checkpoint it goes on where all workers together were: what was left of the epoch is dealt out
    among as many workers as there are now, and seen once.

    Args:
        client: the worker's.
        dataset: the data set, or how many samples it has.
        shuffle: draw another order for every epoch.
        seed: what the orders are drawn from; the same at every worker.
        drop_last: leave out the samples that do not come out even; else some are seen twice.
        name: under which its position is in checkpoints, unique in this worker; None: it is in
            none, as for validation.

    Attributes:
        epoch: the epoch that comes next, or is under way.

    Blocking: reads what the workers of the checkpoint had, where there is one.

    Raises:
        InvalidConfig: the name is taken, the data set is empty or has another length than in the
            checkpoint.
        NotPermitted: the client is no worker's.
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
        self._begun = 0  # of this worker's share of the stage, before `follow`
        self._handed = self._settled = 0  # batches since
        self._handed_clock = 0
        self._batch_size = 0
        if name is not None:
            client.checkpoints.save_points.attach(name, self)
            self._restore(client.checkpoints.restored_states(name))

    # --- torch's

    @property
    def epoch(self) -> int:
        """The epoch that comes next, or is under way."""
        return self._plan.number

    @property
    def seed(self) -> int:
        """What the orders are drawn from."""
        return self._seed

    @property
    def shuffle(self) -> bool:
        """Whether each epoch has another order."""
        return self._plan.is_shuffled

    def set_epoch(self, number: int) -> None:
        """The epoch that comes next. If it is the one that is under way, or was in the checkpoint,
        it goes on where it was; another begins at its begin.
        """
        if number != self._plan.number:
            self._begin(number)

    def __len__(self) -> int:
        """How many samples this worker has before it in the epoch, when `follow` begins."""
        return max(self._share_count - self._begun, 0)

    def __iter__(self) -> Iterator[int]:
        """The numbers of these samples."""
        share = share_of(
            self._plan.left(), self._place, self.num_replicas, drop_last=self.drop_last
        )
        return iter(share[self._begun :].tolist())

    # --- where the script is

    def follow(self, loader: Iterable[BatchT], batch_size: int | None = None) -> Iterator[BatchT]:
        """The batches of a loader that has this sampler, counted as they are trained on; at the end
        the next epoch is due.

        Args:
            loader: a `DataLoader`, or whatever gives batches of this sampler's samples in order.
            batch_size: samples of a batch; None means the loader's.

        Raises:
            InvalidConfig: the loader does not say how large its batches are.
        """
        size = batch_size or getattr(loader, "batch_size", None)
        size = size or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        if not size:
            raise InvalidConfig("the loader has no batch_size; give follow(loader, batch_size=...)")
        self._begun = self._taken
        self._handed = self._settled = 0
        self._batch_size = int(size)
        for batch in loader:
            self._settled, self._handed_clock = self._done, self._client.engine.steps.newest_clock
            self._handed += 1
            yield batch
        self._begin(self._plan.number + 1)

    def seek(self, batch_count: int, batch_size: int) -> None:
        """Go on as a worker does that has seen so many batches since the first epoch began: for one
        that takes the place of another, `sampler.seek(optimizer.clock, batch_size)`.

        It is where the others are if they have taken a step for every batch under BSP, in a run
        that was not started from a checkpoint within an epoch.
        """
        self._begin(0)
        of_epoch = -(-len(self) // batch_size)
        number, batches = divmod(batch_count, max(of_epoch, 1))
        self._begin(number)
        self._begun = batches * batch_size

    @property
    def _share_count(self) -> int:
        return share_count(self._plan.left_count, self.num_replicas, drop_last=self.drop_last)

    @property
    def _done(self) -> int:
        """Batches of those that were handed out that have been trained on."""
        is_sealed = self._client.engine.steps.newest_clock > self._handed_clock
        return self._handed if is_sealed else self._settled

    @property
    def _taken(self) -> int:
        """Samples of this worker's share of the stage that have been seen."""
        return self._begun + self._done * self._batch_size

    def _begin(self, number: int) -> None:
        self._plan = replace(self._plan, number=number, stages=())
        self._begun = self._handed = self._settled = 0

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Where this worker is in the epoch."""
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
        """Go on from one worker's state, all others having seen as many samples as it had: so it is
        under BSP. What a cluster's checkpoint has of all workers is loaded without a call.

        Raises:
            InvalidCheckpoint: it is no such state.
            InvalidConfig: it is of another data set, seed or shuffle.
        """
        self._load([state_dict], alike=True)

    def _restore(self, states: Mapping[int, Any]) -> None:
        if states:
            self._load([states[rank] for rank in sorted(states)], alike=False)

    def _load(self, states: list[Mapping[str, Any]], *, alike: bool) -> None:
        for state in states:
            self._check(state)
        number = min(state["epoch"] for state in states)
        # Of most workers; one that took a place in the middle of the epoch may not know its stages.
        here = [_stage_in(state) for state in states if state["epoch"] == number]
        stages, places = max(here, key=here.count)
        plan = replace(self._plan, number=number, stages=stages)
        taken: list[int | None] = [None] * places
        for state in states:
            if state["epoch"] > number:  # it had seen all of this one
                _warn_of_what_comes_again(state)
                state = {**state, "taken": plan.length}
            elif _stage_in(state) != (stages, places):
                continue
            if state["place"] is not None and state["place"] < places:
                taken[state["place"]] = state["taken"]
        if alike:
            taken = [states[0]["taken"]] * places
        self._begin(number)
        ended = (stage_of(taken),) if any(taken) else ()
        self._plan = replace(plan, stages=(*stages, *ended))
        if not self._plan.left_count:
            self._begin(number + 1)

    def _check(self, state: Mapping[str, Any]) -> None:
        if set(state) != set(_FIELDS):
            raise InvalidCheckpoint(f"a sampler's state of other fields than {', '.join(_FIELDS)}")
        numbers = ("epoch", "length", "places", "seed", "taken")
        if not all(isinstance(state[name], int) for name in numbers) or state["places"] < 1:
            raise InvalidCheckpoint("a sampler's state has no numbers where it should")
        own = {"length": self._plan.length, "seed": self._seed, "shuffle": self._plan.is_shuffled}
        for name, value in own.items():
            if state[name] != value:
                raise InvalidConfig(
                    f"the sampler's {name} is {value}, and was {state[name]} in the checkpoint; "
                    "the rest of that epoch would be another's: give it as it was"
                )


def _stage_in(state: Mapping[str, Any]) -> tuple[tuple[Stage, ...], int]:
    """The stages that are over, and the places of the one that is not."""
    return tuple(map(tuple, state["stages"])), state["places"]


def _warn_of_what_comes_again(state: Mapping[str, Any]) -> None:
    if state["taken"]:
        logs.warning("samples_come_again", epoch=state["epoch"], count=state["taken"])
