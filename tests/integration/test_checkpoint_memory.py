"""What a server takes for a checkpoint is the memory that copies may have, and no more.

In a process of its own, whose allocator keeps what is freed, as a server's does.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from functools import cached_property
from pathlib import Path

import pytest

from ps_cli.bench.instruments.process_memory import PeakWatch
from ps_runtime.grpc.channels import tune_allocator
from ps_server.checkpoint.checkpoint_parts import CheckpointParts
from tests.unit.test_checkpoint_parts import Server

pytestmark = pytest.mark.slow

MIB = 1024 * 1024
BLOCK_ELEMENTS = MIB // 4
BLOCK_COUNT = 96
COPIES_BYTES = 64 * MIB
ELSE_BYTES = 8 * MIB


@pytest.mark.thorough
def test_copies_have_one_memory_however_they_are_made(tmp_path: Path) -> None:
    """Some are made while the memory for them is still being touched."""
    command = [sys.executable, "-m", __name__, f"file://{tmp_path}/00000001-c"]
    child = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert int(child.stdout) < COPIES_BYTES + ELSE_BYTES


class OneGradient(Server):
    """Every block has the same: what waits for a held range takes no memory of its own."""

    @cached_property
    def gradient(self) -> memoryview:
        return super().gradient_of(0)

    def gradient_of(self, block: int) -> memoryview:
        del block
        return self.gradient


async def growth_bytes(url: str) -> int:
    """By how much the process grows while every block is copied before it changes."""
    server = OneGradient(url, "bsp", BLOCK_COUNT, BLOCK_ELEMENTS)
    server.parts = CheckpointParts(server.node, server._report, 0, COPIES_BYTES)
    for clock in (1, 2):
        server.step(clock)
    with PeakWatch(os.getpid()) as quiet:
        server.step(3)
    with PeakWatch(os.getpid()) as busy:
        server.propose()
        server.cut(3)
        for clock in (4, 5):
            server.step(clock)
        report = await server.report()
    assert not report.problem
    await server.parts.close()
    return busy.peak_bytes - quiet.peak_bytes


def main() -> None:
    """`URL`: prints the growth."""
    tune_allocator()
    print(asyncio.run(growth_bytes(sys.argv[1])))


if __name__ == "__main__":
    main()
