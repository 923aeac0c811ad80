"""Ways in which scripts use a device, beside torch.optim: graphs, streams, recomputation, DDP."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ps_worker as ps
from tests.device.training_pairs import LEARNING_RATE, Counting, Pair, squared, whole_numbers
from tests.integration.training_models import Branched, batches, seeded

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(180)]

STEPS = 5
MAX_WAITS = 6
"""For edits, changed gradients, the scaler's two numbers, a norm, and twice the buffers."""


def chain() -> nn.Module:
    """A model without branches, as graphs need it."""
    return nn.Sequential(
        nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3)
    )


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name for a test's tables."""
    return str(request.node.name)


@pytest.fixture
def pair(client: ps.Client, device: torch.device, name: str) -> Pair:
    return Pair(client, name, seeded(chain).to(device))


def train_twin(pair: Pair, inputs: Iterator[torch.Tensor]) -> None:
    """What the script does, in torch alone, without anything special."""
    for x in inputs:
        pair.reference.zero_grad()
        squared(pair.twin, x).backward()
        pair.reference.step()


def warm_up(model: nn.Module, x: torch.Tensor) -> None:
    """Three passes on a stream of their own, as torch's page on graphs has it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            squared(model, x).backward()
    torch.cuda.current_stream().wait_stream(stream)


def captured(model: nn.Module, given: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A graph of a forward and a backward pass, which reads `given`."""
    warm_up(model, given)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        squared(model, given).backward()
    return graph


def test_forward_and_backward_may_be_a_graph(pair: Pair, device: torch.device) -> None:
    given = torch.zeros(6, 12, device=device)
    graph = captured(pair.model, given)
    for x in batches(STEPS):
        given.copy_(x)
        graph.replay()
        pair.optimizer.step()
    train_twin(pair, batches(STEPS))
    pair.check_close()


def test_the_optimizer_may_be_made_after_the_graph(
    client: ps.Client, device: torch.device, name: str
) -> None:
    model = seeded(chain).to(device)
    given = torch.zeros(6, 12, device=device)
    graph = captured(model, given)
    pair = Pair(client, name, model)
    for x in batches(STEPS):
        given.copy_(x)
        graph.replay()
        pair.optimizer.step()
    train_twin(pair, batches(STEPS))
    pair.check_close()


def test_a_model_may_be_made_a_graphed_callable(pair: Pair, device: torch.device) -> None:
    graphed: Any = torch.cuda.make_graphed_callables(
        pair.model, (torch.zeros(6, 12, device=device),)
    )
    for x in batches(STEPS):
        pair.optimizer.zero_grad()
        graphed(x.to(device)).square().mean().backward()
        pair.optimizer.step()
    train_twin(pair, batches(STEPS))
    pair.check_close()


@pytest.mark.parametrize("steps_inside", [True, False], ids=["step inside", "step outside"])
def test_a_script_may_have_a_stream_of_its_own(pair: Pair, *, steps_inside: bool) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for x in batches(STEPS):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # the stream is behind what the host has queued
            pair.optimizer.zero_grad()
            squared(pair.model, x).backward()
            if steps_inside:
                pair.optimizer.step()
        if not steps_inside:
            torch.cuda.current_stream().wait_stream(stream)
            pair.optimizer.step()
            stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(stream)
    train_twin(pair, batches(STEPS))
    pair.check_close()


@pytest.mark.parametrize("is_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_forward_pass_may_be_computed_again(
    pair: Pair, device: torch.device, *, is_reentrant: bool
) -> None:
    first, rest = pair.model[:2], pair.model[2:]
    for x in batches(STEPS):
        pair.optimizer.zero_grad()
        hidden = checkpoint(first, x.to(device).requires_grad_(), use_reentrant=is_reentrant)
        checkpoint(rest, hidden, use_reentrant=is_reentrant).square().mean().backward()
        pair.optimizer.step()
    train_twin(pair, batches(STEPS))
    pair.check_close()


def test_gradients_may_have_a_graph_of_their_own(pair: Pair) -> None:
    """A penalty on the gradient's length, as some losses have it."""
    for x in batches(STEPS):
        for model, optimizer in pair.sides:
            optimizer.zero_grad()
            loss = squared(model, x)
            grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            penalty = torch.stack([grad.square().sum() for grad in grads]).sum()
            (loss + 0.1 * penalty).backward(create_graph=True)
            optimizer.step()
            optimizer.zero_grad()
    pair.check_close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parameters_of_two_bytes_have_masters_of_four(
    client: ps.Client, device: torch.device, name: str, dtype: torch.dtype
) -> None:
    """Gradients are small integers, which every dtype has."""
    make = partial(Counting, 12, (3, 20, 70))
    model = seeded(make).to(device, dtype)
    optimizer = ps.DistributedOptimizer(
        client, model, ps.SGD(lr=0.01), name=name, kernels="exact", block_elements=64
    )
    masters = {key: value.detach().float().cpu() for key, value in model.named_parameters()}
    reference = torch.optim.SGD(masters.values(), lr=0.01)
    for x in whole_numbers(STEPS, 12):
        optimizer.zero_grad()
        model(x.to(device, dtype)).backward()
        for key, value in model.named_parameters():
            masters[key].grad = value.grad.float().cpu()
        optimizer.step()
        reference.step()
    for key, value in model.named_parameters():
        assert torch.equal(value.detach().cpu(), masters[key].to(dtype)), key


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    store = f"file://{tmp_path}/store"
    distributed.init_process_group("nccl", init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_gradients_may_be_views_of_ddps_buckets(pair: Pair, device: torch.device) -> None:
    wrapped = DistributedDataParallel(pair.model, [device.index], gradient_as_bucket_view=True)
    for x in batches(STEPS):
        pair.optimizer.zero_grad()
        wrapped(x.to(device)).square().mean().backward()
        pair.optimizer.step()
    train_twin(pair, batches(STEPS))
    pair.check_close()


def test_a_compiled_model_trains(client: ps.Client, device: torch.device, name: str) -> None:
    """With graphs (`reduce-overhead`), whose memory every replay writes again."""
    model: Any = seeded(chain).to(device)
    compiled: Any = torch.compile(model, mode="reduce-overhead")
    pair = Pair(client, name, model)
    for x in batches(STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        pair.optimizer.zero_grad()
        compiled(x.to(device)).square().mean().backward()
        pair.optimizer.step()
    train_twin(pair, batches(STEPS))
    pair.check_close(1e-4)


def test_a_model_may_leave_the_device_and_come_back(
    client: ps.Client, device: torch.device, name: str
) -> None:
    """Its memory is made anew by `.to` between two steps; the values stay."""
    pair = Pair(client, name, seeded(Branched).to(device))
    pair.train(2)
    pair.model.to("cpu")
    pair.model.to(device)
    pair.train(2)
    pair.check_close()


def test_inputs_may_be_pinned_and_copied_beside(pair: Pair, device: torch.device) -> None:
    for x in batches(STEPS):
        pair.optimizer.zero_grad()
        far = x.pin_memory().to(device, non_blocking=True)
        squared(pair.model, far).backward()
        pair.optimizer.step()
    train_twin(pair, batches(STEPS))
    pair.check_close()
    assert pair.optimizer.param_groups[0]["lr"] == LEARNING_RATE


@pytest.mark.parametrize("made", ["before", "after"])
def test_a_graphs_step_after_an_expired_wait_is_a_step_of_its_own(
    device: torch.device, made: str
) -> None:
    """The replay calls no hook. The other worker comes when the first wait has expired."""
    model, twin = (seeded(chain).to(device) for _ in range(2))
    given = torch.ones(6, 12, device=device)
    with (
        ps.local_cluster(servers=1, workers=2) as cluster,
        ps.connect(cluster.address, rank=0, request_deadline_s=1.0) as hasty,
        ps.connect(cluster.address, rank=1, request_deadline_s=30.0) as calm,
        ThreadPoolExecutor(1) as thread,
    ):
        optimizer_of = partial(
            ps.DistributedOptimizer, optimizer=ps.SGD(lr=LEARNING_RATE), reduction="sum"
        )
        second_made = thread.submit(optimizer_of, calm, seeded(chain).to(device))
        first = optimizer_of(hasty, model) if made == "before" else None
        graph = captured(model, given)
        first = first or optimizer_of(hasty, model)
        second = second_made.result()
        graph.replay()
        for _ in range(2):
            with pytest.raises(ps.WaitExpired):
                first.step()
        given.fill_(2.0)
        graph.replay()

        def two_empty_steps() -> None:
            second.step()
            second.step()

        stepping = thread.submit(two_empty_steps)
        while first.clock < 2 or first._model._sealed is not None:
            with contextlib.suppress(ps.WaitExpired):
                first.step()
        stepping.result()
    reference = torch.optim.SGD(twin.parameters(), lr=LEARNING_RATE)
    squared(twin, torch.ones(6, 12)).backward()
    gradients = [parameter.grad for parameter in twin.parameters()]
    twin.zero_grad()
    squared(twin, torch.full((6, 12), 2.0)).backward()  # of the same parameters: it did not wait
    for parameter, earlier in zip(twin.parameters(), gradients, strict=True):
        parameter.grad += earlier
    reference.step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("buffers", ["rank0", "mean"])
@pytest.mark.parametrize("scaler", [None, "clipped", "scaled"])
def test_a_step_waits_for_the_device_a_few_times_only(
    client: ps.Client, device: torch.device, name: str, buffers: str, scaler: str | None
) -> None:
    """Of fifty layers with buffers; each wait would leave the device idle."""
    layers = [nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12)) for _ in range(50)]
    model: Any = nn.Sequential(*layers).to(device)
    optimizer = ps.DistributedOptimizer(
        client, model, ps.Adam(lr=1e-3), name=name, buffers=buffers,
        clip_norm=1.0 if scaler == "clipped" else None,
    )  # fmt: skip
    scaling = torch.amp.GradScaler("cuda", enabled=scaler == "scaled")
    waits: list[str] = []
    for step, x in enumerate(batches(4)):
        optimizer.zero_grad()
        loss = model(x.to(device)).square().mean()
        torch.cuda.set_sync_debug_mode("warn" if step == 3 else "default")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            scaling.scale(loss).backward()
            scaling.step(optimizer)
            scaling.update()
        torch.cuda.set_sync_debug_mode("default")
        waits = [f"{each.filename}:{each.lineno}" for each in told]
    assert len(waits) <= MAX_WAITS, waits
