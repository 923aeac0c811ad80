"""A process: a byte transformer in training, alone, under DDP, or on a cluster."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import ps_worker as ps
from ps_cli.bench.contenders.child import Actions
from ps_cli.bench.contenders.contenders import ALONE, HEAD_WIDTH
from ps_cli.bench.contenders.training import BYTE_COUNT, LEARNING_RATE, on_all_cores
from ps_cli.bench.devices import CUDA, transformer_thread_count
from ps_worker.training.tables.device_copies import pinned_bytes


class Layer(nn.Module):
    """Attention to earlier bytes, and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.mixed = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, 3, width // HEAD_WIDTH, HEAD_WIDTH)
        query, key, value = self.attention(self.first_norm(x)).view(heads).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(found.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.second_norm(x))))
        return result


class Transformer(nn.Module):
    """Predicts the next byte; on a GPU it computes in bfloat16 (autocast), and keeps float32."""

    def __init__(self, layer_count: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTE_COUNT, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layer_count))
        self.norm = nn.LayerNorm(width)
        self.guess = nn.Linear(width, BYTE_COUNT)

    def forward(self, text: Tensor) -> Tensor:
        """Mean nats per byte of windows of shape (batch, length + 1)."""
        with torch.autocast(text.device.type, dtype=torch.bfloat16, enabled=text.is_cuda):
            hidden = self.embedding(text[:, :-1])
            for layer in self.layers:
                hidden = layer(hidden)
            logits: Tensor = self.guess(self.norm(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())


class _Training:
    """Steps of some micro-batches of random bytes."""

    def __init__(self, model: nn.Module, device: str, shape: tuple[int, int], count: int) -> None:
        self._model = model
        self._count = count
        self._on_gpu = device == CUDA
        self._texts = torch.randint(BYTE_COUNT, (count, shape[0], shape[1] + 1), device=device)

    def timed(self, update: Callable[[], object]) -> float:
        """Take a step; its seconds."""
        self._wait_for_device()
        began_s = time.perf_counter()
        self._model.zero_grad()
        for number, text in enumerate(self._texts):
            is_last = number == self._count - 1
            with contextlib.ExitStack() as stack:
                if isinstance(self._model, DistributedDataParallel) and not is_last:
                    stack.enter_context(self._model.no_sync())
                self._model(text).backward()
        update()
        self._wait_for_device()
        return time.perf_counter() - began_s

    def transfer(self, update: Callable[[], object]) -> float:
        """Take a step of the gradients that are there, other ones than the last: nothing hides its
        transfer. Its seconds.
        """
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        self._wait_for_device()
        began_s = time.perf_counter()
        update()
        self._wait_for_device()
        return time.perf_counter() - began_s

    def _wait_for_device(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def peak_mb(self) -> float:
        """Memory of the GPU that tensors took at most; 0 on a CPU."""
        return torch.cuda.max_memory_allocated() / 1e6 if self._on_gpu else 0.0


@contextlib.contextmanager
def _ddp(model: nn.Module, device: str) -> Iterator[nn.Module]:
    """The model under DDP, of one process: NCCL on a GPU, gloo on a CPU."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device == CUDA else "gloo"
        store = f"file://{folder}/store"
        distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
        yield DistributedDataParallel(model, gradient_as_bucket_view=True)
        distributed.destroy_process_group()


@contextlib.contextmanager
def training(
    way: str, scheduler: str, device: str, micro_batches: str, *sizes: str
) -> Iterator[Actions]:
    """A training; the way is alone, or a lane; sizes are layers, width, batch and length."""
    layer_count, width, *shape = map(int, sizes)
    if device != CUDA:
        torch.set_num_threads(transformer_thread_count())
    torch.manual_seed(0)
    model = Transformer(layer_count, width).to(device)
    element_count = sum(parameter.numel() for parameter in model.parameters())
    trained = partial(
        _Training, device=device, shape=(shape[0], shape[1]), count=int(micro_batches)
    )
    if way == ALONE:
        adam = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)
        plain = trained(model)
        with _ddp(model, device) as wrapped:
            spread = trained(wrapped)
            yield {
                "steps": lambda: plain.timed(adam.step),
                "all cores steps": lambda: on_all_cores(lambda: plain.timed(adam.step)),
                "bare steps": lambda: plain.timed(lambda: None),
                "ddp steps": lambda: spread.timed(adam.step),
                "parameters": lambda: element_count,
                "peak": plain.peak_mb,
            }
        return
    with ps.connect(scheduler, lane=way) as client:
        server_adam: Any = ps.Adam(lr=LEARNING_RATE)
        optimizer = ps.DistributedOptimizer(
            client, model, server_adam, accumulate=int(micro_batches)
        )
        together = trained(model)
        yield {
            "steps": lambda: together.timed(optimizer.step),
            "transfer": lambda: together.transfer(optimizer.step),
            "lane": lambda: client.progress().lane,
            "peak": together.peak_mb,
            "pinned": lambda: pinned_bytes() / 1e6,
        }
