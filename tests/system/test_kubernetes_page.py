"""docs/guides/KUBERNETES.md: its overlay is rendered and checked, and kubectl reads its commands.

There is no cluster. A command is right if kubectl has understood it and then finds nobody at the
address that it is given.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from ps_cli.__main__ import app
from tests.system.manifests import VERSIONS, Manifest, rendered
from tests.tidy.source import ROOT

PAGE = (ROOT / "docs/guides/KUBERNETES.md").read_text(encoding="utf-8")
RUNS_PAGE = (ROOT / "docs/guides/RUNS.md").read_text(encoding="utf-8")
OVERLAY, ANOTHER = "deploy/my-run", "deploy/another"
ELSEWHERE, NIGHTLY = "deploy/second", "deploy/nightly"

KUBECONFIG: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "none", "cluster": {"server": "http://127.0.0.1:0"}}],
    "contexts": [{"name": "none", "context": {"cluster": "none", "namespace": "training"}}],
    "current-context": "none",
}


def blocks(page: str) -> list[str]:
    """The manifests of a page."""
    return re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)


def lines() -> list[str]:
    """Every command of the page."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with the page's overlay in it, and a configuration of kubectl that leads nowhere."""
    made = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "deploy", made / "deploy")
    overlay, components, addition, elsewhere = blocks(PAGE)
    _, nightly = blocks(RUNS_PAGE)
    for name, text in (
        (OVERLAY, overlay + components),
        (ANOTHER, overlay + components + addition),
        (ELSEWHERE, elsewhere),
        (NIGHTLY, nightly),
    ):
        (made / name).mkdir()
        (made / name / "kustomization.yaml").write_text(text, encoding="utf-8")
    (made / "config").write_text(yaml.safe_dump(KUBECONFIG), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def overlaid(folder: Path) -> dict[str, Manifest]:
    """The overlay's objects, by kind and name as kubectl has them."""
    return {
        f"{each['kind'].lower()}/{each['metadata']['name']}": each
        for each in rendered(folder / OVERLAY)
    }


def variables(manifest: Manifest) -> dict[str, str]:
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    return {each["name"]: each.get("value", "") for each in container["env"]}


def test_the_overlay_matches_the_schemas(overlaid: dict[str, Manifest]) -> None:
    for version in VERSIONS:
        for manifest in overlaid.values():
            kubernetes_validate.validate(manifest, version, strict=True)


def test_another_run_has_names_of_its_own(folder: Path, overlaid: dict[str, Manifest]) -> None:
    """How its pods find each other: `test_kubernetes.py`."""
    names = {
        f"{each['kind'].lower()}/{each['metadata']['name']}" for each in rendered(folder / ANOTHER)
    }
    assert names == {name.replace("/", "/second-") for name in overlaid}


def test_the_page_has_every_component() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(path.name for path in (ROOT / "deploy/components").iterdir())


def test_the_overlay_says_its_sizes_everywhere(overlaid: dict[str, Manifest]) -> None:
    sizes = variables(overlaid["deployment/pushpull-scheduler"])
    job = overlaid["job/pushpull-worker"]["spec"]
    assert (
        int(sizes["PUSHPULL_SERVERS"])
        == overlaid["statefulset/pushpull-server"]["spec"]["replicas"]
    )
    assert int(sizes["PUSHPULL_WORKERS"]) == job["completions"] == job["parallelism"] == 4
    (container,) = job["template"]["spec"]["containers"]
    assert container["args"] == ["train.py"]
    assert container["image"] == "registry.example.com/my-run:1"


def test_the_page_names_what_there_is(overlaid: dict[str, Manifest]) -> None:
    """Files, objects, variables with their values, and fields with theirs."""
    for path in re.findall(r"`(deploy/kubernetes[\w./-]*)`", PAGE):
        assert (ROOT / path).exists(), path
    text = yaml.safe_dump(list(overlaid.values()))
    for kind, name in re.findall(r"\| ([A-Z]\w+) `([\w-]+)`", PAGE):
        assert f"{kind.lower()}/{name}" in overlaid
    every = {
        k: v
        for each in overlaid.values()
        if "template" in each["spec"]
        for k, v in variables(each).items()
    }
    named = re.findall(r"`(PUSHPULL_[A-Z_]+)`(?:\s+(?:is `)?\(?(\w+))?", PAGE)
    for name, value in named:
        assert name in every, name
        if value.isdigit() or value == "auto":
            assert every[name] == value, name
    for field, value in re.findall(r"`([a-z]+[A-Z]\w+)`(?: (?:is |\()(\d+))?", PAGE):
        assert (f"{field}: {value}" if value else f"{field}:") in text, field


def test_every_object_that_a_command_names_is_there(overlaid: dict[str, Manifest]) -> None:
    for line in lines():
        for name in re.findall(r"\b((?:deployment|statefulset|job)/[\w-]+)", line):
            assert name in overlaid, line
        for chosen in re.findall(r"-l (\S+)", line):
            labels = dict(each.split("=") for each in chosen.split(","))
            assert any(
                labels.items() <= each["metadata"]["labels"].items() for each in overlaid.values()
            ), line


def test_what_stays_is_what_the_page_says(folder: Path, overlaid: dict[str, Manifest]) -> None:
    """`kubectl delete -k` removes what is rendered, the command by labels what it chooses; claims
    that a StatefulSet's controller makes are in no manifest.
    """
    (line,) = [line for line in lines() if line.startswith("kubectl delete deployment")]
    kinds, (key, value) = line.split()[2].split(","), line.split("-l ")[1].split("=")
    rows = re.findall(r"^\| `([a-z]+/[\w-]+)`.*?\| (\w+).*?\| (\w+).*?\|$", PAGE, re.MULTILINE)
    kept = {
        name
        for name, each in overlaid.items()
        if each["kind"].lower() not in kinds or each["metadata"]["labels"].get(key) != value
    }
    assert {name for name, by_label, _ in rows if by_label == "stays"} == kept
    assert {by_folder for _, _, by_folder in rows} == {"is"}, "they are rendered: removed"
    components = (folder / OVERLAY).with_name("with-logs")
    components.mkdir()
    text = (folder / OVERLAY / "kustomization.yaml").read_text(encoding="utf-8")
    (components / "kustomization.yaml").write_text(text + "  - ../components/update-log\n")
    servers = [each for each in rendered(components) if each["kind"] == "StatefulSet"]
    (made,) = servers[0]["spec"]["volumeClaimTemplates"]
    assert f"`{made['metadata']['name']}-{servers[0]['metadata']['name']}-0`" in PAGE
    assert "persistentVolumeClaimRetentionPolicy" not in servers[0]["spec"], "they would go with it"


def test_the_other_cluster_starts_from_the_first_one_s_claim(
    folder: Path, overlaid: dict[str, Manifest]
) -> None:
    others = {
        f"{m['kind'].lower()}/{m['metadata']['name']}": m for m in rendered(folder / ELSEWHERE)
    }
    assert not others.keys() & overlaid.keys()
    assert "persistentvolumeclaim/second-pushpull-checkpoints" not in others
    for manifest in others.values():
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)
        volumes = manifest["spec"].get("template", {}).get("spec", {}).get("volumes", ())
        claims = [
            v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v
        ]
        assert claims == ["pushpull-checkpoints"] * bool(volumes)
    said = variables(others["deployment/second-pushpull-scheduler"])
    servers = others["statefulset/second-pushpull-server"]["spec"]["replicas"]
    assert int(said["PUSHPULL_SERVERS"]) == servers != 2


def test_another_job_is_the_job_alone(folder: Path, overlaid: dict[str, Manifest]) -> None:
    """docs/guides/RUNS.md; with the variables of the page it is a run of its own."""
    (job,) = rendered(folder / NIGHTLY)
    kubernetes_validate.validate(job, VERSIONS[-1], strict=True)
    assert job["metadata"]["name"] == "pushpull-worker-nightly"
    assert f"`{job['metadata']['name']}`" in RUNS_PAGE
    assert job["spec"] == overlaid["job/pushpull-worker"]["spec"]


def test_the_secret_is_the_one_that_pods_ask_for() -> None:
    """kubectl makes it without a cluster."""
    (line,) = [line for line in lines() if "create secret" in line]
    run = subprocess.run(
        ["bash", "-ec", f"{line} --dry-run=client -o yaml"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    secret = yaml.safe_load(run.stdout)
    assert secret["metadata"]["name"] == "pushpull-join"
    assert secret["data"].keys() == {"secret"}


def kubectl_lines() -> Iterator[str]:
    return (line for line in lines() if line.startswith("kubectl"))


@pytest.mark.parametrize("line", sorted(set(kubectl_lines())))
def test_kubectl_understands_the_command(line: str, folder: Path) -> None:
    command, *arguments = shlex.split(line)
    run = subprocess.run(
        [command, *arguments],
        cwd=folder, env=os.environ | {"KUBECONFIG": str(folder / "config")},
        capture_output=True, text=True, timeout=60.0, check=False,
    )  # fmt: skip
    assert run.returncode != 0
    assert re.search(r"connection refused|was refused|can't assign", run.stderr), run.stderr


def test_an_unknown_option_is_seen(folder: Path) -> None:
    with pytest.raises(AssertionError, match="unknown flag"):
        test_kubectl_understands_the_command("kubectl apply --folder deploy", folder)


def test_pods_are_asked_for_commands_of_ours() -> None:
    asked = [line.partition(" -- pushpull ")[2] for line in lines() if " -- pushpull " in line]
    assert asked
    for command in asked:
        words = shlex.split(command)
        path = [word for word in words[:2] if word.isalpha()]
        found = CliRunner().invoke(app, [*path, "--help"], terminal_width=200)
        assert found.exit_code == 0, command
        for option in (word for word in words if word.startswith("--")):
            assert option in found.output, command
