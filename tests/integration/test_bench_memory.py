"""What the benchmarks say of a process's memory is what the process did."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ps_cli.bench.instruments.process_memory import (
    PeakWatch,
    borrowed_bytes,
    resident,
    thread_count,
)

MIB = 1024 * 1024
SIZE_BYTES = 64 * MIB

# Takes and drops as much memory as it reads; says so.
PROCESS = """
import sys
for line in sys.stdin:
    memory = bytearray(b'1') * int(line)
    del memory
    print('done', flush=True)
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROCESS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        yield child
        assert child.stdin is not None
        child.stdin.close()


def take(process: subprocess.Popen[str], byte_count: int) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{byte_count}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def test_a_peak_that_has_passed_is_seen(process: subprocess.Popen[str]) -> None:
    take(process, 1)
    with PeakWatch(process.pid) as watch:
        take(process, SIZE_BYTES)
    assert SIZE_BYTES - MIB <= watch.growth_bytes < SIZE_BYTES + 16 * MIB
    assert watch.highest.private_bytes >= watch.before.private_bytes


def test_a_peak_before_the_watch_counts_only_for_a_whole_life(
    process: subprocess.Popen[str],
) -> None:
    take(process, SIZE_BYTES)
    with PeakWatch(process.pid, since_its_start=True) as life:
        pass
    with PeakWatch(process.pid) as later:
        take(process, MIB)
    assert life.growth_bytes >= SIZE_BYTES - MIB
    assert later.growth_bytes < SIZE_BYTES // 2


def test_shared_memory_is_its_owners() -> None:
    fd = os.memfd_create("pushpull-test")
    try:
        os.posix_fallocate(fd, 0, SIZE_BYTES)
        before_bytes = borrowed_bytes(os.getpid())
        shared_before_bytes = resident(os.getpid()).shared_bytes
        populated = mmap.MAP_SHARED | mmap.MAP_POPULATE
        with mmap.mmap(fd, SIZE_BYTES, populated, mmap.PROT_READ):
            assert borrowed_bytes(os.getpid()) - before_bytes == SIZE_BYTES
        with mmap.mmap(fd, SIZE_BYTES, populated):
            assert borrowed_bytes(os.getpid()) == before_bytes
            assert resident(os.getpid()).shared_bytes - shared_before_bytes >= SIZE_BYTES
    finally:
        os.close(fd)


def test_threads_are_counted() -> None:
    assert thread_count(os.getpid()) == len(list(Path("/proc/self/task").iterdir()))
