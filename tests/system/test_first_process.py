"""A role as the first process of a container, to which the kernel gives no signal by default."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ps_runtime.launch.role_entry import command_of

DEADLINE_S = 20.0
STARTING = "print('starts', flush=True)\nimport threading\nthreading.Event().wait()\n"
WAITING = """
import asyncio
from functools import partial
from ps_runtime.system.process_end import wait_for_stop_signal

async def main():
    asyncio.get_running_loop().call_soon(partial(print, "starts", flush=True))  # once it waits
    print((await wait_for_stop_signal()).name, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def first_process(directory: Path, code: str) -> tuple[subprocess.Popen[str], int]:
    """It runs `code` by the entry of roles; and its number outside."""
    (directory / "a_role.py").write_text(code)
    path = os.pathsep.join([str(directory), *filter(None, sys.path)])
    process = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", *command_of("a_role", ())],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "starts\n"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return process, int(children)


@pytest.mark.parametrize("code", [STARTING, WAITING], ids=["while it starts", "the second one"])
def test_a_role_that_is_told_to_stop_ends(tmp_path: Path, code: str) -> None:
    process, number = first_process(tmp_path, code)
    try:
        os.kill(number, signal.SIGTERM)
        if code is WAITING:
            assert process.stdout is not None
            assert process.stdout.readline() == "SIGTERM\n"
            os.kill(number, signal.SIGTERM)
        process.wait(DEADLINE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
