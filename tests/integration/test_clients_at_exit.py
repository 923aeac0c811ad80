"""Scripts that end with a client that they did not close."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Event
from multiprocessing.util import Finalize
from pathlib import Path

import numpy as np
import pytest

import ps_worker as ps
from ps_core.cluster_view import NodeState, Role
from ps_runtime.checkpoint.store import resolve
from tests.integration.command_line import ROOT, environment
from tests.integration.warm_processes import warm_context

pytestmark = pytest.mark.thorough

DEADLINE_S = 60.0

TRAINS = """
import sys
import torch
import pushpull as ps

def train(address):
    client, model = ps.connect(address), torch.nn.Linear(4, 2)
    optimizer = ps.DistributedOptimizer(client, model, ps.Adam(lr=0.01))
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    return client

"""

OF_ITS_OWN = (
    TRAINS
    + """
with ps.local_cluster(checkpoint_url=sys.argv[1]) as cluster:
    client = train(cluster.address)
    if sys.argv[1]:
        client.checkpoint()
print("done")
"""
)

WITHOUT_WITH = (
    TRAINS
    + """
def start():
    return train(ps.local_cluster(checkpoint_url=sys.argv[1]).address)

client = start()
client.checkpoint()
print("done")
"""
)

WAITS_IN_VAIN = """
import numpy as np
import pushpull as ps

cluster = ps.local_cluster(workers=2)
client = ps.connect(cluster.address)
table = client.create_table("t", [("w", (4,))], optimizer=ps.SGD(lr=0.1))
client.push(table, {"w": np.ones(4, np.float32)})  # the other worker never comes
print("done")
"""

FORKS = (
    TRAINS
    + """
import os

with ps.local_cluster() as cluster:
    child = os.fork()
    if child == 0:
        sys.exit(3)
    print(os.waitpid(child, 0)[1], flush=True)
    train(cluster.address).close()
print("done")
"""
)

ENDS_WITH_A_VIEW = """
import atexit, queue, sys
import pushpull as ps

client = ps.connect(sys.argv[1], world_size=2)
heard = queue.SimpleQueue()  # views, and the client's end
client.engine.watch(heard.put, heard.put)

def wait_for_a_view():
    known = client.engine.view.view_number
    print("ends", flush=True)
    while getattr(heard.get(), "view_number", known + 1) <= known:
        pass

atexit.register(wait_for_a_view)  # runs before the client leaves, and after all threads have ended
"""

NO_THREADS = """
import asyncio, atexit, threading
from ps_core.cluster_view import Node, NodeState, Role
from ps_runtime.http2.stream_port import StreamPort
from ps_runtime.system.executors import in_thread

def is_caller() -> bool:
    return threading.current_thread() is threading.main_thread()

async def work() -> None:
    print(await in_thread(is_caller))

async def resolve() -> None:
    server = Node(1, 1, Role.SERVER, 0, "localhost:7", NodeState.ALIVE)
    print(await StreamPort(server).connect(7, 5.0))

atexit.register(lambda: asyncio.run(resolve()))
atexit.register(lambda: asyncio.run(work()))
asyncio.run(work())
"""

COPIES = """
import atexit
import numpy as np
from ps_core.sequence_locks import Shared
from ps_worker.transport.lane import Copiers

copiers = Copiers(2, least_bytes=0)
values, target = np.arange(9, dtype=np.uint8), np.zeros(9, np.uint8)
shared = [Shared(values, target, np.array([2], np.uint64), 0, 2)]
print(copiers.begin(shared).result())
atexit.register(lambda: print(copiers.begin(shared)))
"""

OF_ANOTHER = TRAINS + "client = train(sys.argv[1])\nprint('done')\n"


def ran(script: str, argument: str) -> tuple[int, str, str]:
    ended = subprocess.run(
        [sys.executable, "-c", script, argument], cwd=ROOT, env=environment(), check=False,
        capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


def test_a_script_that_has_stopped_its_own_cluster_ends_without_a_word() -> None:
    assert ran(OF_ITS_OWN, "") == (0, "done\n", "")


def test_nor_is_there_an_error_where_it_waited_for_a_checkpoint(tmp_path: Path) -> None:
    code, output, said = ran(OF_ITS_OWN, str(tmp_path))
    assert (code, output) == (0, "done\n")
    assert "error " not in said.replace("error=", "")
    assert "Traceback" not in said
    assert "leave_failed" not in said


def test_a_cluster_without_a_with_block_ends_with_its_checkpoint_and_the_script(
    tmp_path: Path,
) -> None:
    """Nobody keeps it but this process: it lives as long."""
    assert ran(WITHOUT_WITH, str(tmp_path)) == (0, "done\n", "")
    with resolve(str(tmp_path)).reader as reader:
        assert reader.manifest.number == 1


def test_a_step_that_waits_for_a_worker_that_never_came_does_not_hold_up_the_end() -> None:
    assert ran(WAITS_IN_VAIN, "") == (0, "done\n", "")


def test_a_forked_child_does_not_end_its_parents_cluster() -> None:
    assert ran(FORKS, "") == (0, "768\ndone\n", "")


def test_a_worker_with_a_state_leaves_at_the_end_of_its_script(tmp_path: Path) -> None:
    """At the interpreter's end no thread starts any more, and its state is written all the same."""
    with ps.local_cluster(checkpoint_url=str(tmp_path)) as cluster:
        assert ran(OF_ANOTHER, cluster.address) == (0, "done\n", "")
        with ps.connect(cluster.address, role="operator") as operator:
            made = operator.checkpoint().wait()
    assert list(Path(made.url).parent.rglob("*worker*")), sorted(tmp_path.rglob("*"))


def test_a_large_view_that_comes_at_the_end_of_a_script_is_no_reason_to_fail() -> None:
    """A thread would read it, and none starts any more."""
    with ps.local_cluster(workers=2) as cluster:
        other = ps.connect(cluster.address, world_size=2, rank=1)
        many = [(f"layer.{number}.of.a.network.with.a.long.name", (1,)) for number in range(2000)]
        other.create_table("many", many, optimizer=ps.SGD(lr=1.0), consistency=ps.ASP())
        command = [sys.executable, "-c", ENDS_WITH_A_VIEW, cluster.address]
        with subprocess.Popen(
            command, cwd=ROOT, env=environment(),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as script:  # fmt: skip
            assert script.stdout is not None
            assert script.stdout.readline() == "ends\n"
            other.close()
            _, said = script.communicate(timeout=DEADLINE_S)
        assert (script.returncode, said) == (0, "")
        with ps.connect(cluster.address, role="operator") as operator:
            workers = [n for n in operator.engine.view.nodes if n.role is Role.WORKER]
    assert [worker.state for worker in workers] == [NodeState.LEFT] * 2


def test_where_no_thread_takes_work_the_caller_does_it_and_names_are_not_resolved() -> None:
    code, output, said = ran(NO_THREADS, "")
    assert (code, output) == (0, "False\nTrue\nNone\n")
    assert "Traceback" not in said
    assert "stream_port_not_used" in said


def test_the_caller_copies_out_of_shared_memory_where_no_thread_does() -> None:
    assert ran(COPIES, "") == (0, "[True]\nNone\n", "")


def _child(address: str, rank: int, how: str) -> None:
    ps.connect(address, rank=rank)
    if how == "fails":
        raise RuntimeError("on purpose")
    if how != "returns":
        sys.exit(int(how))


ENDS = [
    ("forkserver", "returns", NodeState.LEFT),
    ("forkserver", "0", NodeState.LEFT),
    ("forkserver", "1", NodeState.GONE),
    ("forkserver", "fails", NodeState.GONE),
    ("spawn", "returns", NodeState.LEFT),
    ("spawn", "fails", NodeState.GONE),
]


def test_a_child_of_multiprocessing_leaves_if_it_ends_normally_and_else_is_gone() -> None:
    spawn = multiprocessing.get_context("spawn")
    begins = {"forkserver": warm_context().Process, "spawn": spawn.Process}
    with ps.local_cluster(workers=len(ENDS)) as cluster:
        children = [
            begins[method](target=_child, args=(cluster.address, rank, how))
            for rank, (method, how, _) in enumerate(ENDS)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join(DEADLINE_S)
        with ps.connect(cluster.address, role="operator") as operator:
            states = {n.rank: n.state for n in operator.engine.view.nodes if n.role is Role.WORKER}
    assert [states[rank] for rank in range(len(ENDS))] == [state for _, _, state in ENDS]


def _trains_in_a_thread(address: str, done: Event) -> None:
    """Until after its `target` has returned, beside a pool that nobody shuts down."""
    client, is_ending = ps.connect(address), threading.Event()
    ThreadPoolExecutor(1).submit(int).result()
    Finalize(None, is_ending.set, exitpriority=1)  # before the client's

    def train() -> None:
        is_ending.wait()
        table = client.create_table("t", 4, optimizer=ps.SGD(lr=1.0))
        for _ in range(20):
            client.wait(client.push(table, np.ones(4, np.float32)))
        done.set()

    threading.Thread(target=train).start()


def test_a_child_of_multiprocessing_leaves_when_its_threads_have_ended() -> None:
    with ps.local_cluster() as cluster:
        done = warm_context().Event()
        child = warm_context().Process(target=_trains_in_a_thread, args=(cluster.address, done))
        child.start()
        child.join(DEADLINE_S)
        assert child.exitcode == 0
        assert done.is_set()
        with ps.connect(cluster.address, role="operator") as operator:
            (worker,) = (n for n in operator.engine.view.nodes if n.role is Role.WORKER)
    assert worker.state is NodeState.LEFT
