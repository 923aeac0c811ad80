"""How processes end: by a signal, by a second one, and with their parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ps_core.errors import InvalidConfig
from ps_runtime.system.process_end import die_with_parent_if_asked

DEADLINE_S = 20.0

WAITS = """
import asyncio, sys
from ps_runtime.grpc import channels
from ps_runtime.system.process_end import wait_for_stop_signal

async def main():
    waiting = asyncio.create_task(wait_for_stop_signal())
    await asyncio.sleep(0)
    print("waiting", flush=True)
    print((await waiting).name, flush=True)
    await asyncio.to_thread(sys.stdin.read)

channels.run(main())
"""

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline(), end="", flush=True)
sys.stdin.read()
"""

CHILD = """
import os, signal
from ps_runtime.system.process_end import die_with_parent_if_asked
die_with_parent_if_asked(os.environ)
print("bound", flush=True)
signal.pause()
"""


def started(source: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[str]]:
    with started(WAITS) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        yield process
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_told_and_leaves_time_for_an_orderly_end(
    waiting: subprocess.Popen[str], number: signal.Signals
) -> None:
    waiting.send_signal(number)
    rest, _ = waiting.communicate(timeout=DEADLINE_S)
    assert rest == f"{number.name}\n"
    assert waiting.returncode == 0


def test_a_second_signal_ends_the_process_at_once(waiting: subprocess.Popen[str]) -> None:
    assert waiting.stdout is not None
    waiting.send_signal(signal.SIGTERM)
    assert waiting.stdout.readline() == "SIGTERM\n"
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(DEADLINE_S) == -signal.SIGTERM


def test_a_role_ends_with_its_parent() -> None:
    with started(PARENT, CHILD, PUSHPULL_DIE_WITH_PARENT="1") as parent:
        assert parent.stdout is not None
        pid, word = parent.stdout.readline().split()
        assert word == "bound"
        child = os.pidfd_open(int(pid))
        try:
            parent.kill()
            readable, _, _ = select.select([child], [], [], DEADLINE_S)
            assert readable == [child]
        finally:
            os.close(child)


def test_a_role_whose_starter_is_already_gone_ends_at_once() -> None:
    # Adopted: the parent that it finds is not the one that started it.
    asked = {"PUSHPULL_DIE_WITH_PARENT": "1", "PUSHPULL_PARENT_PID": str(os.getppid())}
    with started(CHILD, **asked) as orphan:
        assert orphan.wait(DEADLINE_S) == -signal.SIGKILL
        assert orphan.stdout is not None
        assert orphan.stdout.read() == ""


def test_a_process_that_forgot_its_parent_still_ends_with_it_and_binds_no_child() -> None:
    forgets = CHILD.replace(
        "print", "from ps_runtime.system.process_end import forget_parent\n"
        "forget_parent(os.environ)\n"
        "assert not [name for name in os.environ if 'PARENT' in name]\nprint", 1
    )  # fmt: skip
    with started(PARENT, forgets, PUSHPULL_DIE_WITH_PARENT="1") as parent:
        assert parent.stdout is not None
        pid, word = parent.stdout.readline().split()
        assert word == "bound"
        child = os.pidfd_open(int(pid))
        try:
            parent.kill()
            assert select.select([child], [], [], DEADLINE_S)[0] == [child]
        finally:
            os.close(child)


def test_only_0_and_1_are_understood() -> None:
    for wanted in ({}, {"PUSHPULL_DIE_WITH_PARENT": "0"}, {"PUSHPULL_DIE_WITH_PARENT": ""}):
        die_with_parent_if_asked(wanted)
    with pytest.raises(InvalidConfig, match="PUSHPULL_DIE_WITH_PARENT is 'yes'; expected 0 or 1"):
        die_with_parent_if_asked({"PUSHPULL_DIE_WITH_PARENT": "yes"})
