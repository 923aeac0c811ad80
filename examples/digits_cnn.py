"""A convolutional network on handwritten digits, trained by any number of workers.

    pushpull train examples/digits_cnn.py --workers 2 --servers 2
    pushpull compare examples/digits_cnn.py --modes bsp,ssp:4,asp   # what consistency costs
    pushpull train examples/digits_cnn.py --checkpoint-url runs/digits --checkpoint-every 100
    pushpull train examples/digits_cnn.py --resume runs/digits      # on any number of servers
    python examples/digits_cnn.py --single          # plain torch, for comparison

Each worker trains on its own share of the images; the servers apply Adam to the mean of their
gradients. Rank 0 prints the accuracy on images that nobody trained on: above 97 %.

The images are in digits.csv.gz: "Optical Recognition of Handwritten Digits" of E. Alpaydin and
C. Kaynak, UCI Machine Learning Repository (CC BY 4.0), in the form in which scikit-learn has them.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import pushpull as ps

DIGITS = Path(__file__).with_name("digits.csv.gz")
TEST_IMAGE_COUNT = 360
PIXEL_MAX = 16.0


@dataclass(frozen=True)
class Images:
    """Images of shape (n, 1, 8, 8) from 0 to 1, and what they show."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, chosen: Tensor | slice) -> Images:
        return Images(self.pixels[chosen], self.labels[chosen])


def load(seed: int) -> tuple[Images, Images]:
    """Images to train on and images to test with: the same split for everybody with this seed."""
    table = np.loadtxt(DIGITS, delimiter=",")  # a line is an image of 8 x 8 pixels, and its digit
    pixels = torch.tensor(table[:, :-1] / PIXEL_MAX, dtype=torch.float32).reshape(-1, 1, 8, 8)
    images = Images(pixels, torch.tensor(table[:, -1], dtype=torch.int64))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return images.take(order[TEST_IMAGE_COUNT:]), images.take(order[:TEST_IMAGE_COUNT])


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def accuracy(model: nn.Module, images: Images) -> float:
    model.eval()
    with torch.no_grad():
        guesses = model(images.pixels).argmax(dim=1)
    model.train()
    return float((guesses == images.labels).float().mean())


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Images],
    client: ps.Client | None,
    planned_steps: int,
) -> float:
    """One pass over the batches, as in any torch script; returns the mean loss."""
    total = 0.0
    for batch in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch.pixels), batch.labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
        if client is not None:
            client.report(loss=loss.item(), planned_steps=planned_steps)
    return total / len(batches)


def train(arguments: Namespace, client: ps.Client | None) -> float:
    """Train to the end; returns the accuracy on the test images."""
    rank, world_size = (client.rank, client.world_size) if client else (0, 1)
    training, testing = load(arguments.seed)
    shard, most = training.take(slice(rank, None, world_size)), len(training) // world_size
    if arguments.batch_size > most:
        sys.exit(f"--batch-size {arguments.batch_size}: expected at most the {most} of a worker")
    torch.manual_seed(arguments.seed)
    model = build_model()
    optimizer: torch.optim.Optimizer
    if client is None:
        optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)
    else:
        optimizer = ps.DistributedOptimizer(
            client,
            model.named_parameters(),
            ps.Adam(lr=arguments.lr),
            block_elements=4096,  # ten blocks: even this small model spreads over the servers
        )
    # Hyperparameters travel with each step, so any scheduler of torch's works as it is.
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs)
    done = 0
    if isinstance(optimizer, ps.DistributedOptimizer) and client is not None:
        client.attach_state("schedule", schedule)
        # Above 0 where the run goes on from a checkpoint, or this worker for one that is gone.
        done = optimizer.clock
    # All workers take the same number of steps: what remains of a share comes up in another epoch.
    step_count = most // arguments.batch_size
    shuffle = torch.Generator().manual_seed(arguments.seed + 1 + rank)
    for epoch in range(1, arguments.epochs + 1):
        order = torch.randperm(len(shard), generator=shuffle)[: step_count * arguments.batch_size]
        batches = [shard.take(chosen) for chosen in order.split(arguments.batch_size)]
        skipped = min(done, step_count)
        done -= skipped
        if skipped == step_count:
            if client is not None and client.is_late_joiner:
                schedule.step()  # a checkpoint would have had it
            continue
        batches = batches[skipped:]
        loss = train_epoch(model, optimizer, batches, client, step_count * arguments.epochs)
        schedule.step()
        if rank == 0:
            print(f"epoch {epoch} of {arguments.epochs}: loss {loss:.4f}")
    return accuracy(model, testing)


def positive(text: str) -> int:
    """The count that an option gives."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "--epochs", type=positive, default=20, help="passes over the training images"
    )
    parser.add_argument("--batch-size", type=positive, default=32, help="images a step and worker")
    parser.add_argument("--lr", type=float, default=4e-3, help="Adam's first learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the split, model and shuffling")
    parser.add_argument("--single", action="store_true", help="plain torch, without a cluster")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.single:
        print(f"test accuracy {train(arguments, None):.2%}")
        return
    with ps.connect() as client:
        reached = train(arguments, client)
        client.report(quality={"test accuracy": reached})
        if client.rank == 0:
            print(f"test accuracy {reached:.2%}")


if __name__ == "__main__":
    main()
