"""`DistributedOptimizer`: a torch optimizer whose parameters live on the servers.

    opt = ps_worker.DistributedOptimizer(client, model, ps_worker.Adam(lr=1e-3))
    for x, y in loader:
        opt.zero_grad()
        loss(model(x), y).backward()    # blocks of gradients leave while backward runs
        opt.step()                      # ends the step; the parameters are the servers' again

Rules:
    - Every step seals every table of the optimizer, whatever has a gradient; either all of them
      take part in the update or none does (a non-finite gradient, an overflow of mixed precision).
    - Hyperparameters are read from `param_groups` when the step ends and travel with it, so torch's
      learning-rate schedulers work as they are.
    - Optimizer state is the servers'; `state_dict` has the hyperparameters. With `Aggregate` the
      state is the local optimizer's and `state_dict` is that one's.

What it deliberately does not do: average over `accumulate` (scale the loss, as without us), or
load parameter values later: what the servers hold comes back with the next step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ps_core.consistency import Consistency
from ps_core.errors import InvalidConfig, InvalidTensor
from ps_core.tables import Hyperparameters
from ps_worker import succession
from ps_worker.buffers import BufferTable, buffer_layouts
from ps_worker.client import Client
from ps_worker.flat_layout import Parameters, named_group, named_groups, table_layouts
from ps_worker.model_pull import birth_clock, table_prefix
from ps_worker.optimizers import (
    Add,
    Aggregate,
    Custom,
    ServerOptimizer,
    check_switches,
    numbers_of,
)
from ps_worker.settings import consistency_of
from ps_worker.step_record import StepTimes
from ps_worker.tickets import StepResult
from ps_worker.trained_table import TrainedTable
from ps_worker.training_options import OptimizerOptions, TrainingOptions

_names_in_use: weakref.WeakKeyDictionary[Client, set[str]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _StepScale:
    """What mixed precision says about a step."""

    contribution_scale: float
    skip: bool


class DistributedOptimizer(torch.optim.Optimizer):
    """Trains a model's parameters on the servers, together with all other workers.

    Args:
        client: a worker's client.
        parameters: a module, or what any torch optimizer takes: parameters, (name, parameter) pairs
            or groups of them. With a module, its buffers are shared as well.
        optimizer: `SGD`, `Adam`, `AdamW`, `Adagrad`, `RMSprop`: runs on the servers. `Aggregate`:
            the servers reduce the gradients and each worker runs a torch optimizer of its own.
            `Add`: each worker runs one on its own gradients; the servers add up what it did.
            `Custom`: an update of the servers' own.
        module: the module of the parameters where they are given otherwise: for the names of
            parameters that come without, and for its buffers.
        options: see `TrainingOptions`.

    Attributes:
        results: how the last step ended on each table: what was too stale (`ASP(reject=...)`), and
            whether an update has formed without it (`BSP(backup_workers=...)`); empty if the step
            was skipped.

    All workers start from the parameters of rank 0. They must register the same parameters in the
    same order, with `requires_grad` as on the others.

    Blocking: until all tables exist and rank 0's parameters have been taken over.

    Raises:
        InvalidConfig: a setting is wrong, or the name is in use.
        TableExists: another worker trains another model under this name.
        WaitExpired: rank 0 or servers are missing.
    """

    _step_supports_amp_scaling = True
    """`torch.amp.GradScaler` leaves unscaling and skipping to `step`, through `grad_scale` and
    `found_inf`."""

    def __init__(
        self,
        client: Client,
        parameters: Parameters,
        optimizer: ServerOptimizer,
        *,
        module: nn.Module | None = None,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        self._client = client
        self._optimizer = optimizer
        self._options = TrainingOptions.of(options, client.consistency)
        self._module = parameters if isinstance(parameters, nn.Module) else module
        self._tables: list[TrainedTable] = []
        self._buffers: list[BufferTable] = []
        self._hooks: dict[torch.Tensor, RemovableHandle] = {}
        self._inner: torch.optim.Optimizer | None = None
        self._is_made = False
        self.results: tuple[StepResult, ...] = ()
        if self._options.buffers == "mean" and self._module is None:
            raise InvalidConfig("buffers is 'mean' without a module; give module=")
        groups = named_groups(parameters, self._module)
        self._adds = isinstance(optimizer, Add)
        if self._adds and self._options.is_eager:
            raise InvalidConfig(
                "mode is 'eager' with Add, which pushes what a whole step did; expected 'sealed'"
            )
        if isinstance(optimizer, Aggregate | Add):
            self._inner = _inner_optimizer(optimizer, groups)
            super().__init__(self._inner.param_groups, dict(self._inner.defaults))
            self._share(self._inner)
        else:
            super().__init__(groups, optimizer.defaults())
        with self._taken_name():
            self._start()
        self._hook_trainable()
        self._times = StepTimes(client)
        self._is_made = True

    def _start(self) -> None:
        """Makes the tables; all workers have rank 0's values in the end."""
        for number in range(len(self.param_groups)):
            self._tables += self._tables_of_group(number)
        if self._module is not None and self._options.buffers is not None:
            self._buffers = [
                BufferTable(self._client, self._module, layout, self._options)
                for layout in buffer_layouts(self._options.name, self._module)
            ]
        self._start_from_rank_zero([*self._tables, *self._buffers])

    # --- torch's own verbs

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """End the step: clock + 1 on every table, and the parameters are the servers' again.

        Under BSP they then are those of every other worker at this clock, bit for bit.

        Args:
            closure: evaluates the model once and returns the loss.

        Returns:
            What `closure` returned; None without one.

        Blocking: until the update is there: under BSP every worker has taken part.

        Raises:
            InvalidTensor: a gradient is not finite; the step was skipped on every server.
            InvalidConfig: another worker's hyperparameters differ at this clock, or a switch that
                is the table's for good was changed.
            GradientChangedAfterPush: in eager mode.
            WaitExpired: workers or servers are missing; the message names them. The step stays
                sealed: the next call waits for it again.
        """
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._times.computed(1 + max((table.handle.clock for table in self._tables), default=0))
        with torch.no_grad():
            self._step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch; what left of the gradients that are zeroed takes no part in the step."""
        super().zero_grad(set_to_none)
        self._hook_trainable()
        for table in self._tables:
            table.discard()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch; the group gets tables of its own, which start from rank 0's values.

        All workers must call it after the same step.

        Blocking: until rank 0 has given the values.

        Raises:
            InvalidConfig: a setting of the group is wrong.
        """
        if not self._is_made:  # torch's constructor hands over the first groups
            super().add_param_group(param_group)
            return
        position = sum(len(group["params"]) for group in self.param_groups)
        group = named_group(param_group, self._module, position)
        if self._inner is not None:
            self._inner.add_param_group(group)
        else:
            super().add_param_group(group)
        try:
            tables = self._tables_of_group(len(self.param_groups) - 1)
            self._start_from_rank_zero(tables)
        except BaseException:
            self.param_groups.pop()  # a group without tables would never train
            raise
        self._tables += tables
        self._hook_trainable()

    def state_dict(self) -> dict[str, Any]:
        """The hyperparameters, and with `Aggregate` the local optimizer's state."""
        return super().state_dict() if self._inner is None else self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave. The servers' state stays as it is."""
        if self._inner is None:
            super().load_state_dict(state_dict)
        else:
            self._inner.load_state_dict(state_dict)
            self._share(self._inner)

    @property
    def clock(self) -> int:
        """Steps that this model has behind it at this worker; where one that takes the place of a
        worker that is gone begins, in its schedules too.
        """
        return max((table.handle.clock for table in self._tables), default=0)

    def set_consistency(
        self,
        consistency: Consistency | str,
        *,
        after_clock: int = 0,
        timeout_s: float | None = None,
    ) -> int:
        """Change how far the workers of this model may run apart, while they train: all its tables,
        as `Client.set_consistency` does one. Call it between two steps, at every worker.

        Returns:
            The last clock of the setting before, on whichever table it is highest.

        Blocking: until every server has promised; a few milliseconds a table.

        Raises:
            InvalidConfig: the setting is wrong, or this model cannot have it: `buffers="mean"` and
                `Aggregate` need BSP.
            WaitExpired: a server has not promised in time; call again to change what is left.
        """
        wanted = consistency_of(consistency)
        options = replace(self._options, consistency=wanted)
        clocks = [
            self._client.set_consistency(
                handle, setting, after_clock=after_clock, timeout_s=timeout_s
            )
            for handle, setting in [
                *((table.handle, wanted) for table in self._tables),
                *((table.handle, wanted.without_policy()) for table in self._buffers),
            ]
        ]
        self._options = options
        return max(clocks, default=0)

    def close(self) -> None:
        """Takes the hooks off the parameters; the tables stay. Idempotent."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    # --- at the start

    def _share(self, inner: torch.optim.Optimizer) -> None:
        self.param_groups = inner.param_groups
        self.defaults = inner.defaults
        self.state = inner.state

    @contextlib.contextmanager
    def _taken_name(self) -> Iterator[None]:
        """The name is this optimizer's for good, unless the work under it fails."""
        if self._client.is_reader:
            raise InvalidConfig("the client is a reader's; expected a worker's (role='worker')")
        names = _names_in_use.setdefault(self._client, set())
        if self._options.name in names:
            raise InvalidConfig(
                f"name '{self._options.name}' is another DistributedOptimizer's of this client; "
                "give each its own name="
            )
        names.add(self._options.name)
        try:
            yield
        except BaseException:
            names.discard(self._options.name)
            raise

    def _tables_of_group(self, number: int) -> list[TrainedTable]:
        group = self.param_groups[number]
        optimizer = self._optimizer
        if not isinstance(optimizer, Aggregate | Add):
            optimizer = optimizer.with_group(group)
        prefix = table_prefix(self._options.name, number, self._birth_clock())
        tables = [
            TrainedTable(self._client, layout, number, optimizer, self._options)
            for layout in table_layouts(prefix, group)
        ]
        if isinstance(optimizer, Custom) and tables:
            # The servers know the numbers that nobody gave; here schedulers find and change them.
            for name, value in tables[0].handle.spec.optimizer.hyperparameters:
                group.setdefault(name, value)
                self.defaults.setdefault(name, value)
        return tables

    def _birth_clock(self) -> int:
        """The model's clock at present; where workers' clocks differ, 0."""
        if not self._options.is_in_lockstep:
            return 0
        return max((birth_clock(t.name) + t.handle.clock for t in self._tables), default=0)

    def _start_from_rank_zero(self, tables: Sequence[TrainedTable | BufferTable]) -> None:
        is_giver = self._client.rank == 0 and not self._client.is_successor
        if self._client.is_successor:
            succession.check_may_succeed(isinstance(self._optimizer, Aggregate))
            succession.begin_where_the_others_are(self._client, tables)
        else:
            for table in tables:
                table.begin_assign() if is_giver else table.begin_pull()
            for table in tables:
                table.finish()
        for table in tables:
            if not is_giver and isinstance(table, TrainedTable):
                table.write_parameters()

    def _hook_trainable(self) -> None:
        """Parameters may be unfrozen at any time; tensors that need no gradient take no hook."""
        for table in self._tables:
            for index, entry in enumerate(table.layout.placed):
                if entry.tensor.requires_grad and self._adds:
                    table.is_asleep = False  # what is pushed is there after the step only
                elif entry.tensor.requires_grad and entry.tensor not in self._hooks:
                    table.is_asleep = False
                    hook = _Hook(weakref.ref(self), table, index)
                    self._hooks[entry.tensor] = entry.tensor.register_post_accumulate_grad_hook(
                        hook
                    )

    # --- a step

    def _hooked(self, table: TrainedTable, index: int) -> None:
        numbers = self._numbers(table) if self._options.applies_on_arrival else ()
        table.hooked(index, numbers)

    def _step(self) -> None:
        self._hook_trainable()
        for table in self._tables:
            table.settle()
        for buffers in self._buffers:
            buffers.settle()
        awake = [(t, self._numbers(t)) for t in self._tables if not t.is_asleep]
        scale = self._move(self._scale()) if self._adds else self._scale()
        if self._options.applies_on_arrival and scale != _StepScale(1.0, skip=False):
            raise InvalidConfig(
                "loss scaling needs steps that count as a whole; expected mode='sealed', got "
                "'eager' under ASP"
            )
        if self._options.is_eager:
            for table, numbers in awake:
                table.check_final(numbers)
        # All that can be refused here is refused before the first seal: all tables end the step.
        bad = None if scale.skip else _push_rest(awake)
        for buffers in self._buffers:
            buffers.push()
        for buffers in self._buffers:
            buffers.seal()
        skip = scale.skip or bad is not None
        tickets = [
            table.seal(numbers, scale.contribution_scale, skip=skip) for table, numbers in awake
        ]
        self._times.sealed(tickets)
        self._take_over([table for table, _ in awake])
        self.results = () if skip else tuple(ticket.future.result() for ticket in tickets)
        for buffers in self._buffers:
            buffers.finish()
        self._times.ended()
        if bad is not None:
            name, table = bad
            raise InvalidTensor(
                f"the gradient of '{name}' has an infinity or a NaN at step {table.handle.clock} "
                f"of table '{table.name}'; expected finite values. The step was skipped on every "
                "server (allow_non_finite=True would apply it)"
            )

    def _take_over(self, tables: list[TrainedTable]) -> None:
        for table in tables:
            pulled = table.finish()
            if self._inner is None or self._adds:
                table.write_parameters()
            elif pulled is not None:
                table.write_gradients(pulled)
        if self._inner is not None and not self._adds:
            self._inner.step()

    def _move(self, scale: _StepScale) -> _StepScale:
        """ADD: the local optimizer takes a step on this worker's own gradients."""
        if self._inner is not None and not scale.skip:
            if scale.contribution_scale != 1.0:
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter.grad.mul_(scale.contribution_scale)
            self._inner.step()
        return _StepScale(1.0, scale.skip)

    def _numbers(self, table: TrainedTable) -> Hyperparameters:
        group = self.param_groups[table.group]
        if self._inner is not None:
            return ()
        check_switches(table.handle.spec.optimizer, group, table.name)
        return numbers_of(table.handle.spec.optimizer, group)

    def _scale(self) -> _StepScale:
        """What `torch.amp.GradScaler` left on the optimizer for this call."""
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        grad_scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        skip = found_inf is not None and bool(found_inf.item())
        if grad_scale is None:
            return _StepScale(1.0, skip)
        # The inverse as GradScaler.unscale_ computes it, so that the products have the same bits.
        return _StepScale(float(grad_scale.double().reciprocal().float()), skip)


class _Hook:
    """A parameter's hook; does not keep its optimizer alive."""

    def __init__(
        self, optimizer: weakref.ref[DistributedOptimizer], table: TrainedTable, index: int
    ) -> None:
        self._optimizer = optimizer
        self._table = table
        self._index = index

    def __call__(self, _: torch.Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._hooked(self._table, self._index)


def _push_rest(
    awake: list[tuple[TrainedTable, Hyperparameters]],
) -> tuple[str, TrainedTable] | None:
    """Sends what is left of the step; the first gradient that is not finite ends that."""
    for table, numbers in awake:
        name = table.push_rest(numbers)
        if name is not None:
            return name, table
    return None


def _inner_optimizer(
    optimizer: Aggregate | Add, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    kind = type(optimizer).__name__
    if optimizer.factory is None:
        raise InvalidConfig(f"{kind} has no factory; expected one that makes a torch optimizer")
    inner = optimizer.factory(groups)
    if not isinstance(inner, torch.optim.Optimizer) or isinstance(inner, torch.optim.LBFGS):
        raise InvalidConfig(
            f"{kind}'s factory made a {type(inner).__name__}; expected a torch optimizer that "
            "uses one gradient a step"
        )
    return inner
