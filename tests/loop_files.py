"""No file on an event loop: whoever opens, lists, renames or removes one on its thread is told.

A disk may take seconds for the least of it, and a loop that waits for one answers nobody: no
heartbeat, no probe, no other server. What the interpreter reports (`sys.addaudithook`) is looked
at, and what `Disk` does, since writing, syncing and closing are not reported.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ps_runtime.system.disk import Disk

_EVENTS = {
    "open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir",
    "os.truncate", "os.link", "os.symlink", "os.chmod", "os.utime", "fcntl.flock", "glob.glob",
    "shutil.copyfile", "shutil.move", "shutil.rmtree", "tempfile.mkstemp", "tempfile.mkdtemp",
}  # fmt: skip
_NO_DISK = ("/proc/", "/sys/", "/dev/")
_PYTHON = (sys.prefix, sys.base_prefix)
_SOURCES = (".py", ".pyc")
"""Modules that are imported, and lines of a traceback: not what a store or a log may hold up."""

_tellers: list[Callable[[str], None]] = []


def forbid() -> None:
    """In this process, from now on, such an operation fails; its reason goes to stderr, too."""

    def refuse(what: str) -> None:
        message = f"a file on the event loop: {what}"
        print(message, file=sys.stderr, flush=True)
        traceback.print_stack(limit=-20)
        raise RuntimeError(message)

    _tellers.append(refuse)
    _watch()


@contextmanager
def watched() -> Iterator[list[str]]:
    """What is done with files on threads that run an event loop meanwhile."""
    found: list[str] = []
    _watch()
    _tellers.append(found.append)
    try:
        yield found
    finally:
        _tellers.remove(found.append)


@functools.cache
def _watch() -> None:
    sys.addaudithook(_on_event)
    for name, method in list(vars(Disk).items()):
        if not name.startswith("_"):
            setattr(Disk, name, _told(name, method))


def _told(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def told(*given: Any) -> Any:
        _tell(f"Disk.{name}")
        return method(*given)

    return told


def _on_event(event: str, given: tuple[Any, ...]) -> None:
    if not _tellers or event not in _EVENTS:
        return
    where = given[0] if given else ""
    if isinstance(where, int) and event == "open":  # a descriptor that is there
        return
    path = str(where)
    if not path.startswith((*_NO_DISK, *_PYTHON)) and not path.endswith(_SOURCES):
        _tell(f"{event} {path}")


def _tell(what: str) -> None:
    if asyncio._get_running_loop() is None:
        return
    for tell in _tellers:
        tell(what)
