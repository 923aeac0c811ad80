"""An embedding whose rows live on the servers: `torch.nn.Embedding` without a size."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from ps_core.consistency import Mode, StalePolicy
from ps_core.errors import InvalidConfig, WaitExpired
from ps_core.rows import Ids
from ps_core.tables.optimizers import OptimizerSpec
from ps_worker.client.client import Client
from ps_worker.spec.rows import RowBatch, cut_ids, ids_of, rows_of
from ps_worker.spec.settings import Normal, RowsOptions, SupportsSpec, consistency_of
from ps_worker.steps.steps import PullTicket, StepResult
from ps_worker.training.tables.step_scale import StepScale
from ps_worker.training.trained_rows import TrainedRows

_AHEAD_COUNT = 2
"""Pulls before their time, at most: of the present step's rows and the next one's."""


@dataclass(frozen=True, slots=True, eq=False)
class _Ahead:
    """A pull before the step that looks its rows up."""

    ids: Ids
    batch: RowBatch
    clock: int | None  # after which they are looked up; None: at any
    ticket: PullTicket[npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """The rows of a forward pass, on their way."""

    ids: Tensor
    batch: RowBatch
    ticket: PullTicket[npt.NDArray[Any]]
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
            table's fill in.

    Args:
        client: a worker's, or a reader's, which opens the table and only looks rows up.
        name: of the table.
        dim: elements of a row.
        optimizer, options: as of `Client.create_embedding`; `init` is `Normal(1.0)`, as torch's,
            unless it is given.
        hashed_ids: negative ids are hashes: their bits count.

    Shapes:
        ids: any, of whole numbers; the result has `dim` elements behind, on the device of the ids.

    Raises:
        InvalidConfig: a setting that `Client.create_embedding` refuses, or backup workers.

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
        **options: Unpack[RowsOptions],
    ) -> None:
        super().__init__()
        self._client = client
        if client.is_reader:
            self.table = client.table(name)
        else:
            setting = consistency_of(options.get("consistency", client.consistency))
            if setting.backup_workers:
                raise InvalidConfig(
                    f"table '{name}' would be under {setting}; with backup workers a late worker "
                    "skips clocks on all tables alike, which an Embedding does not: expected BSP "
                    "without them, SSP or ASP"
                )
            options.setdefault("init", Normal(1.0))
            self.table = client.create_embedding(name, dim, optimizer=optimizer, **options)
            if client.is_late_joiner:
                client.tables.join([self.table])
        self._rows = rows_of(self.table.table)
        self._hashed_ids = hashed_ids
        self.trained = TrainedRows(client, self.table)
        self._ahead: deque[_Ahead] = deque()

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
        setting = self._client.consistency_of(self.table)
        if self._client.is_reader or setting.policy is not StalePolicy.ACCEPT:
            return
        given = ids_of(ids, hashed_ids=self._hashed_ids)
        batch = cut_ids(given, self._rows)
        is_asynchronous = setting.mode is Mode.ASP
        clock = self.table.clock if is_asynchronous else self.table.clock + 1
        ticket = self._client.pulls.start_rows(self.table, batch, clock=clock)
        ahead = _Ahead(given.copy(), batch, None if is_asynchronous else clock, ticket)
        while len(self._ahead) >= _AHEAD_COUNT:
            self._ahead.popleft().ticket.future.cancel()
        self._ahead.append(ahead)

    def _prefetched(self, given: Ids) -> _Ahead | None:
        """The pull that was begun for these ids, and for this clock."""
        for ahead in self._ahead:
            if ahead.clock in (None, self.table.clock) and np.array_equal(ahead.ids, given):
                self._ahead.remove(ahead)
                return ahead
        return None

    def begin_lookup(self, ids: Tensor) -> Lookup:
        """Begin to pull the rows of these ids, unless `prefetch` has; `end_lookup` has them."""
        given = ids_of(ids, hashed_ids=self._hashed_ids)
        ahead = self._prefetched(given)
        if ahead is not None:
            return Lookup(ids, ahead.batch, ahead.ticket, is_prefetched=True)
        batch = cut_ids(given, self._rows)
        ticket = self._client.pulls.start_rows(self.table, batch)
        return Lookup(ids, batch, ticket, is_prefetched=False)

    def end_lookup(self, lookup: Lookup) -> tuple[Tensor, Tensor]:
        """The place of each id, in its shape, among the rows that were pulled, and these."""
        batch, device = lookup.batch, lookup.ids.device
        try:
            pulled = self._client.wait(lookup.ticket)
        except WaitExpired:
            if not lookup.is_prefetched:
                raise
            # The time of a prefetch began before the last step.
            pulled = self._client.wait(self._client.pulls.start_rows(self.table, batch))
        rows = torch.from_numpy(pulled).to(device)
        if torch.is_grad_enabled() and not self._client.is_reader:
            self.trained.watch(batch, rows)
        places = torch.from_numpy(batch.places).to(device)
        return places.reshape(lookup.ids.shape), rows

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients since the last step."""
        super().zero_grad(set_to_none)
        self.trained.discard()

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
        with self._client.connection.loop.together():
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
        """The table, for `print(model)`."""
        return f"{self.table.name!r}, {self.embedding_dim}"


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
