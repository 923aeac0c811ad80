"""One checkpoint's directory, on any filesystem that fsspec knows.

Rules:
    - A file gets its name when it is complete and durable: by a rename on this machine's
      filesystems, by one upload elsewhere. The manifest is the last, so a directory without it is
      no checkpoint; it goes first when a checkpoint is removed.
    - Commands of people may meet in one directory. On this machine's filesystems one of them holds
      it, by flock; elsewhere none removes what another has completed.
    - A filesystem's exception becomes `InvalidCheckpoint`, with the address and the reason.

Nothing here retries, because fsspec's filesystems do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from ps_core.errors import InvalidCheckpoint, InvalidConfig, PushpullError
from ps_core.manifest import MANIFEST_FILE, Manifest, from_json, number_of, to_json
from ps_runtime.system.disk import DISK, Disk

_EXTRAS = {"s3": "s3fs, which comes with: pip install 'pushpull[s3]'"}
"""Packages of protocols that are not always installed."""

_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})

_TRIED = b"pushpull was here\n" * 256
"""A test write: longer than the space that a full disk has left for a name."""


@dataclass(frozen=True, slots=True)
class Location:
    """A place on a filesystem: `path` is the filesystem's name of it, `url` ours."""

    filesystem: Any
    path: str
    url: str

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rsplit("/", 1)[-1]

    @property
    def is_local(self) -> bool:
        return isinstance(self.filesystem, LocalFileSystem)

    @property
    def has_directories(self) -> bool:
        """True if directories are made before their files; an object store would make a bucket."""
        protocol = self.filesystem.protocol
        named = {protocol} if isinstance(protocol, str) else set(protocol)
        return named.isdisjoint(_OBJECT_STORES)

    def child(self, name: str) -> Location:
        return Location(self.filesystem, f"{self.path}/{name}", f"{self.url}/{name}")

    @property
    def parent(self) -> Location:
        path, url = self.path.rsplit("/", 1)[0], self.url.rsplit("/", 1)[0]
        return Location(self.filesystem, path, url)

    def own_name(self, place: Location) -> str:
        """The name of a place that lies directly in this one, symbolic links and `..` resolved;
        empty if it lies elsewhere. Blocking: resolves links.
        """
        parent = place.parent
        if (parent.filesystem, parent.path) == (self.filesystem, self.path):
            return place.name
        if not (place.is_local and self.is_local):
            return ""
        its_parent, name = os.path.split(os.path.realpath(place.path))
        return name if its_parent == os.path.realpath(self.path) else ""

    def names(self) -> list[str]:
        """The names in it; empty if there is no such directory. Blocking: lists it."""
        with reported(self.url, "listed"):
            self.filesystem.invalidate_cache()
            try:
                found = self.filesystem.ls(self.path, detail=False)
            except FileNotFoundError:
                return []
            own = self.path.strip("/")
            paths = (str(path).strip("/") for path in found)
            return sorted(path.rsplit("/", 1)[-1] for path in paths if path != own)


def locate(url: str) -> Location:
    """The place of a URL or a path; a path becomes absolute.

    Raises:
        InvalidConfig: it is empty or not printable, or its protocol is unknown to fsspec, needs a
            package, or cannot be opened by a URL alone.
    """
    if not url:
        raise InvalidConfig("the checkpoints' URL is empty; expected a path or a URL")
    if not url.isprintable():
        raise InvalidConfig(f"the checkpoints' URL is {url!a}; expected printable characters")
    protocol = url.split("://", 1)[0].rsplit("::", 1)[-1] if "://" in url else "file"
    try:
        filesystem, path = url_to_fs(url)
    except ImportError as error:
        needed = _EXTRAS.get("s3" if protocol == "s3a" else protocol, str(error))
        raise InvalidConfig(f"{url}: '{protocol}' needs {needed}") from error
    except Exception as error:  # noqa: BLE001 - each filesystem has errors of its own
        expected = "a path, or a URL that fsspec knows"
        raise InvalidConfig(f"{url}: {error}; expected {expected}") from None
    path = str(path).rstrip("/")
    is_local = isinstance(filesystem, LocalFileSystem)
    return Location(filesystem, path, path if is_local else url.rstrip("/"))


@contextlib.contextmanager
def reported(url: str, done: str) -> Iterator[None]:
    """Turn a filesystem's exception into InvalidCheckpoint, with the address and the reason."""
    try:
        yield
    except PushpullError:
        raise
    except Exception as error:  # each filesystem has errors of its own
        said = str(error) or type(error).__name__
        reason = error.strerror if isinstance(error, OSError) and error.strerror else said
        raise InvalidCheckpoint(f"{url} cannot be {done}: {reason}") from error


class CheckpointDirectory:
    """The directory of one checkpoint; `disk` writes local files. A method raises InvalidCheckpoint
    if the filesystem fails; files that it writes are durable when it returns.
    """

    def __init__(self, location: Location, disk: Disk = DISK) -> None:
        self.location = location
        self._disk = disk

    @property
    def url(self) -> str:
        return self.location.url

    @property
    def name(self) -> str:
        return self.location.name

    def sibling(self, name: str) -> CheckpointDirectory:
        """Another checkpoint's directory under the same root; it need not exist."""
        return CheckpointDirectory(self.location.parent.child(name), self._disk)

    def _path(self, file: str) -> str:
        return f"{self.location.path}/{file}"

    def local_path(self, file: str) -> Path | None:
        """The path of a file on this machine; None if the directory is elsewhere."""
        return Path(self.location.path, file) if self.location.is_local else None

    def create(self) -> None:
        """Make the directory; files of a broken attempt in it may be replaced. InvalidCheckpoint
        also if there is a checkpoint in it.
        """
        with reported(self.url, "made"):
            if self.location.is_local:
                self._disk.make_durable_directory(Path(self.location.path))
            else:
                self.location.filesystem.makedirs(self.location.path, exist_ok=True)
        if self.has_manifest():
            raise InvalidCheckpoint(f"{self.url} is a checkpoint; expected a new directory")

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """As `create`, for a checkpoint that the caller writes alone; if it is not completed, it is
        removed. InvalidCheckpoint also if another process does the same at this moment.
        """
        self.create()
        with self._held() as is_held:
            if self.has_manifest():  # by another, which held it until now
                raise InvalidCheckpoint(f"{self.url} is a checkpoint; expected a new directory")
            try:
                yield
            except BaseException:  # Ctrl-C too: nothing else would remove it
                with contextlib.suppress(PushpullError):
                    if is_held or not self.has_manifest():
                        self.remove()
                raise

    @contextlib.contextmanager
    def _held(self) -> Iterator[bool]:
        """Hold the directory against other processes; False where no filesystem says so."""
        if not self.location.is_local:
            yield False
            return
        with reported(self.url, "opened"):
            descriptor = os.open(self.location.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            is_held = True
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidCheckpoint(
                    f"{self.url} is being written by another process; wait until that has ended"
                ) from None
            except OSError:  # some network filesystems have no such locks
                is_held = False
            yield is_held
        finally:
            os.close(descriptor)

    def try_out(self, file: str) -> None:
        """Write a new file in the directory, which is made if missing, and remove the file."""
        final = self.local_path(file)
        with reported(self.url, "written to"):
            if final is None:
                if self.location.has_directories:
                    self.location.filesystem.makedirs(self.location.path, exist_ok=True)
                self.location.filesystem.pipe_file(self._path(file), _TRIED)
                self.location.filesystem.rm_file(self._path(file))
                return
            self._disk.make_durable_directory(final.parent)
            try:
                self._write_synced(final, _TRIED)
            finally:
                self._disk.remove(final)

    def begin(self, file: str, spool: Path | None = None) -> Path:
        """The path on this machine where a file is written before `commit`. If the directory is
        elsewhere, it waits in `spool`, or among the machine's temporary files, for its upload.
        """
        final = self.local_path(file)
        if final is not None:
            return _temporary(final)
        with reported(str(spool or tempfile.gettempdir()), "written"):
            descriptor, path = tempfile.mkstemp(prefix=f"{file}.", dir=spool)
            os.close(descriptor)
        return Path(path)

    def commit(self, file: str, written: Path) -> None:
        """Give a complete and synced file, at its path from `begin`, its name; remove a spooled
        one, even after a failure. Blocking: elsewhere the upload.
        """
        final = self.local_path(file)
        with reported(f"{self.url}/{file}", "written"):
            if final is not None:
                self._disk.rename(written, final)
                self._disk.sync_directory(final.parent)
            else:
                try:
                    self.location.filesystem.put_file(str(written), self._path(file))
                finally:
                    self._disk.remove(written)

    def write_manifest(self, manifest: Manifest) -> None:
        """Complete the checkpoint; every other file is durable by now."""
        self.write_text(MANIFEST_FILE, to_json(manifest))

    def write_text(self, file: str, text: str) -> None:
        """Write a file, or replace it, as a whole."""
        final = self.local_path(file)
        with reported(f"{self.url}/{file}", "written"):
            if final is None:
                self.location.filesystem.pipe_file(self._path(file), text.encode())
                return
            self._write_synced(_temporary(final), text.encode())
        self.commit(file, _temporary(final))

    def has_manifest(self) -> bool:
        """True for a checkpoint, good or bad; False if it was not completed, or is missing.
        InvalidCheckpoint if the filesystem does not say which.
        """
        return self.has_file(MANIFEST_FILE)

    def has_file(self, file: str) -> bool:
        """True if there is a file of this name; InvalidCheckpoint as `has_manifest`."""
        with reported(self.url, "read"):
            self.location.filesystem.invalidate_cache()
            try:
                found = self.location.filesystem.info(self._path(file))
            except (FileNotFoundError, NotADirectoryError):
                return False
            return bool(found["type"] == "file")

    def read_manifest(self) -> Manifest:
        """Read the manifest; InvalidCheckpoint also if it is damaged or of another checkpoint."""
        where = f"{self.url}/{MANIFEST_FILE}"
        content = self.read(MANIFEST_FILE)
        if content is None:
            raise InvalidCheckpoint(
                f"{self.url} has no {MANIFEST_FILE}: it was not completed, or is no checkpoint"
            )
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise InvalidCheckpoint(f"{where} is not a manifest: {error}; expected UTF-8") from None
        manifest = from_json(text, where)
        if number_of(self.name) is not None and manifest.directory != self.name:
            raise InvalidCheckpoint(
                f"{where}: it is the manifest of checkpoint {manifest.directory}; expected that of "
                f"{self.name}"
            )
        return manifest

    def read(self, file: str) -> bytes | None:
        """Read a whole file; None if there is none."""
        with reported(f"{self.url}/{file}", "read"):
            try:
                return bytes(self.location.filesystem.cat_file(self._path(file)))
            except FileNotFoundError:
                return None

    def open(self, file: str) -> BinaryIO:
        """Open a file for reading by one thread at a time."""
        with reported(f"{self.url}/{file}", "read"):
            local = self.local_path(file)
            if local is not None:
                return cast(BinaryIO, local.open("rb", buffering=0))
            return cast(BinaryIO, self.location.filesystem.open(self._path(file), "rb"))

    def remove(self) -> None:
        """Remove the checkpoint: its manifest first, so that the rest is no checkpoint. Another
        process may remove it at the same time.
        """
        files = sorted(self.location.names(), key=lambda file: file != MANIFEST_FILE)
        with reported(self.url, "removed"):
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    self._remove_file(file)
            if self.location.is_local:
                self._disk.remove_directory(Path(self.location.path))
            elif self.location.filesystem.isdir(self.location.path):
                # An object store's directory is gone with its files.
                self.location.filesystem.rmdir(self.location.path)

    def _remove_file(self, file: str) -> None:
        local = self.local_path(file)
        if local is None:
            self.location.filesystem.rm_file(self._path(file))
            return
        self._disk.remove(local)
        if file == MANIFEST_FILE:
            self._disk.sync_directory(local.parent)

    def _write_synced(self, path: Path, content: bytes) -> None:
        descriptor = self._disk.create(path)
        try:
            self._disk.write(descriptor, content, 0)
            self._disk.sync(descriptor)
        finally:
            self._disk.close(descriptor)


def _temporary(final: Path) -> Path:
    return final.with_name(f".{final.name}.tmp")
