"""The pods of deploy/kubernetes, each in a container as its manifest has it: nothing is lost by a
rolling update, a killed container of each role, or a lost node.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pods.kubelet import Kubelet
from tests.system.containers import BUILD_TIMEOUT_S, Compose, engine, process_of, read_until
from tests.tidy.source import ROOT

TIMEOUT_S = 300.0

DOCKERFILE = """\
FROM pushpull:latest
COPY train.py ./
CMD ["pushpull", "worker", "train.py"]
"""

OVERLAY = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [{base}]
patches:
  - target: {{kind: Job}}
    patch: |-
      - {{op: replace, path: /spec/template/spec/containers/0/args, value: [train.py]}}
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The project's image, with the test's script."""
    project = Compose()("build", timeout_s=BUILD_TIMEOUT_S)
    assert project.returncode == 0, project.stdout[-4000:]
    folder = tmp_path_factory.mktemp("image")
    built = f"pushpull-{uuid.uuid4().hex[:8]}"
    script = Path(__file__).with_name("train.py")
    shutil.copy(script, folder)
    (folder / "Dockerfile").write_text(DOCKERFILE)
    engine("build", "--quiet", "--tag", built, str(folder))
    yield built
    engine("image", "rm", "--force", built)


@pytest.fixture(scope="module")
def cluster(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubelet]:
    """All pods of the base, in training."""
    folder = tmp_path_factory.mktemp("overlay")
    base = os.path.relpath(ROOT / "deploy/kubernetes", folder)
    (folder / "kustomization.yaml").write_text(OVERLAY.format(base=base))
    started = Kubelet(folder, image)
    try:
        started.apply()
        read_until(started.pod("scheduler", 0).container, "event=table_created")
        for ordinal in range(2):
            started.until_ready("server", ordinal)
        yield started
    finally:
        started.close()


def clock(cluster: Kubelet) -> int:
    """The clock that some worker has come to, as the status says."""
    asked = "pushpull status --json --scheduler localhost:${PUSHPULL_LISTEN##*:}"
    status = json.loads(cluster.run_in("scheduler", 0, "sh", "-ec", asked))
    return max((max(n["clocks"].values(), default=0) for n in status["nodes"]), default=0)


@pytest.fixture
def trains(cluster: Kubelet) -> Iterator[None]:
    """Training goes on before a test and after it."""
    before = clock(cluster)
    yield
    end_s = time.monotonic() + TIMEOUT_S / 5
    for ordinal in range(2):
        process_of(cluster.pod("worker", ordinal).container)  # it runs, and says why if not
    while clock(cluster) <= before:
        assert time.monotonic() < end_s


@pytest.mark.timeout(TIMEOUT_S)
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


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.usefixtures("trains")
def test_a_rolling_update_of_the_servers_loses_nothing(cluster: Kubelet) -> None:
    cluster.restart_all("server")
    assert "ranges_lost" not in cluster.logs("scheduler", 0)


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.usefixtures("trains")
def test_a_container_of_each_role_that_is_killed_loses_nothing(cluster: Kubelet) -> None:
    cluster.kill("server", 0)
    cluster.until_ready("server", 0, for_s=5.0)
    cluster.kill("scheduler", 0)
    read_until(cluster.pod("scheduler", 0).container, "event=cluster_resumed")
    cluster.lose(("worker", 0))
    read_until(cluster.pod("worker", 0).container, "event=worker_joined")


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.usefixtures("trains")
def test_a_node_that_is_lost_with_a_server_and_a_worker_loses_nothing(cluster: Kubelet) -> None:
    cluster.lose(("server", 1), ("worker", 1))
    cluster.until_ready("server", 1, for_s=5.0)
    read_until(cluster.pod("worker", 1).container, "event=worker_joined")


@pytest.mark.timeout(TIMEOUT_S)
def test_training_ends_exact(cluster: Kubelet) -> None:
    """The last test: each worker has looked at every value that it read."""
    for ordinal in range(2):
        cluster.run_in("worker", ordinal, "touch", "/tmp/stop")  # noqa: S108 - its own volume
    for ordinal in range(2):
        status = cluster.until_completed("worker", ordinal)
        said = cluster.logs("worker", ordinal)
        assert status == 0, said[-8000:]
        assert re.search(rf"worker {ordinal} ends at clock \d+, exact", said)
