"""The checkpoints under one URL: which there are, which of them are good, and which may go.

Rules:
    - Numbers grow under one URL, whoever writes there; of two checkpoints the one with the larger
      number is the newer, of two with one number that whose name comes later.
    - A checkpoint is good if it can be opened: its manifest, and the length and the header of each
      of its files. Whether each tensor is whole is known when it is read (`problems_of`).
    - What is newer than the oldest checkpoint that is kept is not removed: it may be about to be
      written. Nor is what a kept one refers to.
    - The newest go first: whatever is left when a removal was broken off has what it refers to.
    - Several runs may write under one URL. A cluster removes only what is of its own run.

What it deliberately does not do: keep others from writing under the same URL.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass

from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_core.manifest import Manifest, directory_name, number_of
from ps_runtime.checkpoint.directory import CheckpointDirectory, Location, locate
from ps_runtime.checkpoint.reader import CheckpointReader
from ps_runtime.system.disk import DISK, Disk

_TRIED_PREFIX = ".writable-"
"""How a file is called that is written to see whether one can be."""


class CheckpointStore:
    """The directory that has the checkpoints of one training, or of several.

    Args:
        url: its address, as fsspec knows it; or a path.
        disk: what local files are written with.

    Raises:
        InvalidConfig: there is no such protocol, or what it needs is not installed.
    """

    def __init__(self, url: str | Location, disk: Disk = DISK) -> None:
        self.location = locate(url) if isinstance(url, str) else url
        self._disk = disk

    @property
    def url(self) -> str:
        """Its address; a local path is absolute."""
        return self.location.url

    def names(self) -> list[str]:
        """The names of all directories of checkpoints, good or not, newest last.

        Blocking: lists the root, which need not exist.

        Raises:
            InvalidCheckpoint: it cannot be listed.
        """
        numbered = [(number_of(name), name) for name in self.location.names()]
        return [name for number, name in sorted((n, m) for n, m in numbered if n is not None)]

    def check_writable(self) -> None:
        """Write a small file there and remove it, as whoever writes checkpoints will.

        Blocking: until it is durable, and gone.

        Raises:
            InvalidCheckpoint: that cannot be done; the message has the remedy.
        """
        place = CheckpointDirectory(self.location, self._disk)
        try:
            place.try_out(f"{_TRIED_PREFIX}{os.urandom(8).hex()}")
        except InvalidCheckpoint as error:
            raise InvalidCheckpoint(
                f"no checkpoint can be written: {error.message}; expected a place where this "
                "process may make and remove files, the scheduler, every server and every worker: "
                "give another --checkpoint-url, or none"
            ) from error

    def next_number(self) -> int:
        """The number after the largest that is there, of complete checkpoints or not; from 1.

        Blocking, Raises: as `names`.
        """
        return 1 + max((number_of(name) or 0 for name in self.names()), default=0)

    def directory(self, number: int, cluster_id: str) -> CheckpointDirectory:
        """The directory of a checkpoint, which need not exist."""
        return self.named(directory_name(number, cluster_id))

    def named(self, name: str) -> CheckpointDirectory:
        """The directory of that name, which need not exist."""
        return CheckpointDirectory(self.location.child(name), self._disk)

    def entries(self) -> list[tuple[str, Manifest | InvalidCheckpoint]]:
        """Every checkpoint by its name, newest last: what it has, or why it is not good.

        Blocking: reads every manifest and header.

        Raises:
            InvalidCheckpoint: the root cannot be listed.
        """
        return [(name, self._judged(name)) for name in self.names()]

    def newest_good(self) -> CheckpointDirectory | None:
        """The newest checkpoint that can be opened.

        Blocking, Raises: as `entries`.
        """
        for name in reversed(self.names()):
            if isinstance(self._judged(name), Manifest):
                return self.named(name)
        return None

    def open(self, name: str) -> CheckpointReader:
        """Open one checkpoint, of the newest training or of another.

        Args:
            name: of its directory.

        Blocking: reads its manifest and headers; if it is bad, also those of others.

        Raises:
            InvalidCheckpoint: it is bad: the reason, and which is the newest good one.
        """
        try:
            return CheckpointReader(self.named(name))
        except InvalidCheckpoint as error:
            raise InvalidCheckpoint(f"{error.message}; {self._advice()}") from error

    def prune(self, keep: int, run: Collection[bytes] | None = None) -> list[str]:
        """Remove all but the newest `keep` good checkpoints, and whatever is older than those, save
        what they refer to.

        Args:
            keep: how many stay.
            run: the timelines of one run: the checkpoints of others neither count nor go. None:
                all are meant.

        Returns:
            The names of the directories that are gone.

        Blocking: until they are.

        Raises:
            InvalidConfig: `keep` is below 1.
            InvalidCheckpoint: one cannot be removed.
        """
        if keep < 1:
            raise InvalidConfig(f"keep is {keep}; expected at least 1")
        names = self.names() if run is None else self._names_of(run)
        kept: dict[str, Manifest] = {}
        for name in reversed(names):
            found = self._judged(name) if len(kept) < keep else None
            if isinstance(found, Manifest):
                kept[name] = found
        if not kept:
            return []
        older = names[: min(names.index(name) for name in kept)]
        stay = {*kept, *(base for manifest in kept.values() for base in manifest.bases)}
        removed = [name for name in older if name not in stay]
        for name in reversed(removed):
            self.named(name).remove()
        return removed

    def runs(self) -> dict[frozenset[bytes], str]:
        """The newest checkpoint of each run that has any, by its timelines, the newest run last.

        Blocking: reads every manifest.

        Raises:
            InvalidCheckpoint: the root cannot be listed.
        """
        found: dict[frozenset[bytes], str] = {}
        for name, manifest in self._manifests().items():
            for known in [run for run in found if run & manifest.run]:
                del found[known]
            found[manifest.run] = name
        return found

    def _names_of(self, run: Collection[bytes]) -> list[str]:
        """The directories of a run. One without a manifest, which was given up, is of it if others
        of that cluster are.
        """
        manifests = self._manifests()
        own = {name for name, manifest in manifests.items() if manifest.timeline in run}
        clusters = {name.partition("-")[2] for name in own}
        return [
            name
            for name in self.names()
            if name in own or (name not in manifests and name.partition("-")[2] in clusters)
        ]

    def _manifests(self) -> dict[str, Manifest]:
        """The manifests that can be read, by their directories, newest last."""
        found = {}
        for name in self.names():
            with contextlib.suppress(InvalidCheckpoint):
                found[name] = self.named(name).read_manifest()
        return found

    def _judged(self, name: str) -> Manifest | InvalidCheckpoint:
        try:
            with CheckpointReader(self.named(name)) as reader:
                return reader.manifest
        except InvalidCheckpoint as error:
            return error

    def _advice(self) -> str:
        try:
            good = self.newest_good()
        except InvalidCheckpoint:
            return f"{self.url} cannot be listed"
        return f"no good one is under {self.url}" if good is None else f"{good.url} is good"


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a URL stands for: an open checkpoint, and why newer ones were passed over."""

    reader: CheckpointReader
    passed_over: tuple[str, ...] = ()


def resolve(url: str) -> Resolved:
    """The checkpoint that a URL stands for: its own directory's, or the newest good one under it.

    Blocking: reads manifests and headers.

    Raises:
        InvalidConfig: there is no such protocol, or what it needs is not installed.
        InvalidCheckpoint: the directory's is bad, or there is no good one under the URL.
    """
    location = locate(url)
    is_one = number_of(location.name) is not None
    if is_one or CheckpointDirectory(location).has_manifest():
        return Resolved(CheckpointStore(location.parent).open(location.name))
    store = CheckpointStore(location)
    passed_over: list[str] = []
    for name in reversed(store.names()):
        try:
            return Resolved(CheckpointReader(store.named(name)), tuple(passed_over))
        except InvalidCheckpoint as error:
            passed_over.append(error.message)
    reasons = "".join(f"\n  {reason}" for reason in passed_over) or ": there is none"
    raise InvalidCheckpoint(f"{store.url} has no good checkpoint{reasons}")
