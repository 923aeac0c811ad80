"""The components `journal` and `update-log`: pods that have lost their nodes go on with what is on
their claims, and what a StatefulSet keeps of it is not in the way of the next cluster.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.pods.kubelet import Kubelet, Namespace
from tests.pods.training import TIMEOUT_S, WORLD, begun, check_exact, ended, overlay, progress
from tests.system.containers import BUILD_TIMEOUT_S
from tests.tidy.source import ROOT

pytestmark = pytest.mark.timeout(BUILD_TIMEOUT_S + TIMEOUT_S)


@pytest.fixture
def cluster(image: str, tmp_path: Path) -> Iterator[Kubelet]:
    """A cluster with both components, in training."""
    folders = (ROOT / "deploy/components" / name for name in ("journal", "update-log"))
    components = ", ".join(os.path.relpath(folder, tmp_path) for folder in folders)
    folder = overlay(tmp_path, ROOT / "deploy/kubernetes", f"components: [{components}]\n")
    namespace = Namespace()
    with ExitStack() as stack:
        stack.callback(namespace.close)
        started = Kubelet(folder, image, namespace)
        stack.callback(started.close)
        started.apply()
        yield started


def test_claims_outlive_nodes_and_old_logs_are_in_nobody_s_way(cluster: Kubelet) -> None:
    for rank in range(WORLD):
        assert begun(cluster, rank).clock == 0
    progress(cluster)
    cluster.lose(("scheduler", 0))
    cluster.until_said("scheduler", 0, "event=cluster_resumed")
    progress(cluster)
    cluster.lose(("server", 0), ("server", 1))
    for ordinal in range(2):
        cluster.until_said("server", ordinal, "event=update_log_read")
    progress(cluster)
    check_exact(ended(cluster))

    cluster.delete_folder()
    cluster.apply()
    for rank in range(WORLD):
        found = begun(cluster, rank)
        assert (found.clock, found.most) == (0, [0] * WORLD), "it is a new cluster"
    progress(cluster)
    check_exact(ended(cluster))
