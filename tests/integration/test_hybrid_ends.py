"""Hybrid runs that a worker leaves, is late in, or is interrupted in: of two workers, each a
process, that take the steps which the test orders. Each case is a run of its own of one cluster.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
import torch

import ps_worker as ps
from ps_core import limits
from tests.integration.command_line import environment
from tests.integration.hybrid_jobs import InterruptingRate, Trainer
from tests.integration.lane_cluster import LaneCluster, lane_cluster
from tests.integration.ordered_workers import (
    DEADLINE_S,
    PATIENCE,
    REMEDY,
    Worker,
    begun,
    ordered_workers,
    stepped,
)

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(180)]

WORKERS = 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[LaneCluster]:
    with lane_cluster(servers=1, workers=WORKERS, environment=PATIENCE) as cluster:
        yield cluster


def workers(
    cluster: LaneCluster, run: str, deadline_s: float = 60.0
) -> AbstractContextManager[list[Worker]]:
    """All workers of a run, in hybrid training."""
    make = partial(Trainer, kind="plain", name="model")
    return ordered_workers(cluster, run, make, WORKERS, deadline_s)


# --- one of them ends


def test_a_worker_that_is_killed_ends_the_step_of_the_others(cluster: LaneCluster) -> None:
    with workers(cluster, "killed") as (first, victim):
        begun(first)
        victim.signal(signal.SIGKILL)
        kind, said = first.hear()
        assert kind == "WorkerLost"
        assert "a worker has ended, or its connection has" in said
        assert REMEDY in said


def test_a_worker_whose_script_fails_is_named(cluster: LaneCluster) -> None:
    with workers(cluster, "failed") as (first, victim):
        begun(first)
        victim.pipe.send("fail")
        kind, said = first.hear()
        assert kind == "WorkerLost"
        assert said.startswith("worker 1 was declared gone: its process has ended")
        assert REMEDY in said


def test_a_worker_that_leaves_before_the_others_is_named(cluster: LaneCluster) -> None:
    with workers(cluster, "left") as (first, victim):
        begun(first)
        victim.pipe.send("leave")
        assert victim.hear() == "left"
        kind, said = first.hear()
        assert kind == "WorkerLost"
        assert said.startswith("worker 1 has left the cluster")


# --- one of them is late


def test_a_step_that_is_waited_for_in_vain_or_interrupted_is_taken_by_the_next_call(
    cluster: LaneCluster,
) -> None:
    with workers(cluster, "late", deadline_s=5.0) as (first, late):
        begun(first)
        kind, said = first.hear()
        assert kind == "WaitExpired"
        assert "a worker has not come to this step within 5 s" in said
        first.pipe.send("wait on")
        assert first.hear() == "begins"
        first.signal(signal.SIGINT)
        kind, _ = first.hear()
        assert kind == "KeyboardInterrupt"
        late.pipe.send("step")
        assert late.hear() == "begins"
        first.pipe.send("wait on")
        assert first.hear() == "begins"
        assert [first.hear(), late.hear()] == [2, 2]
        assert stepped([first, late]) == [3, 3]
        for worker in (first, late):
            worker.pipe.send("values")
        values, others = first.hear(), late.hear()
        assert [name for name in values if not torch.equal(values[name], others[name])] == []


@pytest.mark.parametrize("ends_by", ["deadline", "Ctrl-C"])
def test_what_a_script_changes_while_a_step_is_waited_for_comes_after_that_step(
    cluster: LaneCluster, ends_by: str
) -> None:
    """All change the same after the same step, and the first has not seen its end."""
    deadline_s = 3.0 if ends_by == "deadline" else 60.0
    with workers(cluster, f"meanwhile-{ends_by}", deadline_s) as (first, late):
        begun(first)
        if ends_by == "Ctrl-C":
            assert not first.pipe.poll(1.0)
            first.signal(signal.SIGINT)
        kind, _ = first.hear()
        assert kind == ("WaitExpired" if ends_by == "deadline" else "KeyboardInterrupt")
        first.pipe.send("change")
        assert first.hear() == "changed"
        late.pipe.send("step")
        assert late.hear() == "begins"
        first.pipe.send("wait on")
        assert first.hear() == "begins"
        assert [first.hear(), late.hear()] == [2, 2]
        late.pipe.send("change")
        assert late.hear() == "changed"
        assert stepped([first, late]) == [3, 3]
        for worker in (first, late):
            worker.pipe.send("values")
        values, others = first.hear(), late.hear()
        assert [name for name in values if not torch.equal(values[name], others[name])] == []


@pytest.mark.parametrize("how", ["step", "zero_grad", "state_dict", "load_state_dict"])
def test_a_step_that_is_interrupted_while_it_is_sealed_is_taken_once(how: str) -> None:
    """By whichever call comes next."""
    with ps.local_cluster(servers=1, workers=1) as cluster, ps.connect(cluster.address) as client:
        rows = ps.Embedding(client, "rows", 4, optimizer=ps.SGD(lr=0.1))
        head = torch.nn.Linear(4, 1)
        model = torch.nn.Sequential(rows, head)
        optimizer = ps.HybridOptimizer(client, model, torch.optim.SGD(head.parameters(), lr=0.1))
        state, interrupted = optimizer.state_dict(), 0
        for number in range(1, 9):
            rows.hyperparameters["lr"] = rate = InterruptingRate(0.1)
            rate.left = number + 1  # the first is read before the step begins
            optimizer.zero_grad()
            model(torch.arange(3)).sum().backward()
            before, gradient = head.weight.detach().clone(), head.weight.grad
            assert gradient is not None
            try:
                optimizer.step()
            except KeyboardInterrupt:
                interrupted += 1
                rate.left = 0
                getattr(optimizer, how)(*([state] if how == "load_state_dict" else []))
            assert optimizer.clock == number
            torch.testing.assert_close(head.weight.detach(), before - 0.1 * gradient)
        assert interrupted


def interruptible(
    client: ps.Client,
) -> tuple[torch.nn.Sequential, torch.nn.Linear, ps.HybridOptimizer, InterruptingRate]:
    """A model of rows and a linear layer, that layer, the optimizer, and the rate of the rows."""
    rows, head = ps.Embedding(client, "rows", 4, optimizer=ps.SGD(lr=0.1)), torch.nn.Linear(4, 1)
    model = torch.nn.Sequential(rows, head)
    optimizer = ps.HybridOptimizer(client, model, torch.optim.SGD(head.parameters(), lr=0.1))
    rows.hyperparameters["lr"] = rate = InterruptingRate(0.1)
    return model, head, optimizer, rate


def test_a_step_that_is_interrupted_at_its_seal_is_whole_before_the_next_backward_pass() -> None:
    """The script zeroes the gradients without the optimizer, and takes a step of its own."""
    with ps.local_cluster(servers=1, workers=1) as cluster, ps.connect(cluster.address) as client:
        model, head, optimizer, rate = interruptible(client)
        rate.left = 3  # the first is read before the step, the second when rows are pushed ahead
        expected = head.bias.detach().clone()
        for factor in (1.0, 10.0):
            model.zero_grad()
            (factor * model(torch.arange(3)).sum()).backward()
            expected -= 0.1 * factor * 3
            with contextlib.suppress(KeyboardInterrupt):
                optimizer.step()
        assert rate.left < 0
        assert optimizer.clock == 2
        torch.testing.assert_close(head.bias.detach(), expected)


def test_a_backward_pass_before_an_interrupted_step_has_ended_is_refused() -> None:
    """The workers' mean would be written over its gradients."""
    with ps.local_cluster(servers=1, workers=1) as cluster, ps.connect(cluster.address) as client:
        model, head, optimizer, rate = interruptible(client)
        rate.left = 2  # when rows are pushed ahead
        expected = head.bias.detach().clone()
        model(torch.arange(3)).sum().backward()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        with pytest.raises(ps.InvalidConfig, match="before the last step has ended"):
            (10.0 * model(torch.arange(3)).sum()).backward()
        optimizer.zero_grad()
        assert optimizer.clock == 1
        (10.0 * model(torch.arange(3)).sum()).backward()
        optimizer.step()
        assert optimizer.clock == 2
        torch.testing.assert_close(head.bias.detach(), expected - 0.1 * 3 - 0.1 * 30)


def test_a_step_with_too_many_rows_is_refused_before_anything_of_it_is_taken() -> None:
    """The script goes on with another batch, whatever it does about the error."""
    with ps.local_cluster(servers=1, workers=1) as cluster, ps.connect(cluster.address) as client:
        dim, count = 256, limits.FOREIGN_MAX_MESSAGE_BYTES // (8 + 4 * 256) + 1
        rows = ps.Embedding(client, "rows", dim, optimizer=ps.SGD(lr=1.0), partitions=1)
        head = torch.nn.Linear(dim, 1)
        model = torch.nn.Sequential(rows, head)
        optimizer = ps.HybridOptimizer(client, model, torch.optim.SGD(head.parameters(), lr=0.1))
        many, few = torch.arange(count), torch.arange(3)
        before = head.bias.detach().clone()
        model(many).sum().backward()
        with pytest.raises(ps.InvalidConfig, match=f"{count} rows of partition 0"):
            optimizer.step()
        assert torch.equal(head.bias.detach(), before)
        optimizer.zero_grad()
        for half in (many[:-3], many[3:]):  # each fits
            model(half).sum().backward()
        with pytest.raises(ps.InvalidConfig, match=f"{count} rows of partition 0"):
            optimizer.step()
        optimizer.zero_grad()
        model(few).sum().backward()
        assert (optimizer.clock, rows.table.clock) == (0, 0)
        optimizer.step()
        torch.testing.assert_close(head.bias.detach(), before - 0.1 * 3)
        assert (optimizer.clock, rows.table.clock) == (1, 1)


def test_a_step_with_a_wrong_setting_is_refused_before_anything_of_it_is_taken() -> None:
    """The others would wait for its seal, having taken their half."""
    with ps.local_cluster(servers=1, workers=1) as cluster, ps.connect(cluster.address) as client:
        rows = ps.Embedding(client, "rows", 4, optimizer=ps.SGD(lr=1.0))
        head, bias = torch.nn.Linear(4, 1), torch.nn.Parameter(torch.ones(1))
        model = torch.nn.ModuleDict({"rows": rows, "head": head})
        model.register_parameter("bias", bias)
        optimizer = ps.HybridOptimizer(
            client,
            model,
            torch.optim.SGD(head.parameters(), lr=0.1),
            served=[bias],
            server_optimizer=ps.SGD(lr=0.1),
        )
        before = head.bias.detach().clone()
        (head(rows(torch.arange(3))) + bias).sum().backward()
        rows.hyperparameters["momentun"] = 0.9
        with pytest.raises(ps.InvalidConfig, match="no hyperparameter 'momentun'"):
            optimizer.step()
        rows.hyperparameters.clear()
        served = optimizer.servers.param_groups[0]
        served["nesterov"] = True
        with pytest.raises(ps.InvalidConfig, match=r"'nesterov' of table .* is False for good"):
            optimizer.step()
        served["nesterov"] = False
        assert torch.equal(head.bias.detach(), before)
        assert (optimizer.clock, rows.table.clock) == (0, 0)
        optimizer.step()
        torch.testing.assert_close(head.bias.detach(), before - 0.1 * 3)
        assert (optimizer.clock, rows.table.clock) == (1, 1)


def test_a_step_with_a_sparse_gradient_is_refused_before_anything_of_it_is_taken() -> None:
    """One of the workers' half, as of `nn.Embedding(sparse=True)`, and one of the servers'."""
    with ps.local_cluster(servers=1, workers=1) as cluster, ps.connect(cluster.address) as client:
        rows = ps.Embedding(client, "rows", 4, optimizer=ps.SGD(lr=1.0))
        lookup, head = torch.nn.Embedding(3, 4, sparse=True), torch.nn.Linear(4, 1)
        model = torch.nn.ModuleDict({"rows": rows, "small": lookup, "served": head})
        optimizer = ps.HybridOptimizer(
            client,
            model,
            torch.optim.SGD(lookup.parameters(), lr=0.1),
            served=head.parameters(),
            server_optimizer=ps.SGD(lr=0.1),
        )
        small, served = lookup.weight, head.weight
        before = small.detach().clone()
        head(rows(torch.arange(3)) + lookup(torch.arange(3))).sum().backward()
        assert small.grad is not None
        assert served.grad is not None
        with pytest.raises(ps.InvalidTensor, match=r"gradient of 'small.weight' is torch.sparse"):
            optimizer.step()
        small.grad = small.grad.to_dense()
        dense = served.grad
        served.grad = dense.to_sparse()
        with pytest.raises(ps.InvalidTensor, match=r"gradient of 'served.weight' is torch.sparse"):
            optimizer.step()
        assert torch.equal(small.detach(), before)
        assert (optimizer.clock, rows.table.clock) == (0, 0)
        served.grad = dense
        optimizer.step()
        torch.testing.assert_close(small.detach(), before - 0.1 * small.grad)
        assert (optimizer.clock, rows.table.clock) == (1, 1)


def test_a_loss_scale_does_not_outlive_a_step_that_raises() -> None:
    """Of one that is interrupted, and one that is refused after `unscale_`, both given up."""
    with ps.local_cluster(servers=1, workers=1) as cluster, ps.connect(cluster.address) as client:
        model, head, optimizer, rate = interruptible(client)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        expected = head.bias.detach().clone()
        for step, (error, count) in enumerate([(KeyboardInterrupt, 1), (ps.InvalidConfig, 0)]):
            scaler.scale(model(torch.arange(3)).sum()).backward()
            if step == 1:
                scaler.unscale_(optimizer)
            rate.left = 2 * (1 - step)  # the second is read when rows are pushed ahead
            with pytest.raises(error):
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()  # which ends the step that was interrupted
            scaler.scale(model(torch.arange(3)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            expected -= 0.1 * 3 * (1 + count)
            torch.testing.assert_close(head.bias.detach(), expected)


SCRIPT = """
import signal, os, sys
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import pushpull as ps

kind, how = sys.argv[1:]
with ps.connect() as client:
    model = torch.nn.Sequential(
        ps.Embedding(client, "rows", 4, optimizer=ps.SGD(lr=0.1)), torch.nn.Linear(4, 1)
    )
    if kind != "plain":
        ps.HybridOptimizer.init_process_group(client)
    if kind == "fsdp":
        fully_shard(model)
    local = torch.optim.SGD(model[1].parameters(), lr=0.1)
    module = DistributedDataParallel(model) if kind == "ddp" else model
    optimizer = ps.HybridOptimizer(client, module, local)
    for step in range(4):
        loss = module(torch.arange(3)).sum()
        if step == 2 and client.rank == 1:
            print(how, flush=True)
            os.kill(os.getpid(), signal.Signals[how])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def in_interpreters(
    cluster: LaneCluster, tmp_path: Path, kind: str, how: str
) -> list[subprocess.Popen[str]]:
    """The workers of a run of its own, named for `kind` and `how`."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    variables = environment() | {
        "PUSHPULL_SCHEDULER": cluster.address,
        "PUSHPULL_RUN": f"{kind}-{how}",
    }
    return [
        subprocess.Popen(
            [sys.executable, "-m", "pushpull", "worker", f"--rank={rank}", str(script), kind, how],
            env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(WORKERS)
    ]  # fmt: skip


def test_a_fenced_process_ends_though_the_others_are_not_heard_in_the_process_group(
    tmp_path: Path,
) -> None:
    """As one whose network was cut for longer than the worker timeout: others have ended unheard.
    gloo would keep the process from its end for half an hour.
    """
    patience = {"PUSHPULL_WORKER_TIMEOUT_S": "60"}
    with lane_cluster(servers=1, workers=WORKERS, environment=patience) as cluster:
        started = in_interpreters(cluster, tmp_path, "plain", "SIGSTOP")
        try:
            assert started[1].stdout is not None
            assert started[1].stdout.readline() == "SIGSTOP\n"
            ending = [sys.executable, "-m", "pushpull", "runs", "end", "plain-SIGSTOP"]
            subprocess.run([*ending, "--scheduler", cluster.address], env=environment(), check=True)
            _, said = started[0].communicate(timeout=DEADLINE_S)
        finally:
            for process in started:
                process.kill()
            started[1].communicate()
        assert started[0].returncode == 1, said
        assert "Fenced: run 'plain-SIGSTOP'" in said


@pytest.mark.parametrize(
    ("kind", "how"),
    [("plain", "SIGSTOP"), ("ddp", "SIGSTOP"), ("fsdp", "SIGSTOP"), ("ddp", "SIGKILL")],
)
def test_a_process_ends_though_a_worker_is_paused_or_dead(
    cluster: LaneCluster, tmp_path: Path, kind: str, how: str
) -> None:
    """And says whose fault it is, also where torch waits. In interpreters of their own: gloo would
    keep one from ending.
    """
    started = in_interpreters(cluster, tmp_path, kind, how)
    try:
        _, said = started[0].communicate(timeout=DEADLINE_S)
    finally:
        for process in started:
            process.kill()
    assert started[1].communicate()[0] == f"{how}\n"
    assert started[0].returncode == 75, said
    silent = r"worker 1 was declared gone after [\d.]+ s of silence"
    ended = "a worker has ended, or its connection has"  # nobody tells the cluster which
    assert re.search(f"WorkerLost: {silent if how == 'SIGSTOP' else ended}", said), said
    assert REMEDY in said
