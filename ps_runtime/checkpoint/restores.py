"""The restores in place of the runs under a URL, so that nobody goes on from what they left behind.

Rules:
    - A restore takes a run back to its source, and leaves behind what the run has made since: all
      checkpoints of its timelines with larger numbers, up to the newest at the restore. One without
      a source begins the run anew, and leaves all of them behind.
    - A restore that was made of what a later one has left behind is void.
    - A scheduler records a restore when it is durable, and before it is answered; if it ends in
      between, another does that goes on from its journal.
    - Each cluster has a file of its own. The records that are void are dropped from it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ps_core.errors import InvalidCheckpoint
from ps_core.manifest import Manifest, left_directory_name, number_of
from ps_runtime.checkpoint.directory import CheckpointDirectory, Location

_FORMAT = "pushpull-restores"
_VERSION = 1
_FILE = re.compile(r"restores-[A-Za-z0-9_-]{1,8}\.json")


@dataclass(frozen=True, slots=True)
class RecordedRestore:
    """A restore of a run.

    Attributes:
        source: the checkpoint: its directory's name, or its URL if it lies elsewhere; empty if the
            cluster began anew.
        newest: the largest number that the cluster had given.
        timelines: those of the run before.
        order: larger than that of every restore recorded before under the same URL.
    """

    source: str
    newest: int
    timelines: frozenset[bytes]
    order: int = field(default=0, compare=False)

    @property
    def number(self) -> int:
        """The number of the source; 0 if it lies elsewhere, or there is none."""
        return number_of(self.source) or 0

    @property
    def is_elsewhere(self) -> bool:
        return bool(self.source) and number_of(self.source) is None

    @property
    def words(self) -> str:
        return f"a restore from {self.source}" if self.source else "a cluster that began anew"

    def leaves(self, manifest: Manifest) -> bool:
        is_newer = self.number < manifest.number <= self.newest
        return is_newer and manifest.timeline in self.timelines


def in_force(recorded: Iterable[RecordedRestore]) -> list[RecordedRestore]:
    """Those that are not void, newest first."""
    found: list[RecordedRestore] = []
    for restore in sorted(recorded, key=lambda each: each.order, reverse=True):
        later = (each.number for each in found if each.timelines & restore.timelines)
        if restore.newest < min(later, default=math.inf):
            found.append(restore)
    return found


def is_left(manifest: Manifest, restores: Iterable[RecordedRestore]) -> bool:
    """True if one of the restores has left a checkpoint behind."""
    return any(each.leaves(manifest) for each in restores)


def restores_in_force(root: Location) -> list[RecordedRestore]:
    """The restores of all clusters under a root, newest first; InvalidCheckpoint if some cannot be
    read. Blocking.
    """
    place = CheckpointDirectory(root)
    files = [name for name in root.names() if _FILE.fullmatch(name)]
    return in_force(restore for file in files for restore in _read(place, file))


def record_restore(root: Location, cluster_id: str, restore: RecordedRestore) -> None:
    """Write a restore of a cluster, durably, as the newest one under the root, unless it is there;
    InvalidCheckpoint if that fails. Blocking.
    """
    place = CheckpointDirectory(root)
    file = f"restores-{left_directory_name(cluster_id).partition('-')[2]}.json"
    recorded = _read(place, file)
    if restore in recorded:
        return
    orders = (each.order for each in restores_in_force(root))
    newest = replace(restore, order=1 + max(orders, default=0))
    kept = [
        {
            "source": each.source,
            "newest": each.newest,
            "timelines": sorted(timeline.hex() for timeline in each.timelines),
            "order": each.order,
        }
        for each in in_force([newest, *recorded])
    ]
    place.write_text(file, json.dumps({"format": _FORMAT, "version": _VERSION, "restores": kept}))


def _read(place: CheckpointDirectory, file: str) -> Sequence[RecordedRestore]:
    content = place.read(file)
    if content is None:
        return []
    try:
        document = json.loads(content)
        if document["format"] != _FORMAT or document["version"] != _VERSION:
            raise ValueError(f"its version is {document['version']}; expected {_VERSION}")
        return [_restore_of(each) for each in document["restores"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidCheckpoint(
            f"{place.url}/{file} does not tell which checkpoints a restore has left behind: "
            f"{type(error).__name__}: {error}; name a checkpoint, or remove the file"
        ) from None


def _restore_of(fields: dict[str, Any]) -> RecordedRestore:
    timelines = frozenset(map(bytes.fromhex, fields["timelines"]))
    source, newest = str(fields["source"]), int(fields["newest"])
    return RecordedRestore(source, newest, timelines - {b""}, int(fields["order"]))
