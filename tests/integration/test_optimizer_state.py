"""`state_dict` and `load_state_dict`: torch's layout, and what the servers hold (S16)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import ps_worker as ps
from tests.integration import state_jobs as jobs
from tests.integration.state_jobs import STEPS, OneProcess, StateDict
from tests.integration.training_jobs import Values
from tests.integration.training_models import differing
from tests.integration.worker_pool import Pool, Workers

WORKERS = 2


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(WORKERS)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def workers(pool: Pool) -> Iterator[Workers]:
    with (
        ps.local_cluster(servers=2, workers=WORKERS) as cluster,
        pool.connected(cluster.address, WORKERS) as connected,
    ):
        yield connected


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the workers have it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_same(ours: StateDict, theirs: StateDict) -> None:
    """Bit for bit, and every key of torch's."""
    assert ours["state"].keys() == theirs["state"].keys()
    for number, entry in theirs["state"].items():
        assert ours["state"][number].keys() == entry.keys()
        for name, value in entry.items():
            found = ours["state"][number][name]
            assert found.dtype == value.dtype
            assert torch.equal(found, value), (number, name)
    for own, group in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert {key: own[key] for key in group} == group


def check_all_equal(histories: list[list[Values]], expected: list[Values]) -> None:
    for rank, history in enumerate(histories):
        for step, (ours, theirs) in enumerate(zip(history, expected, strict=True)):
            assert differing(ours, theirs) == [], f"rank {rank}, step {step}"


@pytest.mark.parametrize("kind", jobs.PAIRS)
def test_state_is_that_of_torch_and_goes_on_there_and_here(workers: Workers, kind: str) -> None:
    """Tensors that no step has touched have none; step counts differ by tensor."""
    reference = OneProcess(kind, first_at=1)
    before = reference.train(0, 3)
    theirs = jobs.copied(reference.optimizer.state_dict())
    after = reference.train(3, STEPS)

    found = workers.run(jobs.train, name=f"save {kind}", kind=kind, steps=(0, 3), first_at=1)
    check_all_equal([history for history, _, _ in found], before)
    (_, model, ours), (_, _, others) = found
    check_same(ours, theirs)
    check_same(others, theirs)

    in_torch = OneProcess(kind, first_at=1)
    in_torch.model.load_state_dict(model)
    in_torch.optimizer.load_state_dict(ours)
    check_all_equal([in_torch.train(3, STEPS)], after)

    resumed = workers.run(
        jobs.train, name=f"resume {kind}", kind=kind, steps=(3, STEPS), saved=(model, theirs),
        first_at=1,
    )  # fmt: skip
    check_all_equal([history for history, _, _ in resumed], after)
    check_same(resumed[0][2], reference.optimizer.state_dict())
