"""The checkpoints under one URL: the good ones, and the newest one.

Rules:
    - Numbers grow under one URL, whichever cluster writes. The newer of two checkpoints has the
      larger number, or else the later name.
    - A good checkpoint can be opened: its manifest, and the length and the header of each of its
      files. A damaged tensor is found when it is read (`problems_of`).
    - Who goes on from "the newest" passes over those that a restore has left behind. The source of
      a restore comes in their place, also if it lies elsewhere.

`ps_runtime.checkpoint.pruning` deletes old ones.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from ps_core.errors import InvalidCheckpoint
from ps_core.manifest import Manifest, directory_name, number_of
from ps_runtime.checkpoint.directory import CheckpointDirectory, Location, locate
from ps_runtime.checkpoint.reader import CheckpointReader
from ps_runtime.checkpoint.restores import RecordedRestore, is_left, restores_in_force
from ps_runtime.system.disk import DISK, Disk

_TRIED_PREFIX = ".writable-"
"""The beginning of the name of a file that tests writing."""


class CheckpointStore:
    """The checkpoints under a URL that fsspec knows, or a path; `disk` writes local files.

    The root need not exist. A method that reads it raises InvalidCheckpoint if it cannot be listed.
    InvalidConfig as from `locate`.
    """

    def __init__(self, url: str | Location, disk: Disk = DISK) -> None:
        self.location = locate(url) if isinstance(url, str) else url
        self._disk = disk

    @property
    def url(self) -> str:
        return self.location.url

    def names(self) -> list[str]:
        """The names of all checkpoint directories, good or not, newest last."""
        numbered = [(number_of(name), name) for name in self.location.names()]
        return [name for number, name in sorted((n, m) for n, m in numbered if n is not None)]

    def has_complete(self) -> bool:
        """True if a checkpoint was completed and is still there, good or bad."""
        return any(self.named(name).has_manifest() for name in reversed(self.names()))

    def are_left(self, restores: Collection[RecordedRestore]) -> bool:
        """True if every completed checkpoint can be read, and was left behind by the restores."""
        if not restores:
            return not self.has_complete()
        complete = [each for each in map(self.named, self.names()) if each.has_manifest()]
        try:
            return all(is_left(each.read_manifest(), restores) for each in reversed(complete))
        except InvalidCheckpoint:
            return False

    def check_writable(self) -> None:
        """Write a small file and remove it; if that fails, InvalidCheckpoint has the remedy."""
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
        """The number after the largest one, of complete checkpoints or not; from 1."""
        return 1 + max((number_of(name) or 0 for name in self.names()), default=0)

    def directory(self, number: int, cluster_id: str) -> CheckpointDirectory:
        """The directory of a checkpoint; it need not exist."""
        return self.named(directory_name(number, cluster_id))

    def named(self, name: str) -> CheckpointDirectory:
        """The directory of that name; it need not exist."""
        return CheckpointDirectory(self.location.child(name), self._disk)

    def entries(self) -> list[tuple[str, Manifest | InvalidCheckpoint]]:
        """Every checkpoint by its name, newest last: its manifest, or the fault of a bad one.
        Blocking: reads every manifest and header.
        """
        return [(name, self.judged(name)) for name in self.names()]

    def newest_good(
        self, but: Collection[str] = (), cluster_id: str = "", timeline: bytes = b""
    ) -> CheckpointDirectory | None:
        """The newest good checkpoint, `but` for those of these names, of any cluster or the named
        one, and of any of its timelines or one. Blocking: reads manifests and headers until it is
        found.
        """
        for name in reversed(self.names()):
            found = None if name in but else self.judged(name)
            if not isinstance(found, Manifest) or cluster_id not in ("", found.cluster_id):
                continue
            if timeline in (b"", found.timeline):
                return self.named(name)
        return None

    def open(self, name: str) -> CheckpointReader:
        """Open the checkpoint of that directory's name; InvalidCheckpoint has its fault, and the
        newest good one. Blocking: reads its manifest and headers; if it is bad, those of others.
        """
        try:
            return CheckpointReader(self.named(name))
        except InvalidCheckpoint as error:
            raise InvalidCheckpoint(f"{error.message}; {self._advice()}") from error

    def runs(self) -> dict[frozenset[bytes], str]:
        """As `newest_of_runs` of all that are there; reads all manifests."""
        return newest_of_runs(self.manifests())

    def manifests(self) -> dict[str, Manifest]:
        """The manifests that can be read, by their directories, newest last."""
        found = {}
        for name in self.names():
            with contextlib.suppress(InvalidCheckpoint):
                found[name] = self.named(name).read_manifest()
        return found

    def judged(self, name: str) -> Manifest | InvalidCheckpoint:
        """The manifest of a good checkpoint, or the fault; reads its manifest and headers."""
        try:
            with CheckpointReader(self.named(name)) as reader:
                return reader.manifest
        except InvalidCheckpoint as error:
            return error

    def _advice(self) -> str:
        try:
            restores = restores_in_force(self.location)
            there = self.manifests() if restores else {}
            left = [name for name in there if is_left(there[name], restores)]
            good = self.newest_good(left)
        except InvalidCheckpoint as error:
            return error.message
        if good is not None:
            return f"{good.url} is good"
        but = " but for what a restore has left behind" if left else ""
        return f"no good one is under {self.url}{but}"


def newest_of_runs(
    manifests: Mapping[str, Manifest], but: Collection[bytes] = ()
) -> dict[frozenset[bytes], str]:
    """The newest checkpoint of each run, by its timelines, newest last, `but` for checkpoints of
    these timelines.
    """
    found: dict[frozenset[bytes], str] = {}
    for name, manifest in manifests.items():
        if manifest.timeline in but:
            continue
        for known in [run for run in found if run & manifest.run]:
            del found[known]
        found[manifest.run] = name
    return found


@dataclass(frozen=True, slots=True)
class ResolvedCheckpoint:
    """The open checkpoint of a URL, and the faults of newer ones that were passed over."""

    reader: CheckpointReader
    passed_over: tuple[str, ...] = ()


def resolve(url: str, permit: Callable[[str], None] | None = None) -> ResolvedCheckpoint:
    """Open the checkpoint of a URL: its own directory's, or the newest good one under it that no
    restore has left behind. InvalidCheckpoint if there is none, InvalidConfig as from `locate`.
    `permit` raises for a source of a restore that must not be opened, since it lies elsewhere.

    Blocking: reads manifests and headers.
    """
    location = locate(url)
    is_one = number_of(location.name) is not None
    if is_one or CheckpointDirectory(location).has_manifest():
        return ResolvedCheckpoint(CheckpointStore(location.parent).open(location.name))
    store = CheckpointStore(location)
    passed_over: list[str] = []
    restores = restores_in_force(location)
    for place, is_elsewhere in _newest_first(store, restores, permit):
        try:
            reader = CheckpointReader(place)
        except InvalidCheckpoint as error:
            passed_over.append(error.message)
            continue
        left = next((each for each in restores if each.leaves(reader.manifest)), None)
        if left is None or is_elsewhere:  # else it would be void, or lies beside what was left
            return ResolvedCheckpoint(reader, tuple(passed_over))
        reader.close()
        passed_over.append(f"{place.url} was left behind by {left.words}")
    reasons = "".join(f"\n  {reason}" for reason in passed_over) or ": there is none"
    raise InvalidCheckpoint(f"{store.url} has no good checkpoint{reasons}")


def _newest_first(
    store: CheckpointStore,
    restores: list[RecordedRestore],
    permit: Callable[[str], None] | None,
) -> Iterator[tuple[CheckpointDirectory, bool]]:
    """The checkpoints under a URL, and True for the sources of restores that lie elsewhere."""
    places = [(number_of(name) or 0, 0, name) for name in store.names()]
    places += [(each.newest, 1, each.source) for each in restores if each.is_elsewhere]
    for _, is_elsewhere, place in sorted(places, reverse=True):
        if is_elsewhere and permit is not None:
            permit(place)
        found = CheckpointDirectory(locate(place)) if is_elsewhere else store.named(place)
        yield found, bool(is_elsewhere)
