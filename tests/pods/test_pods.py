"""The pods of deploy/kubernetes, each in a container as its manifest has it: nothing is lost by a
rolling update, a killed container of each role, a scheduler that is killed again and again, a
worker that is started again, or a lost node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.pods.kubelet import Kubelet, Namespace
from tests.pods.training import TIMEOUT_S, begun, ended, overlay, progress, steps, words_after
from tests.system.containers import BUILD_TIMEOUT_S, engine
from tests.tidy.source import ROOT

pytestmark = pytest.mark.timeout(BUILD_TIMEOUT_S + TIMEOUT_S)

PAGE = (ROOT / "docs/guides/KUBERNETES.md").read_text(encoding="utf-8")
KILLS = 5


@pytest.fixture(scope="module")
def cluster(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubelet]:
    """All pods of the base, in training."""
    namespace = Namespace()
    folder = overlay(tmp_path_factory.mktemp("overlay"), ROOT / "deploy/kubernetes")
    started = Kubelet(folder, image, namespace)
    try:
        started.apply()
        started.until_said("scheduler", 0, "event=table_created")
        for ordinal in range(2):
            started.until_ready("server", ordinal)
        yield started
    finally:
        started.close()
        namespace.close()


@pytest.fixture
def trains(cluster: Kubelet) -> Iterator[None]:
    """Training goes on before a test and after it."""
    progress(cluster)
    yield
    progress(cluster)


@pytest.mark.usefixtures("trains")
def test_pods_run_as_their_manifests_say(cluster: Kubelet) -> None:
    asked = "id -u; grep -E '^(CapEff|NoNewPrivs)' /proc/1/status; touch /srv/pushpull/x 2>&1; true"
    for component, limit_bytes in (("scheduler", 2**30), ("server", 2**32), ("worker", 2**32)):
        said = cluster.run_in(component, 0, "sh", "-c", asked)
        assert said.startswith("10001\n")
        assert re.search(r"CapEff:\s+0{16}\n", said)
        assert re.search(r"NoNewPrivs:\s+1\n", said)
        assert "Read-only file system" in said
        container = cluster.pod(component, 0).container
        assert (
            int(engine("inspect", "--format", "{{.HostConfig.Memory}}", container)) == limit_bytes
        )
    status = cluster.run_in("scheduler", 0, *words_after(PAGE, "pushpull status"))
    assert "servers 2 of 2  workers 2 of 2" in status


@pytest.mark.usefixtures("trains")
def test_a_rolling_update_of_the_servers_loses_nothing(cluster: Kubelet) -> None:
    cluster.restart_all("server")
    assert "ranges_lost" not in cluster.logs("scheduler", 0)


@pytest.mark.usefixtures("trains")
def test_a_container_of_each_role_that_is_killed_loses_nothing(cluster: Kubelet) -> None:
    cluster.kill("server", 0)
    cluster.until_ready("server", 0, for_s=5.0)
    scheduler_killed(cluster)
    cluster.lose(("worker", 0))
    begun(cluster, 0)


def scheduler_killed(cluster: Kubelet) -> None:
    """Its container is killed, and comes back in its pod with the cluster as it was."""
    resumed = "event=cluster_resumed"
    before = len(re.findall(resumed, cluster.logs("scheduler", 0)))
    cluster.kill("scheduler", 0)
    cluster.until_said("scheduler", 0, resumed, count=before + 1)


def test_a_scheduler_that_is_killed_five_times_under_load_is_no_event(cluster: Kubelet) -> None:
    for _ in range(KILLS):
        scheduler_killed(cluster)
        progress(cluster)
    for ordinal in range(2):
        for component in ("server", "worker"):
            assert "event=registering_again" not in cluster.logs(component, ordinal)


def test_each_worker_that_is_started_again_has_its_rank_at_once(cluster: Kubelet) -> None:
    """One is killed, the pod of the other is deleted: the Job starts each index again, under the
    same host name. Nobody waits until the one before has been silent for long.
    """
    for ordinal in range(2):
        progress(cluster)
        passed = begun(cluster, ordinal).clock + steps(cluster, ordinal) - 1
        if ordinal == 0:
            cluster.lose(("worker", ordinal))
        else:
            cluster.delete("worker", ordinal)
            cluster.start("worker", ordinal)
        came = begun(cluster, ordinal)
        assert came.rank == ordinal
        assert came.clock >= passed, "it goes on where the cluster is"
        progress(cluster)
    gone = re.findall(r'event=worker_gone .*reason="(.*?)"', cluster.logs("scheduler", 0))
    assert len(gone) >= 2
    assert all(reason.endswith("its process has ended") for reason in gone), gone


@pytest.mark.usefixtures("trains")
def test_a_node_that_is_lost_with_a_server_and_a_worker_loses_nothing(cluster: Kubelet) -> None:
    cluster.lose(("server", 1), ("worker", 1))
    cluster.until_ready("server", 1, for_s=5.0)
    begun(cluster, 1)


def test_training_ends_exact(cluster: Kubelet) -> None:
    """The last test."""
    ended(cluster)
