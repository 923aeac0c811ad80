"""`DistributedOptimizer` with parameters on a device, beside torch.optim."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker as ps
from ps_worker.training.optimizer_state import InnerStepsState
from ps_worker.training.tables.step_scale import StepScale
from tests import fake_accelerator
from tests.device.training_pairs import (
    LEARNING_RATE,
    Counting,
    Pair,
    Split,
    squared,
    train_on_device,
    whole_numbers,
)
from tests.integration.lane_cluster import until
from tests.integration.training_jobs import normed
from tests.integration.training_models import Branched, batches, seeded, values
from tests.integration.worker_pool import Pool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CPU = torch.device("cpu")


@pytest.fixture
def model(device: torch.device) -> Any:
    return seeded(Branched).to(device)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name for a test's tables."""
    return str(request.node.name)


@pytest.mark.parametrize(
    ("width", "heights", "block_elements"),
    [
        (12, (3, 20, 70), 64),
        pytest.param(1024, (2048, 2048), 0, marks=pytest.mark.thorough),
    ],
    ids=["small", "16 MB"],
)
def test_sgd_gives_the_bits_that_it_gives_on_the_cpu(
    client: ps.Client,
    device: torch.device,
    name: str,
    width: int,
    heights: tuple[int, ...],
    block_elements: int,
) -> None:
    make = partial(Counting, width, heights)
    pair = Pair(
        client, name, seeded(make).to(device), twin_device=CPU,
        options={"block_elements": block_elements},
    )  # fmt: skip
    for step, x in enumerate(whole_numbers(10, width)):
        for model, optimizer in pair.sides:
            optimizer.zero_grad()
            model(x.to(next(model.parameters()).device)).backward()
            optimizer.step()
        pair.check_bits(step)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("parts", "saved_at"),
    [
        ({"inner_steps": 2}, 4),
        ({"inner_steps": 4, "fragments": 2, "overlap": 1}, 3),  # an outer step is on its way
        ({"inner_steps": 2, "elastic": 0.5}, 3),
    ],
)
def test_outer_steps_give_the_bits_that_they_give_on_the_cpu(
    client: ps.Client, device: torch.device, name: str, parts: dict[str, Any], saved_at: int
) -> None:
    """Also if what inner steps have done there is saved, overwritten and loaded."""
    outer = ps.Outer(partial(torch.optim.SGD, lr=0.5), lr=0.5, momentum=0.5, **parts)
    models = [seeded(partial(Counting, 12, (3, 20))).to(each) for each in (device, CPU)]
    optimizers = [
        ps.DistributedOptimizer(client, model, outer, name=f"{name}-{number}", block_elements=64)
        for number, model in enumerate(models)
    ]
    state = InnerStepsState(optimizers[0].trained_model, None)
    for step, x in enumerate(whole_numbers(7, 12)):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x.to(next(model.parameters()).device)).backward()
            optimizer.step()
        if step == saved_at:
            saved = copy.deepcopy(state.state_dict())
            with torch.no_grad():
                for parameter in models[0].parameters():
                    parameter.zero_()
            state.load_state_dict(saved)
        on_cpu = values(models[1])
        for key, mine in values(models[0]).items():
            assert torch.equal(mine.cpu(), on_cpu[key]), f"{step=} {key}"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)], ids=str
)
def test_adam_gives_what_it_gives_on_the_cpu(
    client: ps.Client, device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    # A larger eps: where a gradient is next to nothing, Adam makes a whole step of its rounding.
    adam = partial(torch.optim.Adam, lr=0.01, eps=1e-4)
    pair = Pair(
        client, f"adam-{dtype}", seeded(Branched).to(device, dtype), twin_device=CPU,
        optimizers=(ps.Adam(lr=0.01, eps=1e-4), adam), options={"kernels": "fast"},
    )  # fmt: skip
    for x in batches(5):
        for model, optimizer in pair.sides:
            optimizer.zero_grad()
            squared(model, x.to(dtype)).backward()
            optimizer.step()
    pair.check_close(tolerance)


@pytest.mark.thorough
@pytest.mark.parametrize("consistency", [ps.BSP(), ps.ASP()], ids=["bsp", "asp"])
@pytest.mark.parametrize("mode", ["sealed", "eager"])
def test_each_mode_trains(
    client: ps.Client, model: Any, name: str, consistency: ps.Consistency, mode: str
) -> None:
    pair = Pair(client, name, model, options={"consistency": consistency, "mode": mode})
    pair.train(4)
    pair.check_close()


@pytest.mark.thorough
@pytest.mark.racing
def test_clipped_gradients_are_the_ones_that_count(
    client: ps.Client, model: Any, name: str
) -> None:
    pair = Pair(client, name, model)
    for x in batches(4):
        for trained, optimizer in pair.sides:
            optimizer.zero_grad()
            squared(trained, x).backward()
            norm = nn.utils.clip_grad_norm_(trained.parameters(), 0.01)
            assert norm > 0.01
            optimizer.step()
    pair.check_close()


@pytest.mark.thorough
@pytest.mark.racing
def test_gradients_scaled_behind_torchs_back_are_found(
    client: ps.Client, model: Any, name: str
) -> None:
    pair = Pair(client, name, model)
    for x in batches(3):
        for trained, optimizer in pair.sides:
            optimizer.zero_grad()
            squared(trained, x).backward()
            for parameter in trained.parameters():
                parameter.grad.data.mul_(0.25)
            optimizer.step()
    pair.check_close()


@pytest.mark.racing
@pytest.mark.parametrize("is_clipped", [False, True], ids=["plain", "clipped"])
def test_mixed_precision_scales_and_skips(
    client: ps.Client, device: torch.device, model: Any, name: str, is_clipped: bool
) -> None:
    """The loss overflows in the second of four steps."""
    pair = Pair(client, name, model)
    scalers = [torch.amp.GradScaler(device.type, init_scale=2.0**10) for _ in pair.sides]
    for step, x in enumerate(batches(4)):
        before = values(pair.model)
        for (trained, optimizer), scaler in zip(pair.sides, scalers, strict=True):
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.float16):
                loss = squared(trained, x).float()
            scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
            if is_clipped:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        is_same = all(torch.equal(old, values(pair.model)[key]) for key, old in before.items())
        assert is_same == (step == 1)
    assert [scaler.get_scale() for scaler in scalers] == [2.0**9, 2.0**9]
    pair.check_close(1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("set_to_none", [True, pytest.param(False, marks=pytest.mark.racing)])
def test_gradients_may_be_zeroed_either_way(
    client: ps.Client, model: Any, name: str, set_to_none: bool
) -> None:
    pair = Pair(client, name, model)
    for step, x in enumerate(batches(4)):
        for trained, optimizer in pair.sides:
            optimizer.zero_grad(set_to_none)
            if step == 2:  # thrown away
                squared(trained, 3 * x).backward()
                optimizer.zero_grad(set_to_none)
            squared(trained, x).backward()
            optimizer.step()
    pair.check_close()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "accumulate", [pytest.param(1, marks=pytest.mark.racing), 2], ids=["unsaid", "said"]
)
def test_gradients_are_accumulated(
    client: ps.Client, model: Any, name: str, accumulate: int
) -> None:
    pair = Pair(client, name, model, options={"accumulate": accumulate})
    for x in batches(3):
        for trained, optimizer in pair.sides:
            optimizer.zero_grad()
            for half in x.chunk(2):
                (squared(trained, half) / 2).backward()
            optimizer.step()
    pair.check_close()


@pytest.mark.thorough
def test_a_branch_without_gradient_is_skipped(client: ps.Client, model: Any, name: str) -> None:
    pair = Pair(client, name, model)
    for step, x in enumerate(batches(4)):
        for trained, optimizer in pair.sides:
            optimizer.zero_grad()
            outputs = trained(x.to(trained.gain.device), is_long=step % 2 == 0)
            outputs.square().mean().backward()
            optimizer.step()
    pair.check_close()


@pytest.mark.thorough
def test_a_frozen_layer_stays_until_it_is_let_go(client: ps.Client, model: Any, name: str) -> None:
    model.first.requires_grad_(False)
    pair = Pair(client, name, model)
    first = model.first.weight.clone()
    pair.train()
    assert torch.equal(model.first.weight, first)
    pair.check_close()
    for trained in (pair.model, pair.twin):
        trained.first.requires_grad_(True)
    pair.train()
    assert not torch.equal(model.first.weight, first)
    pair.check_close()


@pytest.mark.thorough
def test_a_model_may_be_partly_on_the_cpu(
    client: ps.Client, device: torch.device, name: str
) -> None:
    pair = Pair(client, name, seeded(partial(Split, device)))
    pair.train(4)
    pair.check_close()
    assert {parameter.device.type for parameter in pair.model.parameters()} == {"cpu", device.type}


@pytest.mark.thorough
def test_reduced_gradients_come_back_to_the_device(
    client: ps.Client, device: torch.device, model: Any, name: str
) -> None:
    adam = partial(torch.optim.Adam, lr=0.01, eps=1e-4)
    pair = Pair(client, name, model, optimizers=(ps.Aggregate(adam), adam))
    with landing(device):  # a thread sees its gradients arrive; then they are written
        pair.train(4)
    assert {parameter.grad.device.type for parameter in model.parameters()} == {device.type}
    pair.check_close()


@pytest.mark.thorough
@pytest.mark.parametrize("buffers", ["rank0", "mean"])
def test_running_statistics_are_shared(
    client: ps.Client, device: torch.device, name: str, buffers: str
) -> None:
    pair = Pair(client, name, seeded(normed).to(device), options={"buffers": buffers})
    pair.train(4)
    pair.check_close()


@pytest.mark.thorough
@pytest.mark.racing
def test_a_gradient_that_is_not_finite_skips_the_step(
    client: ps.Client, model: Any, name: str
) -> None:
    optimizer = Pair(client, name, model).optimizer
    first, second = batches(2)
    squared(model, first).backward()
    model.last.weight.grad[0, 0] = float("nan")
    before = values(model)
    with pytest.raises(ps.InvalidTensor, match=r"'last\.weight' has an infinity or a NaN"):
        optimizer.step()
    assert all(torch.equal(old, values(model)[key]) for key, old in before.items())
    optimizer.zero_grad()
    squared(model, second).backward()
    optimizer.step()
    assert not torch.equal(model.last.weight, before["last.weight"])


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.stop()


@pytest.mark.thorough
def test_workers_on_a_device_have_the_same_bits(pool: Pool, device: torch.device) -> None:
    with (
        ps.local_cluster(servers=2, workers=2) as cluster,
        pool.connected(cluster.address, 2) as workers,
    ):
        first, second = workers.run(train_on_device, name="shared", steps=4, device=str(device))
    assert all(torch.equal(first[key], second[key]) for key in first)
    alone = seeded(Branched)
    optimizer = torch.optim.SGD(alone.parameters(), lr=LEARNING_RATE)
    for of_first, of_second in zip(batches(4, rank=0), batches(4, rank=1), strict=True):
        optimizer.zero_grad()
        ((squared(alone, of_first) + squared(alone, of_second)) / 2).backward()
        optimizer.step()
    for key, expected in values(alone).items():
        torch.testing.assert_close(first[key], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_a_script_that_waits_for_its_device_before_the_step_holds_nothing_up(
    client: ps.Client, device: torch.device, model: Any, name: str
) -> None:
    """What backward made leaves while the script does something else than a step."""
    pair = Pair(client, name, model)
    with landing(device):
        for x in batches(3):
            for trained, optimizer in pair.sides:
                optimizer.zero_grad()
                loss = squared(trained, x)
                loss.backward()
                loss.item()
                if trained is pair.model:
                    until(lambda: have_left(pair), "every block has left")
                optimizer.step()
    pair.check_close()


@contextlib.contextmanager
def landing(device: torch.device) -> Iterator[None]:
    """Copies end without anybody's wait, as those of a real device do."""
    if device.type == fake_accelerator.NAME:
        fake_accelerator.RUNTIME.lands_by_itself = True
    yield
    fake_accelerator.RUNTIME.lands_by_itself = False


@pytest.mark.thorough
def test_the_last_gradient_takes_along_what_was_gathered(
    client: ps.Client, device: torch.device, name: str
) -> None:
    """A small layer is the last that backward reaches; it alone would wait for more."""
    model = nn.Sequential(nn.Linear(12, 3), nn.Linear(3, 400), nn.Linear(400, 30)).to(device)
    pair = Pair(client, name, model)
    with landing(device):
        for x in batches(2):
            for trained, optimizer in pair.sides:
                optimizer.zero_grad()
                squared(trained, x).backward()
                if trained is pair.model:
                    until(lambda: have_left(pair), "every block has left")
                optimizer.step()
    pair.check_close()


def have_left(pair: Pair) -> bool:
    tables = pair.optimizer._model.tables
    return all(block.has_left for table in tables for block in table.staging._blocks)


@pytest.mark.thorough
def test_nothing_leaves_between_a_steps_end_and_the_next(
    client: ps.Client, device: torch.device, model: Any, name: str
) -> None:
    """As when a step is skipped while copies are under way."""
    pair = Pair(client, name, model)
    tables = pair.optimizer._model.tables
    for x in batches(1):
        squared(model, x).backward()
    for table in tables:
        table.seal((), StepScale(), skip=True)
    left = [block.has_left for table in tables for block in table.staging._blocks]
    torch.get_device_module(device).synchronize()
    for table in tables:
        table._landed()
    assert left == [block.has_left for table in tables for block in table.staging._blocks]
    for table in tables:
        table.finish()
    pair.twin.load_state_dict(model.state_dict())
    model.zero_grad()
    pair.train()
    pair.check_close()
