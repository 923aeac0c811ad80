"""MIGRATION.md: the loops of DDP and torch RPC and ours run, and give the same parameters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.integration.page_folder import PageFolder

pytestmark = [pytest.mark.timeout(150), pytest.mark.slow, pytest.mark.thorough]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every loop of the page has run: theirs beside ours."""
    made = tmp_path_factory.mktemp("migration")
    page = PageFolder("guides/MIGRATION.md", made)
    page.save("task.py", "train.py", "ddp.py", "rpc_trainer.py")
    ours, ddp, rpc, asynchronous = page.commands()
    with ThreadPoolExecutor(2) as threads:
        theirs = [threads.submit(page.type, line) for line in (ddp, rpc)]
        page.type(f"{ours} --checkpoint-url runs")
        (made / "pushpull.pt").rename(made / "bsp.pt")
        page.type(f"{ours} --checkpoint-url runs --resume auto")
        (made / "pushpull.pt").rename(made / "resumed.pt")
        page.type(asynchronous)
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


def test_a_run_that_is_done_takes_no_step_more(folder: Path) -> None:
    assert not differing(saved(folder, "resumed.pt"), saved(folder, "bsp.pt"))


def test_the_asynchronous_run_is_another(folder: Path) -> None:
    found = differing(saved(folder, "pushpull.pt"), saved(folder, "bsp.pt"))
    assert "0.weight" in found
