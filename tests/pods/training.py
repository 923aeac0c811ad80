"""Clusters of pods that run train.py, and what their workers have counted."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.pods.kubelet import Kubelet
from tests.system.containers import process_of

TIMEOUT_S = 900.0
PATIENCE_S = 180.0
"""For a step."""

WORLD = 2

OVERLAY = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [{base}]
patches:
  - target: {{kind: Job}}
    patch: |-
      - {{op: replace, path: /spec/template/spec/containers/0/args, value: [train.py]}}
"""


def overlay(folder: Path, base: Path, more: str = "") -> Path:
    """Makes a folder of manifests: another's, with the test's script and further patches."""
    folder.mkdir(exist_ok=True)
    above = os.path.relpath(base, folder)
    (folder / "kustomization.yaml").write_text(OVERLAY.format(base=above) + more, encoding="utf-8")
    return folder


@dataclass(frozen=True, slots=True)
class Count:
    """How many steps of each rank the values had, in the element with the fewest and that with the
    most, when a worker began or ended at a clock. It has seen `alone` steps without another's.
    """

    rank: int
    clock: int
    least: list[int]
    most: list[int]
    alone: int = 0


def words_after(page: str, command: str) -> list[str]:
    """What a page has kubectl run in a pod: the only such command that begins so."""
    (line,) = re.findall(rf"^kubectl exec \S+ -- ({command}.*)$", page, re.MULTILINE)
    return shlex.split(line)


def begun(cluster: Kubelet, ordinal: int) -> Count:
    """What a worker found that has begun, or is about to."""
    return _said(cluster, ordinal, "begins")


def ended(cluster: Kubelet) -> list[Count]:
    """Stop the workers, which leave one after the other, and see that all that they counted agrees:
    each of them has looked at every value after every step of its own.
    """
    for ordinal in range(WORLD):
        cluster.run_in("worker", ordinal, "touch", "/tmp/stop")  # noqa: S108 - its own volume
    for ordinal in range(WORLD):
        status = cluster.until_completed("worker", ordinal)
        assert status == 0, cluster.logs("worker", ordinal)[-8000:]
    counts = [_said(cluster, ordinal, "ends") for ordinal in range(WORLD)]
    assert [count.rank for count in counts] == list(range(WORLD))
    last = max(counts, key=lambda count: count.clock)
    for rank, count in enumerate(counts):
        first, steps = begun(cluster, rank), count.clock - begun(cluster, rank).clock
        assert count.least[rank] == last.least[rank] == first.least[rank] + steps
        assert count.most[rank] == last.most[rank] == first.most[rank] + steps
        assert count.most[rank] <= count.clock
    return counts


def check_exact(counts: list[Count]) -> None:
    """Of workers that were there from the first step on: every element has every step, once."""
    last = max(counts, key=lambda count: count.clock)
    assert last.least == last.most == [count.clock for count in counts]


def _said(cluster: Kubelet, ordinal: int, word: str) -> Count:
    line = cluster.until_said("worker", ordinal, rf'{{"word": "{word}".*')
    fields: dict[str, Any] = json.loads(line[0])
    del fields["word"]
    return Count(**fields)


def steps(cluster: Kubelet, ordinal: int) -> int:
    """How many steps a worker has begun, as its own metrics say: no scheduler is needed for it."""
    process_of(cluster.pod("worker", ordinal).container)  # it runs, and says why if not
    address = f"http://{cluster.address('worker', ordinal)}:8080/metrics"
    with urllib.request.urlopen(address, timeout=PATIENCE_S) as page:
        (found,) = re.findall(rb"^pushpull_worker_steps_total (\S+)$", page.read(), re.MULTILINE)
    return int(float(found))


def progress(cluster: Kubelet, count: int = 3) -> None:
    """Wait until every worker has taken some steps more."""
    workers = range(WORLD)
    before = [steps(cluster, each) for each in workers]
    end_s = time.monotonic() + PATIENCE_S
    while any(steps(cluster, each) < before[each] + count for each in workers):
        assert time.monotonic() < end_s, "nobody takes a step"
