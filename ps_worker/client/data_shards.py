"""Shards of a data set, which the scheduler leases to whichever worker has none (SEMANTICS S20).

    shards = client.data_shards(dataset, shard_size=1024)
    loader = DataLoader(dataset, batch_size=32, sampler=shards, num_workers=2)
    for number in range(shards.pass_number, passes):
        for examples, labels in shards.over(loader):
            ...

Rules:
    - A shard is reported when its last batch has been trained on (`HandedBatches`), also where the
      loop ends before the next batch. Where the loader has ended and no gradient waits for a step,
      all are; else the rest is held for the next step.
    - A loader draws samples ahead of the training, so drawing never waits for shards that others
      have: it ends, `over` reports what was trained on, waits, and iterates the loader once more.
    - The scheduler refuses that a table stops being asynchronous while shards are leased. A change
      that it had begun before is in the view that a lease waits for, and ends the loop.
    - While one shard is trained on, another is leased in the background, by the call that reports
      the one before. There is one call at a time; a report that failed is repeated as it was, which
      the scheduler recognizes.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from random import Random
from typing import Any, TypeVar

from ps_core import limits
from ps_core.consistency import Mode
from ps_core.errors import InvalidConfig, WaitExpired, check_config
from ps_core.manifest import DataSetSpec
from ps_core.tables.table import Table
from ps_runtime.cluster.registration import LEAST_ATTEMPT_S
from ps_runtime.system.clock import now_s
from ps_runtime.system.future_waits import is_done, tell_when_done, wait_until_ended
from ps_worker.checkpoint.save_points import SavePoints
from ps_worker.client.connection import GRACE_S, ClientConnection
from ps_worker.client.handed_batches import CountedBatches, HandedBatches, batch_size_of
from ps_worker.client.tables import ClientTables
from ps_worker.steps.steps import PushTicket
from pushpull.v1 import scheduler_pb2

BatchT = TypeVar("BatchT")


class DataShards:
    """A worker's shards of a data set; `client.data_shards` makes it. A pass trains on each sample
    once, whichever worker that is; the next begins when all workers' shards of it are done.

    Workers take different numbers of steps in a pass, so all their tables are asynchronous
    (consistency "asp"). Iterating this object gives the indexes that a `DataLoader` draws, in the
    process that trains, between `over` and its end.
    """

    def __init__(
        self,
        connection: ClientConnection,
        tables: ClientTables,
        save_points: SavePoints,
        spec: DataSetSpec,
        timeout_s: float | None,
    ) -> None:
        connection.check_may_push("lease data shards")
        check_config(
            spec.sample_count > 0 and 0 < spec.shard_size <= spec.sample_count and spec.seed >= 0,
            f"data set '{spec.name}' has {spec.sample_count} samples, shards of {spec.shard_size} "
            f"and seed {spec.seed}; expected 1 sample or more, shards of 1 to as many, and a seed "
            "from 0 on",
        )
        self._connection = connection
        self._tables = tables
        self._save_points = save_points
        self._spec = spec
        self._deadline_s = connection.deadline_s(timeout_s)
        self._call: Future[Any] | None = None
        self._reporting: tuple[int, ...] = ()  # reported, and the scheduler may not know it
        self._done: list[int] = []  # to be reported next
        self._drawn: deque[tuple[int, int]] = deque()  # and the samples drawn up to its end
        self._drawn_count = 0  # samples drawn in this iteration of the loader
        self._ahead: deque[int] = deque()  # leased, and not drawn
        self._is_over = False
        self._handed: HandedBatches | None = None  # by the loop that runs
        self._ends_with_steps = False  # that loop's end counts what a step was taken after
        asking = self._leased(None, want_count=0)
        self._pass_number: int = connection.asked(asking, self._deadline_s).pass_number

    @property
    def pass_number(self) -> int:
        """The next or running pass, from 0 on; a worker that joins begins with the present one."""
        return self._pass_number

    def over(self, loader: Iterable[BatchT], batch_size: int | None = None) -> Iterator[BatchT]:
        """The batches of one pass that this worker trains on. A loop that is left early leaves the
        shards undone that it has not trained to their end, and the next loop begins those again.

        Args:
            loader: a `DataLoader` with this object as its sampler, or any iterable of batches of
                this object's samples in order. It is iterated again for shards that other workers
                leave: give `persistent_workers=True` to a loader with processes.
            batch_size: samples of a batch; None means the loader's.

        Blocking: at the end of the pass, while other workers have the shards that are left.

        Raises:
            InvalidConfig: a table is not asynchronous; or there is a HybridOptimizer; or the loader
                has no batch size, drops its last samples, has `in_order=False`, or does not draw
                from these shards; or the loop asks on at the end of the pass while gradients wait
                for a step.
            WaitExpired: the other workers, or this one's steps, were not done in time, or no
                scheduler answered; the message names them. Call it again to go on.
        """
        return CountedBatches(self._over(loader, batch_size), "shards.over")

    def _over(self, loader: Iterable[BatchT], batch_size: int | None) -> Iterator[BatchT]:
        size = batch_size_of(loader, batch_size)
        if getattr(getattr(loader, "batch_sampler", None), "drop_last", False):
            raise InvalidConfig(
                "the loader drops its last samples, which the pass counts; expected drop_last=False"
            )
        with self._opened(ends_with_steps=True) as handed:
            while self._begin_round(handed):
                for batch in loader:
                    self._check_drawn(handed.count)
                    handed.hand(size)
                    self._trained(handed.trained_count)
                    self._advance()
                    yield batch
                    self._check_newest(handed)
                handed.count = self._drawn_count
                self._asked_on(handed)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """The shards of one pass that this worker trains on, each as its first sample and the one
        after its last, for data that a script reads itself. A shard is done when the next is asked
        for, or after the next step where gradients wait for one.

        Blocking, Raises: as `over`.
        """
        return CountedBatches(self._ranges(), "shards.over")

    def _ranges(self) -> Iterator[tuple[int, int]]:
        with self._opened(ends_with_steps=False) as handed:
            while self._begin_round(handed):
                while (samples := self._draw()) is not None:
                    handed.hand(len(samples))
                    self._advance()
                    yield samples.start, samples.stop
                    self._check_newest(handed)
                    self._asked_on(handed)

    def __iter__(self) -> Iterator[int]:
        """The indexes of the samples of this worker's shards, in an order drawn for each pass.

        Raises:
            InvalidConfig: the loader is not iterated by `over`.
        """
        if self._handed is None:
            raise InvalidConfig(
                f"a loader draws from data set '{self._spec.name}' outside of `over`, which alone "
                "knows what was trained on: iterate shards.over(loader)"
            )
        while (samples := self._draw()) is not None:
            key = f"{self._spec.seed}/{self._pass_number}/{samples.start}"
            order = list(samples)
            Random(key).shuffle(order)  # noqa: S311 - every run draws the same
            yield from order

    # --- one pass

    @contextlib.contextmanager
    def _opened(self, *, ends_with_steps: bool) -> Iterator[HandedBatches]:
        """Begin a pass, or go on with it; gives the count of its samples. `ends_with_steps`: what
        the script has taken a step after counts when it leaves the loop.
        """
        self._check_apart()
        self._leave()  # a loop that the script has left, and holds in a variable
        self._ahead.clear()
        self._drawn.clear()
        self._drawn_count = 0
        handed = self._handed = HandedBatches(lambda: self._connection.engine.steps.mark)
        self._ends_with_steps = ends_with_steps
        try:
            yield handed
        finally:
            if self._handed is handed:  # no loop has begun since
                self._leave()
                self._handed = None

    def _leave(self) -> None:
        """The script leaves its loop, after a step or before."""
        if self._handed is not None and self._ends_with_steps:
            self._trained(self._handed.trained_count)

    def _check_apart(self) -> None:
        """Refuse steps for which workers wait for each other, of any table that they train."""
        self._check_not_hybrid()
        for handle in self._tables.trained:
            check_apart(self._tables.newest(handle))

    def _check_not_hybrid(self) -> None:
        check_config(
            not self._save_points.is_in_step,
            "HybridOptimizer's workers take each step together, and with data shards each takes as "
            "many as it can; expected ps.DistributedSampler for the data",
        )

    def _begin_round(self, handed: HandedBatches) -> bool:
        """Wait for a shard; False: the pass is over, and the next one is next."""
        self._await_ahead()
        check_config(
            bool(self._ahead) or not self._drawn,
            f"the loop asks on, and there are no more samples of data set '{self._spec.name}' for "
            f"this worker now: the gradients of its last {self._drawn_count - handed.trained_count}"
            " samples wait for a step. Expected a step before; with gradient accumulation, a "
            "shard_size, and a number of samples, that are multiples of the samples of a step",
        )
        if self._is_over:
            self._is_over = False
            self._pass_number += 1
            return False
        return True

    def _draw(self) -> range | None:
        """The samples of another shard; None if there is none for this worker now."""
        self._check_not_hybrid()  # the script may have made one since
        self._await_ahead()
        if not self._ahead:
            return None
        self._check_apart()  # a table may be new, or have changed before the shard was leased
        shard = self._ahead.popleft()
        samples = self._spec.samples(shard)
        self._drawn_count += len(samples)
        self._drawn.append((shard, self._drawn_count))
        return samples

    def _check_newest(self, handed: HandedBatches) -> None:
        """Refuse a loop that goes on, before it takes samples from the one that has begun since."""
        check_config(
            self._handed is handed,
            f"a loop over data set '{self._spec.name}' goes on after another one has begun, which "
            "has its shards; expected one loop at a time",
        )

    def _check_drawn(self, begun_count: int) -> None:
        if begun_count >= self._drawn_count:
            raise InvalidConfig(
                f"the loader gave a batch after {begun_count} samples, and has drawn "
                f"{self._drawn_count} from data set '{self._spec.name}'; expected a DataLoader "
                "with sampler=shards, and its own batch_size"
            )

    def _asked_on(self, handed: HandedBatches) -> None:
        """The script asks for more than it was handed. It is done with what no gradient waits for,
        as in an evaluation; the rest is trained on after the next step.
        """
        waits = self._connection.engine.steps.has_gradient
        self._trained(handed.trained_count if waits else self._drawn_count)

    def _trained(self, count: int) -> None:
        """The first `count` samples that were drawn have been trained on."""
        while self._drawn and self._drawn[0][1] <= count:
            self._done.append(self._drawn.popleft()[0])

    # --- calls to the scheduler

    def _advance(self) -> None:
        """Report in the background what there is to report, and lease another shard."""
        if self._call is not None and self._call.done():
            with contextlib.suppress(WaitExpired):  # it trains on what it has, and reports again
                self._take_answer()
        if self._call is None and (self._reporting or self._done) and not self._uncommitted():
            self._start_call()

    def _await_ahead(self) -> None:
        """Have a shard that is not drawn, unless there is none for this worker now: the call under
        way may have been made when it had one.
        """
        if not self._ahead and self._call is not None:
            self._take_answer()
        if not self._ahead and not self._is_over:
            self._wait_until_committed()
            self._start_call()
            self._take_answer()

    def _wait_until_committed(self) -> None:
        """The ticket of a failed step raises its error; here it only has to have ended."""
        tickets = self._uncommitted()
        wait_until_ended([ticket.future for ticket in tickets], self._deadline_s)
        for ticket in tickets:
            if not ticket.done():
                raise WaitExpired(self._connection.why_open(ticket, self._deadline_s))

    def _uncommitted(self) -> list[PushTicket]:
        """Steps that may not be in the parameters yet: what they trained on is not done."""
        handles = self._tables.handles
        return [ticket for handle in handles for ticket in handle.steps.uncommitted()]

    def _start_call(self) -> None:
        self._connection.check_usable()
        if not self._reporting:
            self._reporting, self._done = tuple(self._done), []
        want_count = len(self._drawn) + len(self._done) + max(len(self._ahead), 1)
        self._call = self._connection.loop.start(self._leased(self._pass_number, want_count))

    def _leased(self, pass_number: int | None, want_count: int) -> Coroutine[Any, Any, Any]:
        """The call, which ends with the scheduler's answer, once this worker has the view in which
        that was given.
        """
        link, spec = self._connection.engine.scheduler, self._spec
        request = scheduler_pb2.LeaseDataShardsRequest(
            session=link.identity,
            data_set=scheduler_pb2.DataSet(**asdict(spec)),
            pass_number=pass_number,
            done_shards=self._reporting,
            want_count=min(want_count, limits.MAX_HELD_SHARD_COUNT),
        )
        what, end_s = f"shards of data set '{spec.name}'", now_s() + self._deadline_s

        async def answered() -> Any:
            answer = await link.call("LeaseDataShards", request, what, end_s)
            await link.view_at_least(answer.view_number, max(end_s - now_s(), LEAST_ATTEMPT_S))
            return answer

        return answered()

    def _take_answer(self) -> None:
        call, self._call = self._call, None
        assert call is not None  # noqa: S101 - there is one
        if not self._drawn:  # it waits for the shards of others, who may wait for a checkpoint
            tell_when_done(call, self._save_points.wake)
            self._save_points.accompany(partial(is_done, call), self._deadline_s + GRACE_S)
        answer = self._connection.result(call, self._deadline_s + GRACE_S)
        self._reporting = ()
        self._is_over = answer.pass_number > self._pass_number
        known = {shard for shard, _ in self._drawn}.union(self._ahead, self._done)
        self._ahead.extend(shard for shard in answer.shards if shard not in known)


def check_apart(table: Table) -> None:
    """InvalidConfig if workers wait for each other's steps of a table, or will after a change that
    is proposed; or if their steps are at them alone for a while.
    """
    proposed = table.consistency if table.proposed is None else table.proposed.consistency
    for setting, now in ((table.consistency, "is"), (proposed, "is about to become")):
        check_config(
            setting.mode is Mode.ASP,
            f"table '{table.spec.name}' {now} {setting}, where workers wait for each other's steps,"
            " and with data shards each takes as many as it can; expected consistency='asp', or "
            "ps.DistributedSampler for the data",
        )
    inner_steps = table.spec.optimizer.inner_steps
    check_config(
        not inner_steps,
        f"table '{table.spec.name}' has an update for each {inner_steps} steps (ps.Outer), and a "
        "shard that is done must be in the parameters; expected another optimizer, or "
        "ps.DistributedSampler for the data",
    )
