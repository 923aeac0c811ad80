"""A log that a server finds when it starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ps_server.kept_log import KeptLog, open_log
from ps_server.lanes import SharedLanes
from ps_server.shards import Shards
from ps_server.update_log_directory import boot_id
from tests.unit.written_logs import LEFT, Owner, WrittenLog

DEADLINE_S = 1.0


def opened(path: Path) -> KeptLog:
    """As a server that starts has it; it ends at once."""
    kept = asyncio.run(open_log(path, Shards(SharedLanes(), {}), "", DEADLINE_S))
    kept.directory.close()
    return kept


def test_a_segment_that_was_torn_when_it_was_begun_is_no_damage_later(tmp_path: Path) -> None:
    """Its server was killed before the segment had a header; so was the next one, in the next."""
    owner = Owner(LEFT)
    log = WrittenLog(tmp_path, boot=boot_id())
    log.begun(owner)
    log.batch(owner.update(1))
    for torn in (b"", b"pushpull"):
        number = len(list(tmp_path.glob("*.log"))) + 1
        (tmp_path / f"{number:08d}.log").write_bytes(torn)
        kept = opened(tmp_path)
        assert {r: replica.number for r, replica in kept.replicas.items()} == {LEFT: owner.number}
        log.go_on_after(max(kept.sizes))
        log.taken_over(owner)
        log.batch(owner.update(owner.number + 1))
    assert opened(tmp_path).replicas[LEFT].number == 3
