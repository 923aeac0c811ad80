"""`python -m tests.system.on_ray`: a cluster on a local Ray of four nodes, one of which dies.

Prints what was found as one line of JSON, the last of its output.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster

import pushpull as ps
from pushpull.errors import InvalidConfig
from pushpull.types import RayCluster

STORE_BYTES = 100_000_000
PLACED_WITHIN_S = 120.0
PROGRAM_WITHIN_S = 240.0
PAGE = Path(__file__).parents[2] / "docs/guides/SEVERAL_MACHINES.md"
DIES_ONCE = """\
if client.rank == 1 and not client.is_late_joiner:
    import os
    os._exit(3)
"""
QUICK = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500,
         "health_check_failure_threshold": 3}  # fmt: skip


def train(cluster: RayCluster, begun: str, enough: str) -> tuple[int, int, float]:
    """Step until `enough` is there, ten steps at least: the rank, the clock, and the value."""
    with cluster.connect(request_deadline_s=PLACED_WITHIN_S) as client:
        table = client.create_table("w", 1000, optimizer=ps.SGD(lr=1.0))
        while table.clock < 10 or not Path(enough).exists():
            found = client.push_pull(table, np.ones(1000, np.float32))
            if table.clock == 10:
                Path(f"{begun}-{client.rank}").touch()
        assert (found == found[0]).all()
        return client.rank, table.clock, float(found[0])


class Trainer:
    """A worker that is an actor."""

    def train(self, *arguments: Any) -> tuple[int, int, float]:
        return train(*arguments)


def run_program(address: str, dies: str = "") -> str:
    """What the page's program prints, run on this Ray; `dies` comes after each of its steps."""
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (step,) = re.findall(r".*client\.push_pull\(.*\n", program)
    indent = step[: len(step) - len(step.lstrip())]
    program = program.replace(
        step, step + "".join(f"{indent}{line}\n" for line in dies.splitlines())
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"RAY_ADDRESS": address},
        capture_output=True, text=True, timeout=PROGRAM_WITHIN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def told(error: type[Exception], call: Any) -> str:
    """The message with which a call is refused."""
    try:
        call()
    except error as refusal:
        return str(refusal)
    raise AssertionError("it was not refused")


def main() -> None:
    """Two servers on three nodes that have room for one each; the first server's node dies, and
    then its process on the other node.
    """
    found: dict[str, Any] = {"before init": told(InvalidConfig, ps.ray_cluster)}
    head = {"num_cpus": 3, "resources": {"trainers": 2}, "object_store_memory": STORE_BYTES,
            "include_dashboard": False,
            "_system_config": QUICK}  # fmt: skip
    local = Cluster(initialize_head=True, head_node_args=head)
    nodes = [
        local.add_node(num_cpus=1, resources={"room": 1}, object_store_memory=STORE_BYTES)
        for _ in range(3)
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(local.shutdown)
        found["program"] = run_program(local.address)
        found["run again"] = run_program(local.address, DIES_ONCE)
        ray.init(address=local.address)
        stack.callback(ray.shutdown)
        folder = stack.enter_context(TemporaryDirectory())
        cluster = stack.enter_context(
            ps.ray_cluster(servers=2, workers=2, replicas=2, resources={"room": 1})
        )
        found["placed"] = [asdict(role) for role in cluster.roles()]
        begun, enough = f"{folder}/begun", Path(f"{folder}/enough")
        alive: Any = {"num_cpus": 0, "resources": {"trainers": 1}}  # on the node that stays
        task, trainer = ray.remote(**alive)(train), ray.remote(**alive)(Trainer)
        actor: Any = trainer.remote()
        working = [
            task.remote(cluster, begun, str(enough)),
            actor.train.remote(cluster, begun, str(enough)),
        ]
        ray.wait(working, timeout=0.1)
        lost = cluster.roles()[1].node_id
        (dead,) = [node for node in nodes if node.node_id == lost]
        while not all(Path(f"{begun}-{rank}").exists() for rank in range(2)):
            ray.wait(working, timeout=0.1)
        local.remove_node(dead, allow_graceful=False)
        roles = cluster.roles(PLACED_WITHIN_S)
        while any(role.node_id == lost for role in roles):
            ray.wait(working, timeout=0.1)
            roles = cluster.roles(PLACED_WITHIN_S)
        found["placed again"], found["lost"] = [asdict(role) for role in roles], lost
        killed = roles[1].process_id
        os.kill(killed, signal.SIGKILL)
        while any(role.process_id == killed for role in roles):
            ray.wait(working, timeout=0.1)
            roles = cluster.roles(PLACED_WITHIN_S)
        found["started again"] = [asdict(role) for role in roles]
        enough.touch()
        found["trained"] = ray.get(working, timeout=PLACED_WITHIN_S)
        copy = ray.get(ray.remote(num_cpus=0)(told).remote(InvalidConfig, cluster.stop))
        found["copy"] = copy
    print(json.dumps(found))


if __name__ == "__main__":
    main()
