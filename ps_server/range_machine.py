"""The range machine: all that is decided about one table in one range (SEMANTICS S1-S6).

    arrive -> [INVALID | REFUSED | held] -> sealed -> in effect -> folded -> recorded -> committed

BSP: update c forms when the seal of clock c of every member is in effect; steps are folded in rank
order as soon as their turn comes. ASP: a step is folded and recorded when its seal takes effect, an
eager push when it arrives.

Rules:
    - A seal takes effect when every entry of a lower sequence has an outcome or is held, and the seal of
      the clock before it is in effect.
    - A decision is a Record; outcomes are given when it commits. With one replica that is at once.
    - An entry that passed session and epoch checks ends in exactly one outcome; a refusal for room ends
      nothing.

Invariants:
    RM-1  Each sequence of an incarnation is unseen, held, missing (given back) or ended; never two.
    RM-2  Under BSP update c is applied after update c - 1 and holds each member's step once, in rank order.
    RM-3  Nothing is folded before the range has its initial values.
    RM-4  A pull is answered only from committed state that its gate allows.

What it deliberately does not do: look into payloads, know sessions or epochs (`server_machine` checks
them), or replicate (a later record path hooks in at `_commit`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from ps_core import limits
from ps_core.errors import (
    AlreadyPast,
    Fenced,
    InvalidConfig,
    InvalidKeys,
    InvalidTensor,
    Overloaded,
    PushpullError,
    WaitExpired,
    check,
)
from ps_core.keys import Incarnation, RangeId
from ps_core.ledger import Ending, Ledger, Outcome
from ps_core.tables import Hyperparameters, InitializerKind, Mode, OptimizerKind, Table
from ps_server.events import (
    AnswerPull,
    Apply,
    Assign,
    Contributor,
    Effect,
    Fold,
    PullEvent,
    PushEvent,
    Record,
    RefusePull,
    ReplyKind,
    ReplyTo,
    SealEvent,
    SealTerms,
    Sender,
    WithdrawEvent,
)
from ps_server.room import Step


class Room(Protocol):
    """What a range asks of its table's gate memory; giving back reaches every range of the table."""

    def admit(self, step: Step, byte_count: int, effects: list[Effect]) -> bool:
        """Whether there is room; effects of making it are appended."""

    def release(self, step: Step, byte_count: int) -> None:
        """A payload is no longer staged."""


@dataclass(slots=True, eq=False)
class _Push:
    """A push that is held: `payload` is None once it is folded or dropped."""

    sender: Sender
    sequence: int
    block: int
    byte_count: int
    payload: object | None
    pulled_peer_version: int | None


@dataclass(slots=True, eq=False)
class _Step:
    """One worker's step on its way."""

    clock: int
    pushes: dict[int, _Push] = field(default_factory=dict)  # by sequence
    blocks: dict[int, int] = field(default_factory=dict)  # block -> sequence
    missing: dict[int, Sender] = field(default_factory=dict)  # given back, by sequence
    invalid: set[int] = field(default_factory=set)
    seal: SealEvent | None = None
    skip: bool = False
    eager: Hyperparameters | None = None


@dataclass(slots=True, eq=False)
class _Worker:
    rank: int
    incarnation: Incarnation
    sealed_clock: int  # the newest seal in effect
    done_clock: int  # the newest step that is recorded (ASP)
    last_heard_s: float
    ledger: Ledger = field(default_factory=Ledger)
    steps: dict[int, _Step] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)  # sequence -> clock
    own_updates: dict[int, int] = field(default_factory=dict)  # block -> updates with a part of it
    left_clock: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a worker is, for status."""

    rank: int
    incarnation: Incarnation
    clock: int
    low_water: int
    last_heard_s: float
    left: bool


class RangeMachine:
    """One table in one range. Methods take an event and the time, and return effects in order."""

    def __init__(
        self,
        table: Table,
        range_id: RangeId,
        blocks: tuple[int, ...],
        worker_count: int,
        room: Room,
    ) -> None:
        """A fresh range part: clock 0, initialised unless rank 0 is to do it."""
        self.table = table
        self.range_id = range_id
        self.blocks = blocks
        self.initialized = table.spec.initializer.kind is not InitializerKind.FROM_RANK_ZERO
        self.clock = 0
        self.update_count = 0
        self.versions = dict.fromkeys(blocks, 0)
        self._worker_count = worker_count
        self._room = room
        self._workers: dict[Incarnation, _Worker] = {}
        self._by_rank: dict[int, _Worker] = {}
        self._folded_ranks: list[int] = []
        self._waiters: dict[int, PullEvent] = {}
        self._record_count = 0

    # --- entries

    def push(self, event: PushEvent, now_s: float) -> list[Effect]:
        """A block arrived."""
        return self._entry(event, now_s, lambda worker, out: self._take_push(event, worker, out))

    def seal(self, event: SealEvent, now_s: float) -> list[Effect]:
        """A seal arrived."""
        return self._entry(event, now_s, lambda worker, out: self._take_seal(event, worker, out))

    def withdraw(self, event: WithdrawEvent, now_s: float) -> list[Effect]:
        """A number is given up."""
        return self._entry(
            event, now_s, lambda worker, out: self._take_withdrawal(event, worker, out)
        )

    def _entry(
        self,
        event: PushEvent | SealEvent | WithdrawEvent,
        now_s: float,
        take: Callable[[_Worker, list[Effect]], None],
    ) -> list[Effect]:
        out: list[Effect] = []
        try:
            worker = self._worker(event.sender, now_s)
            if isinstance(event, PushEvent | SealEvent):
                worker.ledger.confirm(event.confirmed)
            if worker.ledger.has_ended(event.sequence):
                ending = worker.ledger.ending(event.sequence)
                self._reply(out, event.sender, ReplyKind.COMMITTED, event.sequence, ending=ending)
                return out
            worker.ledger.check_in_reach(event.sequence)
            take(worker, out)
        except PushpullError as error:
            self._reply(out, event.sender, ReplyKind.ERROR, event.sequence, error=error)
            return out
        self._advance(worker, out)
        return out

    def _worker(self, sender: Sender, now_s: float) -> _Worker:
        worker = self._workers.get(sender.incarnation)
        if worker is None:
            holder = self._by_rank.get(sender.rank)
            if holder is not None:
                raise Fenced(
                    f"rank {sender.rank} is incarnation {holder.incarnation} here; got "
                    f"{sender.incarnation}"
                )
            start = -1 if sender.rank == 0 and not self.initialized else 0
            worker = _Worker(sender.rank, sender.incarnation, start, max(start, 0), now_s)
            self._workers[sender.incarnation] = worker
            self._by_rank[sender.rank] = worker
        worker.last_heard_s = now_s
        return worker

    def _take_push(self, event: PushEvent, worker: _Worker, out: list[Effect]) -> None:
        step = worker.steps.get(event.clock)
        if event.sequence in worker.held:
            self._reply(out, event.sender, ReplyKind.RECEIVED, event.sequence)
            return
        if event.replaces:
            self._replace(event, worker, out)
        problem = event.problem or self._push_problem(event, worker, step)
        if problem is None and not self._room.admit(
            Step(event.clock, event.sender.rank), event.byte_count, out
        ):
            retry_ms = int(limits.ROOM_RETRY_S * 1000)
            full = Overloaded(
                f"the gate of table '{self.table.spec.name}' is full", retry_after_ms=retry_ms
            )
            self._reply(out, event.sender, ReplyKind.REFUSED, event.sequence, error=full)
            return
        if problem is not None:
            self._take_invalid(event, worker, problem, out)
            return
        step = worker.steps.setdefault(event.clock, _Step(event.clock))
        step.missing.pop(event.sequence, None)
        self._hold(event, worker, step, out)

    def _take_invalid(
        self, event: PushEvent, worker: _Worker, problem: PushpullError, out: list[Effect]
    ) -> None:
        """The number is consumed; the step that it belonged to, if it is still open, knows."""
        step = worker.steps.get(event.clock)
        if worker.sealed_clock < event.clock <= worker.sealed_clock + limits.MAX_CLOCK_LEAD_COUNT:
            step = step or worker.steps.setdefault(event.clock, _Step(event.clock))
            step.missing.pop(event.sequence, None)
            if step.seal is None or event.sequence < step.seal.sequence:
                step.invalid.add(event.sequence)
        self._end(worker, event.sender, event.sequence, Ending(Outcome.INVALID, problem), out)

    def _hold(self, event: PushEvent, worker: _Worker, step: _Step, out: list[Effect]) -> None:
        push = _Push(
            event.sender,
            event.sequence,
            event.block,
            event.byte_count,
            event.payload,
            event.pulled_peer_version,
        )
        step.pushes[event.sequence] = push
        step.blocks[event.block] = event.sequence
        worker.held[event.sequence] = event.clock
        if event.eager is not None:
            step.eager = self.table.spec.optimizer.merged(event.eager)
        if event.eager is not None and self._is_asp and self.initialized:
            self._record_eager(worker, step, push, event.eager, out)
            return
        self._reply(out, event.sender, ReplyKind.RECEIVED, event.sequence)

    def _push_problem(
        self, event: PushEvent, worker: _Worker, step: _Step | None
    ) -> PushpullError | None:
        """What is wrong with a push apart from its payload."""
        name = self.table.spec.name
        if event.block not in self.versions:
            return InvalidKeys(
                f"block {event.block} of table '{name}' is not in range {self.range_id}"
            )
        if event.is_assign and (event.clock != 0 or event.sender.rank != 0 or self.initialized):
            return InvalidConfig(
                f"ASSIGN to table '{name}' at clock {event.clock} by rank {event.sender.rank}; "
                "expected clock 0 by rank 0, once, in a table that starts from rank 0"
            )
        problem = self._clock_problem(event.clock, worker)
        if not event.is_assign and problem is not None:
            return problem
        if step is not None and step.seal is not None and event.sequence > step.seal.sequence:
            return InvalidConfig(
                f"push {event.sequence} comes after the seal of clock {event.clock}"
            )
        if step is not None and event.block in step.blocks:
            return InvalidKeys(
                f"block {event.block} of table '{name}' was pushed at clock {event.clock} already, "
                f"as sequence {step.blocks[event.block]}; name it in `replaces`"
            )
        if event.eager is not None:
            return self._hyperparameter_problem(event.eager)
        return None

    def _clock_problem(self, clock: int, worker: _Worker) -> PushpullError | None:
        first = max(worker.sealed_clock, 0) + 1
        last = worker.sealed_clock + limits.MAX_CLOCK_LEAD_COUNT
        if worker.left_clock is not None:
            return InvalidConfig(
                f"worker {worker.rank} left table '{self.table.spec.name}' at clock "
                f"{worker.left_clock}; got clock {clock}"
            )
        if not first <= clock <= last:
            return InvalidConfig(
                f"clock {clock} of table '{self.table.spec.name}' by worker {worker.rank}; "
                f"expected {first} (at most {last})"
            )
        return None

    def _replace(self, event: PushEvent, worker: _Worker, out: list[Effect]) -> None:
        if not 1 <= event.replaces < event.sequence:
            raise InvalidKeys(f"sequence {event.sequence} cannot replace {event.replaces}")
        step = worker.steps.get(event.clock)
        if worker.ledger.has_ended(event.replaces):
            if step is not None:
                step.invalid.discard(event.replaces)
            return
        if step is not None:
            self._drop_push(step, worker, event.replaces)
            step.missing.pop(event.replaces, None)
        self._end(worker, event.sender, event.replaces, Ending(Outcome.REPLACED), out)

    def _take_seal(self, event: SealEvent, worker: _Worker, out: list[Effect]) -> None:
        clock = event.terms.clock
        step = worker.steps.setdefault(clock, _Step(clock))
        if event.sequence in worker.held:
            # Asked again: an answer was lost. What was given back may be what was lost.
            full = Overloaded("given back", retry_after_ms=int(limits.ROOM_RETRY_S * 1000))
            for sequence, sender in step.missing.items():
                self._reply(out, sender, ReplyKind.GIVEN_BACK, sequence, error=full)
            self._reply(out, event.sender, ReplyKind.RECEIVED, event.sequence)
            return
        problem = self._seal_problem(event, worker, step)
        if problem is not None:
            if not step.pushes and step.seal is None:
                worker.steps.pop(clock, None)
            self._end(worker, event.sender, event.sequence, Ending(Outcome.INVALID, problem), out)
            return
        step.seal = event
        worker.held[event.sequence] = clock
        self._reply(out, event.sender, ReplyKind.RECEIVED, event.sequence)

    def _seal_problem(self, event: SealEvent, worker: _Worker, step: _Step) -> PushpullError | None:
        name, terms = self.table.spec.name, event.terms
        if event.problem is not None:
            return event.problem
        if step.seal is not None:
            return InvalidConfig(
                f"worker {worker.rank} sealed clock {terms.clock} of table '{name}' already"
            )
        problem = self._clock_problem(terms.clock, worker)
        if terms.clock != 0 and problem is not None:
            return problem
        if terms.clock == 0 and (worker.rank != 0 or terms.skip or self.initialized):
            return InvalidConfig(
                f"clock 0 of table '{name}' is sealed by rank 0, without skip, in a table that "
                "starts from rank 0"
            )
        if not 0.0 < terms.contribution_scale < float("inf"):
            return InvalidConfig(
                f"contribution_scale is {terms.contribution_scale}; expected finite and above 0"
            )
        problem = self._hyperparameter_problem(terms.hyperparameters)
        return problem or self._disagreement(terms, worker, step)

    def _hyperparameter_problem(self, given: Hyperparameters) -> PushpullError | None:
        try:
            self.table.spec.optimizer.merged(given)
        except InvalidConfig as error:
            return error
        return None

    def _disagreement(self, terms: SealTerms, worker: _Worker, own: _Step) -> PushpullError | None:
        """A seal repeats its eager pushes' numbers, and under BSP the other workers' at its clock
        (skipped ones have no say).
        """
        if terms.skip:
            return None
        merged = self.table.spec.optimizer.merged
        mine = merged(terms.hyperparameters)
        if own.eager is not None and own.eager != mine:
            return InvalidConfig(
                f"the seal of clock {terms.clock} of table '{self.table.spec.name}' has other "
                f"hyperparameters ({mine}) than its eager pushes ({own.eager})"
            )
        if self._is_asp:
            return None
        for other in self._by_rank.values():
            step = other.steps.get(terms.clock)
            if other is worker or step is None or step.seal is None or step.seal.terms.skip:
                continue
            theirs = merged(step.seal.terms.hyperparameters)
            if theirs != mine:
                differing = ", ".join(
                    f"{name}: {b:g} and {a:g}"
                    for (name, a), (_, b) in zip(mine, theirs, strict=True)
                    if a != b
                )
                return InvalidConfig(
                    f"workers {other.rank} and {worker.rank} disagree about clock {terms.clock} of "
                    f"table '{self.table.spec.name}': {differing}"
                )
        return None

    def _take_withdrawal(self, event: WithdrawEvent, worker: _Worker, out: list[Effect]) -> None:
        clock = worker.held.get(event.sequence)
        if clock is not None:
            step = worker.steps[clock]
            is_seal = step.seal is not None and step.seal.sequence == event.sequence
            if is_seal or clock <= worker.sealed_clock:
                raise InvalidKeys(
                    f"sequence {event.sequence} is {'a seal' if is_seal else 'in effect'}: it cannot "
                    "be withdrawn"
                )
            self._drop_push(step, worker, event.sequence)
        for step in worker.steps.values():
            step.missing.pop(event.sequence, None)
        self._end(worker, event.sender, event.sequence, Ending(Outcome.WITHDRAWN), out)

    def _drop_push(self, step: _Step, worker: _Worker, sequence: int) -> None:
        """Forget a held push that has not been folded."""
        push = step.pushes.pop(sequence, None)
        if push is None:
            return
        self._unstage(step, worker, push)
        if step.blocks.get(push.block) == sequence:
            del step.blocks[push.block]
        worker.held.pop(sequence, None)

    def _unstage(self, step: _Step, worker: _Worker, push: _Push) -> None:
        if push.payload is not None:
            push.payload = None
            self._room.release(Step(step.clock, worker.rank), push.byte_count)

    def give_back(self, given: Step, out: list[Effect]) -> None:
        """Room is needed for a lower step: what is staged of this one must be sent again.

        The room has already taken the bytes off this step.
        """
        worker = self._by_rank.get(given.rank)
        step = worker.steps.get(given.clock) if worker is not None else None
        if worker is None or step is None:
            return
        staged = [push for push in step.pushes.values() if push.payload is not None]
        if not staged:
            return
        error = Overloaded(
            f"the gate of table '{self.table.spec.name}' gives room to a lower step",
            retry_after_ms=int(limits.ROOM_RETRY_S * 1000),
        )
        for push in staged:
            del step.pushes[push.sequence]
            step.blocks.pop(push.block, None)
            worker.held.pop(push.sequence)
            step.missing[push.sequence] = push.sender
            self._reply(out, push.sender, ReplyKind.GIVEN_BACK, push.sequence, error=error)
        worker.sealed_clock = min(worker.sealed_clock, given.clock - 1)

    # --- seals take effect, updates form

    @property
    def _is_asp(self) -> bool:
        return self.table.spec.mode is Mode.ASP

    def _advance(self, worker: _Worker, out: list[Effect]) -> None:
        """Let every seal of `worker` take effect whose turn has come, and what follows from it."""
        while True:
            step = worker.steps.get(worker.sealed_clock + 1)
            if (
                step is None
                or step.seal is None
                or not self._is_complete(worker, step.seal.sequence)
            ):
                break
            if not self._take_effect(worker, step, step.seal, out):
                break
        self._progress(out)

    @staticmethod
    def _is_complete(worker: _Worker, sequence: int) -> bool:
        return all(
            number in worker.held or worker.ledger.has_ended(number)
            for number in range(worker.ledger.low_water + 1, sequence)
        )

    def _take_effect(
        self, worker: _Worker, step: _Step, seal: SealEvent, out: list[Effect]
    ) -> bool:
        step.skip = seal.terms.skip or (seal.skip_if_invalid and bool(step.invalid))
        if step.invalid and not step.skip:
            step.seal = None
            del worker.held[seal.sequence]
            problem = InvalidTensor(
                f"clock {step.clock} of table '{self.table.spec.name}' has invalid pushes "
                f"({', '.join(map(str, sorted(step.invalid)))}): seal it with skip"
            )
            self._end(worker, seal.sender, seal.sequence, Ending(Outcome.INVALID, problem), out)
            return False
        worker.sealed_clock = step.clock
        if step.skip:
            for push in step.pushes.values():
                self._unstage(step, worker, push)
        if seal.terms.last:
            self._leave(worker, step.clock, out)
        return True

    def _leave(self, worker: _Worker, clock: int, out: list[Effect]) -> None:
        """The worker is not waited for beyond `clock`; what it sent beyond it is withdrawn."""
        worker.left_clock = clock
        for later in [c for c in worker.steps if c > clock]:
            step = worker.steps.pop(later)
            if step.seal is not None:
                seal = step.seal
                self._end(worker, seal.sender, seal.sequence, Ending(Outcome.WITHDRAWN), out)
            for sequence in sorted([*step.pushes, *step.missing]):
                push = step.pushes.get(sequence)
                sender = push.sender if push is not None else step.missing[sequence]
                if push is not None:
                    self._unstage(step, worker, push)
                    del worker.held[sequence]
                self._end(worker, sender, sequence, Ending(Outcome.WITHDRAWN), out)

    def _progress(self, out: list[Effect]) -> None:
        before = (self.clock, self._record_count)
        if not self.initialized:
            self._initialize(out)
        if self.initialized:
            if self._is_asp:
                for worker in self._by_rank.values():
                    self._record_sealed(worker, out)
            else:
                while self._form(out):
                    pass
        if before != (self.clock, self._record_count):
            self._release_waiters(out)

    def _initialize(self, out: list[Effect]) -> None:
        worker = self._by_rank.get(0)
        step = worker.steps.get(0) if worker is not None else None
        if worker is None or step is None or worker.sealed_clock < 0:
            return
        self.initialized = True
        parts = self._take_parts(worker, step)
        record = self._record(0, [self._contributor(worker, step)], (), tuple(b for b, _ in parts))
        out.append(Assign(record, parts))
        self._commit(record, out)

    def _record_sealed(self, worker: _Worker, out: list[Effect]) -> None:
        """ASP: record every step of the worker whose seal is in effect."""
        while worker.done_clock < worker.sealed_clock:
            step = worker.steps[worker.done_clock + 1]
            assert step.seal is not None
            worker.done_clock = step.clock
            self._record_step(worker, step, step.seal, out)

    def _record_step(
        self, worker: _Worker, step: _Step, seal: SealEvent, out: list[Effect]
    ) -> None:
        merged = self.table.spec.optimizer.merged(seal.terms.hyperparameters)
        takes_part = step.pushes and not step.skip
        fold = self._fold(worker, step, seal.terms.contribution_scale) if takes_part else None
        blocks = tuple(block for block, _ in fold.parts) if fold is not None else ()
        contributor = self._contributor(worker, step)
        record = self._record(step.clock, [contributor], merged, blocks)
        if fold is not None:
            out.append(fold)
            out.append(Apply(record))
        self._commit(record, out)

    def _record_eager(
        self,
        worker: _Worker,
        step: _Step,
        push: _Push,
        hyperparameters: Hyperparameters,
        out: list[Effect],
    ) -> None:
        """ASP: one block is a record of its own; the seal that follows only ends the step."""
        merged = self.table.spec.optimizer.merged(hyperparameters)
        part = (push.block, push.payload)
        self._unstage(step, worker, push)
        contributor = Contributor(worker.rank, worker.incarnation, (push.sequence,), False)
        record = self._record(step.clock, [contributor], merged, (push.block,))
        out.append(Fold(self.table.table_id, self.range_id, step.clock, worker.rank, (part,), 1.0))
        out.append(Apply(record))
        self._commit(record, out)
        del step.pushes[push.sequence]

    def _form(self, out: list[Effect]) -> bool:
        """BSP: fold what has its turn; form update `clock + 1` once every member is in (RM-2)."""
        clock = self.clock + 1
        members = [rank for rank in range(self._worker_count) if self._is_member(rank, clock)]
        for rank in members[len(self._folded_ranks) :]:
            worker = self._by_rank.get(rank)
            if worker is None or worker.sealed_clock < clock:
                return False
            step = worker.steps[clock]
            assert step.seal is not None
            if not step.skip and step.pushes:
                out.append(self._fold(worker, step, step.seal.terms.contribution_scale))
            self._folded_ranks.append(rank)
        if not members:
            return False
        self._form_record(clock, members, out)
        return True

    def _form_record(self, clock: int, members: list[int], out: list[Effect]) -> None:
        parts = [(self._by_rank[rank], self._by_rank[rank].steps[clock]) for rank in members]
        contributors = [self._contributor(worker, step) for worker, step in parts]
        blocks = sorted({b for _, step in parts if not step.skip for b in step.blocks})
        terms = next(
            (s.seal.terms.hyperparameters for _, s in parts if s.seal is not None and not s.skip),
            (),
        )
        merged = self.table.spec.optimizer.merged(terms)
        record = self._record(clock, contributors, merged, tuple(blocks))
        self.clock = clock
        self._folded_ranks = []
        # A sum of nothing is a value too: workers that read clock c of an AGGREGATE table get it.
        if record.blocks or self.table.spec.optimizer.kind is OptimizerKind.AGGREGATE:
            out.append(Apply(record))
        self._commit(record, out)

    def _is_member(self, rank: int, clock: int) -> bool:
        worker = self._by_rank.get(rank)
        return worker is None or worker.left_clock is None or clock <= worker.left_clock

    def _take_parts(self, worker: _Worker, step: _Step) -> tuple[tuple[int, object], ...]:
        """The staged payloads of a step by block; they are staged no more."""
        pushes = sorted(step.pushes.values(), key=lambda push: push.block)
        parts = tuple((push.block, push.payload) for push in pushes)
        for push in pushes:
            self._unstage(step, worker, push)
        return parts

    def _fold(self, worker: _Worker, step: _Step, scale: float) -> Fold:
        check(self.initialized, "RM-3", "fold before the initial values")
        parts = self._take_parts(worker, step)
        return Fold(self.table.table_id, self.range_id, step.clock, worker.rank, parts, scale)

    def _contributor(self, worker: _Worker, step: _Step) -> Contributor:
        assert step.seal is not None
        sequences = (*sorted(step.pushes), step.seal.sequence)
        return Contributor(worker.rank, worker.incarnation, sequences, step.skip)

    def _record(
        self,
        clock: int,
        contributors: list[Contributor],
        hyperparameters: Hyperparameters,
        blocks: tuple[int, ...],
    ) -> Record:
        self._record_count += 1
        return Record(
            self.table.table_id,
            self.range_id,
            self._record_count,
            clock,
            clock == 0,
            tuple(contributors),
            hyperparameters,
            blocks,
        )

    def _commit(self, record: Record, out: list[Effect]) -> None:
        """Every in-sync replica has the record (there is one): its outcomes hold."""
        if record.blocks and not record.is_assign:
            self.update_count += 1
            for block in record.blocks:
                self.versions[block] += 1
        for contributor in record.contributors:
            self._end_contribution(record, contributor, out)

    def _end_contribution(
        self, record: Record, contributor: Contributor, out: list[Effect]
    ) -> None:
        worker = self._workers[contributor.incarnation]
        step = worker.steps[record.clock]
        if not contributor.skip and not record.is_assign:
            for block in record.blocks:
                worker.own_updates[block] = worker.own_updates.get(block, 0) + 1
        for sequence in contributor.sequences:
            push = step.pushes.get(sequence)
            worker.held.pop(sequence, None)
            if push is None:
                assert step.seal is not None
                self._end(worker, step.seal.sender, sequence, Ending(Outcome.APPLIED), out)
                del worker.steps[record.clock]
                continue
            outcome = Outcome.SKIPPED if contributor.skip else Outcome.APPLIED
            staleness = 0 if contributor.skip else self._staleness(worker, push)
            ending = Ending(outcome, staleness=staleness)
            self._end(worker, push.sender, sequence, ending, out)

    def _staleness(self, worker: _Worker, push: _Push) -> int:
        if push.pulled_peer_version is None:
            return 0
        return max(0, self.peer_version(worker.incarnation, push.block) - push.pulled_peer_version)

    # --- reads

    def pull(self, event: PullEvent, now_s: float) -> list[Effect]:
        """A read arrived: answered at once, refused, or parked until its deadline."""
        worker = self._workers.get(event.incarnation) if event.incarnation is not None else None
        if worker is not None:
            worker.last_heard_s = now_s
        out: list[Effect] = []
        if event.consistent and self.initialized and self.clock > event.clock:
            past = AlreadyPast(
                f"range {self.range_id} of table '{self.table.spec.name}' is at clock {self.clock}; "
                f"the read asked for {event.clock}",
                clock=self.clock,
            )
            out.append(self._refuse(event, past))
        elif self._may_read(event):
            out.append(self._answer(event))
        else:
            self._waiters[event.waiter] = event
        return out

    def cancel(self, waiter: int) -> None:
        """The caller has gone."""
        self._waiters.pop(waiter, None)

    def tick(self, now_s: float) -> list[Effect]:
        """Reads whose deadline has passed learn whom they waited for."""
        expired = [e for e in self._waiters.values() if e.deadline_s <= now_s]
        out: list[Effect] = []
        for event in expired:
            del self._waiters[event.waiter]
            out.append(self._refuse(event, WaitExpired(self.explain(event, now_s))))
        return out

    def _may_read(self, event: PullEvent) -> bool:
        """RM-4."""
        if not self.initialized:
            return False
        if event.incarnation is None and not event.consistent:
            return True
        if not self._is_asp:
            return self.clock >= event.clock
        worker = self._workers.get(event.incarnation) if event.incarnation is not None else None
        return event.clock == 0 or (worker is not None and worker.done_clock >= event.clock)

    def _release_waiters(self, out: list[Effect]) -> None:
        for event in [e for e in self._waiters.values() if self._may_read(e)]:
            del self._waiters[event.waiter]
            out.append(self._answer(event))

    def _answer(self, event: PullEvent) -> AnswerPull:
        is_sum = self.table.spec.optimizer.kind is OptimizerKind.AGGREGATE
        asked = event.clock if is_sum and event.incarnation is not None else self.clock
        return AnswerPull(event.waiter, self.table.table_id, self.range_id, asked)

    def _refuse(self, event: PullEvent, error: PushpullError) -> RefusePull:
        return RefusePull(event.waiter, self.table.table_id, self.range_id, error)

    def explain(self, event: PullEvent, now_s: float) -> str:
        """What a parked read waits for, in a sentence that names who is missing (G6)."""
        name = f"table '{self.table.spec.name}' (range {self.range_id})"
        if not self.initialized:
            return f"{name} waits for its initial values from {self._who(0, now_s)}"
        if self._is_asp:
            worker = self._workers.get(event.incarnation) if event.incarnation is not None else None
            sealed = worker.sealed_clock if worker is not None else 0
            return (
                f"the read of {name} at clock {event.clock} waits for its own worker's seal; "
                f"the newest in effect is {sealed}"
            )
        clock = self.clock + 1
        late = [
            self._who(rank, now_s)
            for rank in range(self._worker_count)
            if self._is_member(rank, clock)
            and (rank not in self._by_rank or self._by_rank[rank].sealed_clock < clock)
        ]
        return (
            f"update {clock} of {name} waits for {', '.join(late) or 'any worker: all have left'}"
        )

    def _who(self, rank: int, now_s: float) -> str:
        worker = self._by_rank.get(rank)
        if worker is None:
            return f"worker {rank} (not heard yet)"
        heard_s = now_s - worker.last_heard_s
        return (
            f"worker {rank} (clock {max(worker.sealed_clock, 0)}, last heard {heard_s:.1f} s ago)"
        )

    # --- views of the state

    def peer_version(self, incarnation: Incarnation | None, block: int) -> int:
        """Updates of `block` in which `incarnation` had no part."""
        worker = self._workers.get(incarnation) if incarnation is not None else None
        own = worker.own_updates.get(block, 0) if worker is not None else 0
        return self.versions[block] - own

    def waits(self, now_s: float) -> tuple[str, ...]:
        """What the parked reads wait for, each sentence once."""
        return tuple(sorted({self.explain(event, now_s) for event in self._waiters.values()}))

    def worker_places(self) -> Iterator[WorkerPlace]:
        """Where each worker is."""
        for worker in self._by_rank.values():
            yield WorkerPlace(
                worker.rank,
                worker.incarnation,
                max(worker.sealed_clock, 0),
                worker.ledger.low_water,
                worker.last_heard_s,
                worker.left_clock is not None,
            )

    # --- small things

    def _end(
        self, worker: _Worker, sender: Sender, sequence: int, ending: Ending, out: list[Effect]
    ) -> None:
        worker.held.pop(sequence, None)
        worker.ledger.end(sequence, ending)
        self._reply(out, sender, ReplyKind.COMMITTED, sequence, ending=ending)

    def _reply(
        self,
        out: list[Effect],
        sender: Sender,
        kind: ReplyKind,
        sequence: int,
        *,
        ending: Ending | None = None,
        error: PushpullError | None = None,
    ) -> None:
        out.append(
            ReplyTo(sender, kind, self.table.table_id, self.range_id, sequence, ending, error)
        )
