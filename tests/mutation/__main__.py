"""How many small faults in `ps_core` its unit and property tests find: `make core-mutants`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from tests.mutation import runner
from tests.mutation.operators import LEFT_OUT, mutants
from tests.mutation.plan import TESTS, equivalents, source_of

LEAST_RATE = 0.9
"""Of the mutants that are not equivalent."""

_HEADINGS = ("mutants", "killed", "of these: no end", "survived", "equivalent")


class Course:
    """One run over some modules: what it found, and what is wrong with the list of equivalents."""

    def __init__(self, jobs: int, end_s: float) -> None:
        self.jobs = jobs
        self.end_s = end_s
        self.survivors: list[str] = []
        self.wrong: list[str] = []
        self.table: dict[str, Counter[str]] = {}
        self._reasons = {entry.key: entry.why for entry in equivalents()}

    def judge(self, module: str) -> None:
        """Run a module's tests against each of its mutants, those called equivalent included."""
        found = mutants(module, source_of(module))
        keys = {(each.module, each.where, each.change) for each in found}
        row = self.table[module] = Counter({"mutants": len(found)})
        self.wrong += [
            f"{module} {where}: {change} is no mutant"
            for of, where, change in self._reasons
            if of == module and (of, where, change) not in keys
        ]
        runner.check_tests(module)
        timely = takewhile(lambda _: time.monotonic() < self.end_s, found)
        for mutant, verdict in runner.judged(module, timely, self.jobs):
            is_equivalent = (module, mutant.where, mutant.change) in self._reasons
            if verdict is not runner.Verdict.SURVIVED:
                row["killed"] += 1
                row["of these: no end"] += verdict is runner.Verdict.NO_END
                if is_equivalent:
                    self.wrong.append(f"{mutant} is not equivalent: its tests tell it apart")
            elif is_equivalent:
                row["equivalent"] += 1
            else:
                row["survived"] += 1
                self.survivors.append(str(mutant))

    @property
    def sums(self) -> Counter[str]:
        """Of all modules."""
        return sum(self.table.values(), Counter())


def _rate(row: Counter[str]) -> float:
    counted = row["mutants"] - row["equivalent"]
    return row["killed"] / counted if counted else 1.0


def _line(name: str, row: Counter[str]) -> str:
    numbers = "".join(f"{row[heading]:>{len(heading) + 2}}" for heading in _HEADINGS)
    return f"{name:26}{numbers}{_rate(row):>8.1%}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge every mutant and print a table; 1 if too many survive or the list is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("modules", nargs="*", help=f"these alone, of {', '.join(TESTS)}")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--deadline-s", type=float, default=3600.0, help="the most that it takes")
    given = parser.parse_args(arguments)
    if unknown := set(given.modules) - set(TESTS):
        parser.error(f"no tests are named for {', '.join(sorted(unknown))}")
    begin_s = time.monotonic()
    runner.prepare()
    course = Course(given.jobs, begin_s + given.deadline_s)
    print(f"left out: {LEFT_OUT}")
    print(f"{'':26}{''.join(f'  {heading}' for heading in _HEADINGS)}    rate")
    for module in given.modules or TESTS:
        course.judge(module)
        print(_line(module, course.table[module]), flush=True)
    sums = course.sums
    print(_line("all", sums))
    for title, lines in (("survived", course.survivors), ("wrong in the list", course.wrong)):
        if lines:
            print(f"\n{title}:", *lines, sep="\n  ")
    left = sums["mutants"] - sums["killed"] - sums["survived"] - sums["equivalent"]
    print(f"\n{time.monotonic() - begin_s:.0f} s" + (f"; {left} not judged in time" * bool(left)))
    return int(_rate(sums) < LEAST_RATE or bool(course.wrong) or bool(left))


if __name__ == "__main__":
    sys.exit(main())
