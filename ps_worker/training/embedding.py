"""An embedding whose rows live on the servers: `torch.nn.Embedding` without a size."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Self, Unpack, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ps_core.consistency import StalePolicy
from ps_core.errors import InvalidConfig, WaitExpired
from ps_core.rows import Ids
from ps_core.tables.optimizers import OptimizerSpec
from ps_runtime.system.capacity import memory_bytes
from ps_worker.client.client import Client
from ps_worker.embedding.row_cache import RowCache, cached_row_bytes, check_cache, may_lag
from ps_worker.embedding.rows import cut_ids, ids_of, rows_of
from ps_worker.spec.settings import (
    EmbeddingOptions,
    Normal,
    RowsOptions,
    SupportsSpec,
    consistency_of,
)
from ps_worker.steps.steps import StepResult, TableHandle
from ps_worker.training.row_pulls import RowPull, RowPulls
from ps_worker.training.tables.step_scale import StepScale
from ps_worker.training.trained_rows import TrainedRows

_AHEAD_COUNT = 2
"""Pulls before their time, at most: of the present step's rows and the next one's."""


@dataclass(frozen=True, slots=True, eq=False)
class _Ahead:
    """A pull before the step that looks its rows up."""

    ids: Ids
    clock: int  # of which the rows are
    is_late: bool  # they are for the step after the next one, too, which may lack it
    pull: RowPull


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """The rows of a forward pass, on their way."""

    ids: Tensor
    pull: RowPull
    is_prefetched: bool


class Embedding(torch.nn.Module):
    """Rows of an embedding table, looked up by ids of 64 bits.

        model.users = ps.Embedding(client, "users", 64, optimizer=ps.RowwiseAdagrad(lr=0.1))
        optimizer = ps.DistributedOptimizer(client, model, ps.Adam())
        loss(model.head(model.users(ids))).backward()
        optimizer.step()

    `forward` pulls the rows of a batch. The optimizer of the module in which the Embedding lies
    (`DistributedOptimizer`, `HybridOptimizer`) pushes their gradients with its steps, summed over
    all backward passes since the last one, and the servers update the rows. One in no such module
    is stepped by its own `step`. It has no parameters: a torch optimizer and `state_dict` see none.

    Attributes:
        hyperparameters: the optimizer's, of the steps from now on, such as `{"lr": 0.1}`; the
            table's fill in. A resumed run goes on with those of the checkpoint.
        cache_hit_count, cache_miss_count: distinct rows of batches that the cache had, and that
            were pulled.

    Args:
        client: a worker's, or a reader's, which opens the table, only looks rows up, and caches
            none.
        name: of the table.
        dim: elements of a row.
        optimizer, options: as of `Client.create_embedding`; `init` is `Normal(1.0)`, as torch's,
            unless it is given.
        hashed_ids: negative ids are hashes: their bits count.
        cache_rows (int, 0): keep up to so many pulled rows in this worker's memory, a multiple of 8
            that is not above it; each takes its elements and 24 bytes. Those that were looked up
            the longest ago make way. 0: none. Not with a policy for stale steps.
        cache_steps (int, 0): look a row up in the cache in up to so many steps after the one for
            which it was pulled. It may then lack that many of the newest steps, this worker's own
            among them. 0: only in the step for which it was pulled, and as new as without a cache.
            Above 0 only under ASP.

    Shapes:
        ids: any, of whole numbers; the result has `dim` elements behind, on the device of the ids.

    Raises:
        InvalidConfig: a setting that `Client.create_embedding` refuses, or backup workers; a cache
            that is larger than memory, or staler than the consistency allows.

    Blocking: `__init__` as `Client.create_embedding`; `forward` as `Client.pull_rows`; `step` until
        the update is there: under BSP every worker has taken part.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        dim: int,
        *,
        optimizer: SupportsSpec | OptimizerSpec,
        hashed_ids: bool = False,
        **options: Unpack[EmbeddingOptions],
    ) -> None:
        super().__init__()
        self._client = client
        cache_rows, step_count = options.pop("cache_rows", 0), options.pop("cache_steps", 0)
        if client.is_reader:
            cache_rows = 0
            self.table = client.table(name)
        else:
            setting = consistency_of(options.get("consistency", client.consistency))
            if setting.backup_workers:
                raise InvalidConfig(
                    f"table '{name}' would be under {setting}; with backup workers a late worker "
                    "skips clocks on all tables alike, which an Embedding does not: expected BSP "
                    "without them, SSP or ASP"
                )
            check_cache(name, cache_rows, step_count, setting)
            options.setdefault("init", Normal(1.0))
            table_options = cast("RowsOptions", options)  # without those that were taken out
            self.table = client.create_embedding(name, dim, optimizer=optimizer, **table_options)
            if client.is_late_joiner:
                client.tables.join([self.table], at_place=True)
        self._rows = rows_of(self.table.table)
        if self.table.element_count != dim:  # a reader's
            raise InvalidConfig(
                f"dim is {dim}, and rows of table '{name}' have {self.table.element_count} "
                "elements; expected as many"
            )
        self._hashed_ids = hashed_ids
        self._pulls = RowPulls(client, self.table, _cache_of(self.table, cache_rows), step_count)
        self.trained = TrainedRows(client, self.table)
        self._ahead: deque[_Ahead] = deque()
        self._meeting_count = 0  # those after which rows of before were dropped
        self._zeroed_at = (-1, 0)  # the steps before the last `zero_grad`
        self._is_frozen = False

    @property
    def hyperparameters(self) -> dict[str, float]:
        """The optimizer's, of the steps from now on."""
        return self.trained.hyperparameters

    @property
    def client(self) -> Client:
        """The client that made it."""
        return self._client

    @property
    def embedding_dim(self) -> int:
        """The elements of a row."""
        return self.table.element_count

    @property
    def cache_hit_count(self) -> int:
        """The distinct rows of batches that the cache had."""
        return self._pulls.hit_count

    @property
    def cache_miss_count(self) -> int:
        """The distinct rows of batches that the cache did not have, or only too old."""
        return self._pulls.miss_count

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of these ids."""
        places, rows = self.end_lookup(self.begin_lookup(ids))
        return functional.embedding(places, rows)

    def prefetch(self, ids: Tensor) -> None:
        """Begin to pull the rows that the next step looks up, by a forward pass with the same ids.

        Under ASP they are pulled now, so they may lack this worker's present step; under BSP and
        SSP as soon as that step is done, so nothing is staler than without. `ps.prefetch` calls
        this for a loader. With a policy for stale steps (`ASP(reject=...)` and the like) it does
        nothing, since the servers judge a step by when its rows were pulled.

        Blocking: no.
        """
        seen, clock = self._client.tables.newest(self.table), self.table.clock
        if self._client.is_reader or seen.consistency.policy is not StalePolicy.ACCEPT:
            return
        given = ids_of(ids, hashed_ids=self._hashed_ids)
        batch = cut_ids(given, self._rows)
        self._drop_of_before()
        is_late = may_lag(seen, clock)
        asked_clock = clock if is_late else clock + 1
        pull = self._pulls.start(batch, asked_clock, step_clock=clock + 1)
        while len(self._ahead) >= _AHEAD_COUNT:
            self._ahead.popleft().pull.cancel()
        self._ahead.append(_Ahead(given.copy(), asked_clock, is_late, pull))

    def _prefetched(self, given: Ids, clock: int) -> RowPull | None:
        """The pull that was begun for these ids, and may be used in the step after `clock`. Pulls
        for earlier steps are dropped.
        """
        for ahead in list(self._ahead):
            is_due = ahead.clock == clock or (
                ahead.is_late and may_lag(self._client.tables.newest(self.table), clock)
            )
            if clock > ahead.clock + ahead.is_late:
                self._ahead.remove(ahead)
                ahead.pull.cancel()
            elif is_due and np.array_equal(ahead.ids, given):
                self._ahead.remove(ahead)
                return ahead.pull
        return None

    def _drop_of_before(self) -> None:
        """Drop rows from before the last `synchronize`: they may lack steps of other workers."""
        if self._meeting_count == self.trained.meeting_count:
            return
        self._meeting_count = self.trained.meeting_count
        self._pulls.forget()
        while self._ahead:  # under SSP servers have not waited for the others' steps, either
            self._ahead.popleft().pull.cancel()

    def begin_lookup(self, ids: Tensor) -> Lookup:
        """Begin to pull the rows of these ids, unless `prefetch` has; `end_lookup` has them."""
        self._drop_of_before()
        given, clock = ids_of(ids, hashed_ids=self._hashed_ids), self.table.clock
        pull = self._prefetched(given, clock)
        if pull is not None:
            self._pulls.renew(pull, clock)
            return Lookup(ids, pull, is_prefetched=True)
        pull = self._pulls.start(cut_ids(given, self._rows), clock)
        return Lookup(ids, pull, is_prefetched=False)

    def end_lookup(self, lookup: Lookup) -> tuple[Tensor, Tensor]:
        """The place of each id, in its shape, among the rows that were pulled, and these."""
        batch, device = lookup.pull.batch, lookup.ids.device
        try:
            pulled = self._pulls.finish(lookup.pull)
        except WaitExpired:
            if not lookup.is_prefetched:
                raise
            # The time of a prefetch began before the last step.
            pulled = self._pulls.finish(self._pulls.start(batch, self.table.clock))
        rows = torch.from_numpy(pulled).to(device)
        if torch.is_grad_enabled() and not (self._is_frozen or self._client.is_reader):
            self.trained.watch(batch, rows)
        places = torch.from_numpy(batch.places).to(device)
        return places.reshape(lookup.ids.shape), rows

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze the rows, or unfreeze them, for forward passes from now on. `requires_grad_` of a
        module around this one does not reach them, since they are no parameters.

        Blocking: no.
        """
        self._is_frozen = not requires_grad
        return super().requires_grad_(requires_grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients since the last step.

        Blocking: as `step`, if the last one's wait was cut short.
        """
        if not (self.trained.is_owned or self._client.is_reader):
            self.trained.finish()
            self._reach_save_point()
            self._zeroed_at = self._client.engine.steps.mark
        super().zero_grad(set_to_none)
        self.trained.discard()
        self._client.engine.steps.has_gradient = False

    def _reach_save_point(self) -> None:
        self.trained.keep()
        self._client.checkpoints.save_points.reach_alone(self)

    def step(self) -> StepResult:
        """Push the gradients of all backward passes since the last step, and end the step; without
        any it still ends, so that no worker waits for this one.

        Raises:
            InvalidConfig: an optimizer steps it; or hyperparameters that the table's optimizer
                lacks; or more rows of one partition than a message takes.
            InvalidTensor: a gradient is not finite; the step was skipped.
            TableFull: a server has no memory for the new rows of the step, which was refused whole.
            WaitExpired: the message says who is missing. The next call waits for the step, and
                takes another one.
        """
        if self.trained.is_owned:
            raise InvalidConfig(
                f"{self} is stepped by the optimizer of its module: remove this call of step()"
            )
        self.trained.finish()
        if self._zeroed_at != self._client.engine.steps.mark:  # else that was the save point
            self._reach_save_point()
        self._client.checkpoints.begin_rows_step(self.table)
        with self._client.tables.turns.turn(self.table):
            self.trained.begin_step()
            self.trained.prepare()
            ticket = self.trained.seal(StepScale(), skip=False)
        self.trained.finish()
        return ticket.future.result()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled."""
        del protocol
        raise InvalidConfig(
            f"{self} cannot be copied or pickled: its rows are on the servers; expected "
            "torch.save(model.state_dict()), which has the rest, and client.checkpoint() for all"
        )

    def extra_repr(self) -> str:
        """The table and the cache, for `print(model)`."""
        return f"{self.table.name!r}, {self.embedding_dim}{self._pulls.cache_words}"


def _cache_of(table: TableHandle, row_count: int) -> RowCache | None:
    """A cache of so many rows of a table; None for 0. InvalidConfig if memory does not hold it."""
    if not row_count:
        return None
    row_bytes = cached_row_bytes(table.table)
    if row_count * row_bytes > memory_bytes():
        raise InvalidConfig(
            f"cache_rows of table '{table.name}' is {row_count}, {row_count * row_bytes} bytes; "
            f"expected fewer than this machine's memory, {memory_bytes()} bytes, holds"
        )
    return RowCache(row_count, table.element_count, table.dtype.value)


class EmbeddingBag(Embedding):
    """Sums or means of the rows of several ids: `torch.nn.EmbeddingBag` without a size.

    Args:
        mode: "sum" or "mean"; the others as of `Embedding`, in the same order.
        include_last_offset: `offsets` has one more entry, the number of ids.

    Shapes:
        ids: (bags, ids of each), or (all ids,) with `offsets`, where each bag begins.
        per_sample_weights: as `ids`, only with "sum".
        result: (bags, `dim`). An empty bag is zeros.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        **options: Any,
    ) -> None:
        if mode not in ("sum", "mean"):
            raise InvalidConfig(f"mode is '{mode}'; expected sum or mean")
        super().__init__(client, name, dim, **options)
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """One row for each bag."""
        return self.pooled(self.begin_lookup(ids), offsets, per_sample_weights)

    def pooled(self, lookup: Lookup, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
        """One row for each bag of a lookup that was begun."""
        places, rows = self.end_lookup(lookup)
        return functional.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=weights,
            include_last_offset=self.include_last_offset,
        )


def has_embeddings(module: torch.nn.Module) -> bool:
    """True if the module has any."""
    return any(isinstance(each, Embedding) for each in module.modules())


def owned_rows(module: torch.nn.Module, client: Client, optimizer: object) -> list[TrainedRows]:
    """The rows of all Embeddings in a module, which `optimizer` steps from now on; without those of
    readers, which only look rows up.

    Raises:
        InvalidConfig: an Embedding is another client's, or another optimizer steps it, or two are
            of one table.
    """
    found: dict[str, TrainedRows] = {}
    for each in module.modules():
        if not isinstance(each, Embedding) or each.client.is_reader:
            continue
        if each.client is not client:
            raise InvalidConfig(f"{each} is another client's; expected one of the optimizer's")
        if each.table.name in found:
            raise InvalidConfig(
                f"the module has two Embeddings of table '{each.table.name}': expected one module, "
                "in both places"
            )
        found[each.table.name] = each.trained
    for rows in found.values():
        rows.own(optimizer)
    return list(found.values())
