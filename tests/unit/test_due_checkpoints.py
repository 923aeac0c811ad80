"""The edge of checkpoints carries out its schedule: it begins one that is due, and says what of it
is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from ps_core.change import ChangeOutcome
from ps_core.cluster_view import Role, Session
from ps_core.consistency import parsed
from ps_core.errors import InvalidCheckpoint
from ps_core.keys import TableId
from ps_core.manifest import PartReport, ReportedTable, SavedWorker
from ps_core.tables.table import Table
from ps_runtime.checkpoint.directory import CheckpointDirectory, locate
from ps_runtime.checkpoint.store import CheckpointStore
from ps_runtime.observe.metrics import SchedulerMetrics
from ps_runtime.system import clock
from pushpull.v1 import scheduler_pb2
from scheduler.edge.checkpointing import Checkpointing
from scheduler.machine.changes import ChangeRequest
from scheduler.machine.checkpoint_schedule import RETRY_S, CheckpointPolicy
from scheduler.machine.checkpoint_state import CheckpointFailed, CheckpointMade, CheckpointUnneeded
from scheduler.machine.checkpoints import LEAVING
from scheduler.machine.cluster import Decision
from scheduler.machine.state import Restored, RestoredTable
from tests.unit.checkpoint_files import CLUSTER_ID, write_checkpoint
from tests.unit.cluster_harness import SETTINGS, SPEC, Harness
from tests.unit.test_left_parts import worker_file

TABLE = TableId(1)
BYTES, AGE = "checkpoint_bytes", "checkpoint_age_seconds"
LEASE_S = SETTINGS.lease_s


class Saving:
    """A cluster of one server and one worker, whose edge makes a checkpoint every 10 clocks, and
    every minute."""

    def __init__(self, path: Path, restored: Restored | None = None) -> None:
        self.cluster = Harness(
            checkpoint_url=str(path), server_count=1, worker_count=1, restored=restored
        )
        self.server = self.cluster.join(Role.SERVER)
        self.worker: Session = self.cluster.join(Role.WORKER)
        self.cluster.create(self.worker)
        self.transitions: list[Any] = []
        self._begin()

    def _begin(self) -> None:
        self.registry = CollectorRegistry()
        self.edge = Checkpointing(
            self.cluster.cluster,
            CheckpointPolicy(every_s=60.0, every_clocks=10),
            self.carry_out,
            SchedulerMetrics(self.registry),
        )

    def start_again(self, ago_s: float = 0.0) -> None:
        """Another scheduler goes on from the journal, `ago_s` after the newest checkpoint."""
        made = self.cluster.cluster.checkpoints.newest
        if made is not None:
            earlier = replace(made, complete_s=made.complete_s - ago_s)
            self.cluster.cluster._state.checkpoint_made = earlier
        self.cluster.start_again(clock.now_s())
        self._begin()
        self.edge.resume()

    def shown(self, name: str) -> float:
        """The scheduler's gauge of that name."""
        value = self.registry.get_sample_value(f"pushpull_scheduler_{name}")
        assert value is not None
        return value

    def shown_count(self, result: str) -> float:
        """Checkpoints that the scheduler's counter has with that result."""
        labels = {"result": result}
        value = self.registry.get_sample_value("pushpull_scheduler_checkpoints_total", labels)
        assert value is not None
        return value

    def carry_out(self, decision: Decision[Any]) -> Any:
        for transition in decision.transitions:
            self.transitions.append(transition)
            self.edge.published(transition, self.cluster.now_s)
        return decision.reply

    def heard(self, clock: int) -> None:
        said = scheduler_pb2.TableProgress(table_id=TABLE, clock=clock)
        progress = scheduler_pb2.NodeProgress(tables=[said])
        self.edge.heard(self.worker.node_id, progress)

    async def leave(self, clock: int, url: str = "", *, keeps_all: bool = False) -> SavedWorker:
        """The worker leaves, and its state of that clock in a file; `url`: where it finds the place
        of those who leave; `keeps_all`: no server has the parameters. The scheduler looks for it.
        """
        saved = worker_file(CheckpointDirectory(locate(url or self.edge.left_url)), 0, clock)
        tables = {TABLE: ReportedTable(0, clock)}
        part = PartReport(saved.file, saved.byte_count, saved.header_sha256, tables)
        self.edge.report(self.worker, LEAVING, replace(part, has_parameters=keeps_all))
        self.cluster.leave(self.worker)
        await self.ended()
        return saved

    def look(self, seconds: float = 0.0) -> int:
        """The number of the checkpoint that runs afterwards; 0 for none."""
        self.cluster.now_s += seconds
        self.edge.look(self.cluster.now_s)
        running = self.cluster.cluster.view.checkpoint
        return 0 if running is None else running.number

    def happened(self, kind: type) -> list[Any]:
        return [each for each in self.transitions if isinstance(each, kind)]

    def prepare(self, cut: int) -> Table:
        """The server has prepared the cut of the table after that clock."""
        (table,) = self.cluster.cluster.view.tables
        assert table.proposed is not None
        number = table.proposed.number
        self.carry_out(self.cluster.cluster.prepare_change(self.server, TABLE, number, cut))
        return table

    def write(self, cut: int, *, is_here: bool = True) -> None:
        """The running checkpoint is cut after that clock, and its only part written: where the
        scheduler finds it, or where it does not.
        """
        self.prepare(cut)
        self.write_part(cut, is_here=is_here)

    def write_part(self, cut: int, *, is_here: bool = True) -> None:
        """As `write`, of one that is cut."""
        cluster = self.cluster.cluster
        (table,) = cluster.view.tables
        running = cluster.view.checkpoint
        assert running is not None
        written = (2).to_bytes(8, "little") + b"{}"
        Path(running.url).mkdir(exist_ok=True)
        if is_here:
            (Path(running.url) / "server").write_bytes(written)
        file = "server", len(written), hashlib.sha256(written).hexdigest()
        part = PartReport(*file, {TABLE: ReportedTable(table.block_count, cut)})
        self.carry_out(cluster.report_part(self.server, running.number, part))

    async def ended(self) -> None:
        """What the edge has begun has ended."""
        own = {asyncio.current_task()}
        while others := asyncio.all_tasks() - own:
            await asyncio.wait(others)


def test_while_nothing_has_moved_the_one_that_the_cluster_began_from_is_the_answer(
    tmp_path: Path,
) -> None:
    source = CheckpointStore(str(tmp_path / "before")).directory(3, CLUSTER_ID)
    manifest = write_checkpoint(source, 3)
    tables = {SPEC.name: RestoredTable(SPEC.validated(), SPEC.consistency, 41)}

    async def live() -> None:
        saving = Saving(tmp_path / "new", Restored(source.url, tables))
        saving.look()
        assert saving.look(60.0) == 1, "no worker has said a clock"
        saving.prepare(41)
        await saving.ended()
        request = scheduler_pb2.CreateCheckpointRequest(covered_by=1)
        made = await saving.edge.create(request, clock.now_s())
        assert (made.number, made.url, made.byte_count) == (3, source.url, manifest.byte_count)
        assert not saving.happened(CheckpointMade)
        assert saving.look(59.9) == 0
        assert saving.look(0.1) == 2
        await saving.ended()
        assert saving.edge.history(saving.cluster.now_s).failed_count == 0

    asyncio.run(live())


def test_while_nothing_has_moved_one_that_is_gone_is_no_answer(tmp_path: Path) -> None:
    source = CheckpointStore(str(tmp_path / "before")).directory(3, CLUSTER_ID)
    write_checkpoint(source, 3)
    tables = {SPEC.name: RestoredTable(SPEC.validated(), SPEC.consistency, 41)}

    async def live() -> None:
        saving = Saving(tmp_path / "new", Restored(source.url, tables))
        saving.look()
        assert saving.look(60.0) == 1
        source.remove()
        saving.prepare(41)
        await saving.ended()
        request = scheduler_pb2.CreateCheckpointRequest(covered_by=1)
        with pytest.raises(InvalidCheckpoint, match=r"no step was taken since .*has no manifest"):
            await saving.edge.create(request, clock.now_s())
        assert saving.happened(CheckpointUnneeded)

    asyncio.run(live())


def test_a_worker_waits_for_a_checkpoint_until_it_has_been_answered(tmp_path: Path) -> None:
    """From then on no step that it would have to take for one is its script's matter."""

    async def live() -> None:
        saving = Saving(tmp_path)
        worker, other = saving.worker.node_id, saving.server.node_id

        async def ask() -> asyncio.Task[Any]:
            request = scheduler_pb2.CreateCheckpointRequest()
            task = asyncio.create_task(saving.edge.create(request, clock.now_s() + 60.0, worker))
            await asyncio.wait({task}, timeout=0)
            return task

        def waited_for(number: int) -> bool:
            assert not saving.edge.is_waited_for(number, other)
            return saving.edge.is_waited_for(number, worker)

        first = await ask()
        assert [waited_for(number) for number in (1, 2)] == [True, False]
        saving.prepare(10)
        second = await ask()
        assert waited_for(1), "the next one comes after it"
        second.cancel()
        saving.write_part(10)
        assert (await first).number == 1
        assert not waited_for(1)
        with contextlib.suppress(asyncio.CancelledError):
            await second
        assert not waited_for(2)

    asyncio.run(live())


def test_what_is_due_is_begun_and_what_failed_is_begun_again_a_while_later(
    tmp_path: Path,
) -> None:
    async def live() -> None:
        saving = Saving(tmp_path)
        assert saving.look() == 0
        assert saving.edge.schedule.clock == 0
        saving.heard(10)
        assert saving.edge.schedule.clock == 10
        assert saving.edge.schedule.reached == {saving.worker.node_id: {TABLE: 10}}
        assert saving.look() == 1
        saving.edge.give_up("it takes too long")
        assert len(saving.happened(CheckpointFailed)) == 1
        assert saving.look(RETRY_S - 0.1) == 0
        assert saving.look(0.1) == 2
        await saving.ended()

    asyncio.run(live())


def test_one_that_cannot_be_begun_stays_due(tmp_path: Path) -> None:
    async def live() -> None:
        saving = Saving(tmp_path)
        cluster, now_s = saving.cluster.cluster, saving.cluster.now_s
        wanted = ChangeRequest(SPEC.name, parsed("asp"), 0, now_s + 5)
        change = saving.carry_out(cluster.set_consistency(saving.worker, wanted, now_s))
        saving.heard(10)
        assert saving.look() == 0, "a change of the table has not ended"
        cluster.prepare_change(saving.server, TABLE, change.number, 3)
        cluster.prepare_change(saving.server, TABLE, change.number, 3, ChangeOutcome.TAKEN)
        assert saving.look() == 1
        await saving.ended()

    asyncio.run(live())


def test_the_next_is_due_by_the_clock_and_the_moment_at_which_one_was_written(
    tmp_path: Path,
) -> None:
    async def live() -> None:
        saving = Saving(tmp_path)
        saving.heard(10)
        assert saving.look() == 1
        saving.write(cut=21)
        await saving.ended()
        assert len(saving.happened(CheckpointMade)) == 1
        saving.heard(29)
        assert saving.look(59.9) == 0, "the cut was after 21"
        assert saving.look(0.1) == 2, "a minute has passed"
        saving.write(cut=29)
        await saving.ended()
        saving.heard(30)
        assert saving.look() == 3
        await saving.ended()

    asyncio.run(live())


def test_it_is_not_complete_while_a_file_is_not_where_the_scheduler_looks(tmp_path: Path) -> None:
    """Each host has a directory of that name, and no host has the others' files."""

    async def live() -> None:
        saving = Saving(tmp_path)
        saving.heard(10)
        assert saving.look() == 1
        saving.write(cut=10, is_here=False)
        await saving.ended()
        (failed,) = saving.happened(CheckpointFailed)
        assert "server cannot be read: No such file" in failed.reason
        assert "is the place shared by all hosts?" in failed.reason
        assert not saving.happened(CheckpointMade)
        assert CheckpointStore(str(tmp_path)).names() == []

    asyncio.run(live())


def test_one_that_cannot_have_the_state_of_a_worker_that_has_left_fails(tmp_path: Path) -> None:
    """The disk refuses the copy, and would take the manifest; later it takes both."""

    async def live() -> None:
        saving = Saving(tmp_path)
        saving.heard(10)
        saved = await saving.leave(clock=10)
        assert saving.look() == 1
        running = saving.cluster.cluster.view.checkpoint
        assert running is not None
        in_the_way = Path(running.url) / f".{saved.file}.tmp"
        in_the_way.mkdir(parents=True)
        saving.write(cut=10)
        await saving.ended()
        (failed,) = saving.happened(CheckpointFailed)
        assert "the state of worker 0, which has left, cannot be copied" in failed.reason
        assert not saving.happened(CheckpointMade)
        assert saving.look(RETRY_S) == 2
        saving.write(cut=10)
        await saving.ended()
        (made,) = saving.happened(CheckpointMade)
        directory = CheckpointDirectory(locate(made.url))
        assert [worker.file for worker in directory.read_manifest().workers] == [saved.file]

    asyncio.run(live())


def damage(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("is_missing", [True, False])
def test_a_state_that_is_gone_or_damaged_is_lost_and_no_checkpoint_waits_for_it(
    tmp_path: Path, is_missing: bool
) -> None:
    def spoil(file: Path) -> None:
        if is_missing:
            file.unlink()
        else:
            damage(file)

    async def live() -> None:
        saving = Saving(tmp_path)
        saving.heard(10)
        saved = await saving.leave(clock=10)
        spoil(Path(saving.edge.left_url, saved.file))
        assert saving.look() == 1
        saving.write(cut=10)
        await saving.ended()
        (made,) = saving.happened(CheckpointMade)
        (worker,) = CheckpointDirectory(locate(made.url)).read_manifest().workers
        assert (worker.rank, worker.clock, worker.file) == (0, 10, "")
        assert saved.file in worker.problem

    asyncio.run(live())


def test_none_is_complete_without_the_parameters_that_a_lost_file_had(tmp_path: Path) -> None:
    """CP-3: nobody knows that it is damaged before it is copied."""

    async def live() -> None:
        saving = Saving(tmp_path)
        saving.heard(10)
        saved = await saving.leave(clock=10, keeps_all=True)
        damage(Path(saving.edge.left_url, saved.file))
        assert saving.look() == 1
        saving.write(cut=10)
        await saving.ended()
        (failed,) = saving.happened(CheckpointFailed)
        assert "no worker's state is in it, and only the workers have parameters" in failed.reason
        assert not saving.happened(CheckpointMade)

    asyncio.run(live())


def test_a_state_that_was_never_where_the_scheduler_looks_fails_the_checkpoint(
    tmp_path: Path,
) -> None:
    """The worker's host has a directory of its own by that name."""

    async def live() -> None:
        saving = Saving(tmp_path)
        saving.heard(10)
        saved = await saving.leave(clock=10, url=str(tmp_path / "elsewhere"))
        assert saving.look() == 1
        saving.write(cut=10)
        await saving.ended()
        (failed,) = saving.happened(CheckpointFailed)
        assert "the state of worker 0, which has left, was never there" in failed.reason
        assert "is the place shared by all hosts?" in failed.reason
        assert not saving.happened(CheckpointMade)
        (tmp_path / "elsewhere").rename(saving.edge.left_url)
        for number, cut in ((2, 10), (3, 20)):
            saving.heard(cut)
            assert saving.look(RETRY_S) == number
            saving.write(cut)
            await saving.ended()
            shutil.rmtree(saving.edge.left_url, ignore_errors=True)
        made = [CheckpointDirectory(locate(each.url)) for each in saving.happened(CheckpointMade)]
        files = [each.read_manifest().workers[0].file for each in made]
        assert files == [saved.file, ""], "it was there, and is lost later"

    asyncio.run(live())


def test_a_scheduler_that_is_started_again_goes_on_with_the_newest_checkpoint(
    tmp_path: Path,
) -> None:
    async def live() -> None:
        saving = Saving(tmp_path)
        saving.look()
        saving.heard(10)
        assert saving.look() == 1
        saving.write(12)
        await saving.ended()
        url, byte_count = saving.edge.history(clock.now_s()).complete_url, saving.shown(BYTES)
        saving.start_again(ago_s=30.0)
        said = saving.edge.history(clock.now_s())
        assert (said.complete_count, said.complete_url, said.unknown_before) == (1, url, False)
        assert 30_000 <= said.complete_ms < 60_000
        assert 30.0 <= saving.shown(AGE) < 60.0
        assert saving.shown(BYTES) == byte_count > 0
        assert saving.look(LEASE_S) == 0
        saving.heard(13)
        assert saving.look(15.0) == 0, "the interval is not over"
        assert saving.look(15.0) == 2

    asyncio.run(live())


def test_a_manifest_that_a_restore_overtakes_shows_nothing_of_it(tmp_path: Path) -> None:
    """The cluster after it shows the metrics."""

    async def live() -> None:
        saving = Saving(tmp_path)
        saving.look()
        saving.heard(10)
        assert saving.look() == 1
        saving.write(12)
        saving.edge.end()
        age_s = saving.shown(AGE)
        await saving.ended()
        assert saving.shown(BYTES) == 0
        assert saving.shown(AGE) >= age_s
        assert saving.shown_count("complete") == 0
        assert saving.edge.history(clock.now_s()).complete_count == 0

    asyncio.run(live())


def test_a_restore_from_nothing_shows_no_bytes_of_the_cluster_before(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    metrics = SchedulerMetrics(registry)
    metrics.checkpoint_bytes.set(100)
    saving = Saving(tmp_path)
    Checkpointing(saving.cluster.cluster, CheckpointPolicy(), saving.carry_out, metrics)
    assert registry.get_sample_value(f"pushpull_scheduler_{BYTES}") == 0


def test_a_scheduler_that_is_started_again_without_one_says_so_and_makes_one(
    tmp_path: Path,
) -> None:
    """So one that ends more often than once an interval makes some."""
    saving = Saving(tmp_path)
    assert not saving.edge.history(clock.now_s()).unknown_before
    saving.start_again()
    assert saving.edge.history(clock.now_s()).unknown_before
    saving.heard(3)
    assert saving.look() == 0, "not all members have been heard"
    assert saving.look(LEASE_S + 1.0) == 1
