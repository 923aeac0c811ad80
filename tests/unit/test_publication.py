"""What was decided is told when the journal has it: in order, all of it, and never before."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path

import pytest

from ps_core.cluster_view import ClusterView, Role
from ps_core.errors import InvalidJournal, PushpullError, Recovering
from scheduler.edge.publication import JournalWriter, Publication
from scheduler.edge.sqlite_store import SqliteStore
from scheduler.journal import records
from scheduler.machine.cluster import Cluster
from scheduler.machine.state import NodeRegistered, Transition
from tests.unit.cluster_harness import Harness

DEADLINE_S = 20.0


class FailingStore(SqliteStore):
    """Whose writes fail as `failures` says, one after the other; then they are made."""

    def __init__(self, directory: Path, failures: Iterable[PushpullError] = ()) -> None:
        super().__init__(directory)
        self.failures = list(failures)
        self.claim()

    def write(self, records: Mapping[str, bytes], removed: Iterable[str] = ()) -> None:
        if self.failures:
            raise self.failures.pop(0)
        super().write(records, removed)


class StandingStore(FailingStore):
    """Whose writes do not return before `answers` is set."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.answers = threading.Event()

    def write(self, records: Mapping[str, bytes], removed: Iterable[str] = ()) -> None:
        self.answers.wait(DEADLINE_S)
        super().write(records, removed)


class Scene:
    """A cluster, its publication, and what was told."""

    def __init__(self, store: FailingStore, stall_s: float = DEADLINE_S) -> None:
        self.harness = Harness()
        self.store = store
        self.told: list[tuple[ClusterView, tuple[Transition, ...]]] = []
        self.on_told = self.told.append
        self.publication = Publication(
            lambda: self.harness.cluster, self._publish, JournalWriter(self.store), stall_s
        )

    def _publish(
        self, cluster: Cluster, view: ClusterView, transitions: tuple[Transition, ...]
    ) -> None:
        """What is told can be read."""
        assert cluster is self.harness.cluster
        kept = records.read(self.store.read())
        assert kept is not None
        assert kept.state.view_number == view.view_number
        self.on_told((view, transitions))

    def join(self) -> None:
        self.harness.transitions.clear()
        self.harness.join(Role.READER)
        self.publication.decided(tuple(self.harness.transitions))  # type: ignore[arg-type]


def run(
    directory: Path, main: Callable[[Scene], Awaitable[None]], *failures: PushpullError
) -> None:
    async def bounded() -> None:
        scene = Scene(FailingStore(directory, failures))
        async with asyncio.timeout(DEADLINE_S):
            await main(scene)
        await scene.publication.close(has_ended=False)

    asyncio.run(bounded())


async def turn() -> None:
    """The next turn of the loop."""
    is_next = asyncio.Event()
    asyncio.get_running_loop().call_soon(is_next.set)
    await is_next.wait()


@pytest.mark.parametrize("turns", range(6))
def test_whatever_is_decided_is_told_once_and_in_order(tmp_path: Path, turns: int) -> None:
    """However many turns of the loop after the last was told the next is decided."""

    async def main(scene: Scene) -> None:
        for _ in range(10):
            scene.join()
            await scene.publication.flushed()
            for _ in range(turns):
                await turn()
        joined = [
            t.node.node_id for _, told in scene.told for t in told if isinstance(t, NodeRegistered)
        ]
        assert joined == list(range(1, 11))
        numbers = [view.view_number for view, _ in scene.told]
        assert numbers == sorted(numbers)

    run(tmp_path, main)


def test_what_is_decided_right_after_something_was_told_is_told_too(tmp_path: Path) -> None:
    """In the next turn of the loop, in which what has written ends."""

    async def main(scene: Scene) -> None:
        is_told = asyncio.Event()
        tell = scene.told.append

        def told(what: tuple[ClusterView, tuple[Transition, ...]]) -> None:
            tell(what)
            if len(scene.told) < 5:
                asyncio.get_running_loop().call_soon(scene.join)
            else:
                is_told.set()

        scene.on_told = told
        scene.join()
        await is_told.wait()

    run(tmp_path, main)


def test_what_is_decided_meanwhile_goes_together(tmp_path: Path) -> None:
    async def main(scene: Scene) -> None:
        scene.join()
        await turn()  # it is being written
        for _ in range(50):
            scene.join()
        assert scene.told == []
        await scene.publication.flushed()
        assert [len(transitions) for _, transitions in scene.told] == [1, 50]
        assert [view.view_number for view, _ in scene.told] == [2, 52]

    run(tmp_path, main)


def test_a_store_that_takes_nothing_is_tried_again_and_who_waits_is_told(tmp_path: Path) -> None:
    async def main(scene: Scene) -> None:
        standing: list[PushpullError | None] = []
        is_well = asyncio.Event()

        def stand() -> None:
            standing.append(scene.publication.problem)
            if standing[-1] is None:
                is_well.set()

        scene.publication.on_problem = stand
        scene.join()
        for _ in range(2):
            with pytest.raises(Recovering, match="the disk is full"):
                await scene.publication.flushed()
        assert scene.told == []
        await is_well.wait()
        await scene.publication.flushed()
        assert len(scene.told) == 1
        assert [str(each) for each in standing] == ["the disk is full", "None"]

    run(tmp_path, main, Recovering("the disk is full"))


async def first_written(store: StandingStore) -> Scene:
    """A scene whose first write has come, and whose next does not return."""
    scene = Scene(store, stall_s=0.05)
    store.answers.set()
    scene.join()
    await scene.publication.flushed()
    scene.told.clear()
    store.answers.clear()
    return scene


def test_the_first_write_may_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody is served before it, and to start again would take as long."""

    async def main() -> None:
        store = StandingStore(tmp_path)
        scene = Scene(store, stall_s=0.05)
        scene.join()
        flushing = asyncio.ensure_future(scene.publication.flushed())
        while "has not answered for 0.05 s" not in caplog.text:
            await turn()
        assert not flushing.done()
        store.answers.set()
        await flushing
        assert len(scene.told) == 1
        await scene.publication.close(has_ended=False)

    with caplog.at_level("ERROR", logger="pushpull"):
        asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def test_a_disk_that_does_not_answer_is_said_and_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        store = StandingStore(tmp_path)
        scene = await first_written(store)
        scene.join()
        for _ in range(2):
            with pytest.raises(Recovering, match=r"has not answered for 0\.05 s: mend the disk"):
                await scene.publication.flushed()
        assert scene.told == []
        is_well = asyncio.Event()
        scene.publication.on_problem = is_well.set
        store.answers.set()
        await is_well.wait()
        await scene.publication.flushed()
        assert scene.publication.problem is None
        assert len(scene.told) == 1
        await scene.publication.close(has_ended=False)

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


@pytest.mark.parametrize("has_ended", [False, True])
def test_the_end_does_not_wait_for_a_disk_that_does_not_answer(
    tmp_path: Path, has_ended: bool
) -> None:
    async def main() -> None:
        store = StandingStore(tmp_path)
        scene = await first_written(store)
        scene.join()
        with pytest.raises(Recovering, match="has not answered"):
            await scene.publication.flushed()
        await scene.publication.close(has_ended=has_ended)
        assert scene.told == []
        store.answers.set()  # the thread ends

    asyncio.run(asyncio.wait_for(main(), DEADLINE_S / 2))


def test_a_journal_in_other_hands_ends_it(tmp_path: Path) -> None:
    async def main(scene: Scene) -> None:
        scene.join()
        with pytest.raises(InvalidJournal, match="claimed"):
            await scene.publication.flushed()
        await scene.publication.failed.wait()
        scene.join()
        with pytest.raises(InvalidJournal, match="claimed"):
            await scene.publication.flushed()
        assert scene.told == []

    run(tmp_path, main, InvalidJournal("it was claimed"))


def test_a_cluster_that_has_ended_leaves_nothing(tmp_path: Path) -> None:
    async def main(scene: Scene) -> None:
        scene.join()
        await scene.publication.flushed()
        await scene.publication.close(has_ended=True)

    run(tmp_path, main)
    store = SqliteStore(tmp_path)
    assert store.read() == {}
    assert store.claim() == 2
    store.close()
