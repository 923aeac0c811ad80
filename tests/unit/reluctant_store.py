"""A store in this process whose reads and changes a test delays, or lets fail."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from ps_runtime.checkpoint.store import CheckpointStore

URL = "reluctant://bucket/root"
WAIT_S = 10.0

Before = Callable[[str, str], None]
"""Called before each operation, with its name and the path."""


class ReluctantStore(MemoryFileSystem):  # type: ignore[misc]
    """Files in memory; `hooks` may wait, or raise an error of the store."""

    protocol = "reluctant"
    store: dict[str, Any] = {}  # noqa: RUF012 - as fsspec has it
    pseudo_dirs = [""]  # noqa: RUF012
    hooks: ClassVar[list[Before]] = []

    isfile = AbstractFileSystem.isfile  # as of a filesystem that has to ask

    def _call_hooks(self, operation: str, path: str) -> None:
        for hook in ReluctantStore.hooks:
            hook(operation, path)

    def info(self, path: str, **options: Any) -> Any:
        self._call_hooks("info", path)
        return super().info(path, **options)

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._call_hooks("cat_file", path)
        return super().cat_file(path, *arguments, **options)

    def pipe_file(self, path: str, *arguments: Any, **options: Any) -> None:
        self._call_hooks("pipe_file", path)
        super().pipe_file(path, *arguments, **options)

    def put_file(self, local: str, path: str, *arguments: Any, **options: Any) -> None:
        self._call_hooks("put_file", path)
        super().put_file(local, path, *arguments, **options)

    def rm_file(self, path: str) -> None:
        self._call_hooks("rm_file", path)
        super().rm_file(path)


@contextlib.contextmanager
def reluctant_store() -> Iterator[CheckpointStore]:
    """An empty one."""
    fsspec.register_implementation("reluctant", ReluctantStore, clobber=True)
    ReluctantStore.store.clear()
    ReluctantStore.pseudo_dirs[:] = [""]
    try:
        yield CheckpointStore(URL)
    finally:
        ReluctantStore.hooks.clear()


class Gate:
    """Holds the first operation of this name on a path with this end, until it is let go."""

    def __init__(self, operation: str, end: str) -> None:
        self._wanted = operation, end
        self._has_come, self._may_go = threading.Event(), threading.Event()
        ReluctantStore.hooks.append(self._before)

    def _before(self, operation: str, path: str) -> None:
        wanted, end = self._wanted
        if operation == wanted and path.endswith(end):
            self._has_come.set()
            assert self._may_go.wait(WAIT_S)

    def wait(self) -> None:
        assert self._has_come.wait(WAIT_S), f"no {self._wanted}"

    def let_go(self) -> None:
        self._may_go.set()


class Failures:
    """So many operations of this name fail, on paths with this end; `count` are left."""

    def __init__(self, operation: str, end: str, count: int = 1) -> None:
        self._wanted = operation, end
        self.count = count
        ReluctantStore.hooks.append(self._before)

    def _before(self, operation: str, path: str) -> None:
        wanted, end = self._wanted
        if self.count and operation == wanted and path.endswith(end):
            self.count -= 1
            raise OSError(f"{path}: the store is away")
