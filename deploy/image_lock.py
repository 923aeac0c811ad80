"""Writes deploy/image/*.txt: the packages of the image, with the hashes of their wheels.

Versions are those of constraints.txt. torch is in none of the files: its wheel is another one for
each TORCH_INDEX.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy/image"
HEAVY = frozenset({"torch", "numpy", "safetensors"})
"""Dependencies of servers and workers alone."""

PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
_HEAD = "# Written by `make image-lock`: every wheel of CPython {} on Linux, {}.\n"
_OF_CUDA = re.compile("torch$|nvidia-|cuda-|triton")


def needed(direct: Iterable[str]) -> set[str]:
    """The packages that these need, directly or not, as far as the files may have them."""
    found: set[str] = set()
    left = [Requirement(each) for each in direct]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        if name in found or not _is_meant(requirement):
            continue
        found.add(name)
        left += [Requirement(each) for each in metadata.requires(name) or ()]
    return {name for name in found if not _OF_CUDA.match(name)}


def _is_meant(requirement: Requirement) -> bool:
    """Whether some Python that the files are for needs it."""
    marker = requirement.marker
    places = ({"python_version": each, "extra": ""} for each in PYTHONS)
    return marker is None or any(marker.evaluate(place) for place in places)


def pinned() -> dict[str, str]:
    """The version of each package, by its canonical name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {canonicalize_name(name): version for name, version in pairs}


def split(project: Path) -> tuple[set[str], set[str]]:
    """What a scheduler needs, and what servers and workers need besides."""
    direct = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    light = needed(each for each in direct if Requirement(each).name not in HEAVY)
    return light, needed(direct) - light


def _hashes(requirements: list[str], python: str, machine: str) -> dict[str, str]:
    """The hash of each package's wheel that pip chooses for such a machine."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(36, 4, -1)]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed",
            "--no-deps", "--only-binary=:all:", f"--target={folder}", f"--python-version={python}",
            *(f"--platform={each}" for each in (*platforms, f"manylinux2014_{machine}")),
            "--report=-", *requirements,
        ]  # fmt: skip
        report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {
        canonicalize_name(each["metadata"]["name"]): each["download_info"]["archive_info"][
            "hashes"
        ]["sha256"]
        for each in report["install"]
    }


def main() -> None:
    """Write the files."""
    versions = pinned()
    for name, packages in zip(("light", "rest"), split(ROOT / "pyproject.toml"), strict=True):
        requirements = [f"{each}=={versions[each]}" for each in sorted(packages)]
        hashes = [_hashes(requirements, p, m) for p in PYTHONS for m in MACHINES]
        text = _HEAD.format(f"{PYTHONS[0]} to {PYTHONS[-1]}", " and ".join(MACHINES))
        for requirement, each in zip(requirements, sorted(packages), strict=True):
            wheels = sorted({found[each] for found in hashes})
            text += " \\\n    ".join([requirement, *(f"--hash=sha256:{w}" for w in wheels)]) + "\n"
        (FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
