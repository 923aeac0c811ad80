"""What a step may cost: memory, and when its copies run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import ps_worker as ps
from ps_worker.training.tables.device_copies import pinned_bytes

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(180)]

WIDTH, LAYER_COUNT = 2048, 8
MODEL_BYTES = 4 * LAYER_COUNT * WIDTH * (WIDTH + 1)
PAGE_BYTES = 4096


class Trained:
    """A model whose backward pass takes longer than the copies of its gradients."""

    def __init__(
        self, client: ps.Client, device: torch.device, name: str, model: nn.Module | None = None
    ) -> None:
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYER_COUNT)]
        self.model = model or nn.Sequential(*layers).to(device)
        self.optimizer = ps.DistributedOptimizer(client, self.model, ps.SGD(lr=1e-3), name=name)
        self.x = torch.randn(2 * WIDTH, WIDTH, device=device)
        for _ in range(3):
            self.backward()
            self.optimizer.step()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name for a test's tables."""
    return str(request.node.name)


def test_most_gradients_are_copied_while_backward_runs(
    client: ps.Client, device: torch.device, name: str, tmp_path: Path
) -> None:
    trained = Trained(client, device, name)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        trained.backward()
        torch.cuda._sleep(1000)  # its kernel is the next on the stream of backward
        trained.optimizer.step()
        torch.cuda.synchronize()
    path = tmp_path / "trace.json"
    found.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    (end,) = [e["ts"] for e in events if e.get("cat") == "kernel" and "spin" in e["name"]]
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and "DtoH" in e["name"]]
    large = [e for e in copies if e["args"]["bytes"] > 2**20]
    assert sum(e["args"]["bytes"] for e in large) >= MODEL_BYTES * 0.99, "each is copied once"
    assert all("Pinned" in e["name"] for e in large)
    within = sum(e["args"]["bytes"] for e in large if e["ts"] < end)
    assert within >= MODEL_BYTES / 2, f"{within} of {MODEL_BYTES} bytes"


def test_a_steps_own_memory_on_the_device_is_small(
    client: ps.Client, device: torch.device, name: str
) -> None:
    """Parameters and gradients are there anyhow. Sums of their bits are made of parts."""
    model = nn.Linear(WIDTH, 32 * WIDTH, device=device)
    trained = Trained(client, device, name, model)
    trained.backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trained.optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 80e6, "and of the model: 537 MB"


def test_pinned_memory_is_as_large_as_gradients_and_parameters(
    client: ps.Client, device: torch.device, name: str
) -> None:
    before = pinned_bytes()
    trained = Trained(client, device, name)
    pinned = pinned_bytes() - before
    assert 2 * MODEL_BYTES <= pinned <= 2 * (MODEL_BYTES + PAGE_BYTES)
    del trained
