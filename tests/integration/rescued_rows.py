"""Rows of a running cluster that `pushpull checkpoint rescue` reads, for tests."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import safetensors.torch

import ps_worker as ps
from ps_runtime.cluster import kept_values, wire
from pushpull.v1 import types_pb2
from tests.integration.command_line import run_here


def kept_file(path: Path, address: str, moved: Callable[[str], str] = str) -> Path:
    """As a server writes it, in which servers are at `moved` addresses."""
    reader = ps.connect(address, role="reader")
    session = wire.session_to_proto(reader.session)
    view = wire.view_to_proto(reader.engine.view)
    reader.close(leave=False)  # its session stands
    for node in view.nodes:
        if node.role == types_pb2.NODE_ROLE_SERVER:
            node.address = moved(node.address)
    messages = {"session": session, "view": view}
    texts = {
        name: base64.b64encode(each.SerializeToString()).decode() for name, each in messages.items()
    }
    path.write_text(json.dumps({"format": kept_values.FORMAT, **texts}))
    return path


def rescued(kept: Path, out: Path) -> str:
    """What the command prints."""
    ended = run_here("checkpoint", "rescue", str(kept), str(out), cwd=out.parent)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def rows_in(path: Path, name: str) -> dict[int, bytes]:
    """By id."""
    found = safetensors.torch.load_file(path)
    ids, rows = found[f"{name}/ids"].tolist(), found[f"{name}/rows"].numpy()
    assert len(set(ids)) == len(ids)
    return {row_id: row.tobytes() for row_id, row in zip(ids, rows, strict=True)}
