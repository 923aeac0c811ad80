"""What each store of the scheduler's journal must do (`scheduler.journal.state_store`).

Another store is one more entry of `STORES`: how it is opened, and how a fault is made in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from ps_core.errors import InvalidJournal, Recovering
from scheduler.edge.sqlite_store import FILE_NAME, SqliteStore
from scheduler.journal.state_store import StateStore
from tests.file_limits import no_file_above


@dataclass(frozen=True)
class Kind:
    """A store, and what can go wrong with it; `place` is a directory of the test's.

    Attributes:
        open: opens the one at a place.
        opener: a program's text that opens the one at `sys.argv[1]` as `store`.
        spoil: damages what is there.
        fill: while it lasts, the medium takes no more.
    """

    open: Callable[[Path], StateStore]
    opener: str
    spoil: Callable[[Path], None]
    fill: Callable[[Path], AbstractContextManager[None]]


def _spoil_sqlite(place: Path) -> None:
    path = place / FILE_NAME
    content = bytearray(path.read_bytes())
    for offset in range(100, len(content), 64):
        content[offset : offset + 8] = b"\xff" * 8
    path.write_bytes(content)


@contextmanager
def _full(place: Path) -> Iterator[None]:
    """No file of this process grows: as on a full disk, a write fails in the middle."""
    with no_file_above(max(path.stat().st_size for path in place.iterdir())):
        yield


STORES = {
    "sqlite": Kind(
        partial(SqliteStore, lock_wait_s=0.02),
        "from pathlib import Path\n"
        "from scheduler.edge.sqlite_store import SqliteStore\n"
        "store = SqliteStore(Path(sys.argv[1]))\n",
        _spoil_sqlite,
        _full,
    )
}


@pytest.fixture(params=STORES)
def kind(request: pytest.FixtureRequest) -> Kind:
    return STORES[request.param]


def test_it_is_made_empty_where_there_is_none(kind: Kind, tmp_path: Path) -> None:
    with closing(kind.open(tmp_path / "some" / "place")) as store:
        assert store.read() == {}
        assert str(tmp_path) in store.name


def test_what_was_written_is_there_when_it_is_opened_again(kind: Kind, tmp_path: Path) -> None:
    long = os.urandom(3_000_000)
    with closing(kind.open(tmp_path)) as store:
        store.claim()
        store.write({"a": b"1", "b": b"", "c/7": long})
        store.write({"a": b"2"}, removed=["b", "never there"])
        assert store.read() == {"a": b"2", "c/7": long}
    with closing(kind.open(tmp_path)) as store:
        assert store.read() == {"a": b"2", "c/7": long}


def test_each_claim_has_a_higher_term(kind: Kind, tmp_path: Path) -> None:
    terms = []
    for _ in range(3):
        with closing(kind.open(tmp_path)) as store:
            terms.append(store.claim())
    assert terms == [1, 2, 3]


def test_a_store_that_was_not_claimed_or_was_claimed_since_writes_nothing(
    kind: Kind, tmp_path: Path
) -> None:
    with closing(kind.open(tmp_path)) as store:
        store.claim()
        store.write({"a": b"1"})
    with closing(kind.open(tmp_path)) as store:
        with pytest.raises(InvalidJournal, match=r"another (running )?scheduler"):
            store.write({"a": b"2"})
        assert store.read() == {"a": b"1"}


def test_two_do_not_have_it_at_once(kind: Kind, tmp_path: Path) -> None:
    with closing(kind.open(tmp_path)) as store:
        store.claim()
        with pytest.raises(Recovering, match=r"another (running )?scheduler"):
            kind.open(tmp_path)
        store.write({"a": b"1"})
    kind.open(tmp_path).close()


def test_a_writer_that_is_killed_leaves_whole_writes_and_no_lock(
    kind: Kind, tmp_path: Path
) -> None:
    program = (
        f"import sys\n{kind.opener}store.claim()\nnumber = 0\n"
        "while True:\n"
        "    number += 1\n"
        "    text = str(number).encode()\n"
        "    store.write({'first': text, 'last': text, f'of {number}': text})\n"
        "    print(number, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as writer:
        assert writer.stdout is not None
        told = [int(writer.stdout.readline()) for _ in range(5)][-1]
        writer.kill()
        told = max([told, *(int(line) for line in writer.stdout if line.endswith(b"\n"))])
    with closing(kind.open(tmp_path)) as store:
        found = store.read()
    assert found["first"] == found["last"]
    assert int(found["last"]) >= told
    assert len(found) == 2 + int(found["last"])


def test_a_full_medium_is_said_and_keeps_what_was_written(kind: Kind, tmp_path: Path) -> None:
    with closing(kind.open(tmp_path)) as store:
        store.claim()
        store.write({"a": b"1", "b": b"1"})
        with kind.fill(tmp_path):
            with pytest.raises(Recovering, match="free space"):
                store.write({"a": bytes(4_000_000), "c": b"2"}, removed=["b"])
            assert store.read() == {"a": b"1", "b": b"1"}
        store.write({"a": b"3"})
        assert store.read() == {"a": b"3", "b": b"1"}
    with closing(kind.open(tmp_path)) as store:
        assert store.read() == {"a": b"3", "b": b"1"}


def test_a_damaged_one_is_refused_and_stays_as_it_is(kind: Kind, tmp_path: Path) -> None:
    with closing(kind.open(tmp_path)) as store:
        store.claim()
        store.write({f"record {number}": os.urandom(500) for number in range(100)})
    kind.spoil(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InvalidJournal, match="give another directory"):
        kind.open(tmp_path).close()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_is_no_store_is_refused_and_stays_as_it_is(kind: Kind, tmp_path: Path) -> None:
    foreign = tmp_path / FILE_NAME
    foreign.write_text("shopping list")
    with pytest.raises(InvalidJournal, match=str(foreign)):
        kind.open(tmp_path)
    assert foreign.read_text() == "shopping list"


def test_a_place_that_cannot_be_used_is_named(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((InvalidJournal, Recovering), match="file"):
        kind.open(tmp_path / "file" / "journal")
