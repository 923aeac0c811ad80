"""Waiting and reading while others train: expired waits, evaluators, data loaders."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ps_worker as ps
from ps_worker.spec.optimizers import ServerOptimizer
from tests.integration.training_jobs import optimizer_for, sum_of, zeroed
from tests.integration.training_models import Branched, batches, differing, seeded, values

pytestmark = pytest.mark.slow

T = TypeVar("T")


@pytest.fixture(scope="module")
def cluster() -> Iterator[ps.LocalCluster]:
    with ps.local_cluster(servers=2, workers=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: ps.LocalCluster) -> Iterator[ps.Client]:
    with ps.connect(cluster.address, request_deadline_s=20.0) as client:
        yield client


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[ps.Client, ps.Client]]:
    """A worker that does not wait long, and one that does."""
    with (
        ps.local_cluster(servers=1, workers=2) as cluster,
        ps.connect(cluster.address, rank=0, request_deadline_s=1.0) as hasty,
        ps.connect(cluster.address, rank=1, request_deadline_s=30.0) as calm,
    ):
        yield hasty, calm


class Counted(nn.Module):
    """A parameter, and a buffer that `reads` is told of each time it is read."""

    def __init__(self, reads: Callable[[], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.tensor(5))
        self._reads = reads

    def get_buffer(self, target: str) -> torch.Tensor:
        self._reads()
        return super().get_buffer(target)


def takes_a_step(optimizer: ps.DistributedOptimizer, model: Counted) -> None:
    """A step of -1 from the initial values."""
    model.weight.sum().backward()
    optimizer.step()
    assert model.weight.eq(0.0).all()
    assert int(model.seen) == 5


@pytest.mark.thorough
def test_an_optimizer_is_made_after_a_wait_for_its_initial_values_expired() -> None:
    """The server stops when it has been asked for the tables, and before it has their values."""
    with (
        ps.local_cluster(servers=1, workers=1) as cluster,
        ps.connect(cluster.address, rank=0, request_deadline_s=1.0, pull_codec="bf16") as client,
    ):
        pid = cluster.process_ids["server 0"]
        model = Counted(lambda: os.kill(pid, signal.SIGSTOP))
        try:
            with pytest.raises(ps.WaitExpired):
                ps.DistributedOptimizer(client, model, ps.SGD(lr=1.0))
        finally:
            os.kill(pid, signal.SIGCONT)
        model = Counted(int)
        takes_a_step(ended(lambda: ps.DistributedOptimizer(client, model, ps.SGD(lr=1.0))), model)


@pytest.mark.thorough
def test_an_optimizer_is_made_after_one_of_its_initial_values_was_refused(
    client: ps.Client,
) -> None:
    model = Counted(int)
    model.seen.fill_(2**53 + 1)
    with pytest.raises(ps.InvalidTensor, match=r"expected integers up to 2\*\*53"):
        ps.DistributedOptimizer(client, model, ps.SGD(lr=1.0), name="refused")
    model.seen.fill_(5)
    takes_a_step(ps.DistributedOptimizer(client, model, ps.SGD(lr=1.0), name="refused"), model)


def test_an_optimizer_that_is_made_again_with_other_values_is_refused(client: ps.Client) -> None:
    """Ctrl-C comes when the servers have been given the parameters, which they then round."""
    left = 1

    def interrupt() -> None:
        nonlocal left
        left -= 1
        if not left:
            signal.raise_signal(signal.SIGINT)

    model = Counted(interrupt)
    nn.init.constant_(model.weight, 1.001)

    def make() -> ps.DistributedOptimizer:
        options: dict[str, Any] = {"name": "made again", "pull_codec": "bf16"}
        return ps.DistributedOptimizer(client, model, ps.SGD(lr=1.0), **options)

    with pytest.raises(KeyboardInterrupt):
        make()
    assert not left
    for changes in ("weight", "seen"):
        before = copy.deepcopy(model.state_dict())
        model.state_dict()[changes].fill_(2)
        changed = copy.deepcopy(model.state_dict())
        with pytest.raises(ps.InvalidConfig, match=f"'{changes}' has other values .* same seed"):
            make()
        assert differing(changed, model.state_dict()) == []
        model.load_state_dict(before)
    optimizer = make()
    assert model.weight.eq(1.0).all()
    model.weight.sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), torch.full((3,), 0.001), rtol=0.01, atol=0.0)


def ended(end: Callable[[], T]) -> T:
    """What it gives once the other worker has stepped, however often its wait expires before."""
    while True:
        try:
            return end()
        except ps.WaitExpired:
            continue


@pytest.mark.thorough
def test_a_wait_that_expired_goes_on_with_the_next_step(
    two: tuple[ps.Client, ps.Client],
) -> None:
    models = [seeded(Branched), seeded(Branched)]
    inputs = list(batches(2))
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(optimizer_for, two[1], models[1], name="waits")
        first = optimizer_for(two[0], models[0], name="waits")
        second = other.result()
        models[0](inputs[0]).square().mean().backward()
        with pytest.raises(ps.WaitExpired, match="worker 1"):
            first.step()

        def catch_up() -> None:
            for x in inputs:
                second.zero_grad()
                models[1](x).square().mean().backward()
                second.step()

        catching_up = thread.submit(catch_up)
        ended(first.zero_grad)
        models[0](inputs[1]).square().mean().backward()
        ended(first.step)
        catching_up.result()
        assert differing(values(models[0]), values(models[1])) == []


@pytest.mark.thorough
@pytest.mark.parametrize("next_call", ["zero_grad", "step", "other gradients", "state_dict"])
def test_a_step_that_was_refused_is_told_of_also_after_a_wait_that_expired(
    two: tuple[ps.Client, ps.Client], next_call: str
) -> None:
    """Whichever call ends it: one of the next raises what `step` would have."""
    (x,) = batches(1)
    name, models = f"refused {next_call}", [seeded(Branched), seeded(Branched)]
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(optimizer_for, two[1], models[1], name=name)
        first, second = optimizer_for(two[0], models[0], name=name), other.result()
        (models[0](x).sum() * float("nan")).backward()
        with pytest.raises(ps.WaitExpired, match="worker 1"):
            first.step()

        def catch_up() -> None:
            for _ in range(2):
                second.zero_grad()
                models[1](x).sum().backward()
                second.step()

        catching_up = thread.submit(catch_up)
        before = values(models[0])
        if next_call == "state_dict":
            ended(first.state_dict)
        if next_call == "other gradients":
            for parameter in models[0].parameters():
                parameter.grad = torch.ones_like(parameter)
        with pytest.raises(ps.InvalidTensor, match="The step was skipped on every server"):
            ended(first.zero_grad if next_call in ("zero_grad", "state_dict") else first.step)
        first.zero_grad()
        if first.clock == 1:
            models[0](x).sum().backward()
            ended(first.step)
        catching_up.result()
        assert differing(values(models[0]), values(models[1])) == []
        assert differing(before, values(models[0])) != []


KINDS: dict[str, Callable[[], ServerOptimizer]] = {
    "server": lambda: ps.SGD(lr=0.1),
    "aggregate": lambda: ps.Aggregate(partial(torch.optim.SGD, lr=0.1)),
    "add": lambda: ps.Add(partial(torch.optim.SGD, lr=0.1)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ends_by", ["deadline", "Ctrl-C"])
def test_a_step_that_is_asked_for_again_is_the_same_step(
    two: tuple[ps.Client, ps.Client], kind: str, ends_by: str
) -> None:
    name = f"once-{kind}-{ends_by}"
    models = [nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)]
    start = models[0].weight.detach().clone()
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(
            optimizer_for, two[1], models[1], name=name, optimizer=KINDS[kind](), reduction="sum"
        )
        first = optimizer_for(
            two[0], models[0], name=name, optimizer=KINDS[kind](), reduction="sum"
        )
        second = other.result()
        losses = []

        def closure() -> float:
            losses.append(1.0)
            first.zero_grad()
            models[0](torch.ones(2, 4)).sum().backward()
            return 1.0

        def interrupt() -> None:
            while not first.clock:
                threading.Event().wait(0.01)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        if ends_by == "Ctrl-C":
            interrupting = thread.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                first.step(closure)
            interrupting.result()
        else:
            with pytest.raises(ps.WaitExpired, match="worker 1"):
                first.step(closure)

        def step_of_zeros() -> None:
            second.zero_grad()
            (models[1](torch.ones(2, 4)).sum() * 0).backward()
            second.step()

        stepping = thread.submit(step_of_zeros)
        assert ended(lambda: first.step(closure)) == 1.0
        stepping.result()
    assert len(losses) == 1
    assert first.clock == second.clock == 1
    moved = (start - models[0].weight.detach()).max().item()
    assert moved == pytest.approx(0.2), "the gradient is 2"
    assert torch.equal(models[0].weight, models[1].weight)


def _by_backward(model: nn.Module) -> None:
    model.zero_grad()
    (3 * model(torch.ones(1, 4)).sum()).backward()  # a hook may wait for the step before


def _by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)


@pytest.mark.thorough
@pytest.mark.parametrize("write", [_by_backward, _by_hand])
@pytest.mark.parametrize("kind", ["server", "add"])
def test_gradients_that_come_after_an_expired_wait_are_a_step_of_their_own(
    two: tuple[ps.Client, ps.Client], kind: str, write: Callable[[nn.Module], None]
) -> None:
    models = [nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)]
    for model in models:
        nn.init.zeros_(model.weight)
    options = {"name": f"own-{kind}-{write.__name__}", "reduction": "sum"}
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(optimizer_for, two[1], models[1], optimizer=KINDS[kind](), **options)
        first = optimizer_for(two[0], models[0], optimizer=KINDS[kind](), **options)
        second = other.result()
        write(models[0])
        with pytest.raises(ps.WaitExpired, match="worker 1"):
            first.step()
        with pytest.raises(ps.WaitExpired, match="worker 1"):
            first.step()  # the same step

        def two_steps() -> None:
            for _ in range(2):
                models[1].weight.grad = torch.zeros(1, 4)
                second.step()

        stepping = thread.submit(two_steps)
        ended(lambda: write(models[0]))
        ended(first.step)
        stepping.result()
    assert first.clock == second.clock == 2
    assert torch.allclose(models[0].weight, torch.full((1, 4), -0.6))
    assert torch.equal(models[0].weight, models[1].weight)


def _expired(
    two: tuple[ps.Client, ps.Client],
    models: list[nn.Linear],
    thread: ThreadPoolExecutor,
    **options: Any,
) -> tuple[ps.DistributedOptimizer, ps.DistributedOptimizer, Future[Any]]:
    """Two optimizers, of which the first has not seen the end of its step, and the second's step in
    the thread.
    """
    other = thread.submit(optimizer_for, two[1], models[1], **options)
    first, second = optimizer_for(two[0], models[0], **options), other.result()
    models[0](torch.ones(1, 4)).sum().backward()
    with pytest.raises(ps.WaitExpired, match="worker 1"):
        first.step()
    models[1](torch.ones(1, 4)).sum().backward()
    return first, second, thread.submit(second.step)


def test_a_pull_that_has_expired_is_made_again_after_a_backward_pass_has_waited_for_the_step(
    two: tuple[ps.Client, ps.Client],
) -> None:
    """That of another loss, such as a generator's, which goes through this model, too."""
    models = [nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)]
    for model in models:
        nn.init.zeros_(model.weight)
    with ThreadPoolExecutor(1) as thread:
        first, second, stepping = _expired(two, models, thread, name="pulled again")
        ended(lambda: models[0](torch.ones(1, 4)).sum().backward())
        ended(first.zero_grad)
        stepping.result()
    assert first.clock == second.clock == 1
    assert torch.equal(models[1].weight.detach(), torch.full((1, 4), -0.1))
    assert torch.equal(models[0].weight, models[1].weight)


@pytest.mark.thorough
def test_a_step_of_two_tables_of_which_one_has_ended_is_the_same_step(
    two: tuple[ps.Client, ps.Client],
) -> None:
    """The other worker ends its step on the first table only, and on the second when told."""
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    for model in models:
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)

    def made(rank: int) -> ps.DistributedOptimizer:
        model = models[rank]
        groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
        return ps.DistributedOptimizer(
            two[rank], groups, ps.SGD(lr=1.0), module=model, name="halves", reduction="sum"
        )

    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(made, 1)
        first = made(0)
        handles = [table.handle for table in other.result()._tables]
    models[0](torch.ones(1, 4)).sum().backward()
    for handle in handles:
        with pytest.raises(ps.WaitExpired, match=f"'{handle.name}'"):
            first.step()
        two[1].tables.begin_step(handle).seal(skip=True)
    ended(first.step)
    assert first.clock == 1
    assert torch.equal(models[0].weight.detach(), torch.full((1, 4), -1.0))
    assert torch.equal(models[0].bias.detach(), torch.full((1,), -1.0))


@pytest.mark.thorough
def test_zero_grad_waits_for_a_step_that_has_not_ended(two: tuple[ps.Client, ps.Client]) -> None:
    models = [seeded(Branched), seeded(Branched)]
    (x,) = batches(1)
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(optimizer_for, two[1], models[1], name="zeroed")
        first = optimizer_for(two[0], models[0], name="zeroed")
        second = other.result()
        models[0](x).square().mean().backward()
        for end in (first.step, first.zero_grad):
            with pytest.raises(ps.WaitExpired, match="worker 1"):
                end()
        models[1](x).square().mean().backward()
        stepping = thread.submit(second.step)
        ended(first.zero_grad)
        stepping.result()
        assert differing(values(models[0]), values(models[1])) == []


def _filled(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def _backward(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


@pytest.mark.thorough
def test_what_a_script_changes_while_a_step_is_waited_for_comes_after_that_step(
    two: tuple[ps.Client, ps.Client],
) -> None:
    models = [seeded(Branched), seeded(Branched), seeded(Branched)]
    inputs = list(batches(2))
    reference = torch.optim.SGD(models[2].parameters(), lr=0.1, momentum=0.9)
    for x, value in zip(inputs, (0.25, None), strict=True):
        _backward(models[2], x)
        reference.step()
        if value is not None:
            _filled(models[2], value)
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(optimizer_for, two[1], models[1], name="changed")
        first = optimizer_for(two[0], models[0], name="changed")
        second = other.result()
        _backward(models[0], inputs[0])
        with pytest.raises(ps.WaitExpired, match="worker 1"):
            first.step()
        _filled(models[0], 0.25)

        def catch_up() -> None:
            _backward(models[1], inputs[0])
            second.step()
            _filled(models[1], 0.25)
            _backward(models[1], inputs[1])
            second.step()

        catching_up = thread.submit(catch_up)
        ended(first.step)
        assert all((value == 0.25).all() for value in values(models[0]).values())
        _backward(models[0], inputs[1])
        ended(first.step)
        catching_up.result()
    assert [differing(values(model), values(models[2])) for model in models] == [[], [], []]


@pytest.mark.parametrize("changes", ["parameters", "rate", "state"])
def test_aggregate_takes_an_update_as_the_others_do_whatever_the_script_changes_meanwhile(
    two: tuple[ps.Client, ps.Client], changes: str
) -> None:
    """All workers change the same after the same step, and the first has not seen its end."""
    models = [nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)]
    for model in models:
        nn.init.ones_(model.weight)
    kind = partial(torch.optim.SGD, lr=0.5, momentum=0.5, weight_decay=0.25)
    options: dict[str, Any] = {"name": f"meanwhile {changes}", "optimizer": ps.Aggregate(kind)}

    def change(optimizer: ps.DistributedOptimizer, model: nn.Module) -> None:
        if changes == "parameters":
            _filled(model, 8.0)
        elif changes == "rate":
            optimizer.param_groups[0]["lr"] = 0.25
        else:
            saved = ended(optimizer.state_dict)
            saved["state"][0]["momentum_buffer"] = torch.full((1, 4), 16.0)
            ended(lambda: optimizer.load_state_dict(saved))

    def step(optimizer: ps.DistributedOptimizer, model: nn.Module) -> None:
        ended(optimizer.zero_grad)
        model(torch.ones(1, 4)).sum().backward()
        ended(optimizer.step)

    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(optimizer_for, two[1], models[1], **options)
        first = optimizer_for(two[0], models[0], **options)
        second = other.result()
        models[0](torch.ones(1, 4)).sum().backward()
        with pytest.raises(ps.WaitExpired, match="worker 1"):
            first.step()

        def train() -> None:
            step(second, models[1])
            change(second, models[1])
            step(second, models[1])

        training = thread.submit(train)
        change(first, models[0])
        step(first, models[0])
        training.result()
    assert torch.equal(models[0].weight, models[1].weight)
    states = [each.state_dict()["state"][0]["momentum_buffer"] for each in (first, second)]
    assert torch.equal(*states)


def test_the_state_of_aggregate_has_the_last_step_though_its_wait_has_expired(
    two: tuple[ps.Client, ps.Client],
) -> None:
    """A checkpoint after that step has its clock, and this worker's parameters."""
    models = [nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)]
    for model in models:
        nn.init.zeros_(model.weight)
    options: dict[str, Any] = {"name": "own state", "optimizer": KINDS["aggregate"]()}
    with ThreadPoolExecutor(1) as thread:
        first, _, stepping = _expired(two, models, thread, **options)
        (saved,) = ended(first._own_state.state_dict)["parameters"]
        stepping.result()
    assert torch.equal(saved, models[1].weight)
    assert torch.equal(saved, torch.full((1, 4), -0.1))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_script_changes_after_ctrl_c_in_a_seal_comes_after_that_step(
    client: ps.Client, kind: str
) -> None:
    """The worker is alone, so an edit is taken under every optimizer."""
    left = -1

    def interrupt() -> None:
        nonlocal left
        left -= 1
        if not left:
            signal.raise_signal(signal.SIGINT)

    model = Counted(interrupt)
    name = f"sealed-{kind}"
    optimizer = ps.DistributedOptimizer(client, model, KINDS[kind](), name=name)
    model.weight.sum().backward()
    left = 1
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert optimizer.clock == 1
    _filled(model, 8.0)
    with torch.no_grad():
        model.seen.fill_(7)
    optimizer.zero_grad()
    assert model.weight.eq(8.0).all()
    assert int(model.seen) == 7
    model.weight.sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), torch.full((3,), 7.9))


@pytest.mark.thorough
def test_a_second_change_while_the_first_is_waited_for_is_not_written_over(
    two: tuple[ps.Client, ps.Client],
) -> None:
    """The other worker makes the first one alone: both are told; then both make the second."""
    models = [seeded(Branched), seeded(Branched)]
    (x,) = batches(1)
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(optimizer_for, two[1], models[1], name="changed twice")
        first = optimizer_for(two[0], models[0], name="changed twice")
        second = other.result()

        def both(value: float, *, ends: bool = True) -> None:
            _filled(models[1], value)
            _backward(models[1], x)
            stepping = thread.submit(second.step)
            if ends:
                _filled(models[0], value)
                _backward(models[0], x)
                ended(first.step)
                stepping.result()
                return
            with pytest.raises(ps.EditRefused, match=r"'gain', 'first\.weight'"):
                ended(first.step)
            with pytest.raises(ps.EditRefused, match="no parameter was changed"):
                stepping.result()

        _filled(models[0], 0.5)
        _backward(models[0], x)
        with pytest.raises(ps.WaitExpired, match="worker 1"):
            first.step()
        _filled(models[0], 0.25)
        both(0.5, ends=False)
        assert all((value == 0.25).all() for value in values(models[0]).values())
        both(0.25)
    assert differing(values(models[0]), values(models[1])) == []


@pytest.mark.thorough
def test_buffers_that_a_script_changes_while_they_are_waited_for_stay_so(
    two: tuple[ps.Client, ps.Client],
) -> None:
    models = [nn.Sequential(nn.Linear(12, 2), nn.BatchNorm1d(2)) for _ in two]
    (x,) = batches(1)
    with ThreadPoolExecutor(1) as thread:
        options = {"name": "buffers", "buffers": "mean"}
        other = thread.submit(optimizer_for, two[1], models[1], **options)
        first = optimizer_for(two[0], models[0], **options)
        second = other.result()
        _backward(models[0], x)
        with pytest.raises(ps.WaitExpired, match="worker 1"):
            first.step()
        models[0].get_buffer("1.running_mean").fill_(5.0)
        _backward(models[1], x)
        stepping = thread.submit(second.step)
        ended(first.step)
        stepping.result()
    mean, variance = ([m.get_buffer(f"1.running_{n}") for m in models] for n in ("mean", "var"))
    assert (mean[0] == 5.0).all()
    assert torch.equal(*variance), "it was not changed"


@pytest.mark.thorough
def test_an_evaluator_reads_one_clock_of_all_tables_while_training_goes_on(
    cluster: ps.LocalCluster, client: ps.Client
) -> None:
    model = zeroed()
    groups = [{"params": [p]} for p in model.parameters()]
    optimizer = optimizer_for(
        client, groups, module=model, name="watched", optimizer=ps.SGD(lr=1.0)
    )
    enough = threading.Event()
    seen: list[int] = []

    def evaluate() -> None:
        try:
            with ps.connect(cluster.address, role="reader", request_deadline_s=20.0) as reader:
                evaluated = zeroed()
                while len(seen) < 4:
                    clock = ps.pull_model(reader, evaluated, "watched")
                    for name, value in values(evaluated).items():
                        assert torch.equal(value, torch.full_like(value, -float(clock))), name
                    seen.append(clock)
        finally:
            enough.set()

    with ThreadPoolExecutor(1) as thread:
        evaluating = thread.submit(evaluate)
        while not enough.is_set():
            optimizer.zero_grad()
            sum_of(model).backward()
            optimizer.step()
        evaluating.result()
    assert seen == sorted(seen)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_data_loaders_with_processes_do_not_hang(client: ps.Client, method: str) -> None:
    model = nn.Linear(12, 2)
    optimizer = optimizer_for(client, model, name=f"loader-{method}")
    dataset = TensorDataset(torch.linspace(-1, 1, 24 * 12).reshape(24, 12))
    loader = DataLoader(dataset, 6, num_workers=2, multiprocessing_context=method)
    steps = 0
    for _ in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            steps += 1
    assert steps == 8
