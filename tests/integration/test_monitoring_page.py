"""MONITORING.md: its configurations are read, and a cluster shows its metrics, also broken."""

from __future__ import annotations

import json
import re
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import ps_worker as ps
from ps_runtime.launch.cluster_shape import CheckpointPlan, ClusterShape
from ps_runtime.launch.launcher import Launcher, RoleProcess, start_scheduler, start_servers
from tests.integration.lane_cluster import until
from tests.tidy.source import ROOT

PAGE = (ROOT / "docs/guides/MONITORING.md").read_text(encoding="utf-8")
METRIC = re.compile(r"\bpushpull_[a-z_]*[a-z]\b")
SELECTED = re.compile(r"\b(pushpull_[a-z_]*[a-z])\{([^}]*)\}")
LABEL = re.compile(r'(\w+)(!?=)"([^"]*)"')
PHASES = ["Pending", "Running", "Succeeded", "Failed", "Unknown"]
Samples = dict[str, list[tuple[dict[str, str], float]]]

pytestmark = pytest.mark.timeout(120)


def get(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10.0) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def scrape(address: str) -> Samples:
    """Every sample of a role, by its name."""
    found: Samples = {}
    for family in text_string_to_metric_families(get(address, "/metrics")[1]):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    """The sum of the samples with these labels; they must be there."""
    found = [v for given, v in samples[name] if labels.items() <= given.items()]
    assert found, f"{name} has no sample with {labels}"
    return sum(found)


@dataclass
class Watched:
    """Two servers with a copy of each range on both, and a worker that serves metrics."""

    scheduler: str
    servers: list[str]
    processes: list[RoleProcess]
    client: ps.Client
    checkpoints: Path

    @property
    def addresses(self) -> list[str]:
        return [self.scheduler, *self.servers, self.client.http_address]

    def missing(self, count: int) -> float:
        name = "pushpull_scheduler_ranges"
        return value(scrape(self.scheduler), name, missing_replicas=str(count))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    root = tmp_path_factory.mktemp("runs") / "1"
    shape = ClusterShape(2, 1, replica_count=2, checkpoints=CheckpointPlan(str(root)))
    with ExitStack() as stack:
        launcher = stack.enter_context(Launcher())
        scheduler = start_scheduler(launcher, shape)
        processes = start_servers(launcher, shape, scheduler.address)
        servers = [launcher.wait_ready(process).http_address for process in processes]
        client = ps.connect(scheduler.address, http_listen="127.0.0.1:0")
        stack.callback(client.close, leave=False)
        table = client.create_table("t", 1000, optimizer=ps.SGD(lr=0.1), block_elements=64)
        for _ in range(3):
            client.push_pull(table, np.ones(1000, np.float32))
        made = Watched(scheduler.http_address, servers, processes, client, root)
        until(lambda: made.missing(0) > 0 and made.missing(1) == 0, "all ranges have two replicas")
        yield made


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def jobs() -> list[dict[str, Any]]:
    read = [yaml.safe_load(block) for block in blocks("yaml")]
    return [job for each in read for job in each.get("scrape_configs", [])]


def test_every_scrape_job_has_a_way_to_find_its_targets() -> None:
    ways = [key for job in jobs() for key in job if key.endswith("_configs")]
    expected = ["static_configs", "file_sd_configs", "kubernetes_sd_configs", "relabel_configs"]
    assert ways == expected
    for job in jobs():
        assert job.keys() - set(ways) == {"job_name", "scrape_interval"}
    static = [*jobs()[0]["static_configs"], *json.loads(blocks("json")[0])]
    for group in static:
        assert group.keys() == {"targets", "labels"}
        assert all(re.fullmatch(r"10\.0\.0\.\d:\d+", target) for target in group["targets"])
        assert "role" not in group["labels"]


def test_pods_have_what_the_relabelling_asks_for() -> None:
    """The labels and annotations of the manifests."""
    asked = "".join(str(rule["source_labels"]) for rule in jobs()[2]["relabel_configs"])
    for name in ("scheduler", "servers", "workers"):
        parts = yaml.safe_load_all((ROOT / f"deploy/kubernetes/{name}.yaml").read_text())
        (pod,) = [
            each["spec"]["template"]["metadata"] for each in parts if "template" in each["spec"]
        ]
        for kind in ("label", "annotation"):
            for key in pod[f"{kind}s"]:
                assert f"pod_{kind}_{re.sub(r'[^a-z]', '_', key)}" in asked


def test_pods_that_have_ended_are_no_targets() -> None:
    """A Job's pods stay when they are done; their addresses are nobody's, or another pod's."""
    (rule,) = [r for r in jobs()[2]["relabel_configs"] if r.get("action") == "drop"]
    assert rule["source_labels"] == ["__meta_kubernetes_pod_phase"]
    ended = [phase for phase in PHASES if re.fullmatch(rule["regex"], phase)]
    assert ended == ["Succeeded", "Failed"]


def alerts() -> list[dict[str, Any]]:
    (rules,) = [yaml.safe_load(block) for block in blocks("yaml") if block.startswith("groups:")]
    (group,) = rules["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def test_alerts_have_a_rule_each_and_say_what_to_do() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names) == 9
    for rule in alerts():
        assert rule.keys() - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert METRIC.findall(rule["expr"]) or 'up{job="pushpull"' in rule["expr"]


def test_alerts_choose_samples_that_there_are(watched: Watched) -> None:
    served: Samples = {}
    for address in watched.addresses:
        for name, samples in scrape(address).items():
            served.setdefault(name, []).extend(samples)
    chosen = [found for rule in alerts() for found in SELECTED.findall(rule["expr"])]
    assert len(chosen) >= 4
    for name, selector in chosen:
        for label, operator, text in LABEL.findall(selector):
            assert operator == "!=" or value(served, name, **{label: text}) >= 0.0
            assert all(label in labels for labels, _ in served[name])


def test_the_cluster_serves_every_metric_of_the_page(watched: Watched) -> None:
    served = {name for address in watched.addresses for name in scrape(address)}
    named = set(METRIC.findall(PAGE))
    assert len(named) >= 10
    missing = {name for name in named if not served & {name, f"{name}_bucket"}}
    assert not missing
    causes = [
        labels["cause"] for labels, _ in scrape(watched.servers[0])["pushpull_server_parked_pulls"]
    ]
    assert {"workers", "initial_values"} <= set(causes)


def test_healthy_roles_say_so(watched: Watched) -> None:
    for address in watched.addresses:
        assert get(address, "/healthz") == (200, "ok\n")
        assert get(address, "/readyz") == (200, "ok\n")


def test_a_failed_checkpoint_is_an_increase_from_zero(watched: Watched) -> None:
    name = "pushpull_scheduler_checkpoints_total"
    assert value(scrape(watched.scheduler), name, result="failed") == 0.0
    watched.client.checkpoint().wait()
    assert value(scrape(watched.scheduler), name, result="complete") == 1.0
    assert value(scrape(watched.scheduler), "pushpull_scheduler_checkpoint_age_seconds") < 60.0
    shutil.rmtree(watched.checkpoints)
    watched.checkpoints.write_text("no folder", encoding="utf-8")
    with pytest.raises(ps.PushpullError):
        watched.client.checkpoint().wait()
    assert value(scrape(watched.scheduler), name, result="failed") == 1.0


def test_servers_that_leave_show_in_what_the_alerts_ask_for(watched: Watched) -> None:
    """The first has its ranges at the other; the second waits for nothing, as Ctrl-C asks."""
    whole = watched.missing(0)
    watched.processes[0].send(signal.SIGTERM)
    until(lambda: watched.missing(1) == whole, "ranges miss a replica")
    assert value(scrape(watched.scheduler), "pushpull_scheduler_lost_ranges") == 0.0
    assert get(watched.scheduler, "/healthz") == (200, "ok\n")
    watched.processes[1].send(signal.SIGINT)
    until(
        lambda: value(scrape(watched.scheduler), "pushpull_scheduler_lost_ranges") == whole,
        "ranges are lost",
    )
    status, text = get(watched.scheduler, "/healthz")
    assert status == 200
    assert text.startswith("degraded: ")
