"""Frameworks that train with a `DistributedOptimizer`, as their users write it; each job trains for
some steps, saves as the framework does, and goes on from that.

The frameworks are imported by the jobs: that takes seconds, and most workers need none.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ps_worker as ps
from tests.integration.training_jobs import EXACT, Values
from tests.integration.training_models import batches, seeded, values

IMPORTED = ("lightning", "accelerate", "transformers.trainer")
"""For processes that are forks of one which has them: together they take eight seconds of CPU."""

PART = 3
"""Steps before what was saved, and after it."""


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 20), nn.Dropout(0.25), nn.Tanh(), nn.Linear(20, 3))


def _loader(rank: int) -> DataLoader[Any]:
    inputs = torch.stack(list(batches(PART, rank=rank)))
    return DataLoader(TensorDataset(inputs), batch_size=None)


def _optimizer(client: ps.Client, name: str, module: nn.Module) -> ps.DistributedOptimizer:
    return ps.DistributedOptimizer(client, module, ps.AdamW(lr=0.01), name=name, **EXACT)


def lightning(client: ps.Client, name: str, folder: Path, parts: int, *, resume: bool) -> Values:
    """`Trainer.fit(ckpt_path=...)`; a part is an epoch."""
    warnings.simplefilter("ignore")
    import lightning as pl

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = seeded(_net)

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            torch.manual_seed(100 * index + client.rank)  # Lightning saves no RNG
            loss: torch.Tensor = self.net(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = _optimizer(client, name, self)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * PART)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module, path = Module(), folder / f"rank{client.rank}.ckpt"
    trainer = pl.Trainer(
        max_epochs=parts, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.5,
    )  # fmt: skip
    trainer.fit(module, _loader(client.rank), ckpt_path=path if resume else None)
    if parts == 1:
        trainer.save_checkpoint(path)
    return values(module)


def accelerate(client: ps.Client, name: str, folder: Path, parts: int, *, resume: bool) -> Values:
    """`Accelerator.save_state` and `load_state`."""
    warnings.simplefilter("ignore")
    from accelerate import Accelerator

    torch.manual_seed(client.rank)
    accelerator = Accelerator(cpu=True)
    model = seeded(_net)
    optimizer = _optimizer(client, name, model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=2 * PART)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, _loader(client.rank), schedule
    )
    path = str(folder / f"rank{client.rank}")
    if resume:
        accelerator.load_state(path)
    for _ in range(parts - resume):
        for (x,) in loader:
            optimizer.zero_grad()
            accelerator.backward(model(x).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
    if parts == 1:
        accelerator.save_state(path)
    return values(model)


class _Words(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self._ids = torch.randint(0, 50, (40, 8), generator=generator)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


def transformers(client: ps.Client, name: str, folder: Path, parts: int, *, resume: bool) -> Values:
    """The Hugging Face Trainer's `resume_from_checkpoint`."""
    warnings.simplefilter("ignore")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    model = seeded(lambda: GPT2LMHeadModel(config))
    optimizer = _optimizer(client, name, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    path = folder / f"rank{client.rank}"
    arguments = TrainingArguments(
        output_dir=str(path), max_steps=PART * parts, save_steps=PART, use_cpu=True, report_to=[],
        disable_tqdm=True, per_device_train_batch_size=4, seed=client.rank, logging_strategy="no",
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=_Words(client.rank),
        optimizers=(optimizer, schedule),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(path / f"checkpoint-{PART}") if resume else None)
    return values(model)


FRAMEWORKS = {"lightning": lightning, "accelerate": accelerate, "transformers": transformers}
