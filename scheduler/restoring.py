"""What a cluster starts from, read from a checkpoint's manifest."""

from __future__ import annotations

from ps_core.consistency import Consistency, parsed
from ps_core.errors import InvalidCheckpoint, InvalidConfig
from ps_core.imported import Imported
from ps_core.manifest import SavedTable
from ps_runtime import logs
from ps_runtime.checkpoint_store import CheckpointStore, resolve
from scheduler.cluster_state import Restored, RestoredTable


def checkpoints_under(url: str) -> tuple[str, int]:
    """The address of the place for checkpoints, made absolute, and the largest number there. A file
    is written and removed there, so that a place that takes none is not found out hours later.

    Blocking: lists it, and writes.

    Raises:
        InvalidConfig: there is no such protocol, or what it needs is not installed.
        InvalidCheckpoint: it cannot be listed, or nothing can be written there.
    """
    if not url:
        return "", 0
    store = CheckpointStore(url)
    store.check_writable()
    return store.url, store.next_number() - 1


def restored_from(url: str) -> Restored:
    """The checkpoint that a URL stands for; newer ones that are no good are passed over, and said.

    Blocking: reads manifests and headers.

    Raises:
        InvalidConfig: there is no such protocol, or what it needs is not installed.
        InvalidCheckpoint: there is no good one, or it has a table that this version does not know.
    """
    found = resolve(url)
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
    return Restored(where, tables)


def _setting(saved: SavedTable, where: str) -> Consistency:
    try:
        return parsed(saved.consistency)
    except InvalidConfig as error:
        raise InvalidCheckpoint(f"{where}: table '{saved.name}': {error.message}") from error
