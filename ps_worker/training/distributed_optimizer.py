"""`DistributedOptimizer`: a torch optimizer whose parameters live on the servers.

    opt = ps.DistributedOptimizer(client, model, ps.Adam(lr=1e-3))
    for x, y in loader:
        opt.zero_grad()
        loss(model(x), y).backward()    # blocks of gradients leave while backward runs
        opt.step()                      # ends the step; the parameters are the servers' again

Rules:
    - Every step seals every table of the optimizer, whatever has a gradient
      (`ps_worker.training.trained_model`).
    - Hyperparameters are read from `param_groups` when the step ends and travel with it, so torch's
      learning-rate schedulers work as they are.
    - Optimizer state is the servers'; `state_dict` asks for it, and `load_state_dict` gives it to
      them with the next `step` (SEMANTICS S16). With `Aggregate` and `Add` it is the local
      optimizer's and `state_dict` is that one's.
    - Parameters that the script changes between two steps are taken over by the servers with the
      next `step`, if all workers change them alike under BSP; else `step` refuses (SEMANTICS S16).

What it deliberately does not do: average over `accumulate` (scale the loss, as without us).
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar, Unpack

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ps_core.consistency import Consistency
from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_core.manifest import Imported
from ps_worker.client.client import Client
from ps_worker.client.shown_options import THE_CLIENTS, defaults_of, shows
from ps_worker.spec.flat_layout import (
    Parameters,
    named_group,
    named_groups,
    plain_name,
    table_layouts,
)
from ps_worker.spec.optimizers import Add, Aggregate, Custom, ServerOptimizer, check_optimizer
from ps_worker.spec.settings import consistency_of
from ps_worker.spec.training_options import OptimizerOptions, TrainingOptions
from ps_worker.steps.steps import StepResult, TableHandle
from ps_worker.training import joining as succession
from ps_worker.training.local_optimizer import inner_optimizer
from ps_worker.training.model_pull import birth_clock, known_birth, table_prefix
from ps_worker.training.module_buffers import BufferTable, buffer_layouts
from ps_worker.training.optimizer_state import OptimizerState, checked_groups, fill_groups, numbered
from ps_worker.training.served_state import pulled_arrays, torch_state
from ps_worker.training.tables.step_scale import amp_scale_of, check_unscaled
from ps_worker.training.tables.trained_table import TrainedTable
from ps_worker.training.trained_model import TrainedModel

_Base = torch.optim.Optimizer
_P = ParamSpec("_P")
_T = TypeVar("_T")
_SHOWN_TENSOR_COUNT = 5
_names_in_use: weakref.WeakKeyDictionary[Client, set[str]] = weakref.WeakKeyDictionary()


def _plain(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """A method of torch's optimizer as it is written, while nothing is compiled.

    torch wraps it, so that `torch.compile` passes it by; the first call of the wrapped one imports
    the compiler: a second of CPU and 80 MB, for nothing in a script that compiles nothing.
    """
    return method if "torch._dynamo" in sys.modules else inspect.unwrap(method)


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

    Options:
        name (str, 'model'): the first part of its tables' names; two optimizers of one cluster need
            two names.
        consistency (Consistency | str, the client's): `BSP()`, `SSP(staleness)` or `ASP()`, or
            their short form ("ssp:4"). The client's is BSP unless its option says otherwise.
        reduction (str, 'mean'): "mean" or "sum" of the workers' gradients; SSP and ASP apply each
            whole.
        mode (str, 'sealed'): "sealed": a gradient that changes after its block left is sent again
            before the step counts. "eager": the gradient is final when autograd has finished it; a
            later change raises `GradientChangedAfterPush`. Not under BSP, such blocks apply on
            arrival.
        buffers (str | None, 'rank0'): "rank0": every worker has rank 0's buffers after each step;
            "mean": their mean (integers rounded), BSP only; None: each worker keeps its own, and no
            reader sees any. Without a module there are no buffers to speak of.
        kernels (str, 'fast'): "fast", or "exact": bit-equal with torch.optim.
        accumulate (int, 1): backward passes of one step, 1 or more: gradients leave during the last
            of them. A wrong number costs traffic, never correctness (in "eager" mode: an error).
        block_elements (int, 0): elements a block, a multiple of 64; 0 means 262144.
        allow_non_finite (bool, False): apply gradients with infinities and NaNs; else the step is
            skipped, and raises `InvalidTensor`.
        gate_bytes (int, 0): the bound of memory for waiting steps on each server; 0 means the
            server's own.
        clip_norm (float | None, None): the largest norm of all gradients together, above 0; what is
            longer is scaled down to it, as `torch.nn.utils.clip_grad_norm_` does, after the loss
            scale. Under BSP that is the reduced gradient, at one round trip a step more; with
            `Add`, and under SSP and ASP, each worker's own. Not for "eager" steps. None clips
            nothing.
        recompute (int, 3): with `ASP(reject=...)`: how often `step(closure)` computes anew what was
            too stale, and pushes it, before it is given up. 0 never does, nor does `step` without
            closure.

    Attributes:
        results: how the last step ended on each table: what was too stale (`ASP(reject=...)`), and
            whether an update has formed without it (`BSP(backup_workers=...)`); empty if the step
            was skipped.
        gradient_norm: the norm that the last step was clipped by; None without `clip_norm`.

    All workers start from the parameters of rank 0. They must register the same parameters in the
    same order, with `requires_grad` as on the others. Parameters in bfloat16 or float16 have
    float32 masters on the servers, which torch.optim has not: small updates add up.

    What a script does to parameters between two steps (`load_state_dict`, `nn.init`, in-place
    changes of any kind) is taken over with the next step: under BSP, where every worker does the
    same. To clamp in every step, in any setting, give the optimizer `clamp`.

    Blocking: until all tables exist and rank 0's parameters have been taken over.

    Raises:
        InvalidConfig: a setting is wrong, or the name is in use.
        TableExists: another worker trains another model under this name.
        WaitExpired: rank 0 or servers are missing.
    """

    _step_supports_amp_scaling = True
    """`torch.amp.GradScaler` leaves unscaling and skipping to `step`, through `grad_scale` and
    `found_inf`."""

    @shows(OptimizerOptions, {**defaults_of(TrainingOptions), "consistency": THE_CLIENTS})
    def __init__(
        self,
        client: Client,
        parameters: Parameters,
        optimizer: ServerOptimizer,
        *,
        module: nn.Module | None = None,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        check_optimizer(optimizer)
        self._client = client
        self._optimizer = optimizer
        self._model = TrainedModel(
            client, optimizer, TrainingOptions.of(options, client.consistency)
        )
        self._module = parameters if isinstance(parameters, nn.Module) else module
        self._hooks: dict[torch.Tensor, RemovableHandle] = {}
        self._inner: torch.optim.Optimizer | None = None
        self._loss: float | None = None
        self._is_made = False
        self._has_stepped = False
        if self._options.buffers == "mean" and self._module is None:
            raise InvalidConfig("buffers is 'mean' without a module; give module=")
        groups = named_groups(parameters, self._module)
        _check_reduces_alone(groups, self._client.world_size)
        if self._model.adds and self._options.is_eager:
            raise InvalidConfig(
                "mode is 'eager' with Add, which pushes what a whole step did; expected 'sealed'"
            )
        if isinstance(optimizer, Aggregate | Add):
            self._inner = self._model.inner = inner_optimizer(optimizer, groups)
            super().__init__(self._inner.param_groups, dict(self._inner.defaults))
            self._share(self._inner)
        else:
            super().__init__(groups, optimizer.defaults())
        with self._taken_name():
            self._start()
        self._hook_trainable()
        self._is_made = True
        client.checkpoints.save_points.add_model(self._trained)
        self._own_state = OptimizerState(self, self._keeps_parameters)
        client.attach_state(f"optimizer/{self._options.name}", self._own_state)

    def _start(self) -> None:
        """Makes the tables; all workers have rank 0's values in the end."""
        for number in range(len(self.param_groups)):
            self._tables.extend(self._tables_of_group(number))
        if self._module is not None and self._options.buffers is not None:
            self._buffers.extend(
                BufferTable(self._client, self._module, layout, self._options)
                for layout in buffer_layouts(self._options.name, self._module)
            )
        if self._client.checkpoints.imported is not None and self._module is not None:
            _check_known(self._client.checkpoints.imported, self._options.name, self._module)
        self._start_from_rank_zero([*self._tables, *self._buffers])
        self._model.begin()

    @property
    def _keeps_parameters(self) -> bool:
        """Whether the parameters are this worker's own, and the servers have sums."""
        return self._inner is not None and not self._model.adds

    def _trained(self) -> list[tuple[TableHandle, bool]]:
        return [
            *((table.handle, not table.is_asleep) for table in self._tables),
            *((buffers.handle, True) for buffers in self._buffers),
        ]

    @property
    def results(self) -> tuple[StepResult, ...]:
        """How the last step ended on each table."""
        return tuple(self._model.results.values())

    @property
    def gradient_norm(self) -> float | None:
        """The norm that the last step was clipped by."""
        return self._model.gradient_norm

    # --- what it is made of

    @property
    def _options(self) -> TrainingOptions:
        return self._model.options

    @property
    def _tables(self) -> list[TrainedTable]:
        return self._model.tables

    @property
    def _buffers(self) -> list[BufferTable]:
        return self._model.buffers

    # --- torch's own verbs

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """End the step: clock + 1 on every table, and the parameters are the servers' again.

        Under BSP they then are those of every other worker at this clock, bit for bit.

        Where blocks were too stale (`ASP(reject=...)`), `closure` is called again, at the
        parameters that the step brought, and those blocks alone are pushed: a round, which is a
        step of its own, with a clock of its own on every table. There are `recompute` of them at
        most; what is still too stale then is given up, as everything is without a closure.

        Args:
            closure: as torch has it: clears the gradients, evaluates the model, calls `backward`
                and returns the loss.

        Returns:
            What `closure` returned the first time; None without one.

        Blocking: until the update is there: under BSP every worker has taken part.

        Raises:
            InvalidTensor: a gradient is not finite; the step was skipped on every server (in a
                round: what came before it counts).
            InvalidConfig: another worker's hyperparameters or norm differ at this clock; or a
                switch that is the table's for good was changed; or the model is in torch's
                DistributedDataParallel, too, which reduces the gradients among the workers.
            GradientChangedAfterPush: in eager mode.
            EditRefused: parameters were changed since the last step, and not alike by all workers,
                or not under BSP, or by a worker that joins others. The step was not taken; what was
                changed stays so.
            WaitExpired: workers or servers are missing; the message names them. The step stays
                sealed. The next call waits for it, and is no other step unless there was a backward
                pass in between; so it is after Ctrl-C. `zero_grad` waits for it too. Parameters
                that the script changes meanwhile are an edit of the step after it.
        """
        if not self._has_stepped:  # frameworks wrap the model when they have the optimizer
            _check_reduces_alone(self.param_groups, self._client.world_size)
            self._has_stepped = True
        if not self._model.is_repeated:
            self._model.end_step()
            self._client.checkpoints.save_points.reach(is_explicit=False)
            self._loss = None
            if closure is not None:
                check_unscaled(self)
                with torch.enable_grad():
                    self._loss = closure()
        self._hook_trainable()
        try:
            self._model.step(self.param_groups, amp_scale_of(self), closure)
            return self._loss
        finally:
            if not self._model.is_repeated:
                self._loss = None  # it may hold all that backward would need

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch; what left of the gradients that are zeroed takes no part in the step.

        Blocking: until the step before has ended, where `step` could not wait for that.

        Raises:
            WaitExpired: it has not.
        """
        if self._is_made:
            self._model.end_step()
            self._client.checkpoints.save_points.reach(is_explicit=False)
        _plain(_Base.zero_grad)(self, set_to_none)
        self._hook_trainable()
        for table in self._tables:
            table.discard()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch; the group gets tables of its own, which start from rank 0's values.

        All workers must call it after the same step. In a cluster that was started from a
        checkpoint which has the group, at any time before that step of the run is reached again:
        the group goes on from there.

        Blocking: until rank 0 has given the values.

        Raises:
            InvalidConfig: a setting of the group is wrong.
        """
        if not self._is_made:  # torch's constructor hands over the first groups
            _plain(_Base.add_param_group)(self, param_group)
            return
        position = sum(len(group["params"]) for group in self.param_groups)
        group = named_group(param_group, self._module, position)
        if self._inner is not None:
            self._inner.add_param_group(group)
        else:
            _plain(_Base.add_param_group)(self, group)
        try:
            tables = self._tables_of_group(len(self.param_groups) - 1)
            self._start_from_rank_zero(tables)
            self._model.pass_rounds(tables)
        except BaseException:
            self.param_groups.pop()  # a group without tables would never train
            raise
        self._tables.extend(tables)
        self._own_state.group_added()
        self._hook_trainable()

    def state_dict(self) -> dict[str, Any]:
        """The parameter groups, and the optimizer state that the servers hold, in the layout of the
        torch.optim namesake, which can load it. With `Aggregate` and `Add` the local optimizer's.

        State is on the CPU, in float32 (float64 for float64 parameters). Under BSP it is that after
        this worker's last step, at whichever workers ask; elsewhere as it is when it is read.

        Blocking: until the last step has ended, and every server has answered.

        Raises:
            InvalidConfig: `Custom`, whose state has no layout in torch.
            PushpullError: as `Client.wait`.
        """
        if self._inner is not None:
            return self._inner.state_dict()
        self._check_has_layout()
        self._model.end_step()
        loaded = self._model.loaded
        awake = [table for table in self._tables if not table.is_asleep]
        arrays = pulled_arrays(self._client, awake) if loaded is None else loaded.arrays
        entries = torch_state(arrays, self.param_groups)
        self._model.gave_state(entries, self.param_groups)
        self.state.update(entries)
        try:
            found = _plain(_Base.state_dict)(self)
        finally:
            self.state.clear()
        fill_groups(found["param_groups"], self._optimizer)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave, here or of the torch.optim namesake: the groups at
        once, the state with the next `step`. All workers load the same before the same step, under
        BSP. What the servers have already is not sent.

        Blocking: until every server has said what it has.

        Raises:
            InvalidConfig: it is another optimizer's, or of other parameters. Nothing has changed.
            InvalidTensor: an array has another shape, or is not finite. Nothing has changed.
            EditRefused: the setting has no step of all workers, or this worker joins others that
                train. Nothing has changed.
            PushpullError: as `Client.wait`.
        """
        if self._inner is not None:
            self._inner.load_state_dict(state_dict)
            self._share(self._inner)
            return
        self._check_has_layout()
        self._model.end_step()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            hooked = pre_hook(self, state_dict)
            state_dict = state_dict if hooked is None else hooked
        saved = state_dict.get("param_groups")
        groups = checked_groups(saved, self.param_groups, self._optimizer)
        for table in self._tables:
            self._model.numbers(table, groups)
        state = numbered(state_dict.get("state", {}), state_dict["param_groups"])
        self._model.load(state, groups)
        self.param_groups = groups
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _check_has_layout(self) -> None:
        if isinstance(self._optimizer, Custom):
            raise InvalidConfig(
                f"custom update '{self._optimizer.update}' keeps its state on the servers, in no "
                "layout that torch knows; save it with client.checkpoint(), and go on from it with "
                "pushpull train --resume"
            )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"a DistributedOptimizer ('{self._options.name}') cannot be copied or pickled: it "
            "belongs to a connection, and its state is on the servers. Save "
            "optimizer.state_dict(), make the optimizer anew, and load that"
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__reduce_ex__(memo)

    @property
    def has_local_state(self) -> bool:
        """Whether an optimizer runs at this worker (`Aggregate`, `Add`)."""
        return self._inner is not None

    @property
    def clock(self) -> int:
        """Steps that this model has behind it at this worker, rounds included; where one that takes
        the place of a worker that is gone begins, in its schedules too.
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
        return self._model.set_consistency(consistency_of(consistency), after_clock, timeout_s)

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Give every worker the same parameters, with every step of all workers in them: the model
        to evaluate or to save, where workers run apart (SSP, ASP). All workers call it, each after
        its own last step, or between two steps; training goes on after it.

        Under BSP they are the same after each step; it does no harm there. Buffers that the servers
        have come with them.

        Args:
            timeout_s: how long to wait for the others; None means the client's request_deadline_s.

        Blocking: until all workers have called it, have pulled the model, and have said so.

        Raises:
            WaitExpired: somebody is missing, named by the message. Call it again to go on; the
                next `step` goes on with it, too, before it takes its own step. So it is after
                Ctrl-C. What the script changes meanwhile stays.
            EditRefused: a parameter was changed since the last step: its value would be lost.
            InvalidConfig: another worker has made another collective call.
        """
        self._model.synchronize(timeout_s)

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
        name = self._options.name
        birth = known_birth(name, number, self._client.checkpoints.tables_before)
        prefix = table_prefix(name, number, self._birth_clock() if birth is None else birth)
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
        if not self._is_made or not self._options.is_in_lockstep:
            return 0
        return max((birth_clock(t.name) + t.handle.clock for t in self._tables), default=0)

    def _start_from_rank_zero(self, tables: Sequence[TrainedTable | BufferTable]) -> None:
        joins = any(self._client.engine.joins(t.handle.table.table_id) for t in tables)
        is_giver = self._client.rank == 0 and not joins
        if self._client.is_late_joiner:
            succession.check_may_join(isinstance(self._optimizer, Aggregate))
        if joins:
            succession.begin_where_the_others_are(self._client, tables)
        restored = [t for t in tables if t.handle.table.restored_clock is not None]
        given = [t for t in tables if is_giver and t not in restored]
        # What is restored of sums is nobody's parameters: those are in the worker's own state. What
        # was imported is what they begin with.
        is_own = self._keeps_parameters and self._client.checkpoints.imported is None
        own = [t for t in restored if is_own and isinstance(t, TrainedTable)]
        for table in () if joins else tables:
            if table in given:
                table.begin_assign()
            elif table not in own:
                table.begin_pull()
        for table in () if joins else tables:
            table.finish()
        for table in tables:
            if table not in given and table not in own and isinstance(table, TrainedTable):
                table.write_parameters()
        if joins:
            self._model.joined()

    def _hook_trainable(self) -> None:
        """Parameters may be unfrozen at any time; tensors that need no gradient take no hook."""
        for table in self._tables:
            for index, entry in enumerate(table.layout.placed):
                if entry.tensor.requires_grad and self._model.adds:
                    table.is_asleep = False  # what is pushed is there after the step only
                elif entry.tensor.requires_grad and entry.tensor not in self._hooks:
                    table.is_asleep = False
                    hook = _Hook(weakref.ref(self), table, index)
                    self._hooks[entry.tensor] = entry.tensor.register_post_accumulate_grad_hook(
                        hook
                    )

    # --- a step

    def _hooked(self, table: TrainedTable, index: int) -> None:
        self._model.gradient_came()
        arrives = self._options.applies_on_arrival
        numbers = self._model.numbers(table, self.param_groups) if arrives else ()
        table.hooked(index, numbers)


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


def _check_known(imported: Imported, name: str, module: nn.Module) -> None:
    """Refuse what has tensors that the model does not have: it is another model's.

    Tied parameters count under each of their names, as `module.state_dict()` has them; those of
    the module that another optimizer trains count as well.

    Args:
        imported: what was imported.
        name: that of the model's `DistributedOptimizer`.
        module: the model.

    Raises:
        InvalidCheckpoint: naming some of them.
    """
    if not imported.is_for(f"{name}/"):
        return
    unknown = list(imported.unknown([plain_name(key) for key in module.state_dict()]))
    if unknown:
        shown = ", ".join(f"'{tensor}'" for tensor in unknown[:_SHOWN_TENSOR_COUNT])
        other_count = len(unknown) - _SHOWN_TENSOR_COUNT
        more = f" and {other_count} others" if other_count > 0 else ""
        raise InvalidCheckpoint(
            f"{imported.url} has {shown}{more}, which model '{name}' does not have; expected the "
            "state dict of this model, or one that was imported with --prefix for another"
        )


def _check_reduces_alone(groups: Iterable[Mapping[str, Any]], worker_count: int) -> None:
    """Refuse parameters whose gradients another reduces among the workers as well: their module is
    in torch's DistributedDataParallel, since torchrun has started the workers and a framework has
    taken its variables for its own.

    Args:
        groups: the optimizer's.
        worker_count: how many workers there are.

    Blocking: looks at all objects of the process, where it is in a process group of several.

    Raises:
        InvalidConfig: they are a module's that is in DistributedDataParallel with other processes.
    """
    if worker_count == 1 or not distributed.is_available() or not distributed.is_initialized():
        return
    if distributed.get_world_size() == 1:
        return
    ours = {id(parameter) for group in groups for parameter in group["params"]}
    for found in gc.get_objects():
        # `type`, since `isinstance` asks proxies, which may import or answer anything.
        if not issubclass(type(found), DistributedDataParallel):
            continue
        process_count = found.process_group.size()
        if process_count > 1 and any(id(parameter) in ours for parameter in found.parameters()):
            raise InvalidConfig(
                f"the model is in DistributedDataParallel with {process_count} processes, and this "
                f"is one of {worker_count} workers: gradients would be reduced twice, and a "
                "framework deals out the data twice. Train the module itself; where a framework "
                "has wrapped it, remove RANK, WORLD_SIZE and LOCAL_RANK from os.environ after "
                "ps.connect(), before the framework is set up"
            )
