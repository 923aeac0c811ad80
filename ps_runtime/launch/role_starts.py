"""The start of a role's process: a new interpreter, unless this process has another way.

A new interpreter imports torch, a second or two of CPU for each server. This project's tests start
many clusters, so they fork a process that has imported it already. Either way, the new process is a
child of this process and the leader of its own process group.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ps_runtime.launch import role_process


@dataclass(frozen=True, slots=True)
class RoleStart:
    """The start of `python -m module arguments`, with no input.

    Attributes:
        module: our own, never one of the working directory.
        arguments: its command line.
        environment: all of it.
        output: the descriptor for stdout and stderr; the caller closes its own.
    """

    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    output: int


class RoleChild(Protocol):
    """A child process."""

    @property
    def pid(self) -> int:
        """Its number, which is also that of its process group."""
        ...

    def wait(self) -> int:
        """Reap it; returns its exit code, negative for a signal. Blocking: until it ends."""
        ...


Way = Callable[[RoleStart], RoleChild]


def new_interpreter(start: RoleStart) -> RoleChild:
    """Start a process that imports all its modules."""
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
    """Start a process in this process's way."""
    return _way(start)


def begin_by(way: Way) -> Way:
    """Set the way in which this process starts roles; returns the former way."""
    global _way
    before, _way = _way, way
    return before
