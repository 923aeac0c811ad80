"""Turns of a replay: it goes on bit by bit, so that a bar moves, and looks at the memory left."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

from ps_core.errors import TableFull
from ps_runtime.system import capacity
from ps_server.replay.replayer import Replay

_TURN_LENGTH = 64
"""Updates of a turn. One makes at most some MB of rows."""

_FRAME_COUNT = 256
"""Frames that are read in a turn."""

_LEAST_LEFT_SHARE = 0.05
"""Share of the machine's memory that is left to others, as on a server."""

_MIB = 2**20

_Told = Callable[[int, int], object]


def go_to(replay: Replay, position: int, told: Callable[[int], object]) -> None:
    """Replay up to a position; `told` gets the changes that each turn made.

    Raises:
        TableFull: the machine has little memory left.
        InvalidUpdateLog: as `Replay.go_to`.
    """
    is_there = False
    while not is_there:
        check_memory()
        before = replay.made_count
        is_there = replay.go_to(position, _TURN_LENGTH)
        told(replay.made_count - before)


def reading(told: _Told, root: Path = Path("/")) -> _Told:
    """A callback of `read_run` that looks at the memory left, and tells how far that is."""
    calls = itertools.count()

    def look(done: int, total: int) -> None:
        if not next(calls) % _FRAME_COUNT:
            check_memory(root)
        told(done, total)

    return look


def check_memory(root: Path = Path("/")) -> None:
    """Raise TableFull if the machine, or the container, has little memory left; tests give `root`,
    the file system's.
    """
    left_bytes, machine_bytes = capacity.available_bytes(root), capacity.memory_bytes(root)
    least_bytes = machine_bytes * _LEAST_LEFT_SHARE
    if 0 <= left_bytes < least_bytes:
        raise TableFull(
            f"this machine has {left_bytes / _MIB:.0f} MiB of memory left, of which "
            f"{least_bytes / _MIB:.0f} are not for a replay: choose fewer tables with --table, or "
            "--export or --against, which have one range of rows in memory at a time"
        )
