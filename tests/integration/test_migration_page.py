"""docs/MIGRATION.md: the loops of DDP and torch RPC and ours run, and give the same parameters."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.integration.command_line import Tool, environment
from tests.tidy.source import ROOT

PAGE = (ROOT / "docs/MIGRATION.md").read_text(encoding="utf-8")
FILES = ("task.py", "train.py", "ddp.py", "rpc_trainer.py")
ENDED_WITHIN_S = 100.0

pytestmark = pytest.mark.timeout(150)


def commands() -> list[str]:
    return [block.strip() for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)]


def pushpull(line: str, folder: Path) -> str:
    """Run a line of the page that begins with variables and `pushpull`, in warm processes."""
    words = shlex.split(line)
    at = words.index("pushpull")
    variables = dict(word.split("=", 1) for word in words[:at])
    with Tool(*words[at + 1 :], cwd=folder, variables=variables, is_warm=True) as tool:
        assert tool.end(ENDED_WITHIN_S) == 0, tool.text
    return tool.text


def torchrun(line: str, folder: Path) -> None:
    """Run a line of the page that begins with `torchrun`."""
    launcher, *arguments = shlex.split(line)
    assert launcher == "torchrun"
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=folder, env=environment() | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=ENDED_WITHIN_S, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every loop of the page has run: theirs beside ours."""
    made = tmp_path_factory.mktemp("migration")
    programs = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    for name, program in zip(FILES, programs, strict=True):
        (made / name).write_text(program, encoding="utf-8")
    ours, ddp, rpc, asynchronous = commands()
    with ThreadPoolExecutor(2) as threads:
        theirs = [threads.submit(torchrun, line, made) for line in (ddp, rpc)]
        pushpull(ours, made)
        (made / "pushpull.pt").rename(made / "bsp.pt")
        pushpull(asynchronous, made)
        for run in theirs:
            run.result()
    return made


def saved(folder: Path, name: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(folder / name)
    return found


def differing(some: dict[str, Tensor], others: dict[str, Tensor]) -> list[str]:
    assert some.keys() == others.keys()
    return [name for name, tensor in some.items() if not torch.equal(tensor, others[name])]


def test_ddp_ends_with_the_same_bits(folder: Path) -> None:
    assert not differing(saved(folder, "ddp.pt"), saved(folder, "bsp.pt"))


def test_torch_rpc_ends_with_the_same_parameters_and_buffers_of_its_own(folder: Path) -> None:
    found = differing(saved(folder, "rpc.pt"), saved(folder, "bsp.pt"))
    assert not [name for name in found if "running" not in name]


def test_the_asynchronous_run_is_another(folder: Path) -> None:
    found = differing(saved(folder, "pushpull.pt"), saved(folder, "bsp.pt"))
    assert "0.weight" in found
