"""Outer while a server or a worker dies between two outer steps."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import ps_worker as ps
from tests.integration.lane_cluster import lane_cluster, until
from tests.integration.outer_training import (
    INNER_STEPS,
    SGD,
    WORKERS,
    Trainer,
    Values,
    adamw,
    differences,
    is_same,
    new_name,
    together,
    twin,
    values_of,
)
from tests.integration.replicated_cluster import DEADLINE_S, replicated_cluster
from tests.integration.test_worker_gone import PATIENCE, victim

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(180)]

STEPS = 4 * INNER_STEPS


def test_a_server_killed_between_outer_steps_changes_no_bit() -> None:
    with replicated_cluster(servers=3, workers=WORKERS) as cluster, ExitStack() as stack:
        clients = [
            stack.enter_context(ps.connect(cluster.address, request_deadline_s=DEADLINE_S))
            for _ in range(WORKERS)
        ]

        def train(client: ps.Client) -> list[Values]:
            trainer = Trainer(client, "model", adamw())
            for step in range(STEPS):
                if client.rank == 0 and step == INNER_STEPS + 1:
                    cluster.healed()
                    cluster.kill(cluster.a_primary())
                trainer.step()
            return trainer.history

        found = sorted(together(clients, lambda c: (c.rank, train(c))), key=lambda pair: pair[0])
    for (rank, history), expected in zip(found, twin(adamw(), STEPS), strict=True):
        for step, (own, theirs) in enumerate(zip(history, expected, strict=True)):
            assert not differences(own, theirs), f"{rank=} {step=}"


def train_to_the_end(address: str, lane: str, _: str, pipe: Connection) -> None:
    """A worker process: says how many steps it has taken."""
    trainer = Trainer(
        ps.connect(address, rank=1, lane=lane, request_deadline_s=DEADLINE_S), "model", adamw()
    )
    try:
        while True:
            trainer.step()
            pipe.send(trainer.step_count)
    finally:
        os._exit(0)


def test_a_worker_killed_between_outer_steps_is_replaced() -> None:
    """What its inner steps did is lost; the other one gives its outer step without it, and the
    replacement begins with the servers' parameters.
    """
    with (
        lane_cluster(servers=2, workers=WORKERS, environment=PATIENCE) as cluster,
        victim(cluster, "auto", "", train_to_the_end) as dead,
        ThreadPoolExecutor(1) as pool,
        ps.connect(cluster.address, rank=0, request_deadline_s=DEADLINE_S) as client,
    ):
        target: list[int] = []

        def go_on(trainer: Trainer) -> Values:
            while not target or trainer.step_count < target[0]:
                trainer.step()
            return values_of(trainer.model)

        other = pool.submit(lambda: go_on(Trainer(client, "model", adamw())))
        while dead.hear() != INNER_STEPS + 1:
            pass
        dead.signal(signal.SIGKILL)
        until(lambda: any(n.state.value == "gone" for n in client.engine.view.nodes), "it is gone")
        with ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as late:
            assert (late.rank, late.is_replacement) == (1, True)
            trainer = Trainer(late, "model", adamw())
            begun = trainer.optimizer.clock
            assert begun >= 1
            assert trainer.step_count == begun * INNER_STEPS, "as the other, at its last outer step"
            served = torch.from_numpy(late.pull(late.table("model/0/float32")))
            own = torch.cat([each.flatten() for each in values_of(trainer.model)])
            assert torch.equal(own, served)
            target.append(trainer.step_count + STEPS)
            assert is_same(go_on(trainer), other.result(DEADLINE_S))
            assert trainer.optimizer.clock == begun + STEPS // INNER_STEPS


@pytest.mark.parametrize("refused", [0, 1])
@pytest.mark.parametrize("parts", [{}, {"overlap": 1}])
def test_an_outer_step_that_goes_on_after_an_error_has_each_move_once(
    refused: int, parts: dict[str, Any]
) -> None:
    """Workers disagree about one table's rate. The one whose seal came later ends; the other, whose
    pull was refused, takes its step. Each inner step moves parameters by -1.
    """
    outer = ps.Outer(SGD, 2, lr=1.0, momentum=0.0, nesterov=False, **parts)

    def stepped(optimizer: ps.DistributedOptimizer, times: int) -> None:
        for _ in range(times):
            optimizer.zero_grad()
            torch.stack([g["params"][0].sum() for g in optimizer.param_groups]).sum().backward()
            optimizer.step()

    def disagree(client: ps.Client) -> ps.DistributedOptimizer:
        groups = [{"params": [nn.Parameter(torch.zeros(64))]} for _ in range(2)]
        optimizer = ps.DistributedOptimizer(client, groups, outer, name="m", consistency="bsp")
        optimizer.param_groups[refused]["outer_lr"] = 1.0 + client.rank
        with pytest.raises(ps.InvalidConfig, match="disagree about clock 1"):
            stepped(optimizer, 2 + len(parts))
        return optimizer

    with lane_cluster(servers=1, workers=WORKERS) as cluster, ExitStack() as stack:
        clients = [
            stack.enter_context(ps.connect(cluster.address, request_deadline_s=DEADLINE_S))
            for _ in range(WORKERS)
        ]
        optimizers = together(clients, disagree)
        until(lambda: any(each.engine.pushes.refused for each in clients), "one seal is refused")
        first = next(rank for rank in range(WORKERS) if not clients[rank].engine.pushes.refused)
        clients[1 - first].abandon("its script ends with the error")
        stepped(optimizers[first], 2)
        optimizers[first].synchronize(timeout_s=DEADLINE_S)
        for number, table in enumerate(optimizers[first].trained_model.tables):
            rate = 1.0 + first if number == refused else 1.0
            served = torch.from_numpy(clients[first].pull(table.handle))
            assert served.eq(-rate * (4 + len(parts))).all(), served
            assert torch.equal(table.layout.placed[0].tensor.detach(), served)


def test_a_late_joiner_that_has_moved_waits_for_nobody_in_synchronize() -> None:
    """The others are in no call with it: what it has moved comes with its first outer step."""
    outer = ps.Outer(SGD, inner_steps=2)
    environment = {**PATIENCE, "PUSHPULL_MAX_WORKERS": "2"}
    with (
        lane_cluster(servers=1, workers=1, environment=environment) as cluster,
        ExitStack() as stack,
        ThreadPoolExecutor(1) as pool,
    ):
        trainers: list[Trainer] = []

        def join() -> Trainer:
            client = stack.enter_context(ps.connect(cluster.address, request_deadline_s=10.0))
            trainers.append(Trainer(client, "model", outer))
            return trainers[-1]

        first = join()
        first.step()
        joining = pool.submit(join)
        tables = partial(map, first.client.tables.newest, first.client.tables.handles)
        until(lambda: all(table.joins for table in tables()), "it joins")
        while first.optimizer.clock < max(table.joins[-1].after_clock for table in tables()):
            first.step()  # the last without it
        late = joining.result(DEADLINE_S)
        assert late.client.is_late_joiner
        begun, moved = late.optimizer.clock, late.step()
        late.optimizer.synchronize()
        assert is_same(values_of(late.model), moved)

        def train(client: ps.Client) -> Values:
            trainer = trainers[client.rank]
            while trainer.optimizer.clock == begun:
                trainer.step()
            trainer.optimizer.synchronize()
            return values_of(trainer.model)

        assert is_same(*together([trainer.client for trainer in trainers], train))
        assert [trainer.optimizer.clock for trainer in trainers] == [begun + 1] * 2


# --- Ctrl-C


@contextmanager
def ctrl_c_after(function: str, times: int = 1) -> Iterator[None]:
    """Ctrl-C comes when this thread returns from a function of that name, so manieth."""
    left = times

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event == "return" and frame.f_code.co_name == function:
            left -= 1
            if not left:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("at", [0, 1])
def test_an_inner_step_that_is_refused_at_the_moment_of_ctrl_c_is_told_by_the_next_call(
    at: int,
) -> None:
    """Also where it is the last before an outer step, which that call ends."""
    outer = ps.Outer(SGD, inner_steps=2)
    with ps.local_cluster(servers=1, workers=1) as cluster, ps.connect(cluster.address) as client:
        trainer = Trainer(client, "model", outer, clip_norm=1.0)
        for _ in range(at):
            trainer.step()
        trainer.optimizer.zero_grad()
        (trainer.model.loss(0, 0) * float("nan")).backward()
        with pytest.raises(KeyboardInterrupt), ctrl_c_after("_take_inner_step"):
            trainer.optimizer.step()
        with pytest.raises(ps.InvalidTensor, match="inner step was not taken, and counts"):
            (trainer.optimizer.step if at else trainer.optimizer.zero_grad)()
        if not at:
            trainer.model.loss(0, 1).backward()
            trainer.optimizer.step()
        assert trainer.optimizer.clock == 1
        trainer.step()


@pytest.mark.parametrize("times", [1, 2, 3])
def test_ctrl_c_at_the_end_of_a_call_of_synchronize_loses_no_agreement(times: int) -> None:
    """The call that says that another worker has moved, the one that says that all have taken the
    outer step, and the last barrier: the others do not make it again.
    """
    with ps.local_cluster(servers=1, workers=WORKERS) as cluster, ExitStack() as stack:
        clients = [stack.enter_context(ps.connect(cluster.address, rank=r)) for r in range(WORKERS)]
        trainers = together(clients, lambda client: Trainer(client, "model", adamw()))
        trainers[1].step()
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(trainers[1].optimizer.synchronize, 10.0)
            with pytest.raises(KeyboardInterrupt), ctrl_c_after("_enter", times):
                trainers[0].optimizer.synchronize(10.0)
            trainers[0].optimizer.synchronize(10.0)
            other.result()
        assert [trainer.optimizer.clock for trainer in trainers] == [1, 1]
        assert is_same(*(values_of(trainer.model) for trainer in trainers))


@pytest.mark.parametrize("has_gradients", [True, False])
def test_ctrl_c_when_synchronize_has_sealed_leaves_the_gradients_to_the_next_step(
    has_gradients: bool,
) -> None:
    """A backward pass had run before it; else the next step only ends it."""
    with ps.local_cluster(servers=1, workers=1) as cluster, ps.connect(cluster.address) as client:
        trainer = Trainer(client, "model", adamw())
        trainer.step()
        if has_gradients:
            trainer.optimizer.zero_grad()
            trainer.model.loss(0, 1).backward()
        with pytest.raises(KeyboardInterrupt), ctrl_c_after("_seal_early"):
            trainer.optimizer.synchronize()
        trainer.optimizer.step()
        assert trainer.optimizer.clock == 1
        assert trainer.optimizer.trained_model.inner_steps.taken == has_gradients
        trainer.optimizer.synchronize()
        assert trainer.optimizer.clock == 1 + has_gradients


@pytest.mark.parametrize("parts", [{"elastic": 0.5}, {"overlap": 1}])
def test_ctrl_c_between_the_merge_and_the_buffers_merges_once(parts: dict[str, Any]) -> None:
    """The next call waits for the buffers. Later steps are as if nothing had come between: one with
    a NaN gives all parameters back.
    """
    outer = ps.Outer(SGD, inner_steps=2, lr=0.5, momentum=0.0, nesterov=False, **parts)
    count = 2 + parts.get("overlap", 0)
    histories = []
    with ps.local_cluster(servers=1, workers=1) as cluster, ps.connect(cluster.address) as client:
        for is_interrupted in (False, True):
            trainer = Trainer(client, new_name(), outer)
            if is_interrupted:
                for _ in range(count - 1):
                    trainer.step()
                with pytest.raises(KeyboardInterrupt), ctrl_c_after("_take_over"):
                    trainer.step()
                trainer.optimizer.step()
                trainer.step_count += 1
                trainer.history.append(values_of(trainer.model))
            while trainer.step_count < 4:
                trainer.step()
            histories.append(trainer.history[:])
            trainer.model.weight.data[0] = float("nan")
            trainer.step()
            with pytest.raises(ps.InvalidTensor, match="the pseudo-gradient of 'weight' has"):
                trainer.step()
            histories[-1].append(values_of(trainer.model))
    for step, (own, theirs) in enumerate(zip(*histories, strict=True)):
        assert not differences(own, theirs), f"{step=}"
    assert all(each.isfinite().all() for each in histories[1][-1])
