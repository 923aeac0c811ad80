"""`make sim-mutants`: every deliberate bug must be seen by a simulation.

Each bug has a process of its own, which runs the simulations that can see it, seed by seed, until
one fails. Prints a table, and ends with 1 if a bug was seen by none.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from types import FrameType
from typing import NamedTuple

from tests.sim import mutation
from tests.sim.mutants import MUTANTS
from tests.sim.mutation import Mutant

SEEDS = 300
SEED_LIMIT_S = 120
"""Of processor time, so that a busy machine counts for nothing: a bug may be a loop without end."""


class Caught(NamedTuple):
    """Which seed saw it, and how."""

    oracle: str
    kind: str
    seed: int
    took_s: float


class _Hung(BaseException):
    pass


def _hang(_: int, __: FrameType | None) -> None:
    raise _Hung


def oracle_of(error: BaseException) -> str:
    """What an error is called in the table: oracles and invariants say their name first."""
    if isinstance(error, _Hung):
        return "LIVE: a loop without end"
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}" if not isinstance(error, AssertionError) else words


def catch(mutant: Mutant, seed_count: int) -> Caught | None:
    """Run the mutant's simulations until one fails; None if none does. In a fresh process."""
    mutation.apply(mutant)
    from tests.sim.kinds import KINDS

    signal.signal(signal.SIGPROF, _hang)
    began_s = time.monotonic()
    for seed in range(mutant.first_seed, mutant.first_seed + seed_count):
        for kind in mutant.kinds:
            signal.setitimer(signal.ITIMER_PROF, SEED_LIMIT_S)
            try:
                KINDS[kind](seed).run()
            except (Exception, _Hung) as error:  # noqa: BLE001 - whatever it leads to
                return Caught(oracle_of(error), kind, seed, time.monotonic() - began_s)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def _row(mutant: Mutant, caught: Caught | None) -> str:
    name = f"{mutant.name[:55]:55} {mutant.rule:4}"
    if caught is None:
        return f"{name} SURVIVED {', '.join(mutant.kinds)}"
    return f"{name} {caught.kind:9} {caught.seed:4} {caught.took_s:6.1f} s  {caught.oracle[:90]}"


def main(arguments: Sequence[str]) -> int:
    """Run all, or those that are named; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of each simulation, at most")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at a time")
    parser.add_argument("names", nargs="*", help="only mutants with one of these in their name")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if not options.names or any(n in m.name for n in options.names)]
    for mutant in chosen:
        mutant.source()  # one that does not apply is an error before anything runs
    print(f"{'mutant':55} rule {'kind':9} seed   time    seen by")
    survived = []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["grpc", "torch"])  # what no mutant changes, and takes longest
    with ProcessPoolExecutor(options.jobs, context, max_tasks_per_child=1) as pool:
        runs = [pool.submit(catch, mutant, options.seeds) for mutant in chosen]
        for mutant, run in zip(chosen, runs, strict=True):
            caught = run.result()
            print(_row(mutant, caught), flush=True)
            if caught is None:
                survived.append(mutant.name)
    rules = sorted({mutant.rule for mutant in chosen})
    print(f"{len(chosen)} mutants of {', '.join(rules)}: {len(survived)} survived")
    return 1 if survived or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
