"""Hybrid training by processes that torchrun has started, and with process groups of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

import ps_worker as ps
from tests.integration.command_line import environment, run_warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SCRIPT = """
import os
import torch
from torch import distributed
import pushpull as ps

def tell(line):
    os.write(1, f"{line}\\n".encode())  # whole, whatever the others write

def group(name, rank, size):
    store = distributed.FileStore(f"{os.getcwd()}/{name}", size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)

def model(client, name):
    rows = ps.Embedding(client, name, 4, optimizer=ps.SGD(lr=0.1), init=ps.Constant(1.0))
    torch.manual_seed(client.rank)
    return torch.nn.Sequential(rows, torch.nn.Linear(4, 1))

def made(client, module, name):
    local = torch.optim.SGD(module[1].parameters(), lr=0.1)
    return ps.HybridOptimizer(client, module, local, name=name)

def trained(client, name):
    module = model(client, name)
    optimizer = made(client, module, name)
    for step in range(2):
        optimizer.zero_grad()
        module(torch.arange(client.rank, client.rank + 3)).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        tell(f"{name}: {module(torch.arange(4)).sum():.6f}")
    distributed.destroy_process_group()

def say(client, module, name):
    try:
        made(client, module, name)
    except ps.errors.InvalidConfig as refused:
        tell(f"{name} at {client.rank}: {refused}")
    if distributed.is_initialized():
        distributed.destroy_process_group()

with ps.connect() as client:
    rank = client.rank
    assert rank == int(os.environ["RANK"])
    module = model(client, "refused")
    group(f"alone {rank}", 0, 1)
    say(client, module, "alone")
    if rank == 0:
        group("one", 0, 1)
    say(client, module, "one")
    group("swapped", 1 - rank, 2)
    say(client, module, "swapped")
    trained(client, "made")
    distributed.init_process_group("gloo")  # torchrun's
    trained(client, "found")
"""


@pytest.mark.thorough
def test_torchruns_processes_train_with_their_own_group_or_none(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with ps.local_cluster(servers=1, workers=2) as cluster:
        variables = environment() | {"PUSHPULL_SCHEDULER": cluster.address, "OMP_NUM_THREADS": "1"}
        run = run_warm(
            *("--standalone", "--nproc-per-node", "2", str(script)),
            cwd=tmp_path, module="torchrun", variables=variables,
        )  # fmt: skip
    assert run.returncode == 0, run.stderr
    said = sorted(run.stdout.splitlines())
    alone = "is rank 0 of 1 in torch.distributed, and worker 0 of 2 in the cluster; expected the "
    assert said[0].startswith(f"alone at 0: this process {alone}same: start the cluster for as ")
    assert said[1].startswith("alone at 1: this process is rank 0 of 1 in torch.distributed, and")
    found, made = said[2:4], said[4:6]
    assert found == [found[0]] * 2
    assert [line.partition(": ")[2] for line in made] == [found[0].partition(": ")[2]] * 2
    for rank, line in enumerate(said[6:8]):
        assert line.startswith(f"one at {rank}: workers 1 have no torch.distributed process group")
        assert "call init_process_group at each, or at none" in line
    for rank, line in enumerate(said[8:]):
        assert line.startswith(f"swapped at {rank}: this process is rank {1 - rank} of 2 in")
        assert "connect with rank=torch.distributed.get_rank()" in line
    assert len(said) == 10
