"""`HybridOptimizer`: the rows of Embeddings on the servers, the other parameters at the workers.

    optimizer = ps.HybridOptimizer(client, model, torch.optim.Adam(model.parameters()))
    for ids, numbers, wanted in loader:
        optimizer.zero_grad()
        loss(model(ids, numbers), wanted).backward()
        optimizer.step()

A step, at each worker:

    rows' gradients --push-----------------------------------------> seal --> wait
    others --all-reduce, with what each worker found--> clip ----------> torch's optimizer

Rules:
    - All workers take a step or skip it, both halves of it, whoever had a gradient that is not
      finite.
    - A step that all have agreed on is taken by torch's optimizer at each of them, whatever the
      servers say to one of them (a full table): so the parameters stay equal everywhere.
    - The workers' half is taken together with the seals, without interruption: gradients that come
      later, or zeroing them, never change it.
    - Workers with other hyperparameters would part: all of them skip the step, and say so. So would
      those with other loss scales, where torch's wrappers have added up their gradients.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NoReturn, Unpack

import torch
from torch import distributed, nn

from ps_core.errors import EditRefused, InvalidCheckpoint, InvalidConfig, WaitExpired, listed
from ps_runtime.system.interrupts import uninterrupted
from ps_worker.client.client import Client
from ps_worker.spec.flat_layout import KnownParameters, plain_name
from ps_worker.spec.optimizers import SGD, Outer, ServerOptimizer
from ps_worker.spec.training_options import OptimizerOptions
from ps_worker.steps.steps import StepResult
from ps_worker.training.among_workers.gradient_reduction import (
    GradientReduction,
    clip_together,
    is_sharded,
    own_part,
    reduced_elsewhere,
    unwrapped,
)
from ps_worker.training.among_workers.peers import Peers
from ps_worker.training.among_workers.process_group import init_process_group
from ps_worker.training.among_workers.state_left import StateLeft
from ps_worker.training.among_workers.workers_model import SCHEDULES
from ps_worker.training.clipping import multiply_gradients
from ps_worker.training.distributed_optimizer import DistributedOptimizer
from ps_worker.training.embedding import has_embeddings
from ps_worker.training.hybrid.imported_half import take_imported
from ps_worker.training.hybrid.workers_half import WorkersHalf, write_into
from ps_worker.training.local_optimizer import check_shared, local_state
from ps_worker.training.module_buffers import persistent_buffers
from ps_worker.training.planned_edits import edit_refused
from ps_worker.training.tables.inspection import is_finite
from ps_worker.training.tables.staging import check_dense
from ps_worker.training.tables.step_scale import StepScale, amp_scale_of, forgets_scale, is_unscaled

_SHOWN_COUNT = 5


class _ServedHalf(DistributedOptimizer):
    """The optimizer of what the servers train; the workers' half has the buffers."""

    _keeps_own_buffers = False


class HybridOptimizer(torch.optim.Optimizer):
    """Trains a module in two halves: its Embeddings on the servers, its parameters at the workers,
    which reduce their gradients among themselves with torch.distributed.

    Args:
        client: a worker's client.
        module: the model, or what torch's `DistributedDataParallel` or `fully_shard` made of it.
        optimizer: torch's, of the parameters that the workers keep. Each worker runs it on the mean
            of all workers' gradients.
        served: parameters that the servers train as well; `optimizer` has none of them.
        server_optimizer: of `served`, as of `DistributedOptimizer`.

    Options: as of `DistributedOptimizer`, for what the servers train; without `buffers`, `mode` and
    `aggregate_within`. `clip_norm` is the largest norm of each half.

    Attributes:
        servers: the `DistributedOptimizer` of what the servers train.
        gradient_norm: the norm that the last step of the workers' half was clipped by.

    Parameters in DistributedDataParallel, or FSDP2's, are reduced by these while backward runs;
    others by `step`, in one all-reduce for each dtype, float16's in float32. The workers begin
    with the parameters and buffers of rank 0, also of layers that nothing trains (FSDP2's: with
    their own). Buffers are each worker's own after that.

    torch's process group is made if there is none. It takes in no worker that comes later, and ends
    when one is gone: then start all workers again, from the last checkpoint. A checkpoint of the
    cluster has both halves, of one step, and FSDP2's parameters by rank.

    Blocking: until every worker has called this.

    Raises:
        InvalidConfig: there is nothing for the servers to train; or a parameter is in both halves;
            or one of `served` is in one of torch's wrappers; or the process group is not the
            cluster's workers; or workers have other parameters, or another order of them; or
            several keep the weight of a torch lookup with `max_norm`.
        InvalidCheckpoint: the checkpoint that the cluster goes on from has other parameters, or
            none of the workers', or those of another step.
    """

    _step_supports_amp_scaling = True
    """As of `DistributedOptimizer`."""

    def __init__(
        self,
        client: Client,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        served: Iterable[nn.Parameter] = (),
        server_optimizer: ServerOptimizer | None = None,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        self._client = client
        self._module = unwrapped(module)
        self._local = optimizer
        self._clip_norm = options.get("clip_norm")
        self._may_be_infinite = bool(options.get("allow_non_finite"))
        self.gradient_norm: float | None = None
        served = list(served)
        for name in ("buffers", "mode", "aggregate_within"):
            if name in options:
                raise InvalidConfig(f"HybridOptimizer has no {name}=")
        options["buffers"] = None
        self._check(served, server_optimizer)
        self._check_bounded()
        self._elsewhere = reduced_elsewhere(module)
        self._check_wrapped(served)
        init_process_group(client)
        self._served = set(served)
        self._check_alike()
        self.servers = _ServedHalf(
            client,
            served,
            server_optimizer or SGD(lr=0.0),
            module=self._module,
            **options,
        )
        own = [each for each in self._parameters() if each not in self._elsewhere]
        self._reduced = set(own)
        self._reduction = GradientReduction(own, 1 + 3 * client.world_size, client.world_size)
        self._peers = Peers(client)
        if self._elsewhere:
            self._peers.end_waits_of_torch()
        self._open: _OpenStep | None = None
        self.servers.trained_model.is_reducing = self._is_reducing
        self._known = KnownParameters()
        for group in optimizer.param_groups:
            self._known.add(group)
        self._is_made = False
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        self._share()
        self._is_made = True
        self._begin_alike(own)
        self._go_on(options.get("name", "model"))

    def _go_on(self, name: str) -> None:
        """Have checkpoints save the workers' half, and go on from that which the cluster was
        started from.
        """
        client, key = self._client, f"hybrid/{name}"
        client.checkpoints.save_points.keep_in_step()
        half = self._half = WorkersHalf(
            client, self._module, self._local, self._served, lambda: self.clock, self._share
        )
        client.attach_state(key, half)
        imported = client.checkpoints.imported
        if imported is not None and imported.is_for(f"{name}/"):
            take_imported(imported, half.whole())
        found = client.checkpoints.restored_state(key, per_rank=False)
        if client.restored_from and imported is None and found is None:
            raise InvalidCheckpoint(
                f"{client.restored_from} has no parameters of a HybridOptimizer of the name "
                f"'{name}': rows would go on, and the rest begin anew; expected a checkpoint of "
                "such a run. To take over rows alone, export and import them (pushpull checkpoint)"
            )

    @staticmethod
    def init_process_group(client: Client) -> None:
        """Make this worker part of a torch.distributed process group of all workers, with the
        cluster's ranks, unless it is: gloo, and NCCL where there is a GPU. The constructor does so;
        a script calls this where `DistributedDataParallel` or `fully_shard` wraps the model first.

        Blocking: until every worker has called this.

        Raises:
            InvalidConfig: torch has no torch.distributed; or the script has made a process group
                that is not of the cluster's workers, or some workers alone have one; or the worker
                joined others, whose group takes nobody in.
            WorkerLost: the script's process group has trained before a restore in place: some
                workers may wait in it for a call that others never make.
        """
        init_process_group(client)

    def _check(self, served: list[nn.Parameter], server_optimizer: ServerOptimizer | None) -> None:
        if not isinstance(self._local, torch.optim.Optimizer):
            raise InvalidConfig(
                f"optimizer is {type(self._local).__name__}; expected one of torch's, of the "
                "parameters that the workers keep"
            )
        if isinstance(self._local, DistributedOptimizer | torch.optim.LBFGS):
            raise InvalidConfig(
                f"optimizer is {type(self._local).__name__}; expected one of torch's that uses one "
                "gradient a step; what the servers train belongs in served="
            )
        if not served and not has_embeddings(self._module):
            raise InvalidConfig(
                "the module has no Embedding, and no parameters are served: there is nothing for "
                "the servers; expected one or the other, or torch's own DistributedDataParallel"
            )
        if bool(served) != (server_optimizer is not None):
            raise InvalidConfig("served and server_optimizer belong together; give both or neither")
        outer_steps = self._client.connection.config.outer_steps
        if isinstance(server_optimizer, Outer) or outer_steps:
            given = f"outer_steps is {outer_steps}" if outer_steps else "server_optimizer is Outer"
            raise InvalidConfig(
                f"{given}, which leaves out the servers in most steps; expected one with which "
                "both halves take each step"
            )
        names = {p: plain_name(name) for name, p in self._module.named_parameters()}
        local = set(self._parameters())
        both = [names.get(each, "?") for each in served if each in local]
        if both:
            raise InvalidConfig(
                f"parameters of served are optimizer's, too: {listed(both, _SHOWN_COUNT)}; each "
                "belongs in one of them"
            )

    def _check_bounded(self) -> None:
        """Refuse torch's lookups with `max_norm` whose weights several workers keep."""
        local = set(self._parameters())
        for name, module in self._module.named_modules():
            is_lookup = isinstance(module, nn.Embedding | nn.EmbeddingBag)
            if not is_lookup or module.max_norm is None or module.weight not in local:
                continue
            if self._client.world_size > 1:
                raise InvalidConfig(
                    f"'{plain_name(name)}' has a max_norm, by which each worker's forward pass "
                    "changes the rows of its own batch, so that the workers' parameters would "
                    "part; expected none, or ps.Embedding"
                )

    def _check_wrapped(self, served: list[nn.Parameter]) -> None:
        """Refuse served parameters that torch's wrappers reduce or shard."""
        names = {p: plain_name(name) for name, p in self._module.named_parameters()}
        wrapped = [names.get(each, "?") for each in served if each in self._elsewhere]
        if wrapped:
            raise InvalidConfig(
                f"parameters of served are in DistributedDataParallel or fully_shard: "
                f"{listed(wrapped, _SHOWN_COUNT)}; the servers train whole tensors, and reduce "
                "their gradients. Expected a wrapper of the other layers alone"
            )

    def _check_alike(self) -> None:
        """Refuse parameters that differ from worker to worker, which would be added up all the
        same.
        """
        names: dict[torch.Tensor, str] = {
            p: plain_name(name) for name, p in self._module.named_parameters()
        }
        kinds = {
            "of optimizer": self._parameters(),
            "of those that nothing trains": self._untrained(),
        }
        own = {
            kind: [f"'{names.get(p, '?')}', {tuple(p.shape)} of {p.dtype}" for p in parameters]
            for kind, parameters in kinds.items()
        }
        digest = hashlib.sha256(repr(own).encode()).hexdigest()
        name = "the parameters of HybridOptimizer"
        if len({*self._client.gather(digest, name=f"the digest of {name}")}) == 1:
            return
        first, *others = self._client.gather(own, name=name)
        for kind, (rank, other) in itertools.product(own, enumerate(others, 1)):
            pairs = itertools.zip_longest(first[kind], other[kind], fillvalue="none")
            for number, (here, there) in enumerate(pairs):
                if here != there:
                    raise InvalidConfig(
                        f"parameter {number} {kind} is {here} at worker 0, and {there} at worker "
                        f"{rank}; expected the same model, and the same order, at each"
                    )

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self._local.param_groups:
            yield from group["params"]

    def _untrained(self) -> Iterator[torch.Tensor]:
        """Parameters that neither half has, such as those of frozen layers, but for those that
        torch's wrappers have.
        """
        others = self._served | self._elsewhere | {*self._parameters()}
        return (each for each in self._module.parameters() if each not in others)

    def _share(self) -> None:
        """Have the groups of both halves, for schedules."""
        served = [group for group in self.servers.param_groups if group["params"]]
        self.param_groups = [*self._local.param_groups, *served]
        self._shared = (*self.param_groups,)

    def _check_groups(self) -> None:
        """As `DistributedOptimizer.check_groups`, of both halves."""
        self.servers.check_groups()
        name = "HybridOptimizer"
        check_shared(self.param_groups, self._shared, name)
        self._share()  # the script may have loaded `optimizer` alone
        self._known.check(self._local.param_groups, name)
        self._half.restored.check(self._local.param_groups, name)

    @torch.no_grad()
    def _begin_alike(self, own: list[torch.Tensor]) -> None:
        if self._client.world_size == 1:
            return
        buffers = [buffer for _, buffer in persistent_buffers(self._module)]
        whole = (each for each in buffers if not is_sharded(each))
        for tensor in (*own, *self._untrained(), *whole):
            _begin_as_rank_0(tensor)

    @property
    def clock(self) -> int:
        """The steps of this worker, and those of a checkpoint that it goes on from."""
        return self.servers.clock

    @property  # type: ignore[override]
    def state(self) -> dict[torch.Tensor, Any]:
        """The state of `optimizer`, of the parameters that the workers keep."""
        return local_state(self._local)

    @state.setter
    def state(self, state: dict[torch.Tensor, Any]) -> None:
        if self._is_made:  # torch's constructor sets it
            self._local.state = defaultdict(dict, state)

    @property
    def results(self) -> tuple[StepResult, ...]:
        """The results of the last step on the servers, one a table."""
        return self.servers.results

    # --- torch's own verbs

    @forgets_scale
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """End the step: the workers' parameters and the servers' rows are updated.

        Args:
            closure: as in torch: clears the gradients, evaluates the model, calls `backward` and
                returns the loss.

        Blocking: until every worker has called this, and the servers have the update.

        Raises:
            InvalidTensor: a gradient is not finite at some worker, or beyond what its codec can
                hold (fp16); all have skipped the step. Or one is sparse at this worker, which has
                taken nothing of the step: the others wait for its next call.
            InvalidConfig: `GradScaler.unscale_` was called, which does not reach rows, and hides
                the loss scales where torch's wrappers reduce gradients; or there are more rows of
                one partition than a message takes. Nothing of the step was taken: the others wait
                for the next call. Or the workers have other learning rates, for instance, or other
                loss scales with torch's wrappers: all have skipped the step.
            EditRefused: what is served was changed since the last step, and not under BSP: nothing
                of the step was taken, so that the others wait for the next call.
            WorkerLost: another worker has ended, and so has this run.
            WaitExpired: a worker or a server is late. The next call, or `zero_grad`, ends the step;
                likewise after Ctrl-C. A backward pass before that is refused; settings and the
                workers' parameters that the script changes meanwhile come after that step.
            PushpullError: as `DistributedOptimizer.step`. The workers' half has been taken then.
        """
        if self._open is not None:
            self._end_open()
            return None
        if self.servers.trained_model.is_repeated:
            self.servers.step()
            return None
        self._check_groups()
        self.servers.trained_model.end_step()
        self._client.checkpoints.save_points.reach(is_explicit=False)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = amp_scale_of(self, self.servers.trained_model.rows_name)
        if self._elsewhere and self._client.world_size > 1 and is_unscaled(self):
            raise InvalidConfig(
                "GradScaler.unscale_ was called, and the workers cannot compare their loss scales "
                "then, of which DistributedDataParallel or fully_shard may have added up several: "
                "remove the call, and clip by the optimizer's clip_norm= in place of "
                "clip_grad_norm_"
            )
        self._step(scale)
        return loss

    @torch.no_grad()
    def _step(self, scale: StepScale) -> None:
        worker_count = self._client.world_size
        problem = "" if scale.skip or self._may_be_infinite else scale.told(self._problem())
        served = self.servers.trained_model
        self._check_dense()  # like all that follows, before the others count on the step
        self._check_edits()
        for rows in served.rows:
            rows.check_step(is_skipped=scale.skip or bool(problem))
        for table in served.tables:
            table.check_parameters()
            served.hyperparameters(table, self.servers.param_groups)
        control = [0.0] * (1 + 3 * worker_count)
        control[0] = float(scale.skip)
        control[1 + self._client.rank] = float(bool(problem))
        control[1 + worker_count + self._client.rank] = float(self._settings_digest())
        if self._elsewhere:
            control[1 + 2 * worker_count + self._client.rank] = scale.contribution_scale
        with uninterrupted(self._leave):  # the others count on both halves
            self._reduction.begin(control, scale.contribution_scale)
            self._open = _OpenStep(scale, problem)
            self._client.engine.steps.begun = {
                handle.table.table_id: handle.clock + 1
                for handle, is_awake in self.servers.trained_model.awake_handles()
                if is_awake
            }
            if not scale.skip and not problem:
                self.servers.trained_model.push_rows_ahead()
        self._end_open()

    @torch.no_grad()
    def _end_open(self) -> None:
        """End the step that this worker has begun; an error or Ctrl-C before the servers have its
        seal leaves it open, for another call.
        """
        opened = self._open
        if opened is None:
            return
        left = None if opened.is_taken else opened.left
        try:
            with contextlib.nullcontext() if left is None else left.in_place():
                self._end(opened)
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        """The script goes on before the open step is taken: its changes come after that."""
        opened = self._open
        if opened is not None and not opened.is_taken and opened.left is None:
            parameters = map(own_part, self._parameters())
            opened.left = StateLeft(self.param_groups, parameters)

    def _end(self, opened: _OpenStep) -> None:
        if not opened.is_decided:
            self._reduction.wait(self._peers)
            with uninterrupted():
                self._decide(opened)
        if opened.is_taken:
            self.servers.trained_model.end_step()
        else:
            self._end_servers_half(opened)
        if opened.refusal is not None:
            self._open = None
            raise opened.refusal

    def _end_servers_half(self, opened: _OpenStep) -> None:
        """Seal the step, take the workers' half with it, and wait for the servers."""
        try:
            self.servers.step_scaled(opened.scale, self._take)
        except WaitExpired:
            raise
        except Exception:
            self._take()  # whatever the servers say: the others take it
            raise

    def _decide(self, opened: _OpenStep) -> None:
        """Take the workers' mean, and skip the step if one of them must."""
        reduced, scale, problem = self._reduction.finish(), opened.scale, opened.problem
        self._reduction.give_back()
        worker_count = self._client.world_size
        skips, told = reduced.control[0], reduced.control[1:]
        problems, digests, scales = (
            told[begin : begin + worker_count] for begin in range(0, len(told), worker_count)
        )
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if others:
            opened.refusal = InvalidConfig(
                f"the optimizer of worker {others[0]} has other hyperparameters than that of "
                f"worker 0 (here, at worker {self._client.rank}: {self._settings()}), so their "
                "parameters would part; expected the same at each: all have skipped the step. "
                f"{SCHEDULES}"
            )
        if not problem and any(problems):
            rank = next(rank for rank, is_one in enumerate(problems) if is_one)
            problem = f"worker {rank} has a gradient with an infinity or a NaN, or beyond its codec"
        if not problem and not skips and not reduced.fits() and not self._may_be_infinite:
            problem = f"the mean of the workers' gradients of {self._not_finite(self._reduced)}"
        if not skips and not problem and opened.refusal is None:
            opened.refusal = _other_scales(scales)
        opened.is_decided = True
        if skips or problem or opened.refusal is not None:
            opened.scale = StepScale(skip=True, problem=problem)
            return
        reduced_elsewhere = (p for p in self._parameters() if p in self._elsewhere)
        multiply_gradients(reduced_elsewhere, scale.contribution_scale)
        if self._clip_norm is not None:
            self.gradient_norm = clip_together(self._parameters(), self._clip_norm)

    def _take(self) -> None:
        """Take the workers' half of the open step, once. A step that was refused stays open until
        the script has been told.
        """
        opened = self._open
        if opened is not None and not opened.is_taken:
            with uninterrupted():
                opened.is_taken = True
                if opened.refusal is None:
                    self._open = None
                if not opened.scale.skip:
                    self._local.step()

    def _is_reducing(self) -> bool:
        return self._open is not None and not self._open.is_taken

    def _settings(self) -> str:
        """The hyperparameters of the workers' half, in words."""
        groups = [{**each, "params": len(each["params"])} for each in self._local.param_groups]
        return "; ".join(
            ", ".join(f"{name}={_comparable(group[name])}" for name in sorted(group))
            for group in groups
        )

    def _settings_digest(self) -> int:
        """A number of 24 bits: float32 has it, and its sum with zeros."""
        return zlib.crc32(self._settings().encode()) & 0xFFFFFF

    def _problem(self) -> str:
        """Words for a gradient that is not finite, of those that only this worker has, or that
        torch has reduced, or for one that its codec cannot hold; empty without one.
        """
        served = self.servers.trained_model
        if found := self._not_finite(self._served | self._elsewhere):
            return f"the gradient of {found}"
        found = served.non_finite_rows()
        return found or next(filter(None, (t.beyond_codec() for t in served.tables)), "")

    def _check_dense(self) -> None:
        """Raises InvalidTensor if a gradient that the workers reduce is sparse."""
        for name, parameter in self._module.named_parameters():
            if parameter in self._reduced and parameter.grad is not None:
                check_dense(plain_name(name), parameter, parameter.grad)

    def _check_edits(self) -> None:
        """Raises EditRefused for what the script has changed of the servers' half, where no step is
        all workers' (S16): the others would take the step, and this worker stay behind.
        """
        served = self.servers.trained_model
        if (why := served.why_no_edit()) and (edited := served.edited()):
            raise EditRefused(edit_refused(edited, served.options.name, why))

    def _not_finite(self, parameters: AbstractSet[torch.Tensor]) -> str:
        """The first of these whose gradient is not finite, in words; empty if all are."""
        for name, parameter in self._module.named_parameters():
            if parameter in parameters and parameter.grad is not None:
                gradient = own_part(parameter.grad)
                if gradient.layout is torch.strided and not is_finite(gradient):
                    return f"'{plain_name(name)}' has an infinity or a NaN"
        return ""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch, for both halves; ends a step first whose end `step` has not seen. Blocking,
        Raises: as `step`.
        """
        self._end_open()
        self.servers.zero_grad(set_to_none)
        self._local.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse another group: the halves are fixed when it is made."""
        if not self._is_made:
            super().add_param_group(param_group)
            return
        raise InvalidConfig(
            "a HybridOptimizer takes no further group; give its optimizer all groups before it is "
            "made"
        )

    def state_dict(self) -> dict[str, Any]:
        """The state of both halves: of `optimizer`, and of what is `served`. Rows are in the
        cluster's checkpoints. Ends a step first whose end `step` has not seen. Blocking, Raises:
        as `step`, and as `DistributedOptimizer.state_dict`.
        """
        self._end_open()
        return {"workers": self._local.state_dict(), "servers": self.servers.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, at every worker. Ends a step first whose end `step` has
        not seen. Blocking, Raises: as `step`, and as `DistributedOptimizer.load_state_dict`.
        """
        if {*state_dict} != {"workers", "servers"}:
            raise InvalidConfig("expected the state_dict of a HybridOptimizer")
        self._end_open()
        self.servers.load_state_dict(state_dict["servers"])
        before = self._local.param_groups
        self._local.load_state_dict(state_dict["workers"])
        self._half.restored.groups_loaded(before, self._local.param_groups)
        self._share()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a HybridOptimizer cannot be copied or pickled: it belongs to a connection. Save "
            "optimizer.state_dict(), make the optimizer anew, and load that"
        )


@dataclass(slots=True)
class _OpenStep:
    """A step that the workers reduce; `is_decided`: `scale` is what all of them have agreed on;
    `is_taken`: it is sealed, and the workers' half has been taken or skipped.
    """

    scale: StepScale
    problem: str
    is_decided: bool = False
    is_taken: bool = False
    refusal: InvalidConfig | None = None
    left: StateLeft | None = None  # when a call was cut short


def _other_scales(scales: Sequence[float]) -> InvalidConfig | None:
    """The refusal of a step for which workers have other loss scales, by their inverses; None if
    all have one.
    """
    other = next((rank for rank, each in enumerate(scales) if each != scales[0]), None)
    if other is None:
        return None
    return InvalidConfig(
        f"the loss scale of worker {other} is {1 / scales[other]:g}, and that of worker 0 is "
        f"{1 / scales[0]:g}, so their parameters would part: DistributedDataParallel or "
        "fully_shard has added up gradients of both. All have skipped the step. GradScaler finds "
        "an overflow outside of the wrapper at its own worker alone; expected all layers that the "
        "workers keep in the wrapper, or none (each may have a scale of its own then), or autocast "
        "in bfloat16, which needs no scaler. To go on, call "
        "scaler.update(min(client.gather(scaler.get_scale()))) at every worker"
    )


def _begin_as_rank_0(tensor: torch.Tensor) -> None:
    """Write rank 0's values into a tensor, as bytes: torch's process groups lack some dtypes, and
    of strided tensors send other memory. Sparse and quantized ones have more than one piece.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        given = [tensor.cpu()]
        distributed.broadcast_object_list(given, src=0)
        tensor.copy_(given[0])
        return
    values = tensor.contiguous()
    distributed.broadcast(values.view(-1).view(torch.uint8), src=0)
    if values.data_ptr() != tensor.data_ptr():
        write_into(tensor, values)


def _comparable(value: object) -> object:
    """A hyperparameter as workers compare it: its type alone where it has no plain value. What is
    on a GPU is not read, since that would wait for it.
    """
    if isinstance(value, torch.Tensor) and value.is_cpu and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_comparable(each) for each in value]
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return value if is_plain else type(value).__name__
