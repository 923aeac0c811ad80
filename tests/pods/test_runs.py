"""Two Jobs beside each other on one set of servers, each a run of its own: docs/guides/RUNS.md."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.pods.kubelet import Kubelet, Namespace
from tests.pods.training import TIMEOUT_S, WORLD, begun, check_exact, ended, overlay, progress
from tests.system.containers import BUILD_TIMEOUT_S
from tests.tidy.source import ROOT

pytestmark = pytest.mark.timeout(BUILD_TIMEOUT_S + TIMEOUT_S)

VARIABLES, ANOTHER_JOB = re.findall(
    r"```yaml\n(.*?)```", (ROOT / "docs/guides/RUNS.md").read_text(encoding="utf-8"), re.DOTALL
)
PATCH = """\
  - target: {kind: Job}
    patch: |-
      apiVersion: batch/v1
      kind: Job
      metadata: {name: any}
      spec:
        template:
          spec:
            containers:
              - name: worker
"""


@pytest.fixture
def jobs(image: str, tmp_path: Path) -> Iterator[tuple[Kubelet, Kubelet]]:
    """A cluster with its own Job, and the page's other Job, both with the page's variables."""
    variables = PATCH + textwrap.indent(VARIABLES, " " * 16)
    cluster = overlay(tmp_path / "my-run", ROOT / "deploy/kubernetes", variables)
    nightly = tmp_path / "nightly"
    nightly.mkdir()
    (nightly / "kustomization.yaml").write_text(ANOTHER_JOB, encoding="utf-8")
    namespace = Namespace()
    with ExitStack() as stack:
        stack.callback(namespace.close)
        both = Kubelet(cluster, image, namespace), Kubelet(nightly, image, namespace)
        for each in both:
            stack.callback(each.close)
            each.apply()
        yield both


def test_two_runs_beside_each_other_end_exact(jobs: tuple[Kubelet, Kubelet]) -> None:
    """A server is killed while both train. They have a table of one name, and ranks alike."""
    cluster, nightly = jobs
    for job in jobs:
        for rank in range(WORLD):
            assert begun(job, rank).rank == rank
    assert runs(cluster) == {"pushpull-worker": "running", "pushpull-worker-nightly": "running"}
    cluster.until_ready("server", 0)
    cluster.until_ready("server", 1)
    cluster.kill("server", 0)
    cluster.until_ready("server", 0)
    for job in jobs:
        progress(job)
    check_exact(ended(nightly))
    assert runs(cluster) == {"pushpull-worker": "running", "pushpull-worker-nightly": "over"}
    progress(cluster)
    check_exact(ended(cluster))


def runs(cluster: Kubelet) -> dict[str, str]:
    """How each run is doing, as the page's command says."""
    asked = ("pushpull", "runs", "list", "--scheduler", "pushpull-scheduler:7070")
    said = cluster.run_in("scheduler", 0, *asked)
    return dict(re.findall(r"run '(.*?)': (\w+), ", said))
