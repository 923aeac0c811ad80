"""Fashion-MNIST: 70,000 pictures of clothes, 10 kinds, 28 x 28 pixels.

    pushpull train examples/fashion_mnist.py --workers 2 --servers 2
    python examples/fashion_mnist.py --single        # plain torch, for comparison

The pictures come from --data DIR, from Debian's package (apt-get install dataset-fashion-mnist), or
from the authors' server, checked against the checksums that they publish and kept in
~/.cache/pushpull. The network has BatchNorm layers: `buffers="mean"` gives every worker the mean of
the workers' running statistics, where all are at one step (BSP).
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import struct
import sys
import urllib.error
import urllib.request
import warnings
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

import pushpull as ps

DEBIAN_DIRECTORY = Path("/usr/share/datasets/fashion-mnist")
SOURCES = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
)
PUBLISHED_MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
DOWNLOAD_TIMEOUT_S = 30.0
IDX_UNSIGNED_BYTE = 0x08
MEAN, DEVIATION = 0.2860, 0.3530


@dataclass(frozen=True)
class Pictures:
    """Pictures of shape (n, 1, 28, 28), normalised, and what they show."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, chosen: Tensor | slice) -> Pictures:
        return Pictures(self.pixels[chosen], self.labels[chosen])


def find_data(wanted: Path | None) -> Path:
    """The folder that holds the four files; exits with what to do if there is none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pushpull"
    candidates = [wanted] if wanted else [cache / "fashion-mnist", DEBIAN_DIRECTORY]
    for folder in candidates:
        missing = [name for name in PUBLISHED_MD5 if not (folder / name).is_file()]
        if not missing:
            return folder
        if wanted:
            sys.exit(f"--data {wanted} lacks {', '.join(missing)}")
    try:
        return download(cache / "fashion-mnist")
    except (OSError, urllib.error.URLError) as error:
        sys.exit(
            f"Fashion-MNIST is neither in {candidates[0]} nor in {candidates[1]}, and the download "
            f"failed: {error}\nOn Debian: apt-get install dataset-fashion-mnist. Elsewhere: fetch "
            f"the four files from {SOURCES[0]} and pass --data DIR."
        )


def download(folder: Path) -> Path:
    """Fetch what is missing into `folder`; workers that start together fetch it once."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, md5 in PUBLISHED_MD5.items():
            if not (folder / name).is_file():
                unfinished = folder / f"{name}.part"
                unfinished.write_bytes(fetch(name, md5))
                unfinished.replace(folder / name)
    return folder


def fetch(name: str, md5: str) -> bytes:
    """One file from the first source that has it as published."""
    failures = []
    for source in SOURCES:
        print(f"downloading {source}{name}")
        try:
            with urllib.request.urlopen(source + name, timeout=DOWNLOAD_TIMEOUT_S) as answer:  # noqa: S310
                content: bytes = answer.read()
        except OSError as error:
            failures.append(f"{source}: {error}")
            continue
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found == md5:
            return content
        failures.append(f"{source}: {name} has MD5 {found}; its authors published {md5}")
    raise OSError("; ".join(failures))


def read_idx(path: Path, dimension_count: int) -> Tensor:
    """The array in a gzipped idx file of unsigned bytes."""
    content = gzip.decompress(path.read_bytes())
    header_bytes = 4 + 4 * dimension_count
    magic = bytes((0, 0, IDX_UNSIGNED_BYTE, dimension_count))
    if content[:4] != magic:
        sys.exit(f"{path} begins with {content[:4].hex()}; expected {magic.hex()}")
    shape = struct.unpack(f">{dimension_count}I", content[4:header_bytes])
    values = torch.frombuffer(bytearray(content[header_bytes:]), dtype=torch.uint8)
    if values.numel() != torch.Size(shape).numel():
        sys.exit(f"{path} has {values.numel()} bytes of values; its header says {shape}")
    return values.view(shape)


def load(folder: Path, part: str) -> Pictures:
    """The part "train" or "t10k"."""
    pixels = read_idx(folder / f"{part}-images-idx3-ubyte.gz", 3).float().div(255).unsqueeze(1)
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz", 1).long()
    if len(pixels) != len(labels):
        sys.exit(f"{folder} has {len(pixels)} {part} pictures and {len(labels)} labels")
    return Pictures((pixels - MEAN) / DEVIATION, labels)


def build_model() -> nn.Module:
    def stage(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )

    return nn.Sequential(
        stage(1, 16), stage(16, 32), nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip


def accuracy(model: nn.Module, pictures: Pictures) -> float:
    model.eval()
    right = 0
    with torch.no_grad():
        parts = zip(pictures.pixels.split(1000), pictures.labels.split(1000), strict=True)
        for pixels, labels in parts:
            right += int((model(pixels).argmax(dim=1) == labels).sum())
    model.train()
    return right / len(pictures)


def batches(pictures: Pictures, step_count: int, size: int, seed: int) -> Iterator[Pictures]:
    """`step_count` batches, shuffled anew in each pass over the pictures."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(step_count):
        if len(order) < size:
            order = torch.randperm(len(pictures), generator=generator)
        chosen, order = order[:size], order[size:]
        yield pictures.take(chosen)


def schedule_at(
    done: int, optimizer: torch.optim.Optimizer, lr: float, step_count: int
) -> torch.optim.lr_scheduler.OneCycleLR:
    """The learning rates after `done` steps: a checkpoint's would be those of its `step_count`."""
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, step_count)
    with (
        warnings.catch_warnings()
    ):  # torch misses the optimizer's steps, which are an earlier run's
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(min(done, step_count)):
            schedule.step()
    return schedule


def train(arguments: Namespace, client: ps.Client | None) -> dict[str, float]:
    """Train to the end; returns the accuracy on the test pictures, and on those held out."""
    rank, world_size = (client.rank, client.world_size) if client else (0, 1)
    folder = find_data(arguments.data)
    everything = load(folder, "train")
    count = len(everything) - arguments.hold_out
    held_out = everything.take(slice(count, None))
    shard = everything.take(slice(rank, count, world_size))
    most = count // world_size
    if arguments.batch_size > most:
        sys.exit(f"--batch-size {arguments.batch_size}: expected at most the {most} of a worker")
    step_count = arguments.steps or most // arguments.batch_size * arguments.epochs
    torch.manual_seed(arguments.seed)
    model = build_model()
    optimizer: torch.optim.Optimizer
    if client is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    else:
        # Under SSP and ASP workers are at different steps: there is no mean, but rank 0's buffers.
        buffers = "mean" if client.consistency.mode.value == "bsp" else "rank0"
        optimizer = ps.DistributedOptimizer(
            client, model, ps.AdamW(lr=arguments.lr), buffers=buffers
        )
    # Above 0 where the run goes on from a checkpoint, or this worker for one that is gone.
    done = getattr(optimizer, "clock", 0)
    schedule = schedule_at(done, optimizer, arguments.lr, step_count)
    shares = batches(shard, step_count, arguments.batch_size, arguments.seed + 1 + rank)
    for step, batch in islice(enumerate(shares, start=1), done, None):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch.pixels), batch.labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        if client is not None:
            client.report(loss=loss.item(), planned_steps=step_count)
        if rank == 0 and step % arguments.log_every == 0:
            print(f"step {step} of {step_count}: loss {loss.item():.4f}")
    reached = {"test accuracy": accuracy(model, load(folder, "t10k"))}
    if len(held_out):
        reached["validation accuracy"] = accuracy(model, held_out)
    return reached


def positive(text: str) -> int:
    """The count that an option gives."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def not_negative(text: str) -> int:
    """The count that an option gives, which may be none."""
    if int(text) < 0:
        raise ValueError(text)
    return int(text)


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with the four *-ubyte.gz files")
    parser.add_argument(
        "--epochs", type=positive, default=2, help="passes over the training pictures"
    )
    parser.add_argument("--steps", type=not_negative, default=0, help="steps, instead of epochs")
    parser.add_argument(
        "--batch-size", type=positive, default=64, help="pictures a step and worker"
    )
    parser.add_argument(
        "--hold-out", type=not_negative, default=0, help="training pictures to judge settings by"
    )
    parser.add_argument("--lr", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of the model and the shuffling")
    parser.add_argument("--log-every", type=positive, default=100, help="steps between two lines")
    parser.add_argument("--single", action="store_true", help="plain torch, without a cluster")
    return parser.parse_args()


def print_reached(reached: dict[str, float]) -> None:
    print(", ".join(f"{name} {value:.2%}" for name, value in reached.items()))


def main() -> None:
    arguments = parse_arguments()
    if arguments.single:
        print_reached(train(arguments, None))
        return
    find_data(arguments.data)  # before joining: a worker without data must not hold up the others
    with ps.connect() as client:
        reached = train(arguments, client)
        client.report(quality=reached)
        if client.rank == 0:
            print_reached(reached)


if __name__ == "__main__":
    main()
