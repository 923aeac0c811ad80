"""A disk that remembers each operation, and what it may hold after the power went in between.

The model is a hard one: of what was not synced any part may have survived, in any combination:
of a file's writes some, the last of them in part; of a directory's names some.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ps_runtime.system.disk import Disk, Payload


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation; paths are as they were given."""

    kind: str
    path: Path
    target: Path | None = None
    payload: bytes = b""
    offset: int = 0


class RecordingDisk(Disk):
    """Does what it is told, and remembers it."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._paths: dict[int, Path] = {}

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self._paths[descriptor] = path
        self.operations.append(Operation("create", path))
        return descriptor

    def reopen(self, path: Path) -> int:
        descriptor = super().reopen(path)
        self._paths[descriptor] = path
        return descriptor

    def truncate(self, descriptor: int, size_bytes: int) -> None:
        super().truncate(descriptor, size_bytes)
        self.operations.append(Operation("truncate", self._paths[descriptor], offset=size_bytes))

    def write_all(self, descriptor: int, pieces: Sequence[bytes | memoryview], offset: int) -> int:
        self.write(descriptor, b"".join(pieces), offset)
        return sum(map(len, pieces))

    def write(self, descriptor: int, payload: Payload, offset: int) -> None:
        super().write(descriptor, payload, offset)
        path = self._paths[descriptor]
        self.operations.append(Operation("write", path, payload=bytes(payload), offset=offset))

    def fail_to_sync(self, descriptor: int) -> None:
        """What was written is lost in part, and the system takes it for written."""
        self.operations.append(Operation("failed sync", self._paths[descriptor]))

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self.operations.append(Operation("sync", self._paths[descriptor]))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.operations.append(Operation("rename", source, target))

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.operations.append(Operation("sync_directory", path))

    def make_directory(self, path: Path) -> None:
        missing = [each for each in path.parents if not each.exists()]
        super().make_directory(path)
        made = [*reversed(missing), path]
        self.operations += [Operation("make_directory", each) for each in made]

    def remove(self, path: Path) -> None:
        super().remove(path)
        self.operations.append(Operation("remove", path))

    def remove_directory(self, path: Path) -> None:
        super().remove_directory(path)
        self.operations.append(Operation("remove_directory", path))


@dataclass(slots=True)
class _Inode:
    durable: bytes = b""
    pending: list[Operation] = field(default_factory=list)

    def after(self, chooser: random.Random, survival: float) -> bytes:
        content = bytearray(self.durable)
        for write in self.pending:
            if chooser.random() >= survival:
                continue
            if write.kind == "truncate":
                del content[write.offset :]
                continue
            whole = survival == 1 or chooser.random() < 0.5
            kept = len(write.payload) if whole else chooser.randrange(len(write.payload) + 1)
            _put(content, write.payload[:kept], write.offset)
        return bytes(content)


def _put(content: bytearray, payload: bytes, offset: int) -> None:
    content.extend(bytes(max(0, offset + len(payload) - len(content))))
    content[offset : offset + len(payload)] = payload


Change = tuple[Path, _Inode | None]
"""A name comes to mean a file, or nothing."""


class _Model:
    """Files and names, those that are durable and those that may be lost."""

    def __init__(self) -> None:
        self.now: dict[Path, _Inode] = {}
        self.durable: dict[Path, _Inode] = {}
        self.pending: list[Change] = []
        self.directories: set[Path] = set()
        self.pending_directories: list[Path] = []

    def take(self, operation: Operation) -> None:
        path = operation.path
        if operation.kind == "create":
            self._name(path, _Inode())
        elif operation.kind in ("write", "truncate"):
            self.now[path].pending.append(operation)
        elif operation.kind == "sync":
            inode = self.now[path]
            inode.durable = inode.after(random.Random(0), survival=1)
            inode.pending.clear()
        elif operation.kind == "failed sync":
            inode = self.now[path]
            inode.durable = inode.after(random.Random(0), survival=0.5)
            inode.pending.clear()
        elif operation.kind == "rename":
            assert operation.target is not None
            self._name(operation.target, self.now[path])
            self._name(path, None)
        elif operation.kind == "sync_directory":
            for name, meant in self.pending:
                if name.parent == path:
                    _point(self.durable, name, meant)
            self.pending = [change for change in self.pending if change[0].parent != path]
            self.directories |= {made for made in self.pending_directories if made.parent == path}
        elif operation.kind == "make_directory":
            self.pending_directories.append(path)
        elif operation.kind == "remove":
            self._name(path, None)

    def _name(self, path: Path, inode: _Inode | None) -> None:
        _point(self.now, path, inode)
        self.pending.append((path, inode))


def _names_to(directory: Path, root: Path) -> set[Path]:
    """The directories below the root that lead to this one; without their names it is lost."""
    return {each for each in directory.parents if each.is_relative_to(root)}


def _point(names: dict[Path, _Inode], path: Path, inode: _Inode | None) -> None:
    if inode is None:
        names.pop(path, None)
    else:
        names[path] = inode


def restart_after(
    operations: list[Operation], root: Path, seed: int, survival: float, into: Path
) -> None:
    """Write what a disk may hold after `operations` and a power cut.

    Args:
        operations: those that were done.
        root: under which they were done.
        seed: chooses among what may have survived.
        survival: how probable it is that something that was not synced survives; 0 to 1.
        into: the folder that stands for `root`.
    """
    model = _Model()
    for operation in operations:
        model.take(operation)
    chooser = random.Random(seed)
    names = dict(model.durable)
    for path, inode in model.pending:
        if chooser.random() < survival:
            _point(names, path, inode)
    there = {root, *model.directories}
    there |= {made for made in model.pending_directories if chooser.random() < survival}
    there -= {each for each in there if not _names_to(each, root) <= there}
    for directory in there:
        (into / directory.relative_to(root)).mkdir(parents=True, exist_ok=True)
    for path, inode in names.items():
        if path.parent in there:
            (into / path.relative_to(root)).write_bytes(inode.after(chooser, survival))
