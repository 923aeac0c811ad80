"""Outer in parts: fragments that take their outer steps in turn, outer steps that are on their way
while inner steps are taken, and parameters that go only part of the way to the servers'.
"""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker as ps
from ps_worker.training.optimizer_state import InnerStepsState
from tests.integration import resumed_training
from tests.integration.outer_training import (
    ADAMW,
    SGD,
    WORKERS,
    Quadratic,
    Trainer,
    Values,
    differences,
    is_same,
    new_name,
    together,
    values_of,
)
from tests.integration.replicated_cluster import DEADLINE_S, replicated_cluster

pytestmark = pytest.mark.slow

BLOCK = 128  # elements: the model has five blocks
STREAMED = ps.Outer(ADAMW, inner_steps=6, fragments=3)
OVERLAPPED = ps.Outer(ADAMW, inner_steps=9, fragments=3, overlap=2)
WAITING = ps.Outer(ADAMW, inner_steps=3, overlap=1)
ELASTIC = ps.Outer(ADAMW, inner_steps=3, lr=0.5, momentum=0.0, nesterov=False, elastic=0.25)
ALL = ps.Outer(ADAMW, inner_steps=6, fragments=2, overlap=1, elastic=0.5)


@pytest.fixture(scope="module")
def workers() -> Iterator[list[ps.Client]]:
    with ps.local_cluster(servers=2, workers=WORKERS) as cluster:
        clients = [ps.connect(cluster.address, rank=rank) for rank in range(WORKERS)]
        yield clients
        for client in clients:
            client.close(leave=False)


class FragmentTwin:
    """All workers and servers in one process, block by block."""

    def __init__(self, outer: ps.Outer) -> None:
        self.outer = outer
        self.models = [Quadratic() for _ in range(WORKERS)]
        self.locals = [outer.factory([{"params": list(m.parameters())}]) for m in self.models]
        self.served = [each.clone() for each in self.own(0).split(BLOCK)]
        self.servers = torch.optim.SGD(
            self.served, outer.lr, outer.momentum, nesterov=outer.nesterov, foreach=False
        )
        self.pulled = [each.clone() for each in self.served]
        self.measured: list[torch.Tensor] = []  # of each worker, if a merge is due
        self.clock = self.taken = 0
        self.history: list[list[Values]] = [[] for _ in self.models]

    def own(self, rank: int) -> torch.Tensor:
        return torch.cat([each.detach().flatten() for each in self.models[rank].parameters()])

    def write(self, rank: int, values: torch.Tensor) -> None:
        with torch.no_grad():
            for parameter in self.models[rank].parameters():
                parameter.copy_(values[: parameter.numel()].view(parameter.shape))
                values = values[parameter.numel() :]

    def step(self, step: int) -> None:
        for rank, (model, local) in enumerate(zip(self.models, self.locals, strict=True)):
            local.zero_grad()
            model.loss(rank, step).backward()
            local.step()
        self.taken += 1
        if self.taken == self.outer.steps_per_clock:
            self.exchange()
        if self.measured and self.taken == self.outer.overlap:
            self.merge()
        for history, model in zip(self.history, self.models, strict=True):
            history.append(values_of(model))

    def exchange(self) -> None:
        fragment = self.clock % self.outer.fragments
        self.measured = [self.own(rank) for rank in range(WORKERS)]
        for block, (served, pulled) in enumerate(zip(self.served, self.pulled, strict=True)):
            moves = [pulled - own.split(BLOCK)[block] for own in self.measured]
            is_pushed = block % self.outer.fragments == fragment
            served.grad = torch.stack(moves).sum(0) / WORKERS if is_pushed else None
        self.servers.step()
        self.pulled = [each.clone() for each in self.served]
        self.clock += 1
        self.taken = 0

    def merge(self) -> None:
        fragment = (self.clock - 1) % self.outer.fragments
        for rank, measured in enumerate(self.measured):
            own = self.own(rank)
            to = own + self.outer.elastic * (torch.cat(self.pulled) - measured)
            if self.outer.elastic == 1.0:
                to = torch.where(own == measured, torch.cat(self.pulled), to)
            numbers = torch.arange(len(own)) // BLOCK
            self.write(rank, torch.where(numbers % self.outer.fragments == fragment, to, own))
        self.measured = []


def twin(outer: ps.Outer, steps: int) -> list[list[Values]]:
    found = FragmentTwin(outer)
    for step in range(steps):
        found.step(step)
    return found.history


def is_same_history(found: list[Values], expected: list[Values]) -> bool:
    return all(is_same(own, theirs) for own, theirs in zip(found, expected, strict=True))


def train(client: ps.Client, name: str, outer: ps.Outer, steps: int, **options: Any) -> Trainer:
    trainer = Trainer(client, name, outer, **options)
    for _ in range(steps):
        trainer.step()
    return trainer


# --- the arithmetic


@pytest.mark.parametrize("outer", [STREAMED, OVERLAPPED, WAITING, ELASTIC, ALL])
def test_two_workers_have_the_bits_of_one_process(
    workers: list[ps.Client], outer: ps.Outer
) -> None:
    steps = 19
    found = together(workers, partial(train, name=new_name(), outer=outer, steps=steps))
    for trainer, expected in zip(found, twin(outer, steps), strict=True):
        for step, (own, theirs) in enumerate(zip(trainer.history, expected, strict=True)):
            assert not differences(own, theirs), f"{trainer.client.rank=} {step=}"
        assert trainer.optimizer.clock == steps // outer.steps_per_clock


@pytest.mark.thorough
def test_a_clock_moves_the_bytes_of_one_fragment(workers: list[ps.Client]) -> None:
    """Blocks 0 and 3, then 1 and 4, then 2: once around is one exchange of the model."""
    seen: list[list[tuple[int, int]]] = [[] for _ in workers]

    def work(client: ps.Client, name: str) -> None:
        trainer = Trainer(client, name, STREAMED, buffers=None)
        for _ in range(3):
            before = client.progress()
            trainer.step()
            trainer.step()
            after = client.progress()
            seen[client.rank].append((
                after.pushed_bytes - before.pushed_bytes, after.pulled_bytes - before.pulled_bytes
            ))  # fmt: skip

    together(workers, partial(work, name=new_name()))
    last = 630 - 4 * BLOCK
    expected = [(n * 4, n * 4) for n in (2 * BLOCK, BLOCK + last, BLOCK)]
    assert seen == [expected] * WORKERS


@pytest.mark.thorough
def test_parameters_in_another_memory_format_and_several_tables(workers: list[ps.Client]) -> None:
    """Fragments are dealt out over all tables of a model."""
    sgd = partial(torch.optim.SGD, lr=1.0)
    outer = ps.Outer(sgd, 4, lr=1.0, momentum=0.0, nesterov=False, fragments=2)

    def work(client: ps.Client, name: str) -> list[list[float]]:
        image = nn.Parameter(torch.zeros(3, 4, 4, 4).to(memory_format=torch.channels_last))
        other = nn.Parameter(torch.zeros(64))
        groups: list[dict[str, Any]] = [{"params": [image]}, {"params": [other], "lr": 2.0}]
        optimizer = ps.DistributedOptimizer(
            client, groups, outer, name=name, block_elements=64, kernels="exact"
        )
        seen = []
        for _ in range(6):
            optimizer.zero_grad()
            weight = torch.arange(192.0).view(3, 4, 4, 4) * (1 + client.rank)
            ((image * weight).sum() + other.sum() * (1 + client.rank)).backward()
            optimizer.step()
            flat = image.detach().reshape(-1)
            seen.append([float(flat[1]), float(flat[65]), float(other.detach()[0])])
        return seen

    first, second = together(workers, partial(work, name=new_name()))
    # Block 0 is averaged at steps 2 and 6; block 1, and 3 in the second table, at step 4.
    assert [row[0] for row in first] == [-1, -3, -4, -5, -6, -9]
    assert [row[0] for row in second] == [-2, -3, -5, -7, -9, -9]
    assert [row[1] / 65 for row in first] == [-1, -2, -3, -6, -7, -8]
    assert [row[2] for row in first] == [-2, -4, -6, -12, -14, -16]
    assert [row[2] for row in second] == [-4, -8, -12, -12, -16, -20]
    assert first[5][0] == second[5][0]


@pytest.mark.thorough
def test_synchronize_exchanges_the_whole_model(workers: list[ps.Client]) -> None:
    """Also in the middle of an outer step that is on its way."""

    def work(client: ps.Client, name: str, outer: ps.Outer) -> list[Values]:
        trainer = train(client, name, outer, 7)
        trainer.optimizer.synchronize()
        seen = [values_of(trainer.model)]
        served = torch.from_numpy(client.pull(client.table(f"{name}/0/float32")))
        assert torch.equal(torch.cat([each.flatten() for each in seen[0]]), served)
        for _ in range(5):
            trainer.step()
        trainer.optimizer.synchronize()
        return [*seen, values_of(trainer.model)]

    for outer in (STREAMED, OVERLAPPED, ELASTIC):
        first, second = together(workers, partial(work, name=new_name(), outer=outer))
        assert is_same_history(first, second)


@pytest.mark.thorough
@pytest.mark.parametrize("steps", [6, 7])
@pytest.mark.parametrize("consistency", ["bsp", "ssp:1", "asp"])
def test_every_move_is_in_the_end(workers: list[ps.Client], consistency: str, steps: int) -> None:
    """Each inner step moves every parameter by -1. After six an outer step is on its way."""
    outer = ps.Outer(SGD, 4, lr=1.0, momentum=0.0, nesterov=False, fragments=2, overlap=1)

    def work(client: ps.Client, name: str) -> torch.Tensor:
        model = nn.Linear(500, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = ps.DistributedOptimizer(
            client, model, outer, name=name, consistency=consistency, block_elements=64
        )
        for _ in range(steps):
            optimizer.zero_grad()
            model.weight.sum().backward()
            optimizer.step()
        optimizer.synchronize()
        return model.weight.detach()

    for weight in together(workers, partial(work, name=new_name())):
        assert weight.eq(-steps * (1.0 if consistency == "bsp" else WORKERS)).all()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("consistency", "parts", "steps", "kept"),
    [
        ("asp:reject=0", {"inner_steps": 4, "fragments": 2}, 2, (-4.0, -2.0)),
        ("asp:reject=0", {"inner_steps": 4, "fragments": 2, "elastic": 0.5}, 2, (-2.0, -2.0)),
        ("bsp:backup=1", {"inner_steps": 2, "overlap": 1}, 3, (-5.0, -5.0)),
        ("bsp:backup=1", {"inner_steps": 2, "elastic": 0.5}, 2, (-2.0, -2.0)),
    ],
)
def test_what_came_too_late_stays_at_its_worker(
    workers: list[ps.Client],
    consistency: str,
    parts: dict[str, Any],
    steps: int,
    kept: tuple[float, float],
) -> None:
    """One worker's first outer step comes too late: with `elastic` it keeps its values there, else
    it stays moved.
    """
    outer = ps.Outer(SGD, lr=parts.get("elastic", 1.0), momentum=0.0, nesterov=False, **parts)
    name = new_name()
    options: Any = {"name": name, "consistency": consistency, "block_elements": 64}
    models = [nn.Linear(128, 1, bias=False) for _ in workers]
    for model in models:
        nn.init.zeros_(model.weight)
    optimizers = together(
        workers, lambda c: ps.DistributedOptimizer(c, models[c.rank], outer, **options)
    )
    for rank in (0, 1):  # the second worker pulled before the first pushed
        for _ in range(steps):
            optimizers[rank].zero_grad()
            models[rank].weight.sum().backward()
            optimizers[rank].step()
    (late,) = optimizers[1].results
    assert late.rejected == (0,) or late.discarded
    assert models[1].weight[0, :64].eq(kept[0]).all()
    assert models[1].weight[0, 64:].eq(kept[1]).all()


# --- faults and checkpoints


@pytest.mark.timeout(180)
def test_a_server_killed_while_an_outer_step_is_on_its_way_changes_no_bit() -> None:
    steps = 4 * OVERLAPPED.inner_steps
    with replicated_cluster(servers=3, workers=WORKERS) as cluster, ExitStack() as stack:
        clients = [
            stack.enter_context(ps.connect(cluster.address, request_deadline_s=DEADLINE_S))
            for _ in range(WORKERS)
        ]

        def work(client: ps.Client) -> list[Values]:
            trainer = Trainer(client, "model", OVERLAPPED)
            for step in range(steps):
                if client.rank == 0 and step == OVERLAPPED.steps_per_clock:
                    cluster.healed()
                    cluster.kill(cluster.a_primary())
                trainer.step()
            return trainer.history

        found = dict(together(clients, lambda client: (client.rank, work(client))))
    for rank, expected in enumerate(twin(OVERLAPPED, steps)):
        assert is_same_history(found[rank], expected)


@pytest.mark.thorough
@pytest.mark.timeout(180)
@pytest.mark.parametrize("outer", [pytest.param(OVERLAPPED, marks=pytest.mark.thorough), ALL])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, outer: ps.Outer) -> None:
    """From the middle of an outer step that is on its way, and from after its merge."""

    def work(client: ps.Client, begun: int, until: int) -> list[Values]:
        trainer = Trainer(client, "model", outer)
        trainer.step_count = begun
        while trainer.step_count < until:
            trainer.step()
        client.barrier()  # else the other's state may be of an earlier inner step of this clock
        client.checkpoint().wait(DEADLINE_S)
        return trainer.history

    on_way = 2 * outer.steps_per_clock
    found: list[list[Values]] = [[] for _ in range(WORKERS)]
    for begun, until in ((0, on_way), (on_way, on_way + 2), (on_way + 2, on_way + 9)):
        resume = str(tmp_path) if begun else ""
        with ps.local_cluster(1, WORKERS, checkpoint_url=str(tmp_path), resume=resume) as cluster:
            run = partial(work, begun=begun, until=until)
            histories = resumed_training.together(cluster.address, WORKERS, run)
        for own, history in zip(found, histories, strict=True):
            own += history
    for own, expected in zip(found, twin(outer, on_way + 9), strict=True):
        for step, (values, theirs) in enumerate(zip(own, expected, strict=True)):
            assert not differences(values, theirs), f"{step=}"


def test_buffers_come_with_the_merge_however_early_a_call_waits(workers: list[ps.Client]) -> None:
    """A checkpoint waits for them between the two, and has them for a run that goes on from it."""

    def work(client: ps.Client, name: str) -> list[float]:
        trainer = train(client, name, WAITING, 3)
        state = InnerStepsState(trainer.optimizer.trained_model, trainer.model)
        saved = copy.deepcopy(state.state_dict())
        seen = [float(trainer.model.seen[0])]
        for is_resumed in (False, True):
            if is_resumed:
                state.load_state_dict(saved)
            trainer.step()
            seen.append(float(trainer.model.seen[0]))
        return seen

    first, second = together(workers, partial(work, name=new_name()))
    assert first == [3.0, 4.0, 4.0]
    assert second == [6.0, 3.0, 3.0]  # the first worker's after the outer step


def test_a_state_of_another_clock_merges_the_fragment_that_it_has(
    workers: list[ps.Client],
) -> None:
    """A checkpoint under ASP is of one clock for all workers, and their states are of others."""
    outer = ps.Outer(SGD, 4, lr=1.0, momentum=0.0, nesterov=False, fragments=2, overlap=1)
    name = new_name()
    models = [nn.Linear(128, 1, bias=False) for _ in workers]
    for model in models:
        nn.init.zeros_(model.weight)
    optimizers = together(
        workers,
        lambda client: ps.DistributedOptimizer(
            client, models[client.rank], outer, name=name, consistency="asp", block_elements=64
        ),
    )

    def step(rank: int) -> None:
        optimizers[rank].zero_grad()
        models[rank].weight.sum().backward()
        optimizers[rank].step()

    for rank in (1, 1, 0, 0):  # block 0 of each
        step(rank)
    state = InnerStepsState(optimizers[0].trained_model, None)
    saved = copy.deepcopy(state.state_dict())
    for _ in range(2):
        step(0)
    state.load_state_dict(saved)
    assert optimizers[0].clock == 2
    step(0)
    assert models[0].weight[0, :64].eq(-5.0).all()  # three of its own, two of the other
    assert models[0].weight[0, 64:].eq(-3.0).all()


# --- gradients that are not finite, and bad input


def test_a_fragment_with_a_nan_moves_nothing(workers: list[ps.Client]) -> None:
    def work(client: ps.Client, name: str) -> Values:
        outer = ps.Outer(partial(torch.optim.SGD, lr=0.5), 9, fragments=3, overlap=2)
        trainer = Trainer(client, name, outer)
        for step in range(9):
            trainer.optimizer.zero_grad()
            bad = float("nan") if step == 1 and client.rank == 1 else 1.0
            (trainer.model.loss(client.rank, step) * bad).backward()
            if step == 2 and client.rank == 1:
                with pytest.raises(ps.InvalidTensor, match="the pseudo-gradient of 'weight' has"):
                    trainer.optimizer.step()
                assert all(each.isfinite().all() for each in values_of(trainer.model))
            else:
                trainer.optimizer.step()
        trainer.optimizer.synchronize()
        return values_of(trainer.model)

    first, second = together(workers, partial(work, name=new_name()))
    assert is_same(first, second)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fragments": 0}, "fragments is 0; expected 1 to 1,000, and a divisor of inner_steps"),
        ({"fragments": 4}, "fragments is 4; expected 1 to 1,000, and a divisor of inner_steps"),
        ({"fragments": 2, "overlap": 3}, "overlap is 3; expected a whole number from 0 to 2"),
        ({"overlap": -1}, "overlap is -1.0; expected 0 or more"),
        ({"elastic": 0.0}, "elastic is 0.0; expected above 0, up to 1"),
        ({"elastic": float("nan")}, "elastic is nan; expected a finite number"),
    ],
)
def test_settings_out_of_bounds_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ps.InvalidConfig, match=message):
        ps.Outer(ADAMW, inner_steps=6, **given)


@pytest.mark.thorough
def test_workers_with_other_fragments_are_refused(workers: list[ps.Client]) -> None:
    name = new_name()
    Trainer(workers[0], name, ps.Outer(ADAMW, inner_steps=4, fragments=2))
    with pytest.raises(ps.TableExists, match=r"optimizer\.fragment_count is 2; got 4"):
        Trainer(workers[1], name, ps.Outer(ADAMW, inner_steps=4, fragments=4))


@pytest.mark.thorough
def test_more_fragments_than_blocks_are_refused(workers: list[ps.Client]) -> None:
    outer = ps.Outer(ADAMW, inner_steps=6, fragments=6)
    with pytest.raises(ps.InvalidConfig, match=r"fragments is 6, and .* has 5 blocks of up to 128"):
        Trainer(workers[0], new_name(), outer)


# --- beside other features


@pytest.mark.thorough
@pytest.mark.parametrize("codec", ["int8", pytest.param("topk:0.2", marks=pytest.mark.thorough)])
def test_fragments_in_fewer_bits_train_as_well(workers: list[ps.Client], codec: str) -> None:
    """What a codec leaves of a block comes with the block's next outer step."""
    outer = ps.Outer(partial(torch.optim.SGD, lr=0.2), 6, momentum=0.5, fragments=2, overlap=1)

    def loss(codec: str) -> float:
        run = partial(train, name=new_name(), outer=outer, steps=120, push_codec=codec)
        trainer = together(workers, run)[0]
        with torch.no_grad():
            return float(trainer.model.loss(0, 10_000))

    first = float(Quadratic().loss(0, 10_000).detach())
    plain = loss("none")
    assert plain < first / 50
    assert loss(codec) < 1.5 * plain


@pytest.mark.thorough
def test_a_live_change_of_consistency_and_a_group_that_is_added(workers: list[ps.Client]) -> None:
    """While an outer step is on its way: both workers go on, and end with one model."""

    def work(client: ps.Client, name: str) -> Values:
        trainer = train(client, name, OVERLAPPED, 4)  # the first outer step is on its way
        late = nn.Parameter(torch.full((3 * BLOCK,), float(client.rank)))
        trainer.optimizer.add_param_group({"params": [late]})
        assert late.detach().eq(0.0).all(), "rank 0's"
        for consistency in ("ssp:2", "bsp"):
            trainer.optimizer.set_consistency(consistency)
            for _ in range(7):
                trainer.optimizer.zero_grad()
                loss = trainer.model.loss(client.rank, trainer.step_count)
                (loss + (late - 1).square().sum() / 8).backward()
                trainer.optimizer.step()
                trainer.step_count += 1
        trainer.optimizer.synchronize()
        assert 0.0 < float(late.detach().mean()) < 1.5
        return [*values_of(trainer.model), late.detach().clone()]

    first, second = together(workers, partial(work, name=new_name()))
    assert is_same(first, second)


@pytest.mark.thorough
def test_a_script_that_ends_while_an_outer_step_is_on_its_way_holds_nobody() -> None:
    with ps.local_cluster(servers=1, workers=WORKERS) as cluster:

        def work(rank: int) -> int:
            with ps.connect(cluster.address, rank=rank, request_deadline_s=DEADLINE_S) as client:
                return train(client, "model", OVERLAPPED, 3 if rank else 12).step_count

        with ThreadPoolExecutor(WORKERS) as threads:
            assert list(threads.map(work, range(WORKERS))) == [12, 3]


@pytest.mark.thorough
def test_a_wait_that_expires_is_taken_up_again() -> None:
    """The inner step was taken before the wait, and its gradients are not applied twice."""
    outer = ps.Outer(SGD, 2, lr=1.0, momentum=0.0, nesterov=False, overlap=1)
    models = [nn.Linear(100, 1, bias=False) for _ in range(WORKERS)]
    for model in models:
        nn.init.zeros_(model.weight)

    def backward(rank: int) -> None:
        optimizers[rank].zero_grad()
        models[rank].weight.sum().backward()

    with (
        ps.local_cluster(servers=1, workers=WORKERS) as cluster,
        ps.connect(cluster.address, rank=0, request_deadline_s=1.0) as first,
        ps.connect(cluster.address, rank=1) as second,
    ):
        optimizers = [
            ps.DistributedOptimizer(client, model, outer, name="model")
            for client, model in zip((first, second), models, strict=True)
        ]
        for _ in range(2):
            backward(0)
            optimizers[0].step()
        backward(0)
        for _ in range(2):
            with pytest.raises(ps.WaitExpired, match="worker 1"):
                optimizers[0].step()
            assert models[0].weight.eq(-3.0).all()
        for _ in range(2):
            backward(1)
            optimizers[1].step()
        optimizers[0].step()
        assert optimizers[0].clock == 1
        assert models[0].weight.eq(-3.0).all()
        backward(1)
        optimizers[1].step()
        together([first, second], lambda client: optimizers[client.rank].synchronize())
        assert all(model.weight.eq(-3.0).all() for model in models)


@pytest.mark.thorough
def test_what_a_codec_has_left_is_saved_with_the_outer_step_that_is_on_its_way() -> None:
    """The servers discard that step as too late, so all of it comes back; one that stands still
    when it leaves is a slow link.
    """
    outer = ps.Outer(SGD, 2, lr=1.0, momentum=0.0, nesterov=False, overlap=1)
    options: Any = {"consistency": "bsp:backup=1", "push_codec": "int8"}
    models = [nn.Linear(128, 1, bias=False) for _ in range(WORKERS)]

    def step(rank: int) -> None:
        optimizers[rank].zero_grad()
        models[rank].weight.sum().backward()
        optimizers[rank].step()

    with (
        ps.local_cluster(servers=1, workers=WORKERS) as cluster,
        ps.connect(cluster.address, rank=0) as first,
        ps.connect(cluster.address, rank=1) as second,
        ThreadPoolExecutor(1) as threads,
    ):
        optimizers = together(
            [first, second],
            lambda c: ps.DistributedOptimizer(c, models[c.rank], outer, name="model", **options),
        )
        for rank in (0, 0, 0, 1):
            step(rank)
        server = cluster.process_ids["server 0"]
        os.kill(server, signal.SIGSTOP)
        try:
            step(1)
            residuals = optimizers[1].trained_model.tables[0].handle.steps.residuals
            assert residuals is not None
            saved = threads.submit(residuals.state_dict)
        finally:
            os.kill(server, signal.SIGCONT)
        torch.testing.assert_close(saved.result()["residuals"], torch.full((128,), 2.0))
        assert optimizers[1].clock == 1


@pytest.mark.thorough
def test_fragments_with_backup_workers_are_refused(workers: list[ps.Client]) -> None:
    """A worker that is left out would not learn how far the others are."""
    with pytest.raises(ps.InvalidConfig, match="fragments is 3 with bsp:backup=1"):
        Trainer(workers[0], new_name(), STREAMED, consistency="bsp:backup=1")
    trainer = Trainer(workers[0], new_name(), STREAMED)
    with pytest.raises(ps.InvalidConfig, match="expected no fragments with backup workers"):
        trainer.optimizer.set_consistency("bsp:backup=1")
