"""A folder with an installed package in it, as pip leaves one: modules, and metadata beside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(
    folder: Path,
    package: str,
    version: str,
    modules: Mapping[str, str],
    updates: Mapping[str, str],
) -> Path:
    """Install modules (name -> source) whose entry points (name -> "module:attribute") are updates.

    Returns:
        The folder, for a PYTHONPATH.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
    metadata = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    head = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    (metadata / "METADATA").write_text(head, encoding="utf-8")
    lines = [f"{name} = {value}" for name, value in updates.items()]
    text = "\n".join(["[pushpull.updates]", *lines, ""])
    (metadata / "entry_points.txt").write_text(text, encoding="utf-8")
    return folder
