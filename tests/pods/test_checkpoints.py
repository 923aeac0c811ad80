"""A checkpoint of one cluster of pods is what another one starts from: another name prefix, another
number of servers, as docs/guides/KUBERNETES.md has it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.pods.kubelet import Kubelet, Namespace
from tests.pods.training import (
    TIMEOUT_S,
    WORLD,
    begun,
    check_exact,
    ended,
    overlay,
    progress,
    words_after,
)
from tests.system.containers import BUILD_TIMEOUT_S
from tests.tidy.source import ROOT

pytestmark = pytest.mark.timeout(BUILD_TIMEOUT_S + TIMEOUT_S)

PAGE = (ROOT / "docs/guides/KUBERNETES.md").read_text(encoding="utf-8")


@pytest.fixture
def clusters(image: str, tmp_path: Path) -> Iterator[tuple[Kubelet, Kubelet]]:
    """The one with a claim for checkpoints, in training, and the page's other one, not started."""
    deploy = tmp_path / "deploy"
    shutil.copytree(ROOT / "deploy", deploy)
    (page_s,) = re.findall(r"kustomization.yaml`, with.*?```yaml\n(.*?)```", PAGE, re.DOTALL)
    (deploy / "second").mkdir()
    (deploy / "second/kustomization.yaml").write_text(page_s, encoding="utf-8")
    namespace = Namespace()
    with ExitStack() as stack:
        stack.callback(namespace.close)
        found = []
        for name in ("kubernetes-checkpoints", "second"):
            folder = overlay(tmp_path / name, deploy / name)
            found.append(Kubelet(folder, image, namespace))
            stack.callback(found[-1].close)
        first, second = found
        first.apply()
        yield first, second


def test_a_checkpoint_is_gone_on_from_in_another_cluster(
    clusters: tuple[Kubelet, Kubelet],
) -> None:
    """The first cluster trains on meanwhile; both end exact."""
    first, second = clusters
    assert begun(first, 0).clock == 0
    progress(first)
    first.run_in("scheduler", 0, *words_after(PAGE, "pushpull checkpoint create"))
    listed = first.run_in("scheduler", 0, *words_after(PAGE, "pushpull checkpoint list"))
    assert re.search(r" good$", listed.strip()), listed
    shown = first.run_in("scheduler", 0, "pushpull", "checkpoint", "show", "/checkpoints")
    (cut,) = map(int, set(re.findall(r", bsp, clock (\d+)", shown)))
    second.apply()
    for rank in range(WORLD):
        count = begun(second, rank)
        assert (count.rank, count.clock) == (rank, cut)
        assert count.least == count.most == [cut] * WORLD
    progress(second)
    progress(first)
    for cluster in (second, first):
        check_exact(ended(cluster))
