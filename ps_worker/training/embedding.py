"""An embedding whose rows live on the servers: `torch.nn.Embedding` without a size."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ps_core.errors import InvalidConfig
from ps_core.tables import OptimizerSpec
from ps_worker.client.client import Client
from ps_worker.spec.rows import cut_ids, ids_of, rows_of
from ps_worker.spec.settings import Normal, RowsOptions, SupportsSpec, consistency_of
from ps_worker.steps.steps import PushTicket

MAX_PASS_COUNT = 1024
"""Forward passes between two steps: more are a script that never steps."""


class Embedding(torch.nn.Module):
    """Rows of an embedding table, looked up by ids of 64 bits.

        embedding = ps.Embedding(client, "users", 64, optimizer=ps.RowwiseAdagrad(lr=0.1))
        loss(embedding(ids)).backward()
        embedding.step()

    `forward` pulls the rows of a batch; `step` pushes their gradients, summed over all passes since
    the last step, and the servers update the rows. It has no parameters of its own: a torch
    optimizer, `state_dict` and `DistributedOptimizer` see none, and neither gradient clipping nor a
    `GradScaler` reaches its rows.

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

    Blocking: `__init__` as `Client.create_embedding`; `forward` as `Client.pull_rows`; `step` as
        `Client.push_rows`.
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
        self._passes: list[tuple[np.ndarray[Any, np.dtype[np.uint64]], Tensor]] = []

    @property
    def embedding_dim(self) -> int:
        """The elements of a row."""
        return self.table.element_count

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of these ids."""
        places, rows = self._looked_up(ids)
        return functional.embedding(places, rows)

    def _looked_up(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The place of each id, in its shape, among the rows that were pulled."""
        batch = cut_ids(ids_of(ids, hashed_ids=self._hashed_ids), self._rows)
        pulled = self._client.wait(self._client.pulls.start_rows(self.table, batch))
        rows = torch.from_numpy(pulled).to(ids.device)
        if torch.is_grad_enabled() and not self._client.is_reader:
            if len(self._passes) >= MAX_PASS_COUNT:
                raise InvalidConfig(
                    f"{self} was called {MAX_PASS_COUNT} times since its last step: expected "
                    "step() after each backward pass, and torch.no_grad() around passes without one"
                )
            rows.requires_grad_()
            self._passes.append((batch.ids, rows))
        places = torch.from_numpy(batch.places).to(ids.device)
        return places.reshape(ids.shape), rows

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the passes since the last step, and their gradients."""
        super().zero_grad(set_to_none)
        self._passes.clear()

    def step(self, **hyperparameters: float) -> PushTicket:
        """Push the gradients of the rows that were looked up since the last step, and end the step;
        without any it still ends, so that no worker waits for this one.

        Args:
            hyperparameters: the optimizer's, for this step, such as `lr`.
        """
        passes, self._passes = self._passes, []
        given = [(ids, rows.grad) for ids, rows in passes if rows.grad is not None]
        for ids, gradient in given:
            self._client.push_rows(self.table, ids, gradient, seal=False)
        return self._client.seal(self.table, hyperparameters=hyperparameters or None)

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
        places, rows = self._looked_up(ids)
        return functional.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
        )
