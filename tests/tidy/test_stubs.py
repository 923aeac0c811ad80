"""The committed stubs are what the protos give."""

from __future__ import annotations

from pathlib import Path

from grpc_tools import protoc

from tests.tidy.source import ROOT, is_generated

PROTOS = ROOT / "protos"


def generated_files(folder: Path) -> dict[str, bytes]:
    """Stubs below `folder` by their relative path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*.py*"))
        if path.suffix in (".py", ".pyi") and is_generated(path)
    }


def test_stubs_are_generated_from_the_protos(tmp_path: Path) -> None:
    contracts = [path.relative_to(PROTOS).as_posix() for path in sorted(PROTOS.rglob("*.proto"))]
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")]
    assert protoc.main(["protoc", f"-I{PROTOS}", *outputs, *contracts]) == 0

    committed, made = generated_files(PROTOS), generated_files(tmp_path)
    assert made
    differing = {name for name in committed | made if committed.get(name) != made.get(name)}
    assert not differing, f"run `make protos`: {sorted(differing)}"
