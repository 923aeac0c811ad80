"""Manifests as kubectl renders them."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml

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
