"""What was saved in each way goes on bit for bit, on as many servers, on more and on fewer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import ps_worker as ps
from tests.integration import framework_jobs, state_jobs
from tests.integration.framework_jobs import FRAMEWORKS
from tests.integration.state_jobs import STEPS
from tests.integration.training_models import differing
from tests.integration.worker_pool import Pool, Workers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

WORKERS = 2
SERVERS = 2
"""Of the cluster in which is saved."""

Clusters = dict[int, Workers]


@pytest.fixture(scope="module")
def clusters(pool: Pool) -> Iterator[Clusters]:
    """By their number of servers."""
    with ExitStack() as stack:
        found = {}
        for servers in (1, SERVERS, 3):
            cluster = stack.enter_context(ps.local_cluster(servers=servers, workers=WORKERS))
            found[servers] = stack.enter_context(pool.connected(cluster.address, WORKERS))
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the frameworks save."""
    return tmp_path_factory.mktemp("saved")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_a_scripts_own_files_go_on_on_any_number_of_servers(clusters: Clusters, kind: str) -> None:
    whole = clusters[SERVERS].run(
        state_jobs.train, name=f"whole {kind}", kind=kind, steps=(0, STEPS)
    )
    half = clusters[SERVERS].run(state_jobs.train, name=f"half {kind}", kind=kind, steps=(0, 3))
    expected, saved = whole[0][0][3:], half[0][1:]
    for servers, workers in clusters.items():
        found = workers.run(
            state_jobs.train, name=f"resumed {kind}", kind=kind, steps=(3, STEPS), saved=saved
        )
        for history, _, _ in found:
            assert [differing(*pair) for pair in zip(history, expected, strict=True)] == [[]] * 3, (
                f"{servers} servers"
            )


@pytest.mark.thorough
def test_a_checkpoint_has_state_that_was_loaded(
    pool: Pool, clusters: Clusters, tmp_path: Path
) -> None:
    """`--resume` of a run that itself began with a script's own file; ranges have two replicas.
    It has clusters of its own: a checkpoint is of all that a cluster has.
    """
    here = clusters[SERVERS]
    whole = here.run(state_jobs.train, name="whole", kind="adam", steps=(0, STEPS))
    half = here.run(state_jobs.train, name="half", kind="adam", steps=(0, 2))
    expected, saved, url = whole[0][0], half[0][1:], f"file://{tmp_path}"
    cluster = ps.local_cluster(servers=2, workers=WORKERS, replicas=2, checkpoint_url=url)
    with cluster, pool.connected(cluster.address, WORKERS) as workers:
        found = workers.run(state_jobs.train, name="main", kind="adam", steps=(2, 4), saved=saved)
        workers.run(state_jobs.checkpoint)
    assert differing(found[0][0][-1], expected[3]) == []
    for servers in (1, 3):
        cluster = ps.local_cluster(servers=servers, workers=WORKERS, resume=url)
        with cluster, pool.connected(cluster.address, WORKERS) as workers:
            found = workers.run(state_jobs.train, name="main", kind="adam", steps=(4, STEPS))
        for history, _, _ in found:
            pairs = zip(history, expected[4:], strict=True)
            assert [differing(*pair) for pair in pairs] == [[], []], f"{servers} servers"


@pytest.mark.thorough
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_frameworks_files_go_on_on_any_number_of_servers(
    clusters: Clusters, folder: Path, framework: str
) -> None:
    """Its import takes seconds."""
    job, here = FRAMEWORKS[framework], clusters[SERVERS]
    path = folder / framework
    path.mkdir()
    unused = folder / f"{framework} whole"
    unused.mkdir()
    expected = here.run(job, name=f"{framework} whole", folder=unused, parts=2, resume=False)
    half = here.run(job, name=f"{framework} half", folder=path, parts=1, resume=False)
    assert differing(half[0], expected[0]) != []
    for servers, workers in clusters.items():
        found = workers.run(job, name=f"{framework} resumed", folder=path, parts=2, resume=True)
        for ours, theirs in zip(found, expected, strict=True):
            assert differing(ours, theirs) == [], f"{servers} servers"
    assert framework_jobs.PART * 2 == STEPS
