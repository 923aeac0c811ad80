"""Lightning's Trainer on scikit-learn's handwritten digits: trains, evaluates, clips, accumulates,
resumes.

    pushpull train examples/lightning_digits.py --workers 2 --servers 2
    pushpull train examples/lightning_digits.py -w 2 -s 3 -- --epochs 8  # goes on

Needs `pip install 'pushpull[examples,frameworks]'`. The next run goes on from what this
one has saved in `runs/lightning` (`--folder`).
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

import lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
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


class Digits(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, client: ps.Client) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10)
        )
        self.client = client
        self.right = self.seen = 0

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], _index: int) -> None:
        self.right += int((self.net(batch[0]).argmax(1) == batch[1]).sum())
        self.seen += len(batch[1])

    def on_validation_epoch_end(self) -> None:
        # Each worker tests its own share. All log the same, so that callbacks decide alike.
        counts = self.client.all_reduce({"right": self.right, "seen": self.seen})
        self.log("accuracy", counts["right"] / counts["seen"])
        self.right = self.seen = 0

    def configure_optimizers(self) -> Any:
        optimizer = ps.DistributedOptimizer(self.client, self, ps.AdamW(lr=0.01))
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


def train(client: ps.Client, folder: Path, epochs: int) -> None:
    training, testing = load()
    sampler = ps.DistributedSampler(client, training)
    tested = ps.DistributedSampler(client, testing, shuffle=False, name=None)
    module = Digits(client)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        num_sanity_val_steps=0,  # they would call all_reduce before the first step
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    saved = folder / f"rank{client.rank}.ckpt"  # each worker's own: it has its place in the data
    resumes = saved.exists() and not client.is_late_joiner  # who joins others has their model
    loaders = DataLoader(training, 32, sampler=sampler), DataLoader(testing, 128, sampler=tested)
    trainer.fit(module, *loaders, ckpt_path=saved if resumes else None, weights_only=False)
    if "accuracy" not in trainer.callback_metrics:  # no epoch was left, for any worker
        trainer.validate(module, loaders[1], verbose=False)
    trainer.save_checkpoint(saved)
    if client.is_main:
        accuracy = trainer.callback_metrics["accuracy"]
        print(f"{trainer.global_step} steps, test accuracy {accuracy:.1%}")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    passes = "passes over the training data, those of earlier runs included"
    parser.add_argument("--epochs", type=int, default=4, help=passes)
    saved = "what is saved there is gone on from"
    parser.add_argument("--folder", type=Path, default=Path("runs/lightning"), help=saved)
    arguments = parser.parse_args()
    with ps.connect() as client:
        train(client, arguments.folder, arguments.epochs)


if __name__ == "__main__":
    main()
