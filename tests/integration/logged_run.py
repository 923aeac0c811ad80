"""A run of three workers whose servers keep update logs; one of these dies in the middle of it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import ps_worker as ps
from ps_runtime.launch.cluster_shape import CheckpointPlan, ClusterShape, UpdateLogPlan
from ps_runtime.launch.launcher import Launcher, start_scheduler, start_server, start_servers
from tests.integration.command_line import START_DEADLINE_S

WORKERS = 3
CLOCKS = 10
SAVED_CLOCK = 3
KILLED_CLOCK = 6
SHAPES = {"asp": (96, 40), "bsp": (64, 30)}
"""Of each table's tensor: blocks in ranges of both servers."""

BLOCK = 64
DEADLINE_S = 60.0


@dataclass(frozen=True)
class LoggedRun:
    """What was left of it, while its cluster still runs.

    Attributes:
        logs: what --update-log was given.
        checkpoints: of SAVED_CLOCK, and of the end.
        pulled: each table at the end, as a client has it.
    """

    logs: Path
    checkpoints: tuple[str, str]
    pulled: dict[str, np.ndarray]


@contextmanager
def logged_run(root: Path) -> Iterator[LoggedRun]:
    """Train both tables, kill a server and start it again; the cluster ends with the block."""
    logs = root / "logs"
    shape = ClusterShape(
        2,
        WORKERS,
        checkpoints=CheckpointPlan(str(root / "checkpoints")),
        update_log=UpdateLogPlan(str(logs)),
    )
    with Launcher() as launcher:
        scheduler = start_scheduler(launcher, shape)
        servers = start_servers(launcher, shape, scheduler.address)
        for server in servers:
            launcher.wait_ready(server, START_DEADLINE_S)
        reached = threading.Event()

        def restart() -> None:
            """With pushes of three workers on their way."""
            assert reached.wait(2 * DEADLINE_S)
            servers[0].send(signal.SIGKILL)
            assert servers[0].wait(DEADLINE_S) is not None
            again = start_server(launcher, shape, scheduler.address, 0)
            launcher.wait_ready(again, START_DEADLINE_S)

        with ThreadPoolExecutor(WORKERS + 1) as pool:
            restarting = pool.submit(restart)
            runs = [
                pool.submit(_train, scheduler.address, rank, reached) for rank in range(WORKERS)
            ]
            made = [run.result() for run in runs]
            restarting.result()
        with ps.connect(scheduler.address, role="reader") as reader:
            pulled = {name: np.array(reader.pull(reader.table(name))) for name in SHAPES}
        with ps.connect(scheduler.address, role="operator") as operator:
            end = operator.checkpoint("the end", timeout_s=DEADLINE_S).wait().url
        yield LoggedRun(logs, (made[0], end), pulled)


def _train(address: str, rank: int, reached: threading.Event) -> str:
    """Both tables, step by step; where the checkpoint is."""
    rng = np.random.default_rng(rank)
    made = ""
    with ps.connect(address, rank=rank, request_deadline_s=DEADLINE_S) as client:
        tables = {
            name: client.create_table(
                name,
                [(f"{name}.weight", shape)],
                optimizer=ps.Adam(lr=1e-2),
                consistency=name,
                block_elements=BLOCK,
            )
            for name, shape in SHAPES.items()
        }
        for clock in range(1, CLOCKS + 1):
            for name, shape in SHAPES.items():
                client.pull(tables[name])
                client.wait(client.push(tables[name], rng.normal(size=shape).astype("f4")))
            if clock == SAVED_CLOCK:
                made = client.checkpoint("in the middle", timeout_s=DEADLINE_S).wait().url
            if clock == KILLED_CLOCK:
                reached.set()
    return made
