"""Runs the tests of a module against its mutants: each in a process of its own, forked from one
that has imported what the tests need and nothing of ours.
"""

from __future__ import annotations

import ast
import gc
import importlib
import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import Phase, settings

from tests.mutation.operators import Mutant, replaced
from tests.mutation.plan import TESTS, source_of

WARM_IMPORTS = ("numpy", "torch._dynamo", "hypothesis.strategies", "pushpull.v1.parameters_pb2")
"""What costs time to import and does not import `ps_core`."""

EXAMPLE_COUNT = 40
"""Of a property, for one mutant; the same ones each time."""

CPU_LIMIT_S = 30.0
"""Of one mutant's tests, which take a second or two: it loops, then. A busy machine does not count.
"""

MEMORY_LIMIT_BYTES = 2 * 1024**3
"""Beyond what the parent has: a loop that collects something ends here."""

_OPTIONS = (
    "-x", "-q", "--tb=no", "--timeout=0", "--assert=plain", "--hypothesis-profile=mutants",
    "-p", "no:cacheprovider", "-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin",
)  # fmt: skip
"""Nobody reads why a test fails: what pytest would do for that takes longer than most tests."""

_PASSED, _NO_ROOM, _WRONG = 0, 98, 99
_FAILED = (1, 2, 3, 4)
"""A test fails, or a test's file or a `conftest.py` cannot be imported, or pytest itself comes to
grief on what it gets. (4 is also a wrong option or path: `check_tests` would have had it.)
"""


class Verdict(Enum):
    """What became of a mutant."""

    KILLED = "killed"
    NO_END = "no end"
    SURVIVED = "survived"


@dataclass(frozen=True, slots=True)
class _Changed(MetaPathFinder, InspectLoader):
    """Imports one module from a changed tree, and leaves all others alone."""

    module: str
    tree: ast.Module

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname == self.module else None

    def create_module(self, _spec: ModuleSpec) -> ModuleType | None:
        return None

    def get_source(self, _fullname: str) -> str:
        return ast.unparse(self.tree)

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.tree, f"<{self.module}>", "exec"), module.__dict__)  # noqa: S102


def prepare() -> None:
    """Import what all tests need, once, before the processes part."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in WARM_IMPORTS:
        importlib.import_module(name)
    ours = [name for name in sys.modules if name.startswith("ps_")]
    if ours:
        raise RuntimeError(f"{', '.join(ours)} would not be imported again with its fault")
    gc.collect()
    gc.freeze()  # pytest collects garbage after each run: without torch's objects, in no time
    settings.register_profile(
        "mutants",
        deadline=None,
        database=None,
        derandomize=True,
        max_examples=EXAMPLE_COUNT,
        phases=(Phase.explicit, Phase.generate),
    )


def check_tests(module: str) -> None:
    """Run the tests of a module with nothing changed in it.

    Raises:
        RuntimeError: they fail, so that they would prove nothing.
    """
    ((_, verdict),) = _verdicts(module, [(None, ast.parse(source_of(module)))], 1)
    if verdict is not Verdict.SURVIVED:
        raise RuntimeError(f"the tests of {module} fail as it is: {' '.join(TESTS[module])}")


def judged(module: str, found: Iterable[Mutant], jobs: int) -> Iterator[tuple[Mutant, Verdict]]:
    """What becomes of each mutant, as it becomes known."""
    tree = ast.parse(source_of(module))
    changed = ((each, replaced(tree, each.place, each.replacement)) for each in found)
    for mutant, verdict in _verdicts(module, changed, jobs):
        if mutant is not None:
            yield mutant, verdict


def _verdicts(
    module: str,
    trees: Iterable[tuple[Mutant | None, ast.Module]],
    jobs: int,
) -> Iterator[tuple[Mutant | None, Verdict]]:
    running: dict[int, Mutant | None] = {}
    try:
        for mutant, tree in trees:
            if len(running) == jobs:
                yield _next_verdict(running)
            running[_started(module, tree)] = mutant
        while running:
            yield _next_verdict(running)
    finally:
        for process in running:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def _next_verdict(running: dict[int, Mutant | None]) -> tuple[Mutant | None, Verdict]:
    process, status = os.waitpid(-1, 0)
    mutant = running.pop(process)
    if os.WIFSIGNALED(status):
        is_endless = os.WTERMSIG(status) == signal.SIGPROF
        return mutant, Verdict.NO_END if is_endless else Verdict.KILLED
    code = os.WEXITSTATUS(status)
    if code == _NO_ROOM:
        return mutant, Verdict.NO_END
    if code != _PASSED and code not in _FAILED:
        raise RuntimeError(f"pytest ended with {code} for {mutant or 'the module as it is'}")
    return mutant, Verdict.SURVIVED if code == _PASSED else Verdict.KILLED


def _started(module: str, tree: ast.Module) -> int:
    process = os.fork()
    if process:
        return process
    code, errors = _WRONG, os.dup(sys.stderr.fileno())
    try:
        code = _tested(module, tree)
    except MemoryError:
        code = _NO_ROOM
    except BaseException:
        os.dup2(errors, sys.stderr.fileno())
        traceback.print_exc()
        raise
    finally:
        os._exit(code)


def _tested(module: str, tree: ast.Module) -> int:
    """In the child: the exit status of the module's tests, run against `tree`."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MEMORY_LIMIT_BYTES,) * 2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.dup2(nowhere, sys.stderr.fileno())
    sys.meta_path.insert(0, _Changed(module, tree))
    return int(pytest.main([*_OPTIONS, *TESTS[module]]))
