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
    """The start of `python -m module arguments`, with no input and just this environment.

    `module` is our own, never one of the working directory; `output` is the descriptor for stdout
    and stderr, of which the caller closes its own.
    """

    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    output: int


class RoleChild(Protocol):
    """A child process: its number is also that of its process group."""

    @property
    def pid(self) -> int: ...

    def wait(self) -> int:
        """Reap it; returns its exit code, negative for a signal. Blocking: until it ends."""
        ...


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


begin: Callable[[RoleStart], RoleChild] = new_interpreter
"""Starts a process in this process's way."""
