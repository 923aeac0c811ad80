"""The Hugging Face Trainer, as its users write it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

from tests.idioms.framework_parts import enter, folder
from tests.idioms.kit import Kit

STEPS = 4


class _Words(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._ids = torch.randint(0, 50, (count, 8), generator=generator)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


def _model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    return GPT2LMHeadModel(config)


def _arguments(path: Any, **given: Any) -> Any:
    from accelerate.state import AcceleratorState, GradientState
    from transformers import TrainingArguments

    # Settings of a run before this one are the process's otherwise.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return TrainingArguments(
        output_dir=str(path), use_cpu=True, report_to=[], disable_tqdm=True, seed=3,
        per_device_train_batch_size=4, logging_strategy="no",
        **{"max_steps": STEPS, "save_strategy": "no", **given},
    )  # fmt: skip


def _trainer(kind: Any, model: Any, arguments: Any, optimizers: Any) -> Any:
    return kind(
        model=model, args=arguments, train_dataset=_Words(40, 1), eval_dataset=_Words(8, 2),
        optimizers=optimizers,
    )  # fmt: skip


def _trains(
    kit: Kit,
    *,
    lr: float = 0.01,
    has_schedule: bool = True,
    then: Callable[[Any], Any] = lambda _trainer: None,
    **given: Any,
) -> Any:
    from transformers import Trainer, get_linear_schedule_with_warmup

    model = _model()
    optimizer = kit.optimizer(model, "AdamW", lr=lr)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 8) if has_schedule else None
    with folder() as path:
        trainer = _trainer(Trainer, model, _arguments(path, **given), (optimizer, schedule))
        trainer.train()
        judged = trainer.evaluate()["eval_loss"]
        then(trainer)
    return judged, trainer.lr_scheduler.get_last_lr(), model


def _steps_on(trainer: Any) -> None:
    """A loop of one's own after the Trainer's."""
    model, optimizer = trainer.model, trainer.optimizer
    model.train()
    for number in range(2):
        words = _Words(4, 3 + number)
        ids = default_collate([words[index] for index in range(4)])
        optimizer.zero_grad()
        model(**ids).loss.backward()
        optimizer.step()


def _goes_on_from_the_best(trainer: Any) -> None:
    best = trainer.state.best_global_step
    assert best, "nothing was loaded"
    assert best < trainer.state.global_step, "the best is the last"
    _steps_on(trainer)


def _has_groups(kit: Kit) -> Any:
    """No decay for biases and norms, as the Trainer's own optimizer has it."""
    from transformers import Trainer

    class Own(Trainer):  # type: ignore[misc]
        def create_optimizer(self, model: Any = None) -> Any:  # noqa: ARG002 - theirs
            named = list(self.model.named_parameters())
            groups = [
                {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for _, p in named if p.ndim == 1], "weight_decay": 0.0},
            ]
            self.optimizer = kit.optimizer(groups, "AdamW", module=self.model, lr=0.01)
            return self.optimizer

    model = _model()
    with folder() as path:
        arguments = _arguments(path, warmup_steps=2)
        trainer = _trainer(Own, model, arguments, (None, None))
        trainer.train()
        judged = trainer.evaluate()["eval_loss"]
    assert len(trainer.optimizer.param_groups) == 2
    return judged, trainer.lr_scheduler.get_last_lr(), model


_BEST: dict[str, Any] = {
    "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
    "load_best_model_at_end": True, "lr": 0.5,
}  # fmt: skip

enter(
    {
        "Trainer: train and evaluate": _trains,
        "Trainer: batches are accumulated": partial(_trains, gradient_accumulation_steps=2),
        "Trainer: the norm is clipped": partial(_trains, max_grad_norm=0.05),
        "Trainer: batches are accumulated and clipped": partial(
            _trains, gradient_accumulation_steps=2, max_grad_norm=0.05
        ),
        "Trainer: mixed precision": partial(_trains, bf16=True),
        "Trainer: the best model is loaded, and steps follow": partial(
            _trains, then=_goes_on_from_the_best, **_BEST
        ),
        "Trainer: the schedule is its own, with warm-up": partial(
            _trains, has_schedule=False, warmup_steps=2
        ),
        "Trainer: parameter groups of create_optimizer": _has_groups,
        "Trainer: train is called twice": partial(_trains, then=lambda trainer: trainer.train()),
    }
)
