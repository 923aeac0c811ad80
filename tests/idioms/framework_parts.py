"""What the idioms of Lightning, Accelerate and the Hugging Face Trainer have in common.

Each imports its framework when it runs: whoever reads the table needs none.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.idioms.kit import IDIOMS, Idiom, Kit, batches

Run = Callable[[Kit], Any]


def loader(count: int = 6, seed: int = 7, *, width: int = 12) -> DataLoader[Any]:
    """`count` batches, the same in every pass."""
    inputs, targets = zip(*batches(count, width=width, seed=seed), strict=True)
    return DataLoader(TensorDataset(torch.stack(inputs), torch.stack(targets)), batch_size=None)


def noisy() -> Any:
    """A model that is another one in evaluation: BatchNorm and Dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Dropout(0.25), nn.Linear(20, 3)
    )


def _quietly(run: Run) -> Run:
    """Frameworks warn of what this machine lacks."""

    def quiet(kit: Kit) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(kit)

    return quiet


def enter(runs: dict[str, Run]) -> None:
    """Enter runs into the table."""
    IDIOMS.extend(Idiom(name, _quietly(run), is_of_framework=True) for name, run in runs.items())


@contextmanager
def folder() -> Iterator[Path]:
    """A folder of this run alone."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)
