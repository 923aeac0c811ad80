"""The gate under every setting against a twin that works out everything anew after each event.

The twin keeps a list of what happened, and no state: it goes through the list from the start and
says which updates there are, in which order, and which reads have been answered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ps_core.change import TableChange
from ps_core.consistency import Consistency, Mode, parsed
from ps_core.ledger import Outcome
from tests.examples import examples
from tests.unit.machine_harness import Bench, answers, applied, make_table, outcomes, told

WORKERS = 3
SETTINGS = (
    "bsp", "bsp:backup=1", "bsp:backup=2", "ssp:0", "ssp:1", "ssp:3", "asp", "asp:reject=0",
)  # fmt: skip
Payload = tuple[int, int]
Event: TypeAlias = "Sealed | Said | Asked | Held | Settled"


@dataclass(frozen=True)
class Sealed:
    """A worker ended a step; `payload` is None if it pushed nothing, or skips."""

    rank: int
    clock: int
    payload: Payload | None
    last: bool
    skip: bool = False


@dataclass(frozen=True)
class Said:
    """A worker said the scale of an update."""

    clock: int


@dataclass(frozen=True)
class Asked:
    """A read."""

    waiter: int
    rank: int
    clock: int


@dataclass(frozen=True)
class Held:
    """A change is promised: nothing beyond the clock takes effect."""

    clock: int


@dataclass(frozen=True)
class Settled:
    """The change is committed, or withdrawn if it is None."""

    change: TableChange | None


class Twin:
    """What follows from what happened."""

    def __init__(self, consistency: Consistency, happened: list[Event], *, clips: bool) -> None:
        self.clips = clips
        self.taken: dict[int, list[Sealed]] = {}  # by clock, in the order of the sum
        self.summed: list[Sealed] = []  # what is in the update that waits for its scale
        self.settings: list[tuple[int, Consistency]] = [(-1, consistency)]
        self.hold: int | None = None
        self.updates: list[tuple[int, list[Payload]]] = []
        self.discarded: set[Payload] = set()
        self.answered: set[int] = set()
        self.sealed: dict[int, list[Sealed]] = {}  # in the order in which they were first heard
        self.order: list[Sealed] = []
        self.held: list[Sealed] = []
        self.waiting: list[Asked] = []
        self.done = dict.fromkeys(range(WORKERS), 0)
        self.clock = 0
        for event in happened:
            match event:
                case Asked():
                    self.waiting.append(event)
                case Sealed():
                    self.sealed.setdefault(event.rank, [])
                    self.held.append(event)
                case Said() if self.summed and event.clock == self.clock + 1:
                    self.update(event.clock, self.summed)
                    self.summed = []
                    self.decide()
                case Held():
                    self.hold = event.clock
                case Settled():
                    self.hold = None
                    if event.change is not None:
                        self.settings.append((event.change.after_clock, event.change.consistency))
            self.take()
            self.answered |= {read.waiter for read in self.waiting if self.may_read(read)}

    def setting(self, clock: int) -> Consistency:
        return [setting for after, setting in self.settings if clock > after][-1]

    def is_bsp(self, clock: int) -> bool:
        return self.setting(clock).mode is Mode.BSP

    def take(self) -> None:
        """Seals whose turn it is take effect, those who were heard first before the others."""
        for rank in self.sealed:
            for step in [s for s in self.held if s.rank == rank]:
                if self.hold is not None and step.clock > self.hold:
                    break
                self.held.remove(step)
                self.sealed[rank].append(step)
                self.order.append(step)
                is_late = step.clock <= self.done[rank]
                if self.summed and step.clock == self.clock + 1:
                    is_late = True
                if is_late and step.payload is not None:
                    self.discarded.add(step.payload)
                self.decide()

    def decide(self) -> None:
        """Record steps and form updates until there is nothing more to do."""
        clock = -1
        while clock != self.clock:
            clock = self.clock
            for rank, steps in self.sealed.items():
                for step in steps:
                    if step.clock > self.done[rank] and not self.is_bsp(self.done[rank] + 1):
                        self.done[rank] = step.clock
                        if step.payload is not None:
                            self.updates.append((step.clock, [step.payload]))
            if self.is_bsp(clock + 1):
                self.form()
            else:
                here = [self.done[r] for r in range(WORKERS) if not self.has_left(r)]
                self.clock = min(here) if here else max(self.done.values())

    def has_left(self, rank: int) -> bool:
        return any(step.last for step in self.sealed.get(rank, ()))

    def form(self) -> None:
        """One more update, if it can be."""
        clock = self.clock + 1
        if self.summed:
            return
        backups = self.setting(clock).backup_workers
        in_effect = {step for step in self.order if step.clock == clock}
        # Whoever is there when it is this update's turn, in rank order; the others as they come.
        steps = self.taken.setdefault(clock, [])
        steps += sorted(in_effect.difference(steps), key=lambda step: step.rank)
        if not backups:
            steps.sort(key=lambda step: step.rank)
        # One who says goodbye with an empty step is not waited for at its clock.
        gone = {r for r, steps in self.sealed.items() for s in steps if s.last and s.clock <= clock}
        here = [step for step in steps if not step.last]
        if not here or len(here) < WORKERS - len(gone) - backups:
            return
        if self.clips and not all(step.skip for step in here):
            self.summed = here
        else:
            self.update(clock, here)

    def update(self, clock: int, steps: list[Sealed]) -> None:
        """It is there, whatever it holds."""
        self.clock = clock
        self.done = {rank: max(done, clock) for rank, done in self.done.items()}
        payloads = [step.payload for step in steps if step.payload is not None]
        if payloads:
            self.updates.append((clock, payloads))

    @property
    def reached(self) -> int:
        """The highest clock of which anything has taken effect."""
        sealed = [step.clock for steps in self.sealed.values() for step in steps]
        read = [read.clock + 1 for read in self.waiting if read.waiter in self.answered]
        return max([0, *sealed, *read, *self.done.values()])

    def may_read(self, read: Asked) -> bool:
        if self.hold is not None and read.clock + 1 > self.hold:
            return False
        setting = self.setting(read.clock + 1)
        if setting.mode is Mode.BSP:
            return self.clock >= read.clock
        if self.done[read.rank] < read.clock:
            return False
        others = [self.done[rank] for rank in range(WORKERS) if not self.has_left(rank)]
        return setting.mode is Mode.ASP or all(
            done >= read.clock - setting.staleness for done in others
        )


class Gate(RuleBasedStateMachine):
    """Three workers that step, read and leave in any order, while the setting changes (RM-2,
    RM-4).
    """

    @initialize(text=st.sampled_from(SETTINGS), clips=st.booleans())
    def begin(self, text: str, clips: bool) -> None:
        self.clips = clips
        self.consistency = parsed(text)
        self.table = make_table(self.consistency)
        self.bench = Bench(self.table, workers=WORKERS)
        self.happened: list[Event] = []
        self.clocks = [0] * WORKERS
        self.sequences = [0] * WORKERS
        self.left: set[int] = set()
        self.waiters = 0
        self.changes = 0

    @precondition(lambda self: len(self.left) < WORKERS)
    @rule(rank=st.integers(0, WORKERS - 1), kind=st.sampled_from(["push", "nothing", "skip"]))
    def step(self, rank: int, kind: str) -> None:
        if rank in self.left:
            return
        clock = self.clocks[rank] + 1
        self.clocks[rank] = clock
        payload = None
        if kind != "nothing":
            self.sequences[rank] += 1
            self.bench.push(rank, self.sequences[rank], clock)
            payload = (rank, self.sequences[rank]) if kind == "push" else None
        self.sequences[rank] += 1
        skip, clip_scale = kind == "skip", 1.0 if self.clips else None
        self.bench.seal(rank, self.sequences[rank], clock, skip=skip, clip_scale=clip_scale)
        self.happened.append(Sealed(rank, clock, payload, last=False, skip=skip))

    @precondition(lambda self: self.clips)
    @rule(rank=st.integers(0, WORKERS - 1), earlier=st.integers(0, 2))
    def say_scale(self, rank: int, earlier: int) -> None:
        """As every worker does that was told how large the parts of an update are."""
        clocks = sorted(told(self.bench.effects, rank))
        if earlier >= len(clocks):
            return
        clock = clocks[-1 - earlier]
        self.sequences[rank] += 1
        effects = self.bench.scale(rank, self.sequences[rank], clock, 1 / (1 + clock))
        assert outcomes(effects)[rank, self.sequences[rank]] in (
            (Outcome.APPLIED, Outcome.DISCARDED)
        )
        self.happened.append(Said(clock))

    @precondition(lambda self: len(self.left) < WORKERS - 1)
    @rule(rank=st.integers(0, WORKERS - 1))
    def leave(self, rank: int) -> None:
        if rank in self.left:
            return
        self.left.add(rank)
        self.sequences[rank] += 1
        clock = self.clocks[rank] + 1
        self.bench.seal(rank, self.sequences[rank], clock, skip=True, last=True)
        self.happened.append(Sealed(rank, clock, None, last=True))

    @rule(rank=st.integers(0, WORKERS - 1))
    def read(self, rank: int) -> None:
        if rank in self.left:
            return
        self.waiters += 1
        self.bench.pull(rank, self.clocks[rank], waiter=self.waiters)
        self.happened.append(Asked(self.waiters, rank, self.clocks[rank]))

    @rule(rank=st.integers(0, WORKERS - 1))
    def catch_up(self, rank: int) -> None:
        """A worker that was left behind goes where the range is."""
        self.clocks[rank] = max(self.clocks[rank], self.bench.machine.state.clock)

    @precondition(lambda self: self.table.proposed is None)
    @rule(text=st.sampled_from(SETTINGS), later=st.integers(0, 3))
    def propose(self, text: str, later: int) -> None:
        """The scheduler asks for another setting, perhaps further ahead than anyone is."""
        self.changes += 1
        after_clock = max(self.clocks) * (later > 0) + later
        reached = Twin(self.consistency, self.happened, clips=self.clips).reached
        self.table = replace(
            self.table, proposed=TableChange(self.changes, after_clock, parsed(text))
        )
        self.bench.observe(self.table)
        held = self.bench.machine.state.schedule.hold_point
        assert held == max(after_clock, reached)
        self.happened.append(Held(held))

    @precondition(lambda self: self.table.proposed is not None)
    @rule(further=st.integers(0, 2), commits=st.booleans())
    def settle(self, further: int, commits: bool) -> None:
        """Another range had got further, or a server did not promise."""
        held, proposed = self.bench.machine.state.schedule.hold_point, self.table.proposed
        assert held is not None
        assert proposed is not None
        change = replace(proposed, after_clock=held + further) if commits else None
        self.table = replace(self.table, change=change or self.table.change, proposed=None)
        self.bench.observe(self.table)
        self.happened.append(Settled(change))

    @invariant()
    def agrees_with_the_twin(self) -> None:
        if not hasattr(self, "bench"):
            return
        twin = Twin(self.consistency, self.happened, clips=self.clips)
        assert applied(self.bench.effects) == twin.updates
        ended = outcomes(self.bench.effects)
        assert twin.discarded == {
            event.payload
            for event in self.happened
            if isinstance(event, Sealed)
            and event.payload is not None
            and ended.get(event.payload) is Outcome.DISCARDED
        }
        assert set(answers(self.bench.effects)) == twin.answered
        assert len(answers(self.bench.effects)) == len(twin.answered), "answered twice"
        assert self.bench.machine.state.clock == twin.clock


TestGate = Gate.TestCase
TestGate.settings = settings(max_examples=examples(400), stateful_step_count=50, deadline=None)
