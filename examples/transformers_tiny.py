"""The Hugging Face Trainer teaches a tiny GPT-2 to count: trains, evaluates, clips, accumulates,
resumes.

    pushpull train examples/transformers_tiny.py --workers 2 --servers 2
    pushpull train examples/transformers_tiny.py -w 2 -s 3 -- --steps 120  # goes on

Needs `pip install 'pushpull[frameworks]'`. The next run goes on from what this
one has saved in `runs/transformers` (`--folder`).
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)
from transformers.trainer_utils import get_last_checkpoint

import pushpull as ps

WORDS, LENGTH = 50, 8


class Counting(Dataset[dict[str, Tensor]]):
    """Sequences that count up; each share has others."""

    def __init__(self, count: int, share: int) -> None:
        self._starts = torch.randint(
            0, WORDS, (count,), generator=torch.Generator().manual_seed(share)
        )

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (torch.arange(LENGTH) + self._starts[index]) % WORDS
        return {"input_ids": ids, "labels": ids}


def train(client: ps.Client, folder: Path, steps: int) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config)
    optimizer = ps.DistributedOptimizer(client, model, ps.AdamW(lr=0.01))
    saved = folder / f"rank{client.rank}"  # each worker's own: it has its place in the data
    arguments = TrainingArguments(
        output_dir=str(saved),
        max_steps=steps,
        save_steps=steps,
        save_total_limit=1,
        use_cpu=True,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        seed=client.rank,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Counting(256, 1 + client.rank),
        eval_dataset=Counting(64, 0),
        optimizers=(optimizer, get_linear_schedule_with_warmup(optimizer, 10, 10_000)),
    )
    newest = get_last_checkpoint(str(saved)) if saved.exists() else None
    # Who joins others has their model.
    trainer.train(resume_from_checkpoint=None if client.is_late_joiner else newest)
    loss = trainer.evaluate()["eval_loss"]
    if client.is_main:
        print(f"{trainer.state.global_step} steps, loss {loss:.3f}")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    steps = "of the optimizer, those of earlier runs included"
    parser.add_argument("--steps", type=int, default=60, help=steps)
    saved = "what is saved there is gone on from"
    parser.add_argument("--folder", type=Path, default=Path("runs/transformers"), help=saved)
    arguments = parser.parse_args()
    with ps.connect() as client:
        train(client, arguments.folder, arguments.steps)


if __name__ == "__main__":
    main()
