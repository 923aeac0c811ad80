"""The newest checkpoint of a run that was restored in place is of the branch it went on with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ps_core.errors import InvalidCheckpoint, NotPermitted
from ps_core.manifest import MANIFEST_FILE, Manifest, SavedWorker
from ps_runtime.checkpoint.pruning import prune
from ps_runtime.checkpoint.restores import (
    RecordedRestore,
    in_force,
    record_restore,
    restores_in_force,
)
from ps_runtime.checkpoint.store import CheckpointStore, resolve
from scheduler.edge.restoring import AUTO, record, restored_at_start
from scheduler.machine.state import Restored
from tests.unit.checkpoint_files import CLUSTER_ID, write_checkpoint
from tests.unit.cluster_harness import Harness

FIRST, SECOND, THIRD, OTHER = (bytes([number]) * 16 for number in range(1, 5))
"""Timelines: of a run before and after its restores, and of another run."""


@pytest.fixture(params=[str, lambda path: f"memory://{path}"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    """On this machine, and on what has one put a file."""
    made = CheckpointStore(request.param(tmp_path / "runs"))
    made.check_writable()  # as a scheduler's start
    return made


def written(
    store: CheckpointStore, number: int, *timelines: bytes, lost: tuple[int, ...] = ()
) -> Manifest:
    """A checkpoint of these timelines, the newest first, without the states of these ranks."""
    directory = store.directory(number, CLUSTER_ID)
    told = write_checkpoint(directory, number)
    workers = [each for each in told.workers if not each.problem]
    workers += [SavedWorker(rank, number, problem="gone") for rank in lost]
    told = replace(told, timeline=timelines[0], lineage=timelines[1:], workers=tuple(workers))
    directory.write_manifest(told)
    return told


def restored(store: CheckpointStore, source: str, newest: int, *timelines: bytes) -> None:
    """A cluster whose timelines were these goes back, when it had made `newest` checkpoints;
    without a source it begins anew.
    """
    before = Restored("before", {}, lineage=timelines[1:])
    own = {"checkpoint_url": store.url, "timeline": timelines[0], "restored": before}
    cluster = Harness(cluster_id=CLUSTER_ID, checkpoint_count=newest, **own).cluster
    back = Restored(source, {}) if source else None
    record(cluster.in_new_timeline(back, b"n" * 16, b"k" * 32))


def taken(store: CheckpointStore) -> str:
    found = restored_at_start(AUTO, store.url)
    assert found is not None
    return found.url


def test_auto_takes_the_one_that_a_run_went_back_to(store: CheckpointStore) -> None:
    """And then the newest of what it made since, if that is good."""
    made = [written(store, number, FIRST) for number in (1, 2, 3)]
    restored(store, f"{store.url}/{made[0].directory}", 3, FIRST)
    assert taken(store) == f"{store.url}/{made[0].directory}"
    with resolve(store.url).reader as reader:
        assert reader.manifest.number == 1
    newest = written(store, 4, SECOND)
    assert taken(store) == f"{store.url}/{newest.directory}"
    store.directory(4, CLUSTER_ID).remove()
    assert taken(store) == f"{store.url}/{made[0].directory}"


def test_another_run_under_the_url_is_not_left_behind(store: CheckpointStore) -> None:
    first = written(store, 1, FIRST)
    other = written(store, 2, OTHER)
    written(store, 3, FIRST)
    restored(store, f"{store.url}/{first.directory}", 3, FIRST)
    assert taken(store) == f"{store.url}/{other.directory}"


def test_a_restore_from_elsewhere_is_gone_on_from(store: CheckpointStore, tmp_path: Path) -> None:
    """Also where the run had made none. Who asks for a restore opens no other place by it."""
    elsewhere = CheckpointStore(str(tmp_path / "elsewhere"))
    source = f"{elsewhere.url}/{written(elsewhere, 7, OTHER).directory}"
    restored(store, source, 0, FIRST)
    assert taken(store) == source
    written(store, 1, SECOND)
    restored(store, source, 1, SECOND)
    assert taken(store) == source

    def refuse(_: str) -> None:
        raise NotPermitted("elsewhere")

    with pytest.raises(NotPermitted, match="elsewhere"):
        resolve(store.url, refuse)
    newest = written(store, 2, THIRD)
    with resolve(store.url, refuse).reader as reader:
        assert reader.manifest.number == newest.number


@pytest.mark.parametrize("lineage", [(), (OTHER,)], ids=["a copy of its own", "where it began"])
def test_a_source_elsewhere_may_be_of_the_run(
    store: CheckpointStore, tmp_path: Path, lineage: tuple[bytes, ...]
) -> None:
    elsewhere = CheckpointStore(str(tmp_path / "elsewhere"))
    for number in (1, 2, 3):
        written(store, number, FIRST)
    source = f"{elsewhere.url}/{written(elsewhere, 2, *lineage or (FIRST,)).directory}"
    restored(store, source, 3, FIRST, *lineage)
    assert taken(store) == source


@pytest.mark.parametrize(
    "form", ["{root}/../runs/{name}", "{root}/../link/{name}", "file://{root}/{name}"]
)
def test_a_source_beside_the_others_has_many_addresses(tmp_path: Path, form: str) -> None:
    store = CheckpointStore(str(tmp_path / "runs"))
    made = [written(store, number, FIRST).directory for number in (1, 2, 3)]
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    restored(store, form.format(root=store.url, name=made[1]), 3, FIRST)
    assert taken(store) == f"{store.url}/{made[1]}"
    assert [each.source for each in restores_in_force(store.location)] == [made[1]]


def test_auto_starts_empty_where_all_were_removed(store: CheckpointStore) -> None:
    made = [written(store, number, FIRST).directory for number in (1, 2)]
    restored(store, f"{store.url}/{made[0]}", 2, FIRST)
    for name in made:
        store.named(name).remove()
    assert restored_at_start(AUTO, store.url) is None


def test_auto_starts_empty_where_a_cluster_began_anew(store: CheckpointStore) -> None:
    """Until it has made one: who names a checkpoint goes on from that."""
    made = [written(store, number, FIRST).directory for number in (1, 2)]
    restored(store, f"{store.url}/{made[0]}", 2, FIRST)
    restored(store, "", 2, SECOND, FIRST)
    assert restored_at_start(AUTO, store.url) is None
    with pytest.raises(InvalidCheckpoint, match=f"{made[1]} was left behind by a cluster that be"):
        restored_at_start(store.url, store.url)
    named = restored_at_start(f"{store.url}/{made[1]}", store.url)
    assert named is not None
    newest = written(store, 3, THIRD).directory
    assert taken(store) == f"{store.url}/{newest}"
    store.named(newest).remove()
    bad = store.location.child(made[1]).child(MANIFEST_FILE)
    bad.filesystem.pipe_file(bad.path, b"{")
    with pytest.raises(InvalidCheckpoint, match="no good checkpoint"):
        restored_at_start(AUTO, store.url)


def test_another_run_is_gone_on_from_where_one_began_anew(store: CheckpointStore) -> None:
    other = written(store, 1, OTHER)
    written(store, 2, FIRST)
    restored(store, "", 2, FIRST)
    assert taken(store) == f"{store.url}/{other.directory}"


def test_who_began_anew_may_go_back_to_what_was_left_behind(store: CheckpointStore) -> None:
    made = [written(store, number, FIRST).directory for number in (1, 2)]
    restored(store, "", 2, FIRST)
    restored(store, f"{store.url}/{made[1]}", 2, SECOND, FIRST)
    assert taken(store) == f"{store.url}/{made[1]}"


def test_a_number_that_was_left_behind_does_not_count_as_kept(store: CheckpointStore) -> None:
    made = [written(store, number, FIRST).directory for number in (1, 2, 3, 4)]
    restored(store, f"{store.url}/{made[1]}", 4, FIRST)
    assert prune(store, 2) == [], "2 and 1 are kept; 3 and 4 are newer"
    newest = written(store, 5, SECOND).directory
    assert prune(store, 2) == made[:1]
    assert prune(store, 1) == made[1:]
    assert store.names() == [newest]


def test_what_was_left_behind_is_no_remedy_for_a_bad_one(store: CheckpointStore) -> None:
    made = [written(store, number, FIRST).directory for number in (1, 2, 3, 4)]
    restored(store, f"{store.url}/{made[1]}", 4, FIRST)
    bad = store.location.child(made[1]).child(MANIFEST_FILE)
    bad.filesystem.rm_file(bad.path)
    with pytest.raises(InvalidCheckpoint, match=f"was not completed.*; .*{made[0]} is good"):
        resolve(f"{store.url}/{made[1]}")
    store.named(made[0]).remove()
    with pytest.raises(InvalidCheckpoint, match=r"no good one is under .* but for what a restore"):
        resolve(f"{store.url}/{made[1]}")


def test_a_lost_state_is_not_looked_for_in_what_was_left_behind(store: CheckpointStore) -> None:
    """The source of the restore has it, too."""
    made = [written(store, number, FIRST).directory for number in (1, 2, 3)]
    restored(store, f"{store.url}/{made[0]}", 3, FIRST)
    newest = written(store, 4, SECOND, FIRST, lost=(7,)).directory
    assert prune(store, 1) == made[1:]
    assert store.names() == [made[0], newest]


def test_a_file_that_cannot_be_read_refuses_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    made = written(store, 1, FIRST)
    restored(store, f"{store.url}/{made.directory}", 1, FIRST)
    (file,) = tmp_path.glob("restores-*.json")
    for damaged in (b"{", b"[]", b'{"format": "pushpull-restores", "version": 2}', b"\xff"):
        file.write_bytes(damaged)
        with pytest.raises(InvalidCheckpoint, match="name a checkpoint, or remove the file"):
            restored_at_start(AUTO, store.url)
    resolve(f"{store.url}/{made.directory}").reader.close()


def of(order: int, number: int, newest: int, *timelines: bytes) -> RecordedRestore:
    return RecordedRestore(f"{number:08d}-c", newest, frozenset(timelines), order)


@pytest.mark.parametrize(
    ("recorded", "stay"),
    [
        ([of(1, 3, 5, FIRST), of(2, 6, 8, SECOND, FIRST)], [1, 0]),
        ([of(1, 3, 5, FIRST), of(2, 4, 7, SECOND, FIRST)], [1]),
        ([of(1, 3, 5, FIRST), of(2, 5, 5, SECOND, FIRST)], [1]),
        ([of(2, 3, 5, FIRST), of(1, 5, 5, SECOND, FIRST)], [0]),
        ([of(1, 3, 5, FIRST), of(2, 3, 4, SECOND, FIRST)], [1]),
        ([of(1, 2, 4, OTHER), of(2, 1, 6, FIRST)], [1, 0]),
    ],
    ids=[
        "of its branch",
        "to one that was left",
        "the same newest",
        "and back",
        "where the newest were removed",
        "another run",
    ],
)
def test_a_later_restore_may_make_an_earlier_one_void(
    recorded: list[RecordedRestore], stay: list[int]
) -> None:
    assert in_force(recorded) == [recorded[place] for place in stay]


def test_what_is_void_is_dropped(store: CheckpointStore) -> None:
    for newest in range(3, 9):
        record_restore(store.location, CLUSTER_ID, of(0, 3, newest, FIRST))
    assert restores_in_force(store.location) == [of(6, 3, 8, FIRST)]


def test_the_later_of_two_restores_counts_whatever_the_clock(store: CheckpointStore) -> None:
    """Another cluster went on from the run, and made no checkpoint before it went back, too."""
    record_restore(store.location, "c-1", of(0, 2, 4, FIRST))
    record_restore(store.location, "c-2", of(0, 1, 4, SECOND, FIRST))
    assert [each.number for each in restores_in_force(store.location)] == [1]
    record_restore(store.location, "c-1", of(0, 3, 4, THIRD, SECOND, FIRST))
    assert [each.number for each in restores_in_force(store.location)] == [3]
