"""The `StateStore` in one SQLite file on a local disk: `DIR/scheduler.db`, and its WAL.

The file is locked while it is open (locking_mode=EXCLUSIVE); the lock of a dead process is free.
That takes a file system with locks, and no shared memory.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ps_core.errors import InvalidJournal, Recovering
from ps_runtime.system.disk import DISK

FILE_NAME = "scheduler.db"

_APPLICATION_ID = 0x70757368
_LAYOUT = 1
_LOCK_WAIT_S = 2.0  # a scheduler that was killed may take a moment to end
_RETRY_MS = 1_000
_FOR_NOW = frozenset({
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM,
})  # fmt: skip
"""Results that a retry may overcome."""


class SqliteStore:
    """The store in a directory, which is created if missing.

    Raises:
        InvalidJournal: the file is no journal, is damaged, or cannot be opened.
        Recovering: another scheduler has the file open.
    """

    def __init__(self, directory: Path, lock_wait_s: float = _LOCK_WAIT_S) -> None:
        self._path = directory / FILE_NAME
        self._term = 0
        self._connection: sqlite3.Connection | None = None
        with self._translated_errors():
            DISK.make_durable_directory(directory)
            self._connection = sqlite3.connect(
                self._path, timeout=lock_wait_s, isolation_level=None, check_same_thread=False
            )
            try:
                self._open(self._connection)
                DISK.sync_directory(directory)
            except BaseException:
                self.close()
                raise

    @property
    def name(self) -> str:
        return str(self._path)

    def _open(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        application_id = _number(connection, "PRAGMA application_id")
        layout = _number(connection, "PRAGMA user_version")
        is_new = not _number(connection, "SELECT count(*) FROM sqlite_master")
        if not is_new and application_id != _APPLICATION_ID:
            raise InvalidJournal(
                f"{self._path} is another program's database; give another directory"
            )
        if not is_new and layout != _LAYOUT:
            raise InvalidJournal(
                f"{self._path} has layout {layout}, and this version of pushpull reads {_LAYOUT}: "
                "start the scheduler of the version that wrote it"
            )
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("BEGIN IMMEDIATE")  # takes the lock, which stays
        if is_new:
            connection.execute("CREATE TABLE term (number INTEGER NOT NULL)")
            connection.execute("INSERT INTO term VALUES (0)")
            connection.execute("CREATE TABLE record (key TEXT PRIMARY KEY, value BLOB NOT NULL)")
            connection.execute(f"PRAGMA application_id={_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={_LAYOUT}")
        connection.execute("COMMIT")
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(found)

    def read(self) -> dict[str, bytes]:
        with self._translated_errors() as connection:
            return dict(connection.execute("SELECT key, value FROM record"))

    def claim(self) -> int:
        with self._translated_errors() as connection, _transaction(connection):
            self._term = _number(connection, "SELECT number FROM term") + 1
            connection.execute("UPDATE term SET number = ?", (self._term,))
        return self._term

    def write(self, records: Mapping[str, bytes], removed: Iterable[str] = ()) -> None:
        with self._translated_errors() as connection, _transaction(connection):
            term = _number(connection, "SELECT number FROM term")
            if term != self._term:
                raise InvalidJournal(
                    f"{self._path} was claimed by another scheduler (term {term}, and {self._term} "
                    "here): that one serves the cluster"
                )
            connection.executemany("DELETE FROM record WHERE key = ?", ((k,) for k in removed))
            connection.executemany("INSERT OR REPLACE INTO record VALUES (?, ?)", records.items())

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[sqlite3.Connection]:
        """The connection; errors of SQLite and the system become those of the protocol."""
        try:
            yield self._connection  # type: ignore[misc]
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code == sqlite3.SQLITE_BUSY:
                raise Recovering(
                    f"another running scheduler has {self._path} open; end that one, or give this "
                    "one another directory",
                    retry_after_ms=_RETRY_MS,
                ) from error
            if code in _FOR_NOW:
                raise self._unwritten(error) from error
            raise InvalidJournal(
                f"{self._path} is damaged ({error}): put a copy of the directory in its place, or "
                "give another directory, with which the cluster begins anew"
            ) from error
        except OSError as error:
            raise self._unwritten(error) from error

    def _unwritten(self, error: Exception) -> Recovering:
        return Recovering(
            f"{self._path} cannot be written ({error}): free space there, or repair the disk; the "
            "last complete write is intact",
            retry_after_ms=_RETRY_MS,
        )


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # a full disk may have rolled it back
            connection.execute("ROLLBACK")
        raise


def _number(connection: sqlite3.Connection, query: str) -> int:
    return int(connection.execute(query).fetchone()[0])
