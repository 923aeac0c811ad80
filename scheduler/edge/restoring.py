"""The checkpoint that a cluster starts from, as values for the machine."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ps_core.consistency import Consistency, parsed
from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_core.manifest import MAX_LINEAGE_COUNT, Imported, SavedTable
from ps_runtime.checkpoint.directory import locate
from ps_runtime.checkpoint.pruning import RunTimelines
from ps_runtime.checkpoint.restores import RecordedRestore, record_restore, restores_in_force
from ps_runtime.checkpoint.store import CheckpointStore, newest_of_runs, resolve
from ps_runtime.observe import logs
from scheduler.machine.state import ClusterSettings, Restored, RestoredTable

AUTO = "auto"  # the value of `resume` for the newest checkpoint, or an empty start if there is none

_NAMED_COUNT = 3

ANSWERS_WITHIN_S = 5.0
"""Wait for the checkpoint place of a cluster that goes on; meanwhile nobody has a scheduler."""


def checkpoints_under(url: str) -> tuple[str, int]:
    """The absolute address of the checkpoint directory, and the largest number in it. A probe file
    is written and removed, so that a read-only directory fails now and not hours later. Blocking.
    """
    if not url:
        return "", 0
    store = CheckpointStore(url)
    store.check_writable()
    return store.url, store.next_number() - 1


def checkpoints_again_under(url: str, answers_within_s: float = ANSWERS_WITHIN_S) -> str:
    """The absolute address of the checkpoint directory of a cluster that goes on. It goes on where
    no checkpoint can be written, too, which is logged: its servers have the values. Blocking, for
    `answers_within_s`; a place that answers later is used from then on.
    """
    if not url:
        return ""
    store = CheckpointStore(url)
    refused: list[str] = []

    def probe() -> None:
        try:
            store.check_writable()
        except InvalidCheckpoint as error:
            refused.append(error.message)

    probing = threading.Thread(target=probe, name="checkpoint-place", daemon=True)
    probing.start()
    probing.join(answers_within_s)
    if probing.is_alive():
        refused.append(f"it has not answered for {answers_within_s:g} s")
    for reason in refused:
        logs.error("checkpoints_not_writable", url=store.url, reason=reason)
    return store.url


def _is_unused(store: CheckpointStore) -> bool:
    """True if no checkpoint is complete but for what clusters that began anew have left behind, and
    no cluster there was restored from elsewhere.
    """
    restores = restores_in_force(store.location)
    if any(each.is_elsewhere for each in restores):
        return False
    return store.are_left([each for each in restores if not each.source])


def restored_at_start(resume: str, checkpoint_url: str) -> Restored | None:
    """The checkpoint that `resume` names; with `AUTO` the newest under `checkpoint_url`. None for
    an empty start: AUTO starts empty only where no checkpoint was ever complete, so where none has
    a manifest, readable or not, or where the run began anew. Checkpoints of other runs there stay,
    and are logged: so are those of a branch that a restore has left behind. Blocking.
    """
    if resume == AUTO and not checkpoint_url:
        raise InvalidConfig("resume is 'auto' without a checkpoint_url; expected both")
    store = CheckpointStore(checkpoint_url) if checkpoint_url else None
    there = {} if store is None else store.manifests()
    is_new = resume == AUTO and store is not None and _is_unused(store)
    if resume and not is_new:
        restored = restored_from(checkpoint_url if resume == AUTO else resume)
        others = list(newest_of_runs(there, restored.lineage).values())
    else:
        restored, others = None, list(newest_of_runs(there).values())
        if resume == AUTO:
            logs.info("nothing_to_resume", url=checkpoint_url)
    if others:
        newest = ",".join(others[-_NAMED_COUNT:])
        logs.warning("other_runs_kept", url=checkpoint_url, runs=len(others), newest=newest)
    return restored


def lineage_of(settings: ClusterSettings) -> tuple[bytes, ...]:
    """Earlier timelines that the cluster continues, newest first."""
    return () if settings.restored is None else settings.restored.lineage


def run_of(settings: ClusterSettings) -> RunTimelines:
    """The timelines of the cluster's run."""
    return RunTimelines({settings.timeline, *lineage_of(settings)}, settings.left_timelines)


def record(settings: ClusterSettings) -> None:
    """Record the restore in place that began a cluster, if one did, beside its checkpoints; if that
    fails, log it. Blocking.
    """
    restored, left = settings.restored, settings.left_timelines
    if not left or not settings.checkpoint_url:
        return
    root, name, start = locate(settings.checkpoint_url), "", "without --resume"
    if restored is not None:
        source = locate(restored.url)
        name, start = root.own_name(source) or source.url, f"with --resume {restored.url}"
    try:
        restore = RecordedRestore(name, settings.checkpoint_count, left)
        record_restore(root, settings.cluster_id, restore)
    except InvalidCheckpoint as error:
        logs.warning(
            "restore_not_recorded",
            reason=error.message,
            remedy=f"until the next checkpoint start again {start}, and not with auto",
        )


def restored_from(url: str, permit: Callable[[str], None] | None = None) -> Restored:
    """The newest valid checkpoint at a URL; newer invalid ones are skipped, and logged. `permit` is
    that of `resolve`. Blocking.

    Raises:
        InvalidConfig: the protocol is unknown, or its package is not installed.
        InvalidCheckpoint: no checkpoint is valid, or it has a table that this version cannot read.
    """
    found = resolve(url, permit)
    for reason in found.passed_over:
        logs.warning("checkpoint_passed_over", reason=reason)
    with found.reader as reader:
        manifest, where = reader.manifest, reader.directory.url
        if manifest.is_imported:
            logs.info("checkpoint_chosen", url=where, number=manifest.number, imported=True)
            specs = [table.spec for table in reader.tables.values()]
            return Restored(where, {}, Imported.of(where, specs))
        tables = {
            saved.name: RestoredTable(
                reader.tables[saved.name].spec, _setting(saved, where), saved.clock
            )
            for saved in manifest.tables
        }
    clock = max((table.clock for table in tables.values()), default=0)
    logs.info("checkpoint_chosen", url=where, number=manifest.number, clock=clock)
    lineage = (manifest.timeline, *manifest.lineage)[:MAX_LINEAGE_COUNT]
    return Restored(where, tables, lineage=lineage, data_sets=manifest.data_sets)


def _setting(saved: SavedTable, where: str) -> Consistency:
    try:
        return parsed(saved.consistency)
    except InvalidConfig as error:
        raise InvalidCheckpoint(f"{where}: table '{saved.name}': {error.message}") from error
