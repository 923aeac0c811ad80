"""What every kind of test shares: simulation seeds, and imports that are made once."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from ps_runtime.launch import launcher as launching
from ps_runtime.system.collector import spared
from tests.bytecode import compile_share
from tests.integration.warm_roles import FORKER, begin_warm
from tests.joining import SECRET

# The first example of a test may import torch or wait for the other core: wall time proves nothing.
# Examples are few, and the same every time: what fails in one clone fails in all. `make fuzz` has
# others, and more.
settings.register_profile("pushpull", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("fuzz", deadline=None, database=None, print_blob=True)
settings.load_profile("pushpull")
# Hypothesis would also draw constants of the modules that are imported: which those are depends on
# the tests that run beside, and on what ran before.
vars(providers)["is_local_module_file"] = lambda _path: False

SEED = 20_240_229
"""Of every test that draws for itself, but under `make fuzz`."""

# A shell that runs the tests in the background has them ignore Ctrl-C, which some of them send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Threads of torch wait for each other by spinning, which takes the cores of the tests beside this
# one. It reads the number when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Of this process, and of those that tests start; the file of who runs the tests stays as it is.
os.environ["PUSHPULL_JOIN_SECRET"] = SECRET


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """All that is imported and collected stays until the end: a third of the time it takes."""
    compile_share(session.config)
    with spared():
        return (yield)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of `make sim`, and of `make lanes-check`."""
    parser.addoption(
        "--device", choices=("fake", "cuda"), default="fake", help="of tests/device (default: fake)"
    )
    parser.addoption("--all-lanes", action="store_true", help="run tests marked second_lane, too")
    group = parser.getgroup("simulation")
    group.addoption(
        "--sim-seeds",
        type=int,
        default=1,
        help="how many seeds each simulation runs, from 0 up (default: %(default)s)",
    )
    group.addoption("--sim-seed", type=int, default=None, help="run this seed alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is tested on the other lane."""
    if config.getoption("--all-lanes"):
        return
    left_out = [item for item in items if item.get_closest_marker("second_lane")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("second_lane")]


@pytest.fixture(scope="session")
def sim_seeds(request: pytest.FixtureRequest) -> tuple[int, ...]:
    """The seeds that a simulation runs: those of `--sim-seeds`, or the one of `--sim-seed`."""
    only: int | None = request.config.getoption("--sim-seed")
    if only is not None:
        return (only,)
    return tuple(range(request.config.getoption("--sim-seeds")))


@pytest.fixture(scope="session")
def drawn_seed(request: pytest.FixtureRequest) -> int:
    """The seed of a test that draws for itself: `make fuzz` gives another each time."""
    given: str | None = request.config.getoption("--hypothesis-seed")
    return SEED if given is None else int(given)


@pytest.fixture(scope="session", autouse=True)
def warm_roles() -> Iterator[None]:
    """Schedulers and servers that a test starts begin with all imported."""
    before, launching.start_role = launching.start_role, begin_warm
    yield
    launching.start_role = before
    FORKER.close()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch computes in one thread, as on a server with one processor, and as the workers of a pool
    do: matrix products depend on the number.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
