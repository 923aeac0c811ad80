"""The schedule of emulated computation, as a value; `training.step_times` sleeps.

    30ms                                    every worker computes 30 ms a step
    rotating:30ms,90ms,burst=2,seed=1       at any clock one worker computes 90 ms, the others 30;
                                            after `burst` clocks it is another worker's turn
    permanent:30ms,90ms,rank=0              one worker always computes 90 ms

Rules:
    - The time of a step is a function of (rank, number of workers, clock): all workers, and all
      runs of a comparison, have the same schedule without communication.
    - Rotating: each round has one turn a worker, in an order that the seed draws. Over whole rounds
      every worker is slow equally often, so a comparison is of the waits, not of chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ps_core import limits
from ps_core.errors import InvalidConfig


class Straggler(Enum):
    """The pattern of slow workers."""

    NONE = "none"
    ROTATING = "rotating"
    PERMANENT = "permanent"


@dataclass(frozen=True, slots=True)
class ComputeTime:
    """The schedule of a run.

    Attributes:
        fast_s: the time of a step's computation.
        straggler: the pattern of slow workers.
        slow_s: the time of the slow worker.
        burst: ROTATING: clocks that a worker stays slow.
        seed: ROTATING: of the orders in which the workers take turns.
        rank: PERMANENT: the slow worker.
    """

    fast_s: float
    straggler: Straggler = Straggler.NONE
    slow_s: float = 0.0
    burst: int = 1
    seed: int = 0
    rank: int = 0

    @classmethod
    def parsed(cls, text: str) -> ComputeTime:
        """The schedule of a text in one of the forms above."""
        name, colon, rest = text.strip().lower().partition(":")
        try:
            if not colon:
                return cls(_duration_s(name)).validated()
            fast, slow, *words = rest.split(",")
            pairs = [word.partition("=") for word in words]
            integers = {each.strip(): int(value) for each, _, value in pairs}
            kind = Straggler(name)
            if set(integers) - set(_FIELDS[kind]):
                raise ValueError(words)
            return cls(_duration_s(fast), kind, _duration_s(slow), **integers).validated()
        except (ValueError, KeyError):
            raise InvalidConfig(f"compute is '{text}'; expected one of {_FORMS}") from None

    def validated(self) -> ComputeTime:
        """The schedule, checked."""
        times = [("the fast time", self.fast_s, 0.0)]
        if self.straggler is not Straggler.NONE:
            times.append(("the slow time", self.slow_s, self.fast_s))
        for what, value_s, least_s in times:
            if not least_s <= value_s <= limits.MAX_DEADLINE_S:
                raise InvalidConfig(
                    f"{what} of compute is {value_s:g} s; expected {least_s:g} to "
                    f"{limits.MAX_DEADLINE_S:g} s"
                )
        if self.burst < 1:
            raise InvalidConfig(f"burst of compute is {self.burst}; expected 1 or more")
        if self.rank < 0 or self.seed < 0:
            raise InvalidConfig(f"compute is '{self}'; expected a rank and a seed of 0 or more")
        return self

    def check_fits(self, worker_count: int) -> None:
        """Raises InvalidConfig if a cluster of so many workers does not have the slow rank."""
        if self.straggler is Straggler.PERMANENT and self.rank >= worker_count:
            raise InvalidConfig(
                f"compute is '{self}'; expected a rank below {worker_count}, the number of workers"
            )

    def seconds(self, rank: int, worker_count: int, clock: int) -> float:
        """The computation time of step `clock`, from 1, of the worker `rank`."""
        return self.slow_s if rank == self.slow_rank(worker_count, clock) else self.fast_s

    def slow_rank(self, worker_count: int, clock: int) -> int | None:
        """The slow worker at `clock`; None if there is none."""
        if self.straggler is Straggler.NONE:
            return None
        if self.straggler is Straggler.PERMANENT:
            return self.rank
        turn_round, turn = divmod((clock - 1) // self.burst, worker_count)
        drawn = _mixed(_mixed(self.seed) ^ turn_round)
        order = sorted(range(worker_count), key=lambda one: (_mixed(drawn ^ one), one))
        return order[turn]

    def __str__(self) -> str:
        """The text that `parsed` reads."""
        if self.straggler is Straggler.NONE:
            return _shown(self.fast_s)
        others = ",".join(f"{name}={getattr(self, name)}" for name in _FIELDS[self.straggler])
        return f"{self.straggler.value}:{_shown(self.fast_s)},{_shown(self.slow_s)},{others}"


_FIELDS = {Straggler.ROTATING: ("burst", "seed"), Straggler.PERMANENT: ("rank",)}

_FORMS = (
    "30ms (or 0.03s), rotating:FAST,SLOW[,burst=CLOCKS][,seed=SEED], "
    "permanent:FAST,SLOW[,rank=RANK]"
)


def _duration_s(text: str) -> float:
    text = text.strip()
    if text.endswith("ms"):
        return float(text[:-2]) / 1000
    if text.endswith("s"):
        return float(text[:-1])
    raise ValueError(text)


def _shown(duration_s: float) -> str:
    return f"{duration_s * 1000:g}ms"


_MASK = 2**64 - 1


def _mixed(number: int) -> int:
    """SplitMix64: the same pseudo-random number on every machine."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
