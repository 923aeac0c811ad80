"""Deletes checkpoints that are older than those to keep.

Rules:
    - A checkpoint newer than the oldest kept one is not removed, because it may be about to be
      written; nor is one that a kept one refers to.
    - One that a restore has left behind counts for none to keep, nor for one that has what these
      lack, and goes with those as old.
    - A worker's state that all kept ones of its run lack stays, in the newest one that has it. If
      each of them lacks some worker's, the newest that lacks none stays as well.
    - The newest go first, so that a removal that breaks off leaves no dangling reference.
    - A running cluster reads the checkpoint that it began from as long as it goes on: a table or a
      state may come late. While that one cannot be read, all that are older stay, because it may
      refer to them.
    - Several runs may write under one URL. A cluster removes only its own run's. One whose manifest
      cannot be read is nobody's. A branch that a restore of the cluster has left behind is its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_core.manifest import Manifest
from ps_runtime.checkpoint.restores import RecordedRestore, is_left, restores_in_force
from ps_runtime.checkpoint.store import CheckpointStore


class RunTimelines(NamedTuple):
    """The present timeline of a run with those that it goes on from, and those that it was in
    before a restore of its cluster.
    """

    own: Collection[bytes]
    left: Collection[bytes] = ()

    def have(self, manifest: Manifest) -> bool:
        """A timeline that was left is the run's if it begins where the run has been: not if the
        cluster began anew in between.
        """
        is_branch = manifest.timeline in self.left and not manifest.run.isdisjoint(self.own)
        return manifest.timeline in self.own or is_branch


def prune(
    store: CheckpointStore, keep: int, run: RunTimelines | None = None, source: str = ""
) -> list[str]:
    """Remove all checkpoints older than the newest `keep` good ones, save those referred to and
    those with states that these lack; returns their names. InvalidConfig if `keep` is below 1.

    Checkpoints of other runs than `run` neither count nor go. None: all runs.
    `source` is the name of the checkpoint that a running cluster began from, which stays as well.
    """
    if keep < 1:
        raise InvalidConfig(f"keep is {keep}; expected at least 1")
    there = store.names()
    names = there if run is None else _names_of(store, there, run)
    kept: dict[str, Manifest] = {}
    restores = restores_in_force(store.location)
    for name in reversed(names):
        found = store.judged(name) if len(kept) < keep else None
        if isinstance(found, Manifest) and not is_left(found, restores):
            kept[name] = found
    if not kept:
        return []
    older = names[: min(names.index(name) for name in kept)]
    if source in there and source not in kept:
        found = store.judged(source)
        if isinstance(found, Manifest):
            kept[source] = found
        else:
            may_be_needed = there[: there.index(source) + 1]
            older = [name for name in older if name not in may_be_needed]
    older = _with_what_is_lost(store, older, kept, restores)
    stay = {*kept, *(base for manifest in kept.values() for base in manifest.bases)}
    removed = [name for name in older if name not in stay]
    for name in reversed(removed):
        store.named(name).remove()
    return removed


def _with_what_is_lost(
    store: CheckpointStore,
    older: list[str],
    kept: dict[str, Manifest],
    restores: list[RecordedRestore],
) -> list[str]:
    """Add to `kept` those of the `older` that have what these lack of workers, and were not left by
    `restores`. The result is the `older` without one that may have it and cannot be opened, and
    without all that it may refer to.
    """
    if not any(manifest.lost_ranks for manifest in kept.values()):
        return older

    def has_it(found: Manifest) -> bool:
        return not is_left(found, restores) and _has_what_is_lost(found, kept.values())

    for place in reversed(range(len(older))):
        if older[place] in kept:
            continue
        directory, found = store.named(older[place]), store.judged(older[place])
        if isinstance(found, Manifest):
            if has_it(found):
                kept[older[place]] = found
        elif directory.has_manifest():
            try:
                may_have = has_it(directory.read_manifest())
            except InvalidCheckpoint:
                may_have = True
            if may_have:
                return older[place + 1 :]
    return older


def _has_what_is_lost(older: Manifest, kept: Iterable[Manifest]) -> bool:
    """True if all that are kept of the run lack a worker's state, and the older one lacks none, or
    has one that all of them lack.
    """
    lost = [each.lost_ranks for each in kept if each.run & older.run]
    if not lost or not all(lost):
        return False
    has = {worker.rank for worker in older.workers if worker.file}
    return not older.lost_ranks or bool(has & frozenset.intersection(*lost))


def _names_of(store: CheckpointStore, there: list[str], run: RunTimelines) -> list[str]:
    """The directories of a run, of those that are there. A directory without a manifest, which was
    given up, belongs to the run if others of its cluster do.
    """
    manifests = store.manifests()
    own = {name for name, manifest in manifests.items() if run.have(manifest)}
    clusters = {name.partition("-")[2] for name in own}
    given_up = {
        name
        for name in there
        if name not in manifests
        and name.partition("-")[2] in clusters
        and not store.named(name).has_manifest()
    }
    return [name for name in there if name in own or name in given_up]
