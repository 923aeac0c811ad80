"""`DistributedOptimizer`: a torch optimizer whose parameters live on the servers.

    opt = ps.DistributedOptimizer(client, model, ps.Adam(lr=1e-3))
    for x, y in loader:
        opt.zero_grad()
        loss(model(x), y).backward()    # blocks of gradients leave while backward runs
        opt.step()                      # ends the step; the parameters are the servers' again

Rules:
    - Each step carries the hyperparameters of `param_groups`, as they are at its end, so torch's
      learning-rate schedulers work unchanged.
    - Gradients are not averaged over `accumulate`: scale the loss, as with torch.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, ParamSpec, TypeVar, Unpack

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ps_core.consistency import Consistency
from ps_core.errors import InvalidConfig, JoinRefused
from ps_runtime.system.interrupts import uninterrupted
from ps_worker.client.client import Client
from ps_worker.client.shown_options import OF_THE_CLIENT, THE_CLIENTS, defaults_of, shows
from ps_worker.spec.flat_layout import (
    KnownParameters,
    Parameters,
    named_group,
    named_groups,
    table_layouts,
)
from ps_worker.spec.optimizers import (
    Add,
    Aggregate,
    Custom,
    Outer,
    ServerOptimizer,
    check_optimizer,
)
from ps_worker.spec.settings import consistency_of
from ps_worker.spec.training_options import OptimizerOptions, TrainingOptions
from ps_worker.steps.steps import StepResult
from ps_worker.training import joining
from ps_worker.training.among_workers import later_groups
from ps_worker.training.among_workers.process_group import check_reduces_alone
from ps_worker.training.among_workers.worker_group import worker_group
from ps_worker.training.among_workers.workers_model import WorkersModel
from ps_worker.training.embedding import has_embeddings, owned_rows
from ps_worker.training.local_optimizer import (
    check_fragments,
    check_shared,
    inner_optimizer,
    local_state,
    outer_of,
)
from ps_worker.training.module_buffers import (
    BufferTable,
    OwnBuffers,
    buffer_layouts,
    check_none_is_new,
)
from ps_worker.training.optimizer_state import (
    InnerStepsState,
    OptimizerState,
    check_imported,
    checked_groups,
    fill_groups,
    keep_residuals,
    numbered,
)
from ps_worker.training.served_state import ServedState, pulled_arrays, torch_state
from ps_worker.training.tables.awaited_parameters import AwaitedParameters, check_in_module
from ps_worker.training.tables.step_scale import (
    StepScale,
    amp_scale_of,
    check_unscaled,
    forgets_scale,
)
from ps_worker.training.tables.trained_table import TrainedTable
from ps_worker.training.trained_model import TrainedModel
from ps_worker.training.trained_rows import TrainedRows

_Base = torch.optim.Optimizer
_P = ParamSpec("_P")
_T = TypeVar("_T")
_WITH_INNER = (Aggregate, Add, Outer)
"""Optimizers that run at the workers, too."""

_names_in_use: weakref.WeakKeyDictionary[Client, set[str]] = weakref.WeakKeyDictionary()


def _plain(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """A method of torch's optimizer without its wrapper, unless the script compiles.

    The wrapper keeps `torch.compile` away; its first call imports the compiler, which costs a
    second of CPU and 80 MB.
    """
    return method if "torch._dynamo" in sys.modules else inspect.unwrap(method)


class DistributedOptimizer(torch.optim.Optimizer):
    """Trains a model's parameters on the servers, together with all other workers.

    Args:
        client: a worker's client.
        parameters: a module, or the argument of any torch optimizer: parameters, (name, parameter)
            pairs or groups of them. With a module, its buffers are shared as well, and each step
            takes in the rows of every `Embedding` in it.
        optimizer: `SGD`, `Adam`, `AdamW`, `Adagrad`, `RMSprop`: runs on the servers. `Aggregate`:
            the servers reduce the gradients and each worker runs a torch optimizer of its own.
            `Add`: each worker runs one on its own gradients; the servers add up its updates.
            `Outer`: likewise, for many steps before the servers take one with what all did.
            `Custom`: a custom update on the servers. With the client's `outer_steps`: one of the
            first five, which `Outer` then runs at the workers.
        module: the module, if `parameters` is none: for the names of parameters, for its buffers
            and Embeddings.

    Options:
        name (str, 'model'): the beginning of its tables' names; two optimizers of one cluster need
            two names.
        consistency (Consistency | str, the client's): `BSP()`, `SSP(staleness)` or `ASP()`, or
            their short form ("ssp:4"). The client's is BSP unless its option says otherwise.
        reduction (str, 'mean'): "mean" or "sum" of the workers' gradients; SSP and ASP apply each
            whole.
        mode (str, 'sealed'): "sealed": a gradient that changes after its block left is sent again
            before the step ends. "eager": the gradient is final when autograd has finished it; a
            later change raises `GradientChangedAfterPush`. Under SSP and ASP the servers apply such
            blocks on arrival.
        buffers (str | None, 'rank0'): "rank0": every worker has rank 0's buffers after each step
            (without rank 0 the lowest rank's); "mean": their mean (integers rounded), BSP only;
            None: each worker keeps its own, and readers get none. Needs a module.
        kernels (str, 'fast'): "fast", or "exact": bit-equal with torch.optim.
        accumulate (int, 1): backward passes of one step, 1 or more: gradients leave during the
            last. A wrong number costs traffic, never correctness (in "eager" mode: an error).
        block_elements (int, 0): elements of a block, a multiple of 64; 0 means 262144.
        allow_non_finite (bool, False): apply gradients with infinities and NaNs; else the step is
            skipped, and raises `InvalidTensor`.
        gate_bytes (int, 0): the memory quota of waiting steps on each server; 0 means the server's
            own.
        clip_norm (float | None, None): the largest norm of all gradients together, above 0; a
            longer gradient is scaled down to it, as `torch.nn.utils.clip_grad_norm_` does, after
            the loss scale. Under BSP this clips the reduced gradient, for one round trip more a
            step; with `Add` and `Outer`, and under SSP and ASP, each worker's own. Not in "eager"
            mode. None: no clipping.
        recompute (int, 3): with `ASP(reject=...)`: the number of times that `step(closure)`
            computes and pushes blocks anew that were too stale, before it gives them up. 0: never;
            nor does `step` without closure.
        push_codec (str | None, the client's): how gradients travel: "none", as their dtype; "bf16"
            or "fp16"; "int8", a byte an element; "sign", a bit; "topk:0.01", the largest hundredth
            of each block, or "randomk:0.01", a random one; "lowrank:4", two factors of each block,
            of that rank (PowerSGD). What these five leave out goes with the next gradients and into
            checkpoints. `docs/guides/COMPRESSION.md` compares them.
        pull_codec (str | None, the client's): how parameters travel to this worker: "none", "bf16",
            "fp16", or "int8", which rounds them to the nearest: nothing is fed back.
        aggregate_within (str | None, None): workers that give the same name here push and pull as
            one: they reduce their gradients with torch.distributed, and the one of lowest rank
            pushes the result and gives the others what it pulls. "host": those of one machine. BSP
            only, with the servers' optimizers and without Embeddings. All workers give a name, or
            none. `docs/guides/COMPRESSION.md` says when it pays.
        overlap_pull (bool, False): `step` does not wait for the new parameters, which come while
            the next forward pass runs: each is waited for when it is read as an attribute of its
            module, or by `parameters()` or `state_dict()` of the module. A tensor that the script
            has kept itself has its new value after `wait()`. Needs a module, and the servers'
            optimizers. With backup workers, and in CUDA graphs, `step` waits as usual; in
            compiled models the forward waits for all.

    Attributes:
        results: the results of the last step, one a table: blocks that were too stale
            (`ASP(reject=...)`), and updates made without it (`BSP(backup_workers=...)`); empty if
            the step was skipped, and after an inner step (`Outer`).
        gradient_norm: the norm that the last step was clipped by; None without `clip_norm`.

    Rows of Embeddings keep the optimizer and the consistency of their own tables; `param_groups`
    has neither, so learning-rate schedulers do not reach them (`Embedding.hyperparameters` does).
    The loss scale and `clip_norm` reach them: the norm is of all gradients together. Beside others
    under SSP or ASP, which are clipped by that, gradients under BSP are clipped by theirs alone.

    All workers give the same parameters in the same order, with the same `requires_grad`, and start
    from rank 0's; frozen layers that are not given are each worker's own. Parameters in bfloat16 or
    float16 have float32 masters on the servers, unlike in torch.optim, so small updates add up.

    The next step takes over changes that a script makes to parameters between two steps
    (`load_state_dict`, `nn.init`, in-place changes of any kind), if every worker makes the same
    under BSP. To clamp in every step, under any consistency, give the optimizer `clamp`.

    Blocking: until all tables exist and this worker has rank 0's parameters.

    Raises:
        InvalidConfig: a setting is wrong, or the name is in use; or this worker joins others that
            train, with `aggregate_within`; or a call that was cut short has given other values.
        TableExists: another worker trains another model under this name.
        WaitExpired: rank 0 or servers are missing.
    """

    _keeps_own_buffers = True
    """Checkpoints have the module's buffers where workers do not share them."""

    _step_supports_amp_scaling = True
    """`torch.amp.GradScaler` then leaves unscaling and skipping to `step`, by `grad_scale` and
    `found_inf`."""

    @shows(
        OptimizerOptions,
        {**defaults_of(TrainingOptions), **dict.fromkeys(OF_THE_CLIENT, THE_CLIENTS)},
    )
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
        if outer_steps := client.connection.config.outer_steps:
            optimizer = outer_of(optimizer, outer_steps)
        self._client = client
        self._optimizer = optimizer
        checked = TrainingOptions.of(options, client.consistency)
        self._model = TrainedModel(client, optimizer, checked)
        self._tables, self._buffers = self._model.tables, self._model.buffers
        self._rows = self._model.rows
        self._module = parameters if isinstance(parameters, nn.Module) else module
        self._known, self._served_state = KnownParameters(), ServedState()
        self._hooks: dict[torch.Tensor, RemovableHandle] = {}
        self._loss: float | None = None
        self._is_made = self._has_stepped = False
        self._zeroed_at = (-1, 0)  # the steps before the last `zero_grad`
        has_rows = self._module is not None and has_embeddings(self._module)
        self._check_options(checked, has_rows=has_rows)
        groups = named_groups(parameters, self._module, may_be_empty=has_rows)
        check_reduces_alone(groups, self._client.world_size)
        if self._model.moves and checked.is_eager:
            raise InvalidConfig(
                f"mode is 'eager' with {type(optimizer).__name__}, which pushes what a whole step "
                "did; expected 'sealed'"
            )
        self._check_awaited(groups)
        if isinstance(optimizer, _WITH_INNER):
            inner = self._model.inner = inner_optimizer(optimizer, groups)
            super().__init__(inner.param_groups, dict(inner.defaults))
            self._share(inner)
        else:
            super().__init__(groups, optimizer.defaults())
        with self._taken_name():
            self._start()
        for handle, _ in self._model.awake_handles():
            handle.steps.initial_values = None
        self._hook_trainable()
        for rows in self._rows:
            rows.on_gradient = partial(_row_gradient_came, weakref.ref(self))
        self._is_made = True
        if checked.overlap_pull:
            self._model.awaited = AwaitedParameters(self._module)
            client.awaiting.add(self._model.awaited)
        self._own_state = OptimizerState(self, self._model.aggregates, self._tables)
        client.attach_state(f"optimizer/{checked.name}", self._own_state)
        shared = None if checked.buffers is None else self._module
        if checked.buffers is None and self._module is not None and self._keeps_own_buffers:
            own = OwnBuffers(self._module)
            client.attach_state(f"buffers/{checked.name}", own, per_rank=True)
        self._inner_steps_state = InnerStepsState(self._model, shared)
        if self._model.outer is not None:
            name = f"inner_steps/{checked.name}"
            client.attach_state(name, self._inner_steps_state, per_rank=True)
        # With the inner steps of a checkpoint, from which steps to the next save point count.
        client.checkpoints.save_points.add_model(self._model.awake_handles)
        if self._model.aggregates and self._model.inner is not None:
            self._model.own = WorkersModel(client.rank, self._tables, self._model.inner)

    def _check_options(self, checked: TrainingOptions, *, has_rows: bool) -> None:
        """Refuse options that do not go with the module or the optimizer."""
        if checked.buffers == "mean" and self._module is None:
            raise InvalidConfig("buffers is 'mean' without a module; give module=")
        if checked.aggregate_within and (has_rows or isinstance(self._optimizer, _WITH_INNER)):
            raise InvalidConfig(
                f"aggregate_within is {checked.aggregate_within!r} with "
                + ("Embeddings" if has_rows else type(self._optimizer).__name__)
                + ", which each worker pushes for itself; expected one of the servers' optimizers "
                "and no Embeddings"
            )
        if checked.overlap_pull and (
            self._module is None or isinstance(self._optimizer, _WITH_INNER)
        ):
            raise InvalidConfig(
                "overlap_pull needs a module, whose parameters the servers update; got "
                + ("none" if self._module is None else f"{type(self._optimizer).__name__}")
            )

    def _start(self) -> None:
        """Create the tables, and start from rank 0's values."""
        options, imported = self._model.options, self._client.checkpoints.imported
        self._model.group = worker_group(self._client, options)
        if self._module is not None:
            self._rows.extend(owned_rows(self._module, self._client, self))
            self._model.check_rows_fit(options.consistency)
        check_fragments(self._model.outer, self.param_groups, options)
        for number in range(len(self.param_groups)):
            self._tables.extend(self._tables_of_group(number))
            self._known.add(self.param_groups[number])
        if self._module is not None and options.buffers is not None:
            self._buffers.extend(
                BufferTable(self._client, self._module, layout, options)
                for layout in buffer_layouts(options.name, self._module)
            )
        if self._module is not None and imported is not None:
            of_rows = [rows.handle.table.spec for rows in self._rows]
            check_imported(imported, options.name, self._module, of_rows)
        self._start_from_rank_zero([*self._tables, *self._buffers], self._rows)
        self._model.begin()

    @property
    def results(self) -> tuple[StepResult, ...]:
        """The results of the last step, one a table."""
        return (*self._model.results.values(), *self._model.row_results)

    @property
    def gradient_norm(self) -> float | None:
        """The norm that the last step was clipped by."""
        return self._model.gradient_norm

    @property  # type: ignore[override]
    def state(self) -> dict[torch.Tensor, Any]:
        """The local optimizer's state (`Aggregate`, `Add`, `Outer`). Else the servers have it, and
        this is empty and read-only: `state_dict` asks them. Never false, because
        `torch.distributed.checkpoint` takes a step where it is false, to have state made.
        """
        inner = self._model.inner
        return self._served_state if inner is None else local_state(inner)

    @state.setter
    def state(self, state: dict[torch.Tensor, Any]) -> None:
        if not self._is_made:  # torch's constructor sets it
            return
        if self._model.inner is None:
            self._served_state.refuse("set")
        self._model.inner.state = defaultdict(dict, state)

    # --- torch's own verbs

    @forgets_scale
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """End the step: clock + 1 on every table, and pull the parameters.

        Under BSP they are equal to those of every other worker at this clock, bit for bit. With
        `Outer` only every `inner_steps`-th call does so; others run the local optimizer, and return
        at once.

        If blocks were too stale (`ASP(reject=...)`), this calls `closure` again, at the pulled
        parameters, and pushes only those blocks: a round, which is a step of its own, with a clock
        of its own on every table. After `recompute` rounds it gives up blocks that are still too
        stale; without a closure it gives them up at once.

        Args:
            closure: as in torch: clears the gradients, evaluates the model, calls `backward` and
                returns the loss.

        Returns:
            The result of the first call of `closure`; None without one.

        Blocking: until the update is there: under BSP every worker has taken part.

        Raises:
            InvalidTensor: a gradient is not finite, or beyond what its codec can hold (fp16); the
                step was skipped on every server (in a round: earlier rounds count).
            InvalidConfig: another worker's hyperparameters or norm differ at this clock, or what
                its script has changed (`Aggregate`); or a fixed switch of the table was changed; or
                a group has other parameters than it was given; or the model is also in torch's
                DistributedDataParallel, which reduces the gradients among the workers; or it has
                Embeddings, and `GradScaler.unscale_` was called; or, with `aggregate_within`,
                gradients were written before the last step had ended.
            GradientChangedAfterPush: in eager mode.
            EditRefused: parameters were changed since the last step, and not alike by all workers,
                or not under BSP, or by a joining worker. The step was not taken; the changes stay.
            WorkerLost: with `aggregate_within`, a worker has ended, and so has this run.
            WaitExpired: workers or servers are missing; the message names them. The step stays
                sealed. The next call waits for it, and takes a step of its own only after a
                backward pass, or if the script has written other gradients (by replaying a CUDA
                graph, say); likewise after Ctrl-C. `zero_grad` waits for it too. Parameters that
                the script changes meanwhile are an edit of the step after it.
        """
        self.check_groups()
        if not self._has_stepped:  # frameworks wrap the model when they have the optimizer
            check_reduces_alone(self.param_groups, self._client.world_size)
            self._has_stepped = True
        if not self._model.is_repeated:
            self._model.end_step()
            if self._zeroed_at != self._client.engine.steps.mark:  # else that was the save point
                self._client.checkpoints.save_points.reach(is_explicit=False)
            self._loss = None
            if closure is not None:
                check_unscaled(self)
                with torch.enable_grad():
                    self._loss = closure()
        self._hook_trainable()
        try:
            self._model.step(self.param_groups, amp_scale_of(self, self._model.rows_name), closure)
            return self._loss
        finally:
            if not self._model.is_repeated:
                self._loss = None  # it may hold the whole graph of backward

    # --- for `HybridOptimizer`, whose other half decides with it

    @property
    def trained_model(self) -> TrainedModel:
        """All that it trains on the servers."""
        return self._model

    def check_groups(self) -> None:
        """Refuse parameters without a table; warn of other hyperparameters than a checkpoint's."""
        name = self._model.options.name
        if self._model.inner is not None:
            check_shared(self.param_groups, self._model.inner.param_groups, name)
        self._known.check(self.param_groups, name)
        self._own_state.check(name)

    def step_scaled(self, scale: StepScale, meanwhile: Callable[[], object] | None = None) -> None:
        """As `step`, from a save point and with this scale; calls `meanwhile` before it waits."""
        self._hook_trainable()
        self._model.step(self.param_groups, scale, meanwhile=meanwhile)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch; blocks of the zeroed gradients that have left take no part in the step.

        Blocking: until the last step has ended, if `step` could not wait for that.

        Raises:
            WaitExpired: it has not.
            InvalidTensor: a gradient of that step was not finite, and no other call has said so.
        """
        if self._is_made:
            self._model.end_step(is_zeroing=True)
            self._client.checkpoints.save_points.reach(is_explicit=False)
            self._zeroed_at = self._client.engine.steps.mark
        _plain(_Base.zero_grad)(self, set_to_none)
        self._model.group.renewed()
        self._client.engine.steps.has_gradient = False
        self._hook_trainable()
        for table in self._tables:
            table.discard()
        for rows in self._rows:
            rows.discard()
        self._model.tell()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch; the group gets tables of its own, which start from rank 0's values.

        All workers must call it after the same step; under ASP and with backup workers, one to
        which it comes at another clock passes clocks. In a cluster that was started from a
        checkpoint with the group, they may call it at any time before that step is reached again:
        the group goes on from the checkpoint.

        Blocking: until the last step has ended, and rank 0 has given the values.

        Raises:
            InvalidConfig: a setting of the group is wrong, or the module has buffers that it did
                not have when the optimizer was made: workers would not share them.
        """
        if not self._is_made:  # torch's constructor hands over the first groups
            _plain(_Base.add_param_group)(self, param_group)
            return
        self._model.end_step()
        position = sum(len(group["params"]) for group in self.param_groups)
        group = named_group(param_group, self._module, position)
        self._check_awaited([group])
        if self._module is not None and self._model.options.buffers is not None:
            check_none_is_new(self._module, self._buffers)
        if self._model.inner is not None:
            self._model.inner.add_param_group(group)
        else:
            _plain(_Base.add_param_group)(self, group)
        try:
            tables = self._tables_of_group(len(self.param_groups) - 1)
            self._start_from_rank_zero(tables)
            later_groups.keep_apart(self._model.clocks, tables)
        except BaseException:
            self.param_groups.pop()  # a group without tables would never train
            raise
        self._known.add(self.param_groups[-1])
        self._tables.extend(tables)
        for table in tables:
            table.handle.steps.initial_values = None
        if self._model.own is None:
            self._own_state.group_added()
        else:
            self._model.own.added(tables, self._own_state.group_added)
        self._inner_steps_state.take(tables)
        self._hook_trainable()

    def state_dict(self) -> dict[str, Any]:
        """The parameter groups, and the servers' optimizer state, in the layout of the torch.optim
        namesake, which can load it. With `Aggregate`, `Add` and `Outer` the local optimizer's.

        State is on the CPU, in float32 (float64 for float64 parameters). Under BSP it is the state
        after this worker's last step; else the servers' state of the moment.

        Blocking: until the last step has ended, and every server has answered.

        Raises:
            InvalidConfig: `Custom`, whose state has no layout in torch.
            PushpullError: as `Client.wait`.
        """
        self._check_has_layout()
        self._model.end_step()  # with `Aggregate` the local optimizer takes its part of it then
        if self._model.inner is not None:
            return self._model.inner.state_dict()
        loaded = self._model.loaded
        awake = [table for table in self._tables if not table.is_asleep]
        arrays = pulled_arrays(self._client, awake) if loaded is None else loaded.arrays
        entries = torch_state(arrays, self.param_groups)
        self._model.gave_state(entries, self.param_groups)
        with self._served_state.holding(entries):
            found = _plain(_Base.state_dict)(self)
        fill_groups(found["param_groups"], self._optimizer)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, of this class or the torch.optim namesake: the groups at
        once, the state with the next `step`. All workers load the same before the same step, under
        BSP. State that the servers have already is not sent.

        Blocking: until every server has given its state.

        Raises:
            InvalidConfig: it is another optimizer's, or of other parameters. Nothing has changed.
            InvalidTensor: an array has another shape, or is not finite. Nothing has changed.
            EditRefused: the consistency has no step of all workers, or this worker joins others
                that train. Nothing has changed.
            PushpullError: as `Client.wait`.
        """
        self._check_has_layout()
        self._model.end_step()
        if (inner := self._model.inner) is not None:
            before = self.param_groups
            inner.load_state_dict(state_dict)
            self._share(inner)
            self._own_state.groups_loaded(before)
            return
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            hooked = pre_hook(self, state_dict)
            state_dict = state_dict if hooked is None else hooked
        saved = state_dict.get("param_groups")
        groups = checked_groups(saved, self.param_groups, self._optimizer)
        for table in self._tables:
            self._model.hyperparameters(table, groups)
        state = numbered(state_dict.get("state", {}), state_dict["param_groups"])
        self._model.load(state, groups)
        before, self.param_groups = self.param_groups, groups
        self._own_state.groups_loaded(before)
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
            f"a DistributedOptimizer ('{self._model.options.name}') cannot be copied or pickled: "
            "it belongs to a connection, and its state is on the servers. Save "
            "optimizer.state_dict(), make the optimizer anew, and load that"
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__reduce_ex__(memo)

    @property
    def has_local_state(self) -> bool:
        """True if a torch optimizer runs at this worker (`Aggregate`, `Add`, `Outer`)."""
        return self._model.inner is not None

    @property
    def clock(self) -> int:
        """The steps that this worker has taken with the model, rounds included; a late joiner
        begins at this step, in its schedules too. With `Outer` the outer steps.
        """
        return self._model.clock

    def set_consistency(
        self,
        consistency: Consistency | str,
        *,
        after_clock: int = 0,
        timeout_s: float | None = None,
    ) -> int:
        """Change the consistency of all tables of this model while workers train, as
        `Client.set_consistency` does for one. Call it between two steps, at every worker.

        Returns:
            The last clock of the old setting, the highest of all tables.

        Blocking: until every server has prepared the changes; a few milliseconds a table.

        Raises:
            InvalidConfig: as `Client.set_consistency`; or this model does not support it:
                `buffers="mean"` and `Aggregate` need BSP, fragments of `Outer` no backup workers.
            WaitExpired: a server did not prepare in time; call again to change the other tables.
        """
        return self._model.set_consistency(consistency_of(consistency), after_clock, timeout_s)

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Pull the same parameters at every worker, with every step of all workers in them: a model
        to evaluate or to save under SSP and ASP. All workers call it, each after its own last step,
        or between two; under BSP and SSP after as many steps, inner ones too: one that takes more
        waits for those in this call, and they for it. Buffers on the servers come with them.

        Under BSP parameters are the same after each step anyway; with `Outer` after each outer
        step, and this takes one early, or several, until the servers have all inner steps. With
        `Add` and a codec that sends a part of each update, they have as well what this worker has
        still to send: until its next step, this takes that out.

        Args:
            timeout_s: None means the client's request_deadline_s.

        Blocking: until all workers have called it and have pulled the model.

        Raises:
            WaitExpired: a worker is missing, named by the message. The same call goes on with it;
                so does the next `step`, before it takes its own step; likewise after Ctrl-C.
                Changes that the script makes meanwhile stay.
            EditRefused: a parameter was changed since the last step: its value would be lost.
            InvalidTensor: with `Outer`, as `step`; all workers have the model, without that step.
            InvalidConfig: another worker has made another collective call.
        """
        self._model.synchronize(self.param_groups, timeout_s)

    def wait(self) -> None:
        """With `overlap_pull`: wait for the parameters of the last step.

        Blocking: until they are here.

        Raises:
            PushpullError: as `Client.wait`; the next call goes on.
        """
        self._model.awaited.wait()

    def close(self) -> None:
        """Remove the hooks of the parameters; the tables stay. Idempotent.

        Blocking: as `wait`.
        """
        self._model.awaited.close()
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    # --- at the start

    def _share(self, inner: torch.optim.Optimizer) -> None:
        self.param_groups = inner.param_groups
        self.defaults = inner.defaults

    @contextlib.contextmanager
    def _taken_name(self) -> Iterator[None]:
        """Takes the name for this optimizer, unless the block fails."""
        if self._client.is_reader:
            raise InvalidConfig("the client is a reader's; expected a worker's (role='worker')")
        name, names = self._model.options.name, _names_in_use.setdefault(self._client, set())
        if name in names:
            raise InvalidConfig(
                f"name '{name}' is another DistributedOptimizer's of this client; give each its "
                "own name="
            )
        names.add(name)
        try:
            yield
        except BaseException:
            names.discard(name)
            raise

    def _check_awaited(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Refuse parameters that would be read without being awaited."""
        if self._model.options.overlap_pull and self._module is not None:
            check_in_module(self._module, groups)

    def _tables_of_group(self, number: int) -> list[TrainedTable]:
        group, optimizer = self.param_groups[number], self._optimizer
        if self._model.inner is None:
            optimizer = optimizer.with_group(group)
        elif group.get("clamp") is not None and "clamp" not in self.defaults:
            raise InvalidConfig(
                f"parameter group {number} has clamp={group['clamp']} with "
                f"{type(optimizer).__name__}, whose torch optimizer ignores it; expected none"
            )
        clocks = self._model.clocks if self._is_made else None
        prefix, options = later_groups.begun(self._client, self._model.options, number, clocks)
        layouts = table_layouts(prefix, group)
        tables = [TrainedTable(self._client, each, number, optimizer, options) for each in layouts]
        for table in tables:
            table.is_followed = not self._model.group.is_leader
            keep_residuals(self._client, self._model, table)
        if isinstance(optimizer, Custom) and tables:
            # Fill in the servers' defaults, so that schedulers find and change them.
            for name, value in tables[0].handle.spec.optimizer.hyperparameters:
                group.setdefault(name, value)
                self.defaults.setdefault(name, value)
        return tables

    def _start_from_rank_zero(
        self, tables: Sequence[TrainedTable | BufferTable], rows: Sequence[TrainedRows] = ()
    ) -> None:
        for table in tables:
            table.check_as_given()
            table.handle.inner_steps = self._model.inner_steps
        joins = any(self._client.engine.joins(t.handle.table.table_id) for t in tables)
        if self._client.is_late_joiner and isinstance(self._optimizer, Aggregate):
            raise JoinRefused(
                f"worker {self._client.rank} joins others that train, and with Aggregate only they "
                "have the parameters: start all workers again, together, from the last checkpoint "
                "(pushpull train --resume), or train with Add"
            )
        restored = [t for t in tables if t.handle.table.restored_clock is not None]
        gives = self._client.rank == 0 and not joins
        # One that an interrupted call has given is pulled.
        given = [t for t in tables if gives and not (t in restored or t.handle.steps.has_assigned)]
        # Restored sums are not parameters, which the worker's own state has; imported values are.
        is_own = self._model.aggregates and self._client.checkpoints.imported is None
        own = [t for t in restored if is_own and isinstance(t, TrainedTable)]
        if joins:
            joining.begin_where_the_others_are(self._client, tables, rows)
        else:
            with uninterrupted():
                for table in given:
                    table.begin_assign()
            for table in (t for t in tables if t not in given and t not in own):
                table.begin_pull()
            for table in tables:
                table.finish()
            for table in given:
                if table.handle.codecs.pull is not None:  # the others have rounded values
                    table.begin_pull()
                    table.finish()
        with uninterrupted():
            for table in tables:
                is_as_given = table in given and table.handle.codecs.pull is None
                if not is_as_given and table not in own and isinstance(table, TrainedTable):
                    table.begin_as_pulled()
        if joins:
            self._model.joined()

    def _hook_trainable(self) -> None:
        """Hook parameters that the script has unfrozen; torch hooks no other tensors."""
        for table in self._tables:
            for index, entry in enumerate(table.layout.placed):
                if not entry.tensor.requires_grad:
                    continue
                table.wake()
                if entry.tensor not in self._hooks:
                    hook = partial(_hooked, weakref.ref(self), weakref.ref(table), index)
                    handle = entry.tensor.register_post_accumulate_grad_hook(hook)
                    self._hooks[entry.tensor] = handle


def _hooked(
    owner: weakref.ref[DistributedOptimizer],
    its_table: weakref.ref[TrainedTable],
    index: int,
    on: torch.Tensor,
) -> None:
    """A parameter's hook, which does not keep its optimizer or their client alive."""
    optimizer, table = owner(), its_table()
    if optimizer is None or table is None or optimizer._client.is_closed:
        return  # another one may train the module now
    model = optimizer._model
    if on.is_cuda and torch.cuda.is_current_stream_capturing():
        model.are_replayed = True
        return
    model.gradient_came()
    if model.moves or not model.group.is_alone:  # what it pushes exists only after the step
        return
    arrives = model.options.applies_on_arrival
    table.hooked(index, model.hyperparameters(table, optimizer.param_groups) if arrives else ())


def _row_gradient_came(reference: weakref.ref[DistributedOptimizer]) -> None:
    optimizer = reference()
    if optimizer is not None and not optimizer._client.is_closed:
        optimizer._model.gradient_came()
