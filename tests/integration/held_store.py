"""A scheduler's journal whose writes can be held, for the tests beside this file."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from scheduler.edge.sqlite_store import SqliteStore
from tests.integration.scheduler_calls import DEADLINE_S


class HeldStore(SqliteStore):
    """Whose writes wait until `may_write` is set; `waits` is set when one does."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.may_write, self.waits = threading.Event(), threading.Event()
        self.may_write.set()

    def write(self, records: Mapping[str, bytes], removed: Iterable[str] = ()) -> None:
        if not self.may_write.is_set():
            self.waits.set()
        assert self.may_write.wait(DEADLINE_S)
        super().write(records, removed)
