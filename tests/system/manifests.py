"""Manifests as kubectl renders them."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.joining import SECRET

VERSIONS = ["1.29", "1.37"]
"""From the first in which a Job counts failures by index unless it is turned off, to the newest
schema there is."""

Manifest = dict[str, Any]


@cache
def rendered(folder: Path) -> tuple[Manifest, ...]:
    """What `kubectl apply -k` would send of a folder."""
    command = ["kubectl", "kustomize", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return tuple(yaml.safe_load_all(run.stdout))


def pod_of(workload: Manifest) -> Manifest:
    """The pod that a workload starts."""
    spec: Manifest = workload["spec"]["template"]["spec"]
    return spec


def container_of(workload: Manifest) -> Manifest:
    """Its only container."""
    (only,) = pod_of(workload)["containers"]
    found: Manifest = only
    return found


def variables(workload: Manifest, ordinal: int) -> dict[str, str]:
    """The variables of a pod's container as the cluster would set them."""
    name = workload["metadata"]["name"]
    labels = dict(workload["spec"]["template"]["metadata"]["labels"])
    if workload["kind"] == "Job":
        labels["batch.kubernetes.io/job-name"] = name
    fields = {
        "metadata.name": f"{name}-{ordinal}",
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(ordinal),
    } | {f"metadata.labels['{k}']": v for k, v in labels.items()}
    container = container_of(workload)
    found: dict[str, str] = {}
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        if "value" in variable:
            text = re.sub(r"\$\((\w+)\)", lambda m: found[m[1]], variable["value"])
        elif "secretKeyRef" in source:
            text = SECRET
        elif "resourceFieldRef" in source:
            kind, _, resource = source["resourceFieldRef"]["resource"].partition(".")
            text = container["resources"][kind][resource]
        else:
            text = fields[source["fieldRef"]["fieldPath"]]
        found[variable["name"]] = text
    return found
