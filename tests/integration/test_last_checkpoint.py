"""A scheduler that nobody watches over, as in a container, makes a last checkpoint when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import io
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ps_worker as ps
from ps_cli.console.output import Output
from ps_cli.train.exit_rules import RunEnd
from ps_cli.train.run_checkpoints import make_last
from ps_runtime.checkpoint.store import CheckpointStore, resolve
from ps_runtime.launch.cluster_shape import ClusterShape
from ps_runtime.launch.launcher import Launcher, RoleProcess, start_scheduler, start_servers
from scheduler.edge.sqlite_store import SqliteStore
from tests.integration.lane_cluster import until
from tests.integration.resumed_training import Position

pytestmark = pytest.mark.slow

END_DEADLINE_S = 60.0
WORKERS, SERVERS, COUNT = 2, 2, 500
NO_LAST_CHECKPOINT = 3
"""The exit code of a scheduler whose last checkpoint of a finished run failed."""

_LARGE_COUNT = 1 << 23
_STEP_S = 8.0
"""A step whose servers have gone is given up then, and its worker ends."""


@dataclass
class Bare:
    """A scheduler and servers, each on its own, and workers that are threads of this process."""

    launcher: Launcher
    address: str
    root: Path

    def role(self, kind: str) -> RoleProcess:
        return next(each for each in self.launcher.processes if each.command.kind == kind)

    @contextlib.contextmanager
    def stopped_servers(self) -> Iterator[None]:
        """All of them: which has the table is theirs to say."""
        servers = [role for role in self.launcher.processes if role.command.kind == "server"]
        for server in servers:
            server.send(signal.SIGSTOP)
        try:
            yield
        finally:
            for server in servers:
                server.send(signal.SIGCONT)

    def end_of(self, kind: str, exit_code: int = 0) -> str:
        """Waits for it; what it said last."""
        return _end_of(self.role(kind), exit_code)

    def end_of_next_scheduler(self) -> str:
        """Starts one again as it was, and waits for it."""
        return _end_of(self.launcher.start(self.role("scheduler").command))


def _end_of(role: RoleProcess, exit_code: int = 0) -> str:
    ended = role.wait(END_DEADLINE_S)
    assert ended is not None, f"{role.name} has not ended"
    assert ended.returncode == exit_code, ended.fate
    return "\n".join(role.recent_lines)


@contextlib.contextmanager
def bare_cluster(root: Path, workers: int = WORKERS, **settings: str) -> Iterator[Bare]:
    named = {f"PUSHPULL_{name.upper()}": value for name, value in settings.items()}
    environment = {"PUSHPULL_CHECKPOINT_URL": str(root), **named}
    with Launcher() as launcher:
        shape = ClusterShape(SERVERS, workers, environment=environment)
        scheduler = start_scheduler(launcher, shape)
        for server in start_servers(launcher, shape, scheduler.address):
            launcher.wait_ready(server)
        yield Bare(launcher, scheduler.address, root)


@contextlib.contextmanager
def training(cluster: Bare, until: int = 0) -> Iterator[None]:
    """Two workers that take steps, until the block ends; or so many, and then they leave."""
    stop, begun = threading.Event(), threading.Barrier(WORKERS + 1)

    def work(rank: int) -> None:
        client = ps.connect(cluster.address, rank=rank)
        try:
            table = client.create_table(
                "counted", COUNT, optimizer=ps.SGD(lr=1.0), reduction="sum", block_elements=64
            )
            counted = Position()
            client.attach_state("counted", counted, per_rank=True)
            first = table.clock + 1
            while not stop.is_set() and (not until or table.clock < until):
                client.push_pull(table, np.ones(COUNT, np.float32), timeout_s=_STEP_S)
                counted.seen += 1
                assert counted.seen == table.clock
                client.save_point()
                if table.clock == first:
                    begun.wait(END_DEADLINE_S)
        finally:
            client.close(leave=bool(until))

    with ThreadPoolExecutor(WORKERS) as pool:
        working = [pool.submit(work, rank) for rank in range(WORKERS)]
        begun.wait(END_DEADLINE_S)
        try:
            yield
        finally:
            if not until:
                stop.set()
        for each in working if until else ():
            each.result(END_DEADLINE_S)


def check_whole(root: Path, reason: str) -> int:
    """Every block and both workers' states are of one clock, which is given back."""
    with resolve(str(root)).reader as reader:
        (table,) = reader.manifest.tables
        for block in range(table.block_count):
            values: Any = np.frombuffer(reader.read("counted", block), np.float32)
            assert set(values) == {-WORKERS * table.clock}
        saved = [(w.rank, w.clock, bool(w.file)) for w in reader.manifest.workers]
        assert saved == [(rank, table.clock, True) for rank in range(WORKERS)]
        assert reader.manifest.reason == reason
        return table.clock


def test_told_to_stop_it_makes_one_while_workers_train(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    with bare_cluster(root) as cluster, training(cluster):
        cluster.role("scheduler").send(signal.SIGTERM)
        assert "checkpoint_complete" in cluster.end_of("scheduler")
    assert check_whole(root, "stopped") >= 1


@pytest.mark.thorough
def test_a_server_that_is_lost_meanwhile_does_not_cost_it(tmp_path: Path) -> None:
    """A stopped server takes no part in it; when its lease has ended, the other makes another."""
    root = tmp_path / "checkpoints"
    with bare_cluster(root, replicas="2") as cluster, training(cluster):
        cluster.role("server").send(signal.SIGSTOP)
        cluster.role("scheduler").send(signal.SIGTERM)
        said = cluster.end_of("scheduler")
        assert "event=last_checkpoint_again" in said
        assert "a server was lost while it was made" in said
        assert "checkpoint_complete" in said
    assert check_whole(root, "stopped") >= 1


@pytest.mark.thorough
def test_when_all_workers_have_left_it_makes_one_and_all_ends(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    with bare_cluster(root, stop_when_done="1") as cluster:
        with training(cluster, until=3):
            pass
        assert "reason=all workers and servers have left" in cluster.end_of("scheduler").replace(
            '"', ""
        )
        cluster.end_of("server")
    assert check_whole(root, "the end of training") == 3
    with bare_cluster(root, stop_when_done="1", resume=str(root)) as cluster:
        with training(cluster, until=5):
            pass
        cluster.end_of("scheduler")
    assert check_whole(root, "the end of training") == 5


@pytest.mark.parametrize("timeout_s", ["1", "0"])
def test_with_a_journal_it_makes_one_and_no_second(tmp_path: Path, timeout_s: str) -> None:
    """Also when its last worker ended in the middle, and nobody took its place in time."""
    root, ends_early = tmp_path / "checkpoints", timeout_s != "0"
    settings = {"worker_timeout_s": timeout_s, "lease_s": "0.5", "heartbeat_interval_s": "0.1"}
    settings |= {"stop_when_done": "1", "journal": str(tmp_path / "journal")}
    with bare_cluster(root, workers=1, **settings) as cluster:
        client = ps.connect(cluster.address)
        table = client.create_table("t", COUNT, optimizer=ps.SGD(lr=1.0))
        client.push_pull(table, np.ones(COUNT, np.float32))
        if ends_early:
            client.abandon("SIGTERM")
        else:
            client.close()
        said = cluster.end_of("scheduler")
    assert said.count("event=change_proposed") == 1
    assert "no_last_checkpoint" not in said
    with resolve(str(root)).reader as reader:
        assert reader.manifest.reason == "the end of training"


def records_in(journal: Path) -> dict[str, bytes]:
    with contextlib.closing(SqliteStore(journal)) as store:
        return store.read()


def take_no_checkpoints(root: Path) -> None:
    shutil.rmtree(root)
    root.write_text("no folder", encoding="utf-8")


@pytest.mark.thorough
def test_a_finished_run_whose_last_checkpoint_fails_is_saved_by_the_next_scheduler(
    tmp_path: Path,
) -> None:
    """As an engine starts it: the journal has the cluster, and servers have the values."""
    root, journal = tmp_path / "checkpoints", tmp_path / "journal"
    settings = {"stop_when_done": "1", "journal": str(journal)}
    with bare_cluster(root, workers=1, **settings) as cluster:
        with ps.connect(cluster.address) as client:
            table = client.create_table("t", COUNT, optimizer=ps.SGD(lr=1.0))
            client.push_pull(table, np.ones(COUNT, np.float32))
            take_no_checkpoints(root)
        said = cluster.end_of("scheduler", NO_LAST_CHECKPOINT)
        assert "event=no_last_checkpoint" in said
        assert "event=values_stay_at_servers" in said
        root.unlink()
        assert "event=checkpoint_complete" in cluster.end_of_next_scheduler()
        cluster.end_of("server")
    assert not records_in(journal)
    with resolve(str(root)).reader as reader:
        assert reader.manifest.reason == "the end of training"
        values: Any = np.frombuffer(reader.read("t", 0), np.float32)
        assert set(values) == {-1.0}


@pytest.mark.thorough
def test_a_finished_run_without_a_journal_ends_with_its_servers_and_says_that_it_is_not_saved(
    tmp_path: Path,
) -> None:
    root = tmp_path / "checkpoints"
    with bare_cluster(root, workers=1, stop_when_done="1") as cluster:
        with ps.connect(cluster.address) as client:
            table = client.create_table("t", COUNT, optimizer=ps.SGD(lr=1.0))
            client.push_pull(table, np.ones(COUNT, np.float32))
            take_no_checkpoints(root)
        assert "event=no_last_checkpoint" in cluster.end_of("scheduler", NO_LAST_CHECKPOINT)
        cluster.end_of("server")


@pytest.mark.thorough
def test_a_run_whose_values_are_lost_is_not_begun_anew_by_the_next_scheduler(
    tmp_path: Path,
) -> None:
    """That one ends well: an engine that starts again whoever fails comes to rest."""
    journal = tmp_path / "journal"
    settings = {"worker_timeout_s": "1", "lease_s": "0.5", "heartbeat_interval_s": "0.1"}
    settings |= {"stop_when_done": "1", "journal": str(journal)}
    with bare_cluster(tmp_path / "checkpoints", workers=1, **settings) as cluster:
        client = ps.connect(cluster.address)
        table = client.create_table("t", COUNT, optimizer=ps.SGD(lr=1.0))
        client.push_pull(table, np.ones(COUNT, np.float32))
        servers = [role for role in cluster.launcher.processes if role.command.kind == "server"]
        for server in servers:
            server.send(signal.SIGINT)
            _end_of(server)
        client.abandon("SIGTERM")
        assert "event=no_last_checkpoint" in cluster.end_of("scheduler", NO_LAST_CHECKPOINT)
        assert "event=cluster_was_finished" in cluster.end_of_next_scheduler()
    assert not records_in(journal)


@pytest.mark.thorough
def test_who_left_is_in_checkpoints_of_the_next_scheduler(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    with bare_cluster(root, checkpoint_last_s="1", journal=str(tmp_path / "journal")) as cluster:
        clients = [ps.connect(cluster.address, rank=rank) for rank in range(WORKERS)]
        for client in clients:
            table = client.create_table("t", COUNT, optimizer=ps.SGD(lr=1.0), consistency="asp")
            client.attach_state("counted", Position(), per_rank=True)
            client.push_pull(table, np.ones(COUNT, np.float32))
        clients[1].close()
        cluster.role("scheduler").send(signal.SIGTERM)
        cluster.end_of("scheduler")
        assert list(root.glob("left-*"))
        again = cluster.launcher.start(cluster.role("scheduler").command)
        cluster.launcher.wait_ready(again)
        clients[0].checkpoint("of the next").wait()
        with resolve(str(root)).reader as reader:
            assert reader.manifest.reason == "of the next"
            assert [bool(worker.file) for worker in reader.manifest.workers] == [True, True]
        clients[0].close()
    assert not list(root.glob("left-*")), "the launcher ended the cluster, and no other goes on"


@pytest.mark.thorough
def test_the_one_that_the_cluster_began_from_stays_while_it_goes_on(tmp_path: Path) -> None:
    """A table that comes later begins with its values, and a state that is attached later."""
    root = tmp_path / "checkpoints"

    def stepped(client: ps.Client, name: str) -> Any:
        table = client.create_table(name, COUNT, optimizer=ps.SGD(lr=1.0))
        return client.push_pull(table, np.ones(COUNT, np.float32))

    def counted(client: ps.Client) -> Position:
        position = Position()
        client.attach_state("counted", position, per_rank=True)
        return position

    with bare_cluster(root, workers=1) as cluster, ps.connect(cluster.address) as client:
        for name in ("first", "second"):
            stepped(client, name)
        counted(client).seen = 7
        client.checkpoint().wait()
    settings = {"resume": "auto", "checkpoint_keep": "1"}
    with (
        bare_cluster(root, workers=1, **settings) as cluster,
        ps.connect(cluster.address) as client,
    ):
        stepped(client, "first")
        for _ in range(2):
            client.checkpoint().wait()
        names = CheckpointStore(str(root)).names
        until(lambda: len(names()) == 2, "the one between is removed")
        assert set(np.asarray(stepped(client, "second"))) == {-2.0}
        assert counted(client).seen == 7


@pytest.mark.thorough
def test_told_to_stop_while_a_resumed_script_starts_up_the_newest_is_where_it_began(
    tmp_path: Path,
) -> None:
    """One of its two tables is there again, and nothing of its state."""
    root = tmp_path / "checkpoints"
    with bare_cluster(root, workers=1) as cluster, ps.connect(cluster.address) as client:
        for name in ("first", "second"):
            table = client.create_table(name, COUNT, optimizer=ps.SGD(lr=1.0))
            client.push_pull(table, np.ones(COUNT, np.float32))
        client.attach_state("counted", Position(), per_rank=True)
        began_from = client.checkpoint().wait().url
    with bare_cluster(root, workers=1, resume=str(root)) as cluster:
        client = ps.connect(cluster.address)
        try:
            client.create_table("first", COUNT, optimizer=ps.SGD(lr=1.0))
            cluster.role("scheduler").send(signal.SIGTERM)
            said = cluster.end_of("scheduler")
        finally:
            client.close(leave=False)
    newest = CheckpointStore(str(root)).newest_good()
    assert newest is not None
    assert newest.url == began_from
    assert "event=checkpoint_unneeded" in said


@pytest.mark.thorough
@pytest.mark.parametrize("last_s", ["1", "0"])
def test_it_waits_so_long_and_no_longer(tmp_path: Path, last_s: str) -> None:
    root = tmp_path / "checkpoints"
    with bare_cluster(root, checkpoint_last_s=last_s) as cluster, training(cluster):
        with cluster.stopped_servers():
            cluster.role("scheduler").send(signal.SIGTERM)
            said = cluster.end_of("scheduler")
        assert ("event=no_last_checkpoint" in said) == (last_s == "1")
    assert CheckpointStore(str(root)).newest_good() is None


@pytest.mark.thorough
def test_who_waits_for_its_cut_goes_on_when_it_is_given_up(tmp_path: Path) -> None:
    """Servers that are stopped promise none; a worker is at its save point and holds on."""
    with (
        bare_cluster(tmp_path / "checkpoints", checkpoint_last_s="1") as cluster,
        ThreadPoolExecutor(WORKERS) as pool,
    ):
        clients = [ps.connect(cluster.address, rank=rank) for rank in range(WORKERS)]
        for client in clients:
            table = client.create_table("counted", COUNT, optimizer=ps.SGD(lr=1.0))
            client.attach_state("counted", Position(), per_rank=True)
            assert table.clock == 0
        try:
            with cluster.stopped_servers():
                cluster.role("scheduler").send(signal.SIGTERM)
                until(
                    lambda: all(each.engine.view.checkpoint for each in clients), "it is proposed"
                )
                resting = [pool.submit(client.save_point) for client in clients]
                assert "event=no_last_checkpoint" in cluster.end_of("scheduler")
                for each in resting:
                    each.result(_STEP_S)
        finally:
            for client in clients:
                client.close(leave=False)


@pytest.mark.thorough
def test_without_servers_it_waits_for_nobody(tmp_path: Path) -> None:
    with bare_cluster(tmp_path / "checkpoints", stop_when_done="1") as cluster:
        with training(cluster):
            for role in cluster.launcher.processes:
                if role.command.kind == "server":
                    role.send(signal.SIGTERM)
            cluster.end_of("server")
        cluster.role("scheduler").send(signal.SIGTERM)
        said = cluster.end_of("scheduler")
        assert "event=no_last_checkpoint" in said
        assert "no checkpoint can be made: " in said


@pytest.mark.thorough
def test_without_a_table_of_the_run_without_a_name_none_is_made_and_nothing_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints are of that run alone: neither the tool nor the scheduler waits for one."""
    with (
        bare_cluster(tmp_path / "checkpoints", workers=1) as cluster,
        ps.connect(cluster.address, run="named", world_size=1) as client,
    ):
        client.create_table("named", COUNT, optimizer=ps.SGD(lr=1.0))
        printed = io.StringIO()
        last = make_last(cluster.address, 60.0, RunEnd(130, "stopped"), Output(printed))
        assert asyncio.run(last), capsys.readouterr().err
        assert printed.getvalue() == (
            "there is no last checkpoint, since there is no table of the run without a name\n"
        )
        cluster.role("scheduler").send(signal.SIGTERM)
        assert "no_last_checkpoint" not in cluster.end_of("scheduler")


@pytest.mark.thorough
def test_a_local_cluster_ends_after_a_checkpoint_that_nobody_waits_for(tmp_path: Path) -> None:
    """It is large, so that it is not written before the cluster is told to end."""
    root = tmp_path / "checkpoints"
    cluster = ps.local_cluster(checkpoint_url=str(root))
    with cluster, ps.connect(cluster.address) as client:
        table = client.create_table("large", _LARGE_COUNT, optimizer=ps.SGD(lr=1.0))
        client.push_pull(table, np.ones(_LARGE_COUNT, np.float32))
        client.checkpoint("mine")
    with resolve(str(root)).reader as reader:
        assert reader.manifest.reason == "mine"


@pytest.mark.thorough
def test_a_scheduler_that_makes_no_last_one_waits_for_one_that_was_asked_for(
    tmp_path: Path,
) -> None:
    root = tmp_path / "checkpoints"
    with bare_cluster(root, stop_when_done="1", workers=1, checkpoint_last_s="0") as cluster:
        with ps.connect(cluster.address) as client:
            table = client.create_table("large", _LARGE_COUNT, optimizer=ps.SGD(lr=1.0))
            client.push_pull(table, np.ones(_LARGE_COUNT, np.float32))
            client.checkpoint("mine")
        assert "no_last_checkpoint" not in cluster.end_of("scheduler")
    with resolve(str(root)).reader as reader:
        assert reader.manifest.reason == "mine"
