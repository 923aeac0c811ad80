"""The kustomize base: real schemas, and what the schemas cannot say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib

import kubernetes_validate
import pytest
import yaml

from ps_runtime.system.process_end import REFUSED_EXIT_CODE
from scheduler.config import SchedulerConfig
from tests.joining import SECRET
from tests.system.manifests import (
    VERSIONS,
    Manifest,
    container_of,
    pod_of,
    rendered,
    variables,
)
from tests.tidy.source import ROOT

INSTANCE = "app.kubernetes.io/instance"
BASE, WITH_CHECKPOINTS = "deploy/kubernetes", "deploy/kubernetes-checkpoints"


def manifests(folder: str = BASE) -> tuple[Manifest, ...]:
    """What `kubectl apply -k` would send of a folder of the repository."""
    return rendered(ROOT / folder)


def workloads(folder: str = BASE) -> dict[str, Manifest]:
    """Manifests that start pods, by the component that they run."""
    return {
        manifest["metadata"]["labels"]["app.kubernetes.io/component"]: manifest
        for manifest in manifests(folder)
        if "template" in manifest["spec"]
    }


def pod(component: str, folder: str = BASE) -> Manifest:
    """The pod of a component."""
    return pod_of(workloads(folder)[component])


def container(component: str, folder: str = BASE) -> Manifest:
    """Its only container."""
    return container_of(workloads(folder)[component])


def environment(component: str, folder: str = BASE) -> dict[str, str]:
    """The variables of the component's second pod; its number is its rank, if it is a worker."""
    return variables(workloads(folder)[component], 1)


COMPONENTS = ["scheduler", "server", "worker"]


def test_the_base_runs_the_three_roles() -> None:
    kinds = {component: manifest["kind"] for component, manifest in workloads().items()}
    assert kinds == {"scheduler": "Deployment", "server": "StatefulSet", "worker": "Job"}


@pytest.mark.parametrize("folder", [BASE, WITH_CHECKPOINTS])
@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_match_the_schemas(version: str, folder: str) -> None:
    for manifest in manifests(folder):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_misspelt_field_is_seen() -> None:
    broken = yaml.safe_load(yaml.safe_dump(workloads()["server"]))
    broken["spec"]["replica"] = broken["spec"].pop("replicas")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("component", COMPONENTS)
def test_pods_run_without_privileges(component: str) -> None:
    assert pod(component)["securityContext"]["runAsNonRoot"] is True
    security = container(component)["securityContext"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["readOnlyRootFilesystem"] is True
    assert security["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("component", COMPONENTS)
def test_probes_ask_the_port_that_the_role_listens_on(component: str) -> None:
    port = int(environment(component)["PUSHPULL_LISTEN"].rpartition(":")[2])
    for probe in ("startupProbe", "livenessProbe"):
        assert container(component)[probe]["grpc"]["port"] == port
    assert port in {entry["containerPort"] for entry in container(component)["ports"]}


@pytest.mark.parametrize("component", COMPONENTS)
def test_kubernetes_adds_no_variables_that_roles_refuse(component: str) -> None:
    assert pod(component)["enableServiceLinks"] is False


@pytest.mark.parametrize("folder", [BASE, WITH_CHECKPOINTS])
@pytest.mark.parametrize("component", ["scheduler", "server"])
def test_the_role_accepts_its_settings(component: str, folder: str) -> None:
    _, *arguments = container(component, folder)["command"]
    command = [sys.executable, "-m", "pushpull", *arguments, "--print-config"]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env=plain_environment() | environment(component, folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    for name, value in environment(component, folder).items():
        if value == SECRET:
            assert value not in run.stdout
        elif name.startswith("PUSHPULL_"):
            assert value.strip('"') in run.stdout, f"{name} is not in {run.stdout}"


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_role_has_the_join_secret_of_one_secret_object(component: str) -> None:
    (variable,) = [v for v in container(component)["env"] if v["name"] == "PUSHPULL_JOIN_SECRET"]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "pushpull-join", "key": "secret"}}


def test_a_server_drains_before_it_is_killed() -> None:
    grace_s = pod("server")["terminationGracePeriodSeconds"]
    assert float(environment("server")["PUSHPULL_DRAIN_GRACE_S"]) < grace_s


def test_a_last_checkpoint_is_made_before_the_scheduler_is_killed() -> None:
    last_s = float(environment("scheduler")["PUSHPULL_CHECKPOINT_LAST_S"])
    assert last_s > SchedulerConfig(workers=1, servers=1).checkpoint_last_s
    assert last_s + 1.0 < pod("scheduler")["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("component", COMPONENTS)
def test_all_have_the_same_place_for_checkpoints(component: str) -> None:
    """And it is writable for the user that they run as."""
    url = environment("scheduler", WITH_CHECKPOINTS)["PUSHPULL_CHECKPOINT_URL"]
    found = pod(component, WITH_CHECKPOINTS)
    assert found["securityContext"]["fsGroup"] == found["securityContext"]["runAsGroup"]
    volumes = {volume["name"]: volume for volume in found["volumes"]}
    mounts = container(component, WITH_CHECKPOINTS)["volumeMounts"]
    (mount,) = [each for each in mounts if each["mountPath"] == url]
    claim = volumes[mount["name"]]["persistentVolumeClaim"]["claimName"]
    (volume,) = [m for m in manifests(WITH_CHECKPOINTS) if m["kind"] == "PersistentVolumeClaim"]
    assert volume["metadata"]["name"] == claim
    assert volume["spec"]["accessModes"] == ["ReadWriteMany"]


def test_a_worker_has_as_many_threads_as_cores_and_shared_memory_for_data_loaders() -> None:
    asked = container("worker")["resources"]["requests"]["cpu"]
    assert environment("worker")["OMP_NUM_THREADS"] == asked
    volumes = {volume["name"]: volume for volume in pod("worker")["volumes"]}
    (mount,) = [m for m in container("worker")["volumeMounts"] if m["mountPath"] == "/dev/shm"]  # noqa: S108 - Linux's place for shared memory
    assert volumes[mount["name"]]["emptyDir"]["medium"] == "Memory"


def test_a_worker_that_is_lost_is_started_again_under_its_rank() -> None:
    job = workloads()["worker"]["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["backoffLimitPerIndex"] > 0
    assert "backoffLimit" not in job, "it would end the run"
    assert pod("worker")["restartPolicy"] == "Never", "else a pod is started again, not an index"
    assert environment("worker")["PUSHPULL_RANK"] == "1"


def test_an_eviction_is_no_failure_and_a_refusal_is_not_tried_again() -> None:
    evicted, refused = workloads()["worker"]["spec"]["podFailurePolicy"]["rules"]
    assert evicted == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    assert refused["action"] == "FailIndex"
    assert refused["onExitCodes"] == {
        "containerName": container("worker")["name"],
        "operator": "In",
        "values": [REFUSED_EXIT_CODE],
    }


def test_the_operator_s_targets_have_the_labels_of_the_page(with_all: str) -> None:
    """docs/guides/MONITORING.md asks for them; the operator would name the job after the object."""
    (monitor,) = [m["spec"] for m in manifests(with_all) if m["kind"] == "PodMonitor"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    given = {rule["targetLabel"]: rule for rule in endpoint["relabelings"]}
    assert given["job"]["replacement"] == "pushpull"
    page = (ROOT / "docs/guides/MONITORING.md").read_text(encoding="utf-8")
    for source, target in re.findall(
        r"source_labels: \[(__meta_kubernetes_pod_label_\w+)\]\n +target_label: (\w+)", page
    ):
        assert given[target]["sourceLabels"] == [source]
    assert given.keys() == {"job", "component", "run"}


def test_sizes_agree() -> None:
    job = workloads()["worker"]["spec"]
    sizes = environment("scheduler")
    assert int(sizes["PUSHPULL_SERVERS"]) == workloads()["server"]["spec"]["replicas"]
    assert 2 <= int(sizes["PUSHPULL_REPLICAS"]) <= int(sizes["PUSHPULL_SERVERS"])
    assert int(sizes["PUSHPULL_WORKERS"]) == job["completions"] == job["parallelism"]


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of another run in the same namespace, as the base's comment describes it."""
    folder = tmp_path_factory.mktemp("second")
    base = (ROOT / BASE / "kustomization.yaml").read_text(encoding="utf-8")
    said = "".join(re.findall(r"^#   (namePrefix: .*\n|labels: .*\n)", base, re.MULTILINE))
    resources = f"resources: [{os.path.relpath(ROOT / WITH_CHECKPOINTS, folder)}]\n"
    (folder / "kustomization.yaml").write_text(said + resources, encoding="utf-8")
    return os.path.relpath(folder, ROOT)


@pytest.fixture(scope="module")
def with_all(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of another run that has every component there is."""
    folder = tmp_path_factory.mktemp("all")
    up = os.path.relpath(ROOT / "deploy", folder)
    components = sorted(path.name for path in (ROOT / "deploy/components").iterdir())
    made = {
        "resources": [f"{up}/kubernetes-checkpoints"],
        "components": [f"{up}/components/{name}" for name in components],
        "namePrefix": "all-",
        "labels": [{"pairs": {INSTANCE: "all-pushpull"}, "includeSelectors": True}],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(made), encoding="utf-8")
    return os.path.relpath(folder, ROOT)


@pytest.mark.parametrize("version", VERSIONS)
def test_components_match_the_schemas_together(version: str, with_all: str) -> None:
    foreign = [m for m in manifests(with_all) if m["kind"] == "PodMonitor"]  # a kind of Prometheus'
    assert len(foreign) == 1
    for manifest in manifests(with_all):
        if manifest not in foreign:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_components_fit_the_pods(with_all: str) -> None:
    check_names(with_all)
    (journal,) = [v for v in pod("scheduler", with_all)["volumes"] if v["name"] == "journal"]
    claims = {m["metadata"]["name"] for m in manifests(with_all)
              if m["kind"] == "PersistentVolumeClaim"}  # fmt: skip
    assert journal == {
        "name": "journal", "persistentVolumeClaim": {"claimName": "all-pushpull-journal"}
    }  # fmt: skip
    assert "all-pushpull-journal" in claims
    logged = environment("server", with_all)["PUSHPULL_UPDATE_LOG"]
    (mount,) = [
        m for m in container("server", with_all)["volumeMounts"] if m["mountPath"] == logged
    ]
    (claim,) = workloads(with_all)["server"]["spec"]["volumeClaimTemplates"]
    assert mount["name"] == claim["metadata"]["name"]
    assert container("worker", with_all)["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_the_network_policy_lets_a_run_s_own_pods_in(with_all: str) -> None:
    policy, _ = policies(with_all)
    own, scraped = policy["ingress"]
    (peer,) = own["from"]
    for labels in (policy["podSelector"]["matchLabels"], peer["podSelector"]["matchLabels"]):
        assert labels[INSTANCE] == "all-pushpull"
        assert len(selected_by(labels, with_all)) == 3
    taken = {port["port"] for rule in (own, scraped) for port in rule["ports"]}
    offered = {p["containerPort"] for c in COMPONENTS for p in container(c, with_all)["ports"]}
    assert taken == offered


def test_the_network_policy_lets_workers_reach_each_other(with_all: str) -> None:
    """torch.distributed takes any port."""
    _, policy = policies(with_all)
    (rule,) = policy["ingress"]
    (peer,) = rule.pop("from")
    assert rule == {}
    for labels in (policy["podSelector"]["matchLabels"], peer["podSelector"]["matchLabels"]):
        assert labels[INSTANCE] == "all-pushpull"
        assert selected_by(labels, with_all) == ["worker"]


def policies(folder: str) -> list[Manifest]:
    """The NetworkPolicies: of all pods, and of the workers'."""
    return [m["spec"] for m in manifests(folder) if m["kind"] == "NetworkPolicy"]


def services(folder: str) -> dict[str, Manifest]:
    """The Services, by name."""
    return {m["metadata"]["name"]: m["spec"] for m in manifests(folder) if m["kind"] == "Service"}


def check_names(folder: str) -> None:
    """Addresses in variables are those of Services of the same folder."""
    found = services(folder)
    for component in ("server", "worker"):
        host, _, port = environment(component, folder)["PUSHPULL_SCHEDULER"].partition(":")
        assert int(port) in {entry["port"] for entry in found[host]["ports"]}
    assert environment("scheduler", folder)["PUSHPULL_ADVERTISE"] in found
    workload = workloads(folder)["server"]
    service = workload["spec"]["serviceName"]
    assert service in found
    advertised = environment("server", folder)["PUSHPULL_ADVERTISE"]
    assert advertised == f"{workload['metadata']['name']}-1.{service}"
    for each in found.values():
        assert selected_by(each["selector"], folder)


def selected_by(selector: dict[str, str], folder: str) -> list[str]:
    """Components whose pods carry the labels."""
    return [
        component
        for component, manifest in workloads(folder).items()
        if selector.items() <= manifest["spec"]["template"]["metadata"]["labels"].items()
    ]


def test_names_resolve_to_services() -> None:
    check_names(BASE)


def test_two_runs_in_a_namespace_do_not_meet(second: str) -> None:
    check_names(second)
    names = [
        {(m["kind"], m["metadata"]["name"]) for m in manifests(f)}
        for f in (WITH_CHECKPOINTS, second)
    ]
    assert not names[0] & names[1]
    for one, other in ((WITH_CHECKPOINTS, second), (second, WITH_CHECKPOINTS)):
        for manifest in manifests(one):
            selector = manifest["spec"].get("selector", {})
            labels = selector.get("matchLabels", selector)
            assert not labels or not selected_by(labels, other)
        for rule in pod("server", one)["topologySpreadConstraints"]:
            assert selected_by(rule["labelSelector"]["matchLabels"], one) == ["server"]
            assert not selected_by(rule["labelSelector"]["matchLabels"], other)
    claimed = {v["persistentVolumeClaim"]["claimName"] for v in pod("server", second)["volumes"]
               if "persistentVolumeClaim" in v}  # fmt: skip
    assert claimed == {m["metadata"]["name"] for m in manifests(second)
                       if m["kind"] == "PersistentVolumeClaim"}  # fmt: skip


def test_a_machine_that_is_drained_takes_one_server_at_a_time() -> None:
    (budget,) = [m["spec"] for m in manifests() if m["kind"] == "PodDisruptionBudget"]
    assert budget["maxUnavailable"] == 1
    assert selected_by(budget["selector"]["matchLabels"], BASE) == ["server"]


def test_an_update_log_on_a_claim_counts_on_another_node() -> None:
    """There what a system had not written to its disk yet is gone."""
    (component,) = yaml.safe_load_all(
        (ROOT / "deploy/components/update-log/kustomization.yaml").read_text(encoding="utf-8")
    )
    (patch,) = component["patches"]
    operations = yaml.safe_load(patch["patch"])
    added = [each["value"] for each in operations if each["path"].endswith("/env/-")]
    mounted = [each["value"] for each in operations if each["path"].endswith("/volumeMounts/-")]
    assert {each["name"]: each["value"] for each in added} == {
        "PUSHPULL_UPDATE_LOG": mounted[0]["mountPath"], "PUSHPULL_UPDATE_LOG_SYNC": "1",
    }  # fmt: skip


def test_the_image_has_the_project_s_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "version"
    ]
    assert container("server")["image"] == f"pushpull:{version}"


def plain_environment() -> dict[str, str]:
    """This process's variables without settings of ours."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PUSHPULL_")}
