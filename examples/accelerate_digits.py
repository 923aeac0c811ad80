"""Accelerate on scikit-learn's handwritten digits: trains, evaluates, clips, accumulates, resumes.

    pushpull train examples/accelerate_digits.py --workers 2 --servers 2
    pushpull train examples/accelerate_digits.py -w 2 -s 3 -- --epochs 8  # goes on

Needs `pip install 'pushpull[examples,frameworks]'`. The next run goes on from what this
one has saved in `runs/accelerate` (`--folder`).
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pushpull as ps

TEST_COUNT = 360


def load() -> tuple[TensorDataset, TensorDataset]:
    """What is trained on, and what is tested with: the same split for everybody."""
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    training, testing = order[TEST_COUNT:], order[:TEST_COUNT]
    return TensorDataset(x[training], y[training]), TensorDataset(x[testing], y[testing])


class Epochs:
    """How many are behind this run; `save_state` saves it with the rest."""

    done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def accuracy(client: ps.Client, model: nn.Module, loader: Any) -> float:
    """Each worker tests its own share; all have the same number."""
    model.eval()
    right = seen = 0
    with torch.no_grad():
        for x, y in loader:
            right += int((model(x).argmax(1) == y).sum())
            seen += len(y)
    model.train()
    counts = client.all_reduce({"right": right, "seen": seen})
    return float(counts["right"] / counts["seen"])


def train(client: ps.Client, folder: Path, epochs: int) -> None:
    training, testing = load()
    sampler = ps.DistributedSampler(client, training)
    tested = ps.DistributedSampler(client, testing, shuffle=False, name=None)
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10)
    )
    optimizer: Any = ps.DistributedOptimizer(client, model, ps.AdamW(lr=0.01))
    schedule: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    loader: Any = DataLoader(training, 32, sampler=sampler)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    past = Epochs()
    accelerator.register_for_checkpointing(past)
    saved = folder / f"rank{client.rank}"  # each worker's own: it has its place in the data
    if saved.exists() and not client.is_late_joiner:  # who joins others has their model
        accelerator.load_state(str(saved))
    for epoch in range(past.done, epochs):
        loader.set_epoch(epoch)  # which tells the sampler
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
        past.done = epoch + 1
        reached = accuracy(client, model, DataLoader(testing, 128, sampler=tested))
        if client.is_main:
            print(f"epoch {past.done} of {epochs}: test accuracy {reached:.1%}")
    accelerator.save_state(str(saved))


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    passes = "passes over the training data, those of earlier runs included"
    parser.add_argument("--epochs", type=int, default=4, help=passes)
    saved = "what is saved there is gone on from"
    parser.add_argument("--folder", type=Path, default=Path("runs/accelerate"), help=saved)
    arguments = parser.parse_args()
    with ps.connect() as client:
        train(client, arguments.folder, arguments.epochs)


if __name__ == "__main__":
    main()
