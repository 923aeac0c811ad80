"""What a cluster starts from, read from a checkpoint's manifest."""

from __future__ import annotations

from google.protobuf.json_format import ParseDict, ParseError

from ps_core.consistency import parsed
from ps_core.errors import InvalidCheckpoint, PushpullError
from ps_core.manifest import SavedTable
from ps_runtime import logs, wire
from ps_runtime.checkpoint_store import CheckpointStore, resolve
from pushpull.v1 import types_pb2
from scheduler.cluster_state import Restored, RestoredTable


def checkpoints_under(url: str) -> tuple[str, int]:
    """The address of the place for checkpoints, made absolute, and the largest number there.

    Blocking: lists it.

    Raises:
        InvalidConfig: there is no such protocol, or what it needs is not installed.
        InvalidCheckpoint: it cannot be listed.
    """
    if not url:
        return "", 0
    store = CheckpointStore(url)
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
        tables = {table.name: _restored_table(table, where) for table in manifest.tables}
    clock = max((table.clock for table in tables.values()), default=0)
    logs.info("checkpoint_chosen", url=where, number=manifest.number, clock=clock)
    return Restored(where, tables)


def _restored_table(saved: SavedTable, where: str) -> RestoredTable:
    try:
        message = ParseDict(dict(saved.spec), types_pb2.TableSpec(), ignore_unknown_fields=True)
        spec = wire.spec_from_proto(message).validated()
        return RestoredTable(spec, parsed(saved.consistency), saved.clock)
    except (ParseError, PushpullError) as error:
        raise InvalidCheckpoint(f"{where}: the spec of table '{saved.name}': {error}") from error
