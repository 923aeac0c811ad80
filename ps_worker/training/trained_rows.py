"""The rows of one embedding table in training: their gradients since the last step, and its steps.

    rows pulled --backward--> a gradient of each pass --step--> one push, one seal --> committed

Rules:
    - A pass counts from the moment its gradient is there: what is looked up without a backward
      pass leaves nothing.
    - A gradient is of one step: a step takes it away, also from a graph that is kept.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import numpy.typing as npt
import torch

from ps_core.errors import InvalidConfig, InvalidTensor
from ps_core.rows import Ids, sums_by_key
from ps_core.tables.optimizers import Hyperparameters
from ps_runtime.observe import logs
from ps_worker.client.pending import PendingTickets
from ps_worker.embedding.rows import RowBatch, check_fit, cut_ids, rows_of
from ps_worker.spec.optimizers import Aggregate, Outer, ServerOptimizer
from ps_worker.spec.training_options import TrainingOptions
from ps_worker.steps.steps import checked_hyperparameters
from ps_worker.training.among_workers.workers_model import explained
from ps_worker.training.tables.inspection import is_finite
from ps_worker.training.tables.step_scale import StepScale

if TYPE_CHECKING:
    from ps_worker.client.client import Client
    from ps_worker.steps.steps import PushBody, PushTicket, StepResult, TableHandle
    from ps_worker.training.tables.trained_table import TrainedTable

_STATE = "embeddings/hyperparameters"

MAX_PASS_COUNT = 1024
"""Backward passes between two steps: more are a script that never steps."""

_TOLD_STEP_COUNT = 8
"""Steps of other tables while gradients wait: with as many, a script may step no rows at all."""


class TrainedRows:
    """The steps of this worker on one embedding table.

    Attributes:
        hyperparameters: the optimizer's, of the steps from now on, such as `lr`; the table's
            fill in.
        on_gradient: is called when a gradient has come.
        meeting_count: the times that all workers have met (`synchronize`).
    """

    def __init__(self, client: Client, handle: TableHandle) -> None:
        self.handle = handle
        self.hyperparameters: dict[str, float] = {}
        self.on_gradient: Callable[[], None] = lambda: None
        self.meeting_count = 0
        self.pending = PendingTickets(client)
        self._client = client
        self._owner: ref[object] | None = None
        self._passes: list[tuple[RowBatch, torch.Tensor]] = []
        self._bodies: list[PushBody] = []
        self._is_ahead = False
        self._terms: Hyperparameters = ()
        self._ticket: PushTicket | None = None
        self._has_told_late = self._has_told_waiting = False
        self._marks: set[tuple[int, int]] = set()  # one for each step of others since the last own
        self._kept = _kept.setdefault(client, KeptHyperparameters())
        self._kept.add(client, self)

    @property
    def name(self) -> str:
        return self.handle.name

    @property
    def is_owned(self) -> bool:
        """True if an optimizer steps these rows."""
        return self._owner is not None and self._owner() is not None

    def own(self, optimizer: object) -> None:
        """Note the optimizer that steps these rows from now on; InvalidConfig if another does."""
        if self.is_owned:
            raise InvalidConfig(
                f"rows of '{self.name}' are another optimizer's: expected each Embedding in the "
                "module of one optimizer"
            )
        self._owner = ref(optimizer)
        self.keep()

    def keep(self) -> None:
        """Have checkpoints keep the hyperparameters. Idempotent."""
        self._client.checkpoints.save_points.attach(_STATE, self._kept)

    # --- gradients

    def watch(self, batch: RowBatch, rows: torch.Tensor) -> None:
        """Note the gradient of the rows of a batch, a leaf of a graph, once it is there."""
        rows.requires_grad_().register_post_accumulate_grad_hook(partial(_came, ref(self), batch))

    def came(self, batch: RowBatch, rows: torch.Tensor) -> None:
        """A backward pass has reached rows that are watched."""
        if not any(each is rows for _, each in self._passes):
            if len(self._passes) >= MAX_PASS_COUNT:
                raise InvalidConfig(
                    f"the rows of '{self.name}' have gradients of {MAX_PASS_COUNT} backward passes "
                    "since the last step: expected a step after each; the optimizer of a module "
                    "steps the Embeddings in it, others have a step() of their own"
                )
            self._passes.append((batch, rows))
        if not self.is_owned:
            self._tell_waiting()
        self._client.engine.steps.has_gradient = True
        self.on_gradient()

    def _tell_waiting(self) -> None:
        """Warn, once, if the script steps other tables and not these rows."""
        self._marks.add(self._client.engine.steps.mark)
        if len(self._marks) > _TOLD_STEP_COUNT and not self._has_told_waiting:
            self._has_told_waiting = True
            logs.warning(
                "rows_not_stepped",
                table=self.name,
                passes=len(self._passes),
                remedy="give the optimizer the model, not its parameters, or call the Embedding's "
                "step(); torch.no_grad() for rows that are not to be trained",
            )

    def discard(self) -> None:
        """Forget the gradients."""
        self._marks.clear()
        for _, rows in self._passes:
            rows.grad = None
        self._passes.clear()

    def norm_part(self) -> torch.Tensor:
        """The gradient whose norm is this worker's: rows that came in several passes are summed.
        Shapes: (rows, length).
        """
        given = self._given()
        if len(given) == 1:
            return given[0][1].detach()
        if not given:
            return torch.empty(0)
        ids, gradients = _joined(given)
        return torch.from_numpy(sums_by_key(ids, gradients)[1])

    def multiply(self, factor: float) -> None:
        """Multiply the gradients in place."""
        for _, rows in self._passes:
            if rows.grad is not None:
                rows.grad.mul_(factor)

    def non_finite(self) -> str:
        """Words for a gradient with an infinity or a NaN; empty without one."""
        for _, rows in self._passes:
            if rows.grad is not None and not is_finite(rows.grad):
                return (
                    f"the gradient of rows of '{self.name}' has an infinity or a NaN at step "
                    f"{self.handle.clock + 1}"
                )
        return ""

    def _given(self) -> list[tuple[RowBatch, torch.Tensor]]:
        return [(batch, rows.grad) for batch, rows in self._passes if rows.grad is not None]

    # --- steps

    def check_step(self, *, is_skipped: bool) -> None:
        """Raise what `begin_step` and `prepare` would, before anything of the step is taken; a
        skipped one is not prepared.
        """
        checked_hyperparameters(self.handle, self.hyperparameters)
        if not is_skipped:
            self._check_sizes()

    def _check_sizes(self) -> None:
        table, given = self.handle.table, self._given()
        row_bytes = table.spec.element_count * given[0][1].element_size() if given else 0
        if len(given) == 1:
            check_fit(table, given[0][0].spans, row_bytes)
            return
        counts: Counter[int] = Counter()
        for batch, _ in given:
            counts.update({block: end - begin for block, (begin, end) in batch.spans.items()})
        try:  # ids that come in several passes count several times
            check_fit(table, {block: (0, count) for block, count in counts.items()}, row_bytes)
        except InvalidConfig:
            ids = np.concatenate([batch.ids for batch, _ in given])
            check_fit(table, cut_ids(ids, rows_of(table)).spans, row_bytes)

    def begin_step(self, *, has_gradients: bool = True) -> None:
        """Take the hyperparameters for the step that `seal` ends; InvalidConfig if the optimizer
        lacks one. Without gradients forget those that came: they were pushed by an earlier round.
        """
        self._terms = checked_hyperparameters(self.handle, self.hyperparameters)
        if self._is_ahead and has_gradients:
            return
        if self._is_ahead:
            self._withdraw()
        self._bodies = []
        if not has_gradients:
            self.discard()

    def prepare(self) -> None:
        """Make the pushes of the step; InvalidConfig if there are more rows of one partition than
        a message takes.
        """
        given = self._given()
        if not given or self._is_ahead:
            return
        step = self._client.tables.begin_step(self.handle)
        if len(given) == 1:  # distinct ids, cut by partition already
            batch, gradient = given[0]
            self._bodies = step.row_bodies(batch, _on_host(gradient), are_summed=True)
            return
        ids, gradients = _joined(given)
        batch = cut_ids(ids, rows_of(self.handle.table))
        self._bodies = step.row_bodies(batch, gradients, are_summed=False)

    def push_ahead(self) -> None:
        """Push the gradients before it is known whether the step is taken; `seal` says that. Raises
        as `begin_step` and `prepare`.
        """
        if self._is_ahead:  # of a step that was never sealed
            self._withdraw()
        self.begin_step()
        self.prepare()
        bodies, self._bodies = self._bodies, []
        self._client.tables.begin_step(self.handle).push_bodies(bodies)
        self._is_ahead = True

    def _withdraw(self) -> None:
        self._client.tables.begin_step(self.handle).withdraw()
        self._is_ahead = False

    def seal(self, scale: StepScale, *, skip: bool) -> PushTicket:
        """Push what was prepared, and end the step; `finish` waits."""
        step = self._client.tables.begin_step(self.handle)
        step.push_bodies(self._bodies)
        self._bodies = []
        self._ticket = step.seal(
            self._terms,
            contribution_scale=scale.contribution_scale,
            skip=skip,
            clip_scale=scale.clip_scale,
        )
        self.pending.add(self._ticket)
        self._is_ahead = False
        self.discard()
        return self._ticket

    def pass_clock(self) -> None:
        """Seal a step in which the rows have no part; `finish` waits."""
        step = self._client.tables.begin_step(self.handle)
        self.pending.add(step.seal(self._terms, skip=True))

    def finish(self, *, is_skipped: bool = False) -> StepResult | None:
        """Wait for the steps that were sealed, as `Client.wait`. Returns the last one's result, or
        None if it has failed, and that was told.
        """
        try:
            self.pending.wait((InvalidTensor,) if is_skipped else ())
        except InvalidConfig as error:
            raise explained(error, of_rows=True) from None
        ticket, self._ticket = self._ticket, None
        if ticket is None or ticket.future.exception() is not None:
            return None
        result = ticket.future.result()
        if result.discarded and not self._has_told_late:
            self._has_told_late = True
            logs.warning(
                "rows_of_late_step_lost",
                table=self.name,
                step=result.clock,
                remedy=f"no backup workers for rows: pushpull tables set '{self.name}' bsp",
            )
        return result


class KeptHyperparameters:
    """The attached state of all Embeddings of a client: the hyperparameters that its script has
    set, by table, of each Embedding of it in the order in which they were made.
    """

    def __init__(self) -> None:
        self._by_table: defaultdict[str, list[dict[str, float]]] = defaultdict(list)

    def add(self, client: Client, rows: TrainedRows) -> None:
        """Keep those of `rows`, which begins with what the cluster goes on from."""
        if client.is_reader:
            return
        own, saved = self._by_table[rows.name], client.checkpoints.restored_state(_STATE) or {}
        for found in saved.get(rows.name, [])[len(own) :][:1]:
            rows.hyperparameters.update(found)
        own.append(rows.hyperparameters)
        client.checkpoints.save_points.loaded(_STATE)

    def state_dict(self) -> dict[str, list[dict[str, float]]]:
        """Copies of all."""
        return {name: [dict(each) for each in own] for name, own in self._by_table.items()}

    def load_state_dict(self, state: object) -> None:
        """Nothing: `add` loads."""


_kept: WeakKeyDictionary[Client, KeptHyperparameters] = WeakKeyDictionary()


def bind_rows(client: Client, rows: Sequence[TrainedRows], tables: Iterable[TrainedTable]) -> None:
    """Have the steps that are open, and sealed next, be skipped on all of these if a server refuses
    a push of one, such as new rows that it has no memory for.
    """
    parts: list[TrainedRows | TrainedTable] = [*rows, *tables] if rows else []
    if len(parts) > 1:
        first, *others = [client.tables.begin_step(part.handle) for part in parts]
        first.together(others)


def have_met(rows: Iterable[TrainedRows]) -> None:
    """Note that all workers have met: rows that were pulled before may lack steps of others."""
    for each in rows:
        each.meeting_count += 1


def check_rows_fit(rows: str, optimizer: ServerOptimizer, options: TrainingOptions) -> None:
    """Refuse settings of a model that has Embeddings, one of which has the table `rows`."""
    if options.consistency.backup_workers:
        raise InvalidConfig(
            f"'{options.name}' would be under {options.consistency}, and has rows of '{rows}': a "
            "worker whose step came too late would skip clocks that the rows do not; expected BSP "
            "without backup workers, SSP or ASP"
        )
    if isinstance(optimizer, Aggregate) and options.clip_norm is not None:
        raise InvalidConfig(
            f"clip_norm with Aggregate does not reach rows of '{rows}': the servers update them; "
            "expected an optimizer on the servers, or no clip_norm"
        )
    if isinstance(optimizer, Outer):
        raise InvalidConfig(
            f"'{options.name}' has rows of '{rows}', which take each step on the servers, and its "
            "other parameters would take inner steps at the worker: expected Outer for a module "
            "without Embeddings, which have a step() of their own"
        )


def _joined(given: Sequence[tuple[RowBatch, torch.Tensor]]) -> tuple[Ids, npt.NDArray[Any]]:
    """The ids of all passes, and the gradients of their rows, one behind the other."""
    ids = np.concatenate([batch.ids for batch, _ in given])
    return ids, np.concatenate([_on_host(gradient) for _, gradient in given])


def _on_host(gradient: torch.Tensor) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = gradient.detach().cpu().numpy()
    return found


def _came(trained: ref[TrainedRows], batch: RowBatch, rows: torch.Tensor) -> None:
    """A hook, which does not keep the module alive."""
    found = trained()
    if found is not None:
        found.came(batch, rows)
