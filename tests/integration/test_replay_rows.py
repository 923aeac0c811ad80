"""`pushpull replay` of tables of rows, beside the cluster that has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch

from tests.integration.command_line import run_here
from tests.integration.logged_rows import LoggedRows, logged_rows

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoggedRows]:
    with logged_rows(tmp_path_factory.mktemp("run")) as found:
        yield found


def replay(logged: LoggedRows, *arguments: str, cwd: Path) -> str:
    """What the command prints."""
    ended = run_here("replay", str(logged.logs), *arguments, cwd=cwd)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def by_id(path: Path, name: str) -> dict[int, bytes]:
    """A table's rows in a safetensors file."""
    found = safetensors.torch.load_file(path)
    ids, rows = found[f"{name}/ids"].tolist(), found[f"{name}/rows"].numpy()
    assert len(set(ids)) == len(ids)
    return {row_id: row.tobytes() for row_id, row in zip(ids, rows, strict=True)}


def test_all_is_what_the_checkpoints_have(logged: LoggedRows, tmp_path: Path) -> None:
    for url in logged.checkpoints:
        ended = run_here("replay", str(logged.logs), "--against", url, cwd=tmp_path)
        print(ended.stdout, ended.stderr)
    shown = run_here("replay", str(logged.logs), cwd=tmp_path)
    print(shown.stdout, shown.stderr)
