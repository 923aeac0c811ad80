"""Workers that push and pull as one: they reduce their gradients, and share one pull.

    each member:  gradients --reduce--> the members' mean, everywhere
    each member:  .grad <--the mean, times the member's loss scale
    leader:       .grad, sealed with their number over its loss scale --push--> servers
    each member:  seal ------------------------------> servers
    leader:       parameters <--pull-- servers, --broadcast--> members

Rules:
    - The leader is the member of lowest rank. Every member seals every step; one that pushes
      nothing takes part with zeros. So the servers know of no group: they divide by all workers,
      compare what all have sealed, and wait for each of them.
    - A step that one member skips is skipped by all.
    - Members make the same calls in the same order: a reduction for each step, and a broadcast for
      each clock, those of edits included. A step whose reduction has begun is ended by a later call
      if a deadline or Ctrl-C cut the first one short, since the others take it: with the gradients
      that it was begun with, whatever the script has done to them meanwhile.
    - If the leader's step or pull has failed, the others pull for themselves, and are told why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import distributed

from ps_core.consistency import Mode
from ps_core.errors import InvalidConfig, PushpullError, WaitExpired
from ps_runtime.observe import logs
from ps_runtime.system.capacity import machine_name
from ps_runtime.system.interrupts import uninterrupted
from ps_worker.compression.push_encoder import BEYOND_HALF
from ps_worker.spec.training_options import HOST, TrainingOptions
from ps_worker.training.among_workers.gradient_reduction import GradientReduction, Group
from ps_worker.training.among_workers.peers import Peers
from ps_worker.training.among_workers.process_group import init_process_group, subgroups
from ps_worker.training.among_workers.state_left import StateLeft
from ps_worker.training.tables.gradient_marks import GradientMarks
from ps_worker.training.tables.staging import check_dense
from ps_worker.training.tables.step_scale import StepScale
from ps_worker.training.tables.trained_table import TrainedTable

if TYPE_CHECKING:
    from ps_worker.client.client import Client

_HALF_MOST = torch.finfo(torch.float16).max

_MOST = 2.0**48
"""The largest gradient in a unit above 1: so norms of it are finite at all members, or at none."""

_Tables: TypeAlias = Sequence[TrainedTable]


@dataclass(slots=True)
class _BegunStep:
    """A step that the members reduce; `agreed` is what they have agreed on, `unit` that of this
    member's gradients: its loss scale, if the mean has room for it there; `marks` are those of the
    gradients when a call was cut short, if no hooks tell of others.
    """

    reduction: GradientReduction
    scale: float
    problem: str
    agreed: StepScale | None = None
    unit: float = 1.0
    marks: GradientMarks | None = None
    left: StateLeft | None = None  # the settings when a call was cut short


class WorkerGroup:
    """The members' ranks, in order; this worker alone needs no process group.

    Attributes:
        is_leader: this worker pushes and pulls for the others.
        pushes_for: the ranks whose gradients this worker pushes: all members', or no one's.
    """

    def __init__(
        self,
        client: Client,
        ranks: Sequence[int],
        group: Group = None,
        *,
        may_be_infinite: bool = False,
    ) -> None:
        self.is_leader = client.rank == ranks[0]
        self.pushes_for = tuple(ranks) if self.is_leader else ()
        self._client = client
        self._rank = client.rank
        self._ranks = ranks
        self._group = group
        self._may_be_infinite = may_be_infinite
        self._peers, self._everyone = Peers(client, ranks), Peers(client)
        self._reduced: list[TrainedTable] = []
        self._reduction: GradientReduction | None = None
        self._begun: _BegunStep | None = None
        self._is_in_less = False  # the gradients are in a smaller unit than their loss scale
        self._flag = torch.zeros(1, dtype=torch.uint8)  # 1: the leader has pulled the values
        self._shared: object = None  # the step whose values are broadcast, or were last
        self._works: list[Any] | None = None  # what has not ended of that; None: not begun

    @property
    def is_alone(self) -> bool:
        return len(self._ranks) == 1

    @property
    def has_begun(self) -> bool:
        """True if the members' next step was begun, and is not sealed here."""
        return self._begun is not None

    def sealed(self) -> None:
        """The step is sealed, or was given up by all workers."""
        if self._begun is not None:
            self._client.engine.steps.begun = {}
        self._begun = None

    def renewed(self) -> None:
        """The gradients of that step will not be used again."""
        self._is_in_less = False

    def reduced(self, tables: _Tables, scale: StepScale) -> StepScale:
        """Give the parameters of all tables that are awake the mean of the members' gradients, in
        the unit that this member's have; a later call ends what was begun. A step that is skipped
        leaves them as they are.

        Returns:
            The scale to seal the step with: each member's makes the same of its gradients.

        Blocking: until every member has called it.

        Raises:
            InvalidConfig: somebody has changed the consistency of a table; or the gradients are in
                a smaller unit than the loss scale.
            InvalidTensor: a gradient is sparse.
            WorkerLost: a worker of the cluster has ended.
            WaitExpired: a member is late; the next call waits on.
        """
        if self._group is None:  # the cluster has no groups
            return scale
        begun = self._begun
        if begun is None:
            self._everyone.check()
            self._check_lockstep(tables)
            if self.is_alone:
                return scale
            begun = self._begin([table for table in tables if not table.is_asleep], scale)
        if begun.agreed is None:
            begun.reduction.wait(self._peers)
        with uninterrupted():
            begun.agreed = begun.agreed or self._agreed(begun)
            if not begun.agreed.skip:  # the script may have changed what an earlier call gave
                begun.reduction.give_back(begun.unit)
        return begun.agreed

    @contextlib.contextmanager
    def marking(
        self, marks: Callable[[], GradientMarks | None], groups: Sequence[Mapping[str, Any]]
    ) -> Iterator[None]:
        """Around all that comes before a step is sealed: if that is cut short, take marks of the
        gradients, by which `check_gradients` knows others. None: hooks tell of them. A later call
        seals the step with the settings that `groups` had then.
        """
        left = None if self._begun is None else self._begun.left
        try:
            with contextlib.nullcontext() if left is None else left.in_place():
                yield
        except BaseException:
            if self._begun is not None:
                self._begun.marks = marks()
                self._begun.left = left or StateLeft(groups)
            raise

    def check_gradients(self, marks: Callable[[], GradientMarks]) -> None:
        """InvalidConfig if the script has written others since a step was cut short, once: the
        reduced ones will be written over them.
        """
        begun = self._begun
        if begun is None or begun.marks is None:
            return
        before, now = begun.marks, marks()
        begun.marks = now
        if now.differ_from(before):
            raise InvalidConfig(
                "gradients were written before the last step has ended, which will write the "
                "reduced gradients; call step() or zero_grad() until it returns, and compute them "
                "anew"
            )

    def _check_lockstep(self, tables: _Tables) -> None:
        for table in tables:
            setting = self._client.consistency_of(table.handle)
            if setting.mode is not Mode.BSP or setting.backup_workers:
                raise InvalidConfig(
                    f"table '{table.name}' is under {setting} now, and aggregate_within needs BSP "
                    "without backup workers; set it back, and call step() again"
                )

    def _begin(self, tables: list[TrainedTable], scale: StepScale) -> _BegunStep:
        if self._is_in_less:
            raise InvalidConfig(
                "the gradients are those of a step that was not taken: their mean, which had no "
                "room for the loss scale. Call the optimizer's zero_grad(), compute them anew, and "
                "call step()"
            )
        for entry in (entry for table in tables for entry in table.layout.placed):
            if entry.tensor.grad is not None:
                check_dense(entry.name, entry.tensor, entry.tensor.grad)
        problem = ""
        if not scale.skip and not self._may_be_infinite:
            problem = next(filter(None, (table.non_finite_gradient() for table in tables)), "")
        if self._reduction is None or tables != self._reduced:
            parameters = (entry.tensor for table in tables for entry in table.layout.placed)
            count = len(self._ranks)
            self._reduction = GradientReduction(parameters, 2 + count, count, self._group)
            self._reduced = tables
        has_problem = [float(bool(problem) and rank == self._rank) for rank in self._ranks]
        is_narrow = self.is_leader and any(table.pushes_half for table in tables)
        control = [float(scale.skip), float(is_narrow), *has_problem]
        with uninterrupted():  # the others count on it
            self._reduction.begin(control, scale.contribution_scale)
            self._begun = _BegunStep(self._reduction, scale.contribution_scale, problem)
            self._client.engine.steps.begun = {
                table.handle.table.table_id: table.handle.clock + 1 for table in tables
            }
        return self._begun

    def _agreed(self, begun: _BegunStep) -> StepScale:
        reduced, problem = begun.reduction.finish(), begun.problem
        skips, is_narrow, *problems = reduced.control
        if not problem and any(problems):
            rank = next(r for r, has_one in zip(self._ranks, problems, strict=True) if has_one)
            problem = f"worker {rank}, of the same group, has a gradient with an infinity or a NaN"
        if not (problem or skips or reduced.fits() or self._may_be_infinite):
            problem = f"the sum of the gradients of workers {self._ranks} has an infinity or a NaN"
        most = _HALF_MOST if is_narrow else _MOST
        if is_narrow and not (problem or skips or reduced.fits(limit=most)):
            problem = f"the mean of the gradients of workers {self._ranks} is {BEYOND_HALF}"
        if problem or skips:
            return StepScale(skip=True, problem=problem)
        begun.unit = reduced.unit(1.0 / begun.scale, most)
        self._is_in_less = begun.unit < 1.0 / begun.scale
        return StepScale(len(self._ranks) / begun.unit)

    @contextlib.contextmanager
    def sharing(self, tables: _Tables, step: object) -> Iterator[None]:
        """Around the wait for the end of a step, or of an edit: after it, every member has the
        values that the leader has pulled of `tables`. Once for each `step`, however often its end
        is waited for.

        Blocking: until the leader's pull has ended.

        Raises:
            WorkerLost: a member has ended.
            WaitExpired: the leader is late; the next call waits on.
        """
        if self.is_alone:
            yield
            return
        if self._shared is not step:
            self._works = None
            self._shared = step
        if not self.is_leader:
            self._broadcast(tables)
            with uninterrupted():
                if not self._flag:
                    self._flag.fill_(1)
                    for table in tables:
                        table.begin_pull()
        try:
            yield
        except WaitExpired:
            raise
        except PushpullError:
            if self.is_leader:
                with contextlib.suppress(PushpullError):  # the script hears of its own
                    self._broadcast(tables, is_pulled=False)
            raise
        if self.is_leader:
            self._broadcast(tables)

    def _broadcast(self, tables: _Tables, *, is_pulled: bool = True) -> None:
        """Give the leader's values to all; ends a broadcast that was begun."""
        if self._works is None:
            self._flag.fill_(is_pulled)
            with uninterrupted():
                self._works = [
                    distributed.broadcast(values, self._ranks[0], self._group, async_op=True)
                    for values in (self._flag, *(table.pulled_bytes for table in tables))
                ]
        while self._works:
            giver = None if self.is_leader else self._ranks[0]
            self._peers.wait(self._works[0], is_cpu=True, giver=giver)
            del self._works[0]


def worker_group(client: Client, options: TrainingOptions) -> WorkerGroup:
    """The group of this worker, as `aggregate_within` says.

    Blocking: until every worker has called it.

    Raises:
        InvalidConfig: the torch.distributed process group is not the cluster's workers.
        JoinRefused: this worker joins others that train.
    """
    name = options.aggregate_within
    if name is None or client.world_size == 1:
        return WorkerGroup(client, [client.rank])
    init_process_group(client)
    label = machine_name() if name == HOST else name
    groups: dict[str, list[int]] = {}
    for rank, each in enumerate(client.gather(label, name=f"the groups of '{options.name}'")):
        groups.setdefault(each, []).append(rank)
    made = dict(zip(groups, subgroups(groups.values()), strict=True))
    ranks = groups[label]
    logs.info("worker_group_made", name=options.name, group=name, ranks=ranks, leader=ranks[0])
    return WorkerGroup(client, ranks, made[label], may_be_infinite=options.allow_non_finite)
