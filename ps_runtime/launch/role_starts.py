"""How the process of a role begins: as a new interpreter, unless this process has another way.

A new interpreter imports torch, a second or two of CPU for each server. Who starts clusters again
and again, as this project's tests do, may have them begin as forks of a process that has done so.
Whatever the way, what began is a child of this process and the leader of its own process group,
and nothing else is asked of it here.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ps_runtime.launch import role_process


@dataclass(frozen=True, slots=True)
class RoleStart:
    """What begins: `python -m module arguments`, with nothing to read.

    Attributes:
        module: our own, never one of the working directory.
        arguments: its command line.
        environment: all of it.
        output: the descriptor that it writes to, on stdout and stderr; the caller closes its own.
    """

    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    output: int


class RoleChild(Protocol):
    """A child process: its number, and how it ended."""

    @property
    def pid(self) -> int:
        """Its number, also of its process group."""
        ...

    def wait(self) -> int:
        """Reap it; negative for a signal. Blocking: until it ends."""
        ...


Way = Callable[[RoleStart], RoleChild]


def new_interpreter(start: RoleStart) -> RoleChild:
    """A process that imports all it needs."""
    return subprocess.Popen(
        role_process.command_of(start.module, start.arguments),
        stdin=subprocess.DEVNULL,
        stdout=start.output,
        stderr=subprocess.STDOUT,
        env=start.environment,
        process_group=0,
    )


_way: Way = new_interpreter


def begin(start: RoleStart) -> RoleChild:
    """Begin a process, in the way that this process has."""
    return _way(start)


def begin_by(way: Way) -> Way:
    """Let every role that this process starts from now on begin in that way; the one until now."""
    global _way
    before, _way = _way, way
    return before
