"""`make sim`: the seeds of every kind of simulation, on all cores; or one, with its transcript.

Prints what happened, and ends with 1 if a seed failed, or if what should happen now and then never
did. What seldom happens is looked for by `make sim-seldom`: in seeds of each kind until all of it
has, or did not in as many as should have it.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import NamedTuple

from ps_server.rows import row_kernels
from tests.sim.kinds import KINDS, SHARES
from tests.sim.test_simulation import Run

CHUNK = 10


class Seed(NamedTuple):
    """What came of one."""

    kind: str
    seed: int
    counts: Counter[str]
    problem: str = ""
    transcript: str = ""


def run_one(kind: str, seed: int, *, narrate: bool = False) -> Seed:
    """Run one seed."""
    simulation = KINDS[kind](seed, narrate=narrate)
    problem = ""
    try:
        simulation.run()
    except Exception:  # noqa: BLE001 - whatever it is, the others are run too
        problem = traceback.format_exc(limit=-2)
    world = simulation.world
    return Seed(kind, seed, world.counts, problem, "\n".join(world.transcript))


def collect_seldom() -> None:
    """In a process that runs seeds: modules are never garbage, and a seed leaves little."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 10)


def load_loops() -> None:
    """Before processes are forked: else each of them would load the compiled loops of rows."""
    row_kernels.load()
    row_kernels.step_loops()


def run_chunk(kind: str, seeds: range) -> list[Seed]:
    """Run some seeds."""
    found = [run_one(kind, seed) for seed in seeds]
    gc.collect()
    return found


def replay(kinds: Sequence[str], seed: int) -> int:
    """Run a seed of each kind and print its transcript; the exit code."""
    failed = False
    for kind in kinds:
        found = run_one(kind, seed, narrate=True)
        print(f"=== {kind}, SEED={seed}\n{found.transcript}\n{found.problem or 'as it should be'}")
        print(", ".join(f"{name} {count}" for name, count in sorted(found.counts.items())))
        failed = failed or bool(found.problem)
    return 1 if failed else 0


def run_all(kinds: Sequence[str], seeds: range, jobs: int) -> int:
    """Run the seeds of each kind; the exit code."""
    began_s = time.monotonic()
    runs = {kind: Run(KINDS[kind]) for kind in kinds}
    failed = 0
    with _pool(jobs) as pool:
        chunks = [
            pool.submit(run_chunk, kind, own[at : at + CHUNK])
            for kind in kinds
            for own in [seeds if len(kinds) == 1 else seeds[: -(-len(seeds) // SHARES[kind])]]
            for at in range(0, len(own), CHUNK)
        ]
        for chunk in chunks:
            failed += _noted(chunk.result(), runs)
    return _ended(runs, failed, time.monotonic() - began_s)


def run_seldom(kinds: Sequence[str], first: int, jobs: int) -> int:
    """Run seeds of each kind until all has happened that should in `many`; the exit code."""
    began_s = time.monotonic()
    runs = {kind: Run(KINDS[kind]) for kind in kinds}
    failed = 0
    with _pool(jobs) as pool:

        def begin(kind: str, at: int) -> Future[list[Seed]]:
            return pool.submit(run_chunk, kind, range(at, at + CHUNK))

        open_chunks = {begin(kind, first): (kind, first + CHUNK) for kind in kinds}
        while open_chunks:
            done, _ = wait(open_chunks, return_when=FIRST_COMPLETED)
            for chunk in done:
                kind, at = open_chunks.pop(chunk)
                failed += _noted(chunk.result(), runs)
                if runs[kind].lacks_something and at < first + KINDS[kind].many:
                    open_chunks[begin(kind, at)] = kind, at + CHUNK
    return _ended(runs, failed, time.monotonic() - began_s)


def _pool(jobs: int) -> ProcessPoolExecutor:
    load_loops()
    context = multiprocessing.get_context("fork")  # once, before the pool has a thread
    return ProcessPoolExecutor(jobs, context, collect_seldom)


def _noted(chunk: Sequence[Seed], runs: Mapping[str, Run]) -> int:
    """What came of some seeds; how many of them failed."""
    failed = [found for found in chunk if found.problem]
    for found in failed:
        print(f"FAILED {found.kind} SEED={found.seed}\n{found.problem}", flush=True)
    for found in chunk:
        if not found.problem:
            runs[found.kind].add(found.counts)
    return len(failed)


def _ended(runs: Mapping[str, Run], failed: int, took_s: float) -> int:
    for kind, run in runs.items():
        print(f"{kind}: {run.report()}")
        for words in run.lacks():
            failed += 1
            print(f"FAILED {kind}: {words}")
    print(f"{failed} failures; {took_s:.0f} s")
    return 1 if failed else 0


def main(arguments: Sequence[str]) -> int:
    """As the command line says; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="this one alone, with its transcript")
    parser.add_argument("--kind", choices=sorted(KINDS), help="only this kind; all its seeds")
    parser.add_argument("--seldom", action="store_true", help="until what seldom happens has")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at a time")
    options = parser.parse_args(arguments)
    kinds = [options.kind] if options.kind else list(KINDS)
    if options.seed is not None:
        return replay(kinds, options.seed)
    if options.seldom:
        return run_seldom(kinds, options.first, options.jobs)
    seeds = range(options.first, options.first + options.seeds)
    return run_all(kinds, seeds, options.jobs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
