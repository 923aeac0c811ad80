"""Lightning, Accelerate and the Hugging Face Trainer, as their users write them.

Each imports its framework when it runs: that takes seconds, and most idioms need none.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.idioms.kit import IDIOMS, Idiom, Kit, batches, idiom, loss_of, perceptron


def _loader(count: int = 6, seed: int = 7) -> DataLoader[Any]:
    inputs, targets = zip(*batches(count, seed=seed), strict=True)
    return DataLoader(TensorDataset(torch.stack(inputs), torch.stack(targets)), batch_size=None)


def _quietly(run: Callable[[Kit], Any]) -> Callable[[Kit], Any]:
    """Frameworks warn of what this machine lacks."""

    def quiet(kit: Kit) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(kit)

    return quiet


# --- Lightning


def _lightning(kit: Kit, *, validates: bool = False, by_hand: bool = False, **trainer: Any) -> Any:
    import lightning as pl

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = perceptron()
            self.automatic_optimization = not by_hand
            self.seen: list[float] = []

        def training_step(self, batch: Any, _index: int) -> Any:
            loss = loss_of(self.net, batch)
            self.seen.append(loss.item())
            if not by_hand:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

        def validation_step(self, batch: Any, _index: int) -> None:
            self.seen.append(loss_of(self.net, batch).item())

        def configure_optimizers(self) -> Any:
            optimizer = kit.optimizer(self, "AdamW", lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    module = Module()
    fitted = pl.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, **trainer,
    )  # fmt: skip
    fitted.fit(module, _loader(), _loader(2, seed=9) if validates else None)
    return module.seen, module.net


def _averaging() -> Any:
    """A callback that validates an average of weights, and puts back what is trained."""
    import lightning as pl

    class Averaging(pl.Callback):  # type: ignore[misc]
        mean: Any = None

        def on_train_batch_end(self, _trainer: Any, module: Any, *_rest: Any) -> None:
            if self.mean is None:
                self.mean = copy.deepcopy(module.net.state_dict())
            for name, value in module.net.state_dict().items():
                self.mean[name].lerp_(value, 0.2)

        def on_validation_start(self, _trainer: Any, module: Any) -> None:
            self.kept = copy.deepcopy(module.net.state_dict())
            module.net.load_state_dict(self.mean)

        def on_validation_end(self, _trainer: Any, module: Any) -> None:
            module.net.load_state_dict(self.kept)

    return Averaging()


def _lightning_averages(kit: Kit) -> Any:
    return _lightning(kit, validates=True, callbacks=[_averaging()])


_LIGHTNING: dict[str, Callable[[Kit], Any]] = {
    "Lightning: fit": _lightning,
    "Lightning: validation between epochs": partial(_lightning, validates=True),
    "Lightning: gradients are clipped": partial(_lightning, gradient_clip_val=0.1),
    "Lightning: gradients are clipped by value": partial(
        _lightning, gradient_clip_val=0.01, gradient_clip_algorithm="value"
    ),
    "Lightning: batches are accumulated": partial(_lightning, accumulate_grad_batches=2),
    "Lightning: optimization by hand": partial(_lightning, by_hand=True),
    "Lightning: a callback validates an average": _lightning_averages,
}

IDIOMS.extend(Idiom(name, _quietly(run)) for name, run in _LIGHTNING.items())


# --- Accelerate


def _accelerate(kit: Kit, *, norm: float = 0.0, value: float = 0.0, every: int = 1) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=every)
    model: Any = perceptron()
    optimizer: Any = kit.optimizer(model, "Adam", lr=0.01)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (1 + n))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, _loader(), schedule)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients and norm:
                accelerator.clip_grad_norm_(model.parameters(), norm)
            if accelerator.sync_gradients and value:
                accelerator.clip_grad_value_(model.parameters(), value)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
    return losses, accelerator.unwrap_model(model)


_ACCELERATE: dict[str, Callable[[Kit], Any]] = {
    "Accelerate: prepare and backward": _accelerate,
    "Accelerate: batches are accumulated": partial(_accelerate, every=3),
    "Accelerate: clip_grad_norm_": partial(_accelerate, norm=0.1),
    "Accelerate: clip_grad_value_": partial(_accelerate, value=0.01),
}

IDIOMS.extend(Idiom(name, _quietly(run)) for name, run in _ACCELERATE.items())


# --- Hugging Face


class _Words(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._ids = torch.randint(0, 50, (count, 8), generator=generator)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


def _hugging_face(kit: Kit, **given: Any) -> Any:
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainingArguments,
        get_linear_schedule_with_warmup,
    )

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config)
    optimizer = kit.optimizer(model, "AdamW", lr=0.01)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 8)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=str(Path(folder)), use_cpu=True, report_to=[], disable_tqdm=True,
            per_device_train_batch_size=4, logging_strategy="no", seed=3,
            **{"max_steps": 6, "save_strategy": "no", **given},
        )  # fmt: skip
        trainer = Trainer(
            model=model, args=arguments, train_dataset=_Words(40, 1), eval_dataset=_Words(8, 2),
            optimizers=(optimizer, schedule),
        )  # fmt: skip
        trainer.train()
        judged = trainer.evaluate()["eval_loss"]
    return judged, model


_BEST: dict[str, Any] = {
    "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
    "load_best_model_at_end": True,
}  # fmt: skip

_HUGGING_FACE: dict[str, Callable[[Kit], Any]] = {
    "Trainer: train and evaluate": _hugging_face,
    "Trainer: batches are accumulated": partial(_hugging_face, gradient_accumulation_steps=2),
    "Trainer: the norm is clipped": partial(_hugging_face, max_grad_norm=0.05),
    "Trainer: the best model is loaded at the end": partial(_hugging_face, **_BEST),
}

IDIOMS.extend(Idiom(name, _quietly(run)) for name, run in _HUGGING_FACE.items())


@idiom("Lightning's Fabric")
@_quietly
def fabric(kit: Kit) -> Any:
    import lightning as pl

    fabric = pl.Fabric(accelerator="cpu", devices=1)
    model: Any = perceptron()
    optimizer: Any = kit.optimizer(model, lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    losses = []
    for batch in fabric.setup_dataloaders(_loader()):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.2)
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.module.state_dict())
