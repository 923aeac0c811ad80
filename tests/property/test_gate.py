"""The gate under every setting against a twin that works out everything anew after each event.

The twin keeps a list of what happened, and no state: it goes through the list from the start and
says which updates there are, in which order, and which reads have been answered.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ps_core.consistency import Consistency, Mode, parsed
from ps_core.ledger import Outcome
from tests.unit.machine_harness import Bench, answers, applied, make_table, outcomes

WORKERS = 3
SETTINGS = (
    "bsp", "bsp:backup=1", "bsp:backup=2", "ssp:0", "ssp:1", "ssp:3", "asp", "asp:reject=0",
)  # fmt: skip
Payload = tuple[int, int]


@dataclass(frozen=True)
class Sealed:
    """A worker ended a step; `payload` is None if it pushed nothing, or skips."""

    rank: int
    clock: int
    payload: Payload | None
    last: bool


@dataclass(frozen=True)
class Asked:
    """A read."""

    waiter: int
    rank: int
    clock: int


class Twin:
    """What follows from what happened."""

    def __init__(self, consistency: Consistency, happened: list[Sealed | Asked]) -> None:
        self.consistency = consistency
        self.updates: list[tuple[int, list[Payload]]] = []
        self.discarded: set[Payload] = set()
        self.answered: set[int] = set()
        self.sealed: dict[int, list[Sealed]] = {rank: [] for rank in range(WORKERS)}
        self.order: list[Sealed] = []
        self.waiting: list[Asked] = []
        self.clock = 0
        for event in happened:
            if isinstance(event, Asked):
                self.waiting.append(event)
            else:
                self.take(event)
            self.answered |= {read.waiter for read in self.waiting if self.may_read(read)}

    def take(self, event: Sealed) -> None:
        self.sealed[event.rank].append(event)
        self.order.append(event)
        if self.consistency.mode is not Mode.BSP:
            if event.payload is not None:
                self.updates.append((event.clock, [event.payload]))
        else:
            if event.clock <= self.clock and event.payload is not None:
                self.discarded.add(event.payload)
            # A late goodbye too may let an update form: one worker fewer is waited for.
            while self.form():
                pass

    def has_left(self, rank: int) -> bool:
        return any(step.last for step in self.sealed[rank])

    def form(self) -> bool:
        """Whether one more update forms."""
        clock = self.clock + 1
        steps = [step for step in self.order if step.clock == clock]
        if not self.consistency.backup_workers:
            steps.sort(key=lambda step: step.rank)
        # One who says goodbye with an empty step is not waited for at its clock.
        gone = {r for r in range(WORKERS) for s in self.sealed[r] if s.last and s.clock <= clock}
        here = [step for step in steps if not step.last]
        awaited = WORKERS - len(gone) - self.consistency.backup_workers
        if not here or len(here) < awaited:
            return False
        self.clock = clock
        payloads = [step.payload for step in here if step.payload is not None]
        if payloads:
            self.updates.append((clock, payloads))
        return True

    def may_read(self, read: Asked) -> bool:
        if self.consistency.mode is Mode.BSP:
            return self.clock >= read.clock
        own = max((step.clock for step in self.sealed[read.rank]), default=0)
        if self.consistency.mode is Mode.ASP:
            return own >= read.clock
        others = [
            max((step.clock for step in self.sealed[rank]), default=0)
            for rank in range(WORKERS)
            if not self.has_left(rank)
        ]
        return own >= read.clock and all(
            clock >= read.clock - self.consistency.staleness for clock in others
        )


class Gate(RuleBasedStateMachine):
    """Three workers that step, read and leave in any order."""

    @initialize(text=st.sampled_from(SETTINGS))
    def begin(self, text: str) -> None:
        self.consistency = parsed(text)
        self.bench = Bench(make_table(self.consistency), workers=WORKERS)
        self.happened: list[Sealed | Asked] = []
        self.clocks = [0] * WORKERS
        self.sequences = [0] * WORKERS
        self.left: set[int] = set()
        self.waiters = 0

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
        self.bench.seal(rank, self.sequences[rank], clock, skip=kind == "skip")
        self.happened.append(Sealed(rank, clock, payload, last=False))

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

    @precondition(lambda self: self.consistency.backup_workers > 0)
    @rule(rank=st.integers(0, WORKERS - 1))
    def catch_up(self, rank: int) -> None:
        """A worker that was left behind goes where the range is."""
        self.clocks[rank] = max(self.clocks[rank], self.bench.machine.state.clock)

    @invariant()
    def agrees_with_the_twin(self) -> None:
        if not hasattr(self, "bench"):
            return
        twin = Twin(self.consistency, self.happened)
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
        if self.consistency.mode is Mode.BSP:
            assert self.bench.machine.state.clock == twin.clock


TestGate = Gate.TestCase
TestGate.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
