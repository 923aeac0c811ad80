"""A process may open as many files as its system allows."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from ps_runtime.system import capacity

pytestmark = pytest.mark.thorough

OF_A_SHELL = 512


def test_a_process_has_as_many_descriptors_as_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 1, before[1]))
        assert capacity.allow_open_files() == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_server_has_them_from_its_start() -> None:
    """Each table has a file in each range where rows are on disk."""
    script = (
        "import resource, sys\n"
        "from ps_server import process\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({OF_A_SHELL}, hard))\n"
        "sys.argv = ['server', '--scheduler', '127.0.0.1:1', '--listen', '127.0.0.1:0',\n"
        "            '--connect-deadline-s', '0.1']\n"
        "try:\n"
        "    process.main()\n"
        "except SystemExit:\n"
        "    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "    print(soft == hard)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.stdout.splitlines()[-1:] == ["True"], run.stderr
