"""More workers than a cluster was started for join it while it trains, and leave it again."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ps_worker as ps
from ps_cli.console import scheduler_query
from ps_cli.status.document import StatusDocument, status_document
from ps_runtime.launch.cluster_shape import ClusterShape
from ps_runtime.launch.launcher import Launcher, start_scheduler
from ps_worker.spec.optimizers import ServerOptimizer
from tests.integration.lane_cluster import LaneCluster, lane_cluster, until
from tests.integration.test_successor import Trainer
from tests.integration.test_worker_gone import (
    DEADLINE_S,
    PATIENCE,
    gradient,
    table,
    victim,
)
from tests.integration.training_jobs import optimizer_for
from tests.integration.training_models import Branched, batches, differing, seeded, values

FIRST = 2
STEPS = 12
ENVIRONMENT = {**PATIENCE, "PUSHPULL_MAX_WORKERS": "4"}


@pytest.fixture
def cluster() -> Iterator[LaneCluster]:
    with lane_cluster(servers=2, workers=FIRST, environment=ENVIRONMENT) as running:
        yield running


def _first(cluster: LaneCluster) -> list[ps.Client]:
    return [
        ps.connect(cluster.address, rank=rank, request_deadline_s=DEADLINE_S)
        for rank in range(FIRST)
    ]


def _status(cluster: LaneCluster) -> StatusDocument:
    response = asyncio.run(scheduler_query.first_status(cluster.address)).response
    return status_document(response, {})


def _close(clients: list[ps.Client]) -> None:
    for client in clients:
        client.close(leave=False)


class Running:
    """Workers that step until all are at a clock that is not known when they begin."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._target: int | None = None
        self._begun = 0  # the highest clock that a step leads to
        self._lock = threading.Lock()
        self._runs: list[Future[list[float]]] = []

    def begin(self, client: ps.Client, handle: ps.TableHandle) -> None:
        self._runs.append(self._pool.submit(self._go_on, client, handle))

    def _go_on(self, client: ps.Client, handle: ps.TableHandle) -> list[float]:
        """The first value after each step."""
        found = []
        while self._goes_on(handle.clock):
            values = client.push_pull(handle, gradient(client.rank))
            found.append(float(np.asarray(values)[0]))
        return found

    def _goes_on(self, clock: int) -> bool:
        with self._lock:
            if self._target is not None and clock >= self._target:
                return False
            self._begun = max(self._begun, clock + 1)
            return True

    def end(self, clock: int) -> list[list[float]]:
        """At this clock, or where the first of them is about to be: all take as many steps."""
        with self._lock:
            self._target = max(clock, self._begun)
        return [run.result(DEADLINE_S) for run in self._runs]


@pytest.mark.thorough
def test_a_newcomer_joins_what_nobody_steps(cluster: LaneCluster) -> None:
    """A frozen layer, and a model that the others have not stepped yet."""
    clients = _first(cluster)

    def made(client: ps.Client) -> tuple[nn.Module, ps.DistributedOptimizer]:
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)))
        model[0].requires_grad_(False)
        optimizer_for(client, seeded(lambda: nn.Linear(2, 1)), name="later")
        return model, optimizer_for(client, model, name="tuned")

    def train(trained: tuple[nn.Module, ps.DistributedOptimizer], until_clock: int) -> None:
        model, optimizer = trained
        while optimizer.clock < until_clock:
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()

    with ThreadPoolExecutor(FIRST + 2) as pool:
        every = list(pool.map(made, clients))
        list(pool.map(train, every, [3] * FIRST))
        for rank in (FIRST, FIRST + 1):  # the second joins after a first one
            clients.append(ps.connect(cluster.address, request_deadline_s=DEADLINE_S))
            every.append(made(clients[-1]))
            assert (clients[-1].rank, every[-1][1].clock) == (rank, 3 * (rank - 1))
            list(pool.map(train, every, [3 * rank] * (rank + 1)))
    assert len({str(values(model)) for model, _ in every}) == 1
    _close(clients)


@pytest.mark.thorough
def test_a_newcomer_joins_what_is_frozen_again(cluster: LaneCluster) -> None:
    """The others have trained a layer that is frozen now: they go on to step its table."""
    clients = _first(cluster)

    def made(client: ps.Client) -> tuple[nn.Sequential, ps.DistributedOptimizer]:
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)))
        model[0].requires_grad_(False)
        return model, optimizer_for(client, model)

    def train(trained: tuple[nn.Sequential, ps.DistributedOptimizer], until_clock: int) -> None:
        model, optimizer = trained
        while optimizer.clock < until_clock:
            model[0].requires_grad_(optimizer.clock in (1, 2, 7))
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()

    def stepped_counts() -> list[int]:
        nodes = asyncio.run(scheduler_query.first_status(cluster.address)).response.nodes
        return [len(each.progress.loop.tables) for each in nodes if each.progress.HasField("loop")]

    with ThreadPoolExecutor(FIRST + 1) as pool:
        every = list(pool.map(made, clients))
        list(pool.map(train, every, [5] * FIRST))
        until(lambda: stepped_counts() == [2] * FIRST, "both have told of both tables")
        clients.append(ps.connect(cluster.address, request_deadline_s=DEADLINE_S))
        every.append(made(clients[-1]))
        assert every[-1][1].clock == 5
        list(pool.map(train, every, [9] * (FIRST + 1)))
    assert len({str(values(model)) for model, _ in every}) == 1
    _close(clients)


Pair = list[tuple[nn.Module, ps.DistributedOptimizer]]


def _pair(client: ps.Client) -> Pair:
    models = [seeded(lambda: nn.Linear(4, 1)), seeded(lambda: nn.Linear(4, 2))]
    named = zip(models, ("critic", "actor"), strict=True)
    return [(model, optimizer_for(client, model, name=name)) for model, name in named]


def _step(model: nn.Module, optimizer: ps.DistributedOptimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()


@pytest.mark.thorough
@pytest.mark.parametrize("pace", [1, 3])
def test_a_newcomer_joins_between_the_steps_of_two_models(cluster: LaneCluster, pace: int) -> None:
    """The others have taken a step of the first one: it begins where their loop does."""
    clients, loops, joined_in = _first(cluster), 9, 5
    are_between, may_go_on = threading.Barrier(FIRST + 1), threading.Event()

    def train(pair: Pair) -> None:
        (critic, critic_optimizer), (actor, actor_optimizer) = pair
        while critic_optimizer.clock < loops * pace:
            for number in range(pace):
                _step(critic, critic_optimizer)
                if critic_optimizer.clock == joined_in * pace + 1 and not may_go_on.is_set():
                    are_between.wait(DEADLINE_S)
                    assert may_go_on.wait(DEADLINE_S), number
            _step(actor, actor_optimizer)

    with ThreadPoolExecutor(FIRST + 1) as pool:
        every = list(pool.map(_pair, clients))
        training = [pool.submit(train, pair) for pair in every]
        are_between.wait(DEADLINE_S)
        clients.append(ps.connect(cluster.address, request_deadline_s=DEADLINE_S))
        newcomer = clients[-1].connection.engine
        until(
            lambda: len([j for t in newcomer.view.tables for j in t.joins]) == 2,
            "it has joined both",
        )
        may_go_on.set()
        every.append(_pair(clients[-1]))
        begun = [optimizer.clock for _, optimizer in every[-1]]
        training.append(pool.submit(train, every[-1]))
        for run in training:
            run.result(DEADLINE_S)
    assert begun == [(joined_in + 1) * pace, joined_in + 1]
    assert len({str([values(model) for model, _ in pair]) for pair in every}) == 1
    _close(clients)


Steps = list[tuple[Callable[[], None], ps.TableHandle]]


def _rows(client: ps.Client, name: str) -> tuple[Callable[[], None], ps.TableHandle]:
    """Rows in no model, and a step of them."""
    rows = ps.Embedding(client, name, 2, optimizer=ps.SGD(lr=1.0), init=ps.Zeros())

    def step() -> None:
        rows(torch.arange(3)).sum().backward()
        rows.step()

    return step, rows.table


def _rows_and_model(client: ps.Client) -> Steps:
    model = seeded(lambda: nn.Linear(4, 1))
    optimizer = optimizer_for(client, model, name="critic")
    (dense,) = client.tables.handles
    return [(functools.partial(_step, model, optimizer), dense), _rows(client, "users")]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda client: [_rows(client, "users"), _rows(client, "items")], id="rows"),
        pytest.param(_rows_and_model, id="beside a model"),
    ],
)
def test_a_newcomer_joins_between_the_steps_of_rows_that_are_in_no_model(
    cluster: LaneCluster, made: Callable[[ps.Client], Steps]
) -> None:
    clients, loops, joined_in = _first(cluster), 9, 5
    are_between, may_go_on = threading.Barrier(FIRST + 1), threading.Event()

    def train(steps: Steps) -> None:
        (first, table), (second, _) = steps
        while table.clock < loops:
            first()
            if table.clock == joined_in + 1 and not may_go_on.is_set():
                are_between.wait(DEADLINE_S)
                assert may_go_on.wait(DEADLINE_S)
            second()

    with ThreadPoolExecutor(FIRST + 1) as pool:
        every = list(pool.map(made, clients))
        training = [pool.submit(train, steps) for steps in every]
        are_between.wait(DEADLINE_S)
        clients.append(ps.connect(cluster.address, request_deadline_s=DEADLINE_S))
        newcomer = clients[-1].connection.engine
        until(lambda: all(t.joins for t in newcomer.view.tables), "it has joined both")
        may_go_on.set()
        every.append(made(clients[-1]))
        begun = [table.clock for _, table in every[-1]]
        training.append(pool.submit(train, every[-1]))
        for run in training:
            run.result(DEADLINE_S)
    assert begun == [joined_in + 1, joined_in + 1]
    assert [table.clock for steps in every for _, table in steps] == [loops] * 6
    _close(clients)


@pytest.mark.thorough
def test_a_newcomer_that_is_interrupted_between_two_steps_leaves_where_it_is(
    cluster: LaneCluster,
) -> None:
    """It has ended steps of the others' loop with nothing by then."""
    clients, comes, has_left = _first(cluster), threading.Event(), threading.Event()
    has_joined, was_interrupted = threading.Event(), threading.Event()
    now = [(False, False)]  # of this time of the loop: the newcomer comes; it is the last
    loop = threading.Barrier(
        FIRST, lambda: now.append((comes.is_set(), has_left.is_set())), DEADLINE_S
    )
    in_the_middle = threading.Barrier(FIRST + 1, timeout=DEADLINE_S)

    def train(pair: Pair) -> None:
        critic, actor = pair
        while not now[-1][1]:
            loop.wait()
            joins = now[-1][0] and not has_joined.is_set()
            for number in range(6):
                if joins and number == 2:
                    in_the_middle.wait()
                    has_joined.wait(DEADLINE_S)
                _step(*critic)
            if joins:
                was_interrupted.wait(DEADLINE_S)
            _step(*actor)

    def interrupt(late: ps.Client) -> None:
        place, engine = late.tables.place, late.connection.engine
        until(lambda: len(place.joined(engine.view)) == 2, "it has joined both tables")
        has_joined.set()
        until(lambda: bool(place.clocks), "it follows the others")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with ThreadPoolExecutor(FIRST + 1) as pool:
        every = list(pool.map(_pair, clients))
        training = [pool.submit(train, pair) for pair in every]
        until(lambda: every[0][1][1].clock >= 2, "they step both")
        comes.set()
        in_the_middle.wait()
        late = ps.connect(cluster.address, request_deadline_s=DEADLINE_S)
        pool.submit(interrupt, late)
        with pytest.raises(KeyboardInterrupt):
            _pair(late)
        was_interrupted.set()
        ended = late.tables.place.clocks
        assert {h.table.table_id: h.clock for h in late.tables.handles}.items() <= ended.items()
        late.close()
        has_left.set()
        for run in training:
            run.result(DEADLINE_S)
    _close(clients)


@pytest.mark.slow
def test_models_that_go_on_from_other_clocks_are_equally_far_for_a_newcomer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = {"PUSHPULL_CHECKPOINT_URL": str(tmp_path)}
    resumed = {**ENVIRONMENT, "PUSHPULL_RESUME": str(tmp_path)}

    def trained(client: ps.Client, name: str, count: int) -> ps.DistributedOptimizer:
        """One of the models, after so many steps."""
        model = seeded(lambda: nn.Linear(4, 1))
        optimizer = optimizer_for(client, model, name=name)
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
        return optimizer

    with (
        lane_cluster(servers=1, workers=1, environment=root) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
    ):
        models = [trained(client, "critic", 4), trained(client, "actor", 2)]
        assert [model.clock for model in models] == [4, 2]
        client.checkpoint("for the test").wait(DEADLINE_S)
    with lane_cluster(servers=1, workers=1, environment=resumed) as again:
        for count in (1, 0):  # the second takes the place of the first, who is gone
            client = ps.connect(again.address, request_deadline_s=DEADLINE_S)
            models = [trained(client, "critic", count), trained(client, "actor", count)]
            assert [model.clock for model in models] == [5, 3]
            assert client.is_late_joiner is (count == 0)
            _close([client])
    assert "joined_between_steps" not in caplog.text


@pytest.mark.thorough
def test_a_newcomer_may_leave_without_having_trained(cluster: LaneCluster) -> None:
    """It ends the tables of the others at the clocks that it has joined at."""
    clients = _first(cluster)

    def train(client: ps.Client) -> int:
        model = seeded(Branched)
        optimizer = optimizer_for(client, model, name="alone")
        for x in batches(3, rank=client.rank):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return optimizer.clock

    with ThreadPoolExecutor(FIRST) as pool:
        assert list(pool.map(train, clients)) == [3, 3]
    with ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as late:
        assert late.is_late_joiner
    _close(clients)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "consistency",
    ["bsp", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("ssp:1", "asp"))],
)
def test_a_third_worker_joins_two_that_train(cluster: LaneCluster, consistency: str) -> None:
    clients = _first(cluster)
    assert not any(client.is_late_joiner for client in clients)
    with ThreadPoolExecutor(FIRST + 1) as pool:
        running = Running(pool)
        handles = [table(client, consistency) for client in clients]
        for client, handle in zip(clients, handles, strict=True):
            running.begin(client, handle)
        until(lambda: min(handle.clock for handle in handles) >= 2, "they train")
        late = ps.connect(cluster.address, request_deadline_s=DEADLINE_S)
        clients.append(late)
        assert (late.rank, late.world_size) == (FIRST, FIRST + 1)
        assert late.is_late_joiner
        assert not late.is_replacement
        assert clients[0].world_size == FIRST, "as it was when it connected"
        handle = table(late, consistency)
        at_start = np.asarray(late.pull(handle)).copy()
        begun = handle.clock
        assert begun >= 2, "it begins where the others are"
        running.begin(late, handle)
        *_, found = running.end(begun + STEPS)
        assert len(found) >= STEPS
        if consistency == "bsp":  # its steps are in every update since, in every range
            assert len(np.unique(at_start)) == 1
            mean = -float(gradient(0)[0] + gradient(1)[0] + gradient(2)[0]) / (FIRST + 1)
            assert np.allclose(np.diff([at_start[0], *found]), mean)
        else:  # every step is in there, once
            counts = [*(handle.clock for handle in handles), len(found)]
            expected = sum(count * 10.0**rank for rank, count in enumerate(counts))
            assert np.all(np.asarray(late.pull(handle)) == -expected)
        shown = _status(cluster)
        assert (shown["worker_count"], shown["world_size"]) == (FIRST, FIRST + 1)
        assert sorted(n["rank"] or 0 for n in shown["nodes"] if n["role"] == "worker") == [0, 1, 2]
        _close(clients)


@pytest.mark.thorough
@pytest.mark.timeout(120)
@pytest.mark.parametrize("count", [1, 2])
def test_models_stay_equal_when_workers_join_under_bsp_with_a_schedule(
    cluster: LaneCluster, count: int
) -> None:
    """With BatchNorm and two groups of parameters; `count` workers come at the same time."""
    clients = _first(cluster)
    with ThreadPoolExecutor(FIRST + 2 * count) as pool:
        trainers = list(pool.map(Trainer, clients))
        target: list[int] = []

        def go_on(trainer: Trainer) -> None:
            while not target or trainer.optimizer.clock < target[0]:
                trainer.step()

        def begin(client: ps.Client) -> None:
            trainer = Trainer(client)
            assert trainer.optimizer.clock >= 2
            trainers.append(trainer)
            runs.append(pool.submit(go_on, trainer))  # at once: the others wait for it

        runs = [pool.submit(go_on, trainer) for trainer in trainers]
        until(lambda: trainers[0].optimizer.clock >= 2, "they train")
        late = [ps.connect(cluster.address, request_deadline_s=DEADLINE_S) for _ in range(count)]
        assert [client.rank for client in late] == list(range(FIRST, FIRST + count))
        for beginning in [pool.submit(begin, client) for client in late]:
            beginning.result(DEADLINE_S)
        target.append(max(trainer.optimizer.clock for trainer in trainers) + 8)
        for run in runs:
            run.result(DEADLINE_S)
        assert {trainer.optimizer.clock for trainer in trainers} == {target[0]}
        mine, *others = [trainer.state() for trainer in trainers]
        for other in others:
            for name, value in mine.items():
                assert torch.equal(value, other[name]), name
        _close([*clients, *late])


class Loads:
    """A training loop that may load what it has of an earlier run, whether others train or not."""

    def __init__(self, client: ps.Client, optimizer: ServerOptimizer) -> None:
        self.model = seeded(Branched)
        self.optimizer = optimizer_for(client, self.model, optimizer=optimizer)
        (self._x,) = batches(1, rank=client.rank)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._x).square().mean().backward()
        self.optimizer.step()


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["server", "add"])
def test_what_a_newcomer_has_loaded_is_refused_at_it_alone(cluster: LaneCluster, kind: str) -> None:
    """The others hear nothing of it; without what it has loaded it trains with them."""
    optimizer: ServerOptimizer = ps.SGD(lr=0.1, momentum=0.9)
    if kind == "add":
        optimizer = ps.Add(functools.partial(torch.optim.SGD, lr=0.1))
    clients = _first(cluster)
    with ThreadPoolExecutor(FIRST) as pool:
        loops = list(pool.map(Loads, clients, [optimizer] * FIRST))
        target: list[int] = []

        def go_on(loop: Loads) -> None:
            while not target or loop.optimizer.clock < target[0]:
                loop.step()

        runs = [pool.submit(go_on, loop) for loop in loops]
        until(lambda: loops[0].optimizer.clock >= 2, "they train")
        clients.append(ps.connect(cluster.address, request_deadline_s=DEADLINE_S))
        late = Loads(clients[-1], optimizer)
        loops.append(late)
        begun, served = late.optimizer.clock, values(late.model)
        if kind == "server":
            saved = late.optimizer.state_dict()
            for entry in saved["state"].values():
                entry["momentum_buffer"].mul_(2.0)
            with pytest.raises(ps.EditRefused, match=r"joins others .* optimizer\.clock is 0"):
                late.optimizer.load_state_dict(saved)
        late.model.load_state_dict(seeded(Branched, seed=77).state_dict())
        with pytest.raises(ps.EditRefused, match=r"'gain', .* joins others .*\.clock is 0"):
            late.step()
        late.model.load_state_dict(served)
        assert late.optimizer.clock == begun
        target.append(begun + 3)
        go_on(late)
        for run in runs:
            run.result(DEADLINE_S)
        mine, *others = [values(loop.model) for loop in loops]
        assert [differing(mine, other) for other in others] == [[], []]
        _close(clients)


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_it_leaves_and_another_gets_its_rank(cluster: LaneCluster) -> None:
    clients = _first(cluster)
    with ThreadPoolExecutor(FIRST + 1) as pool, ExitStack() as stack:
        running = Running(pool)
        for client in clients:
            running.begin(client, table(client, "bsp"))
        stack.callback(_close, clients)
        ends = []
        for _ in range(2):
            late = ps.connect(cluster.address, request_deadline_s=DEADLINE_S)
            assert (late.rank, late.world_size, late.is_late_joiner) == (FIRST, FIRST + 1, True)
            handle = table(late, "bsp")
            late.pull(handle)
            for _ in range(3):
                late.push_pull(handle, gradient(late.rank))
            ends.append(handle.clock)
            late.close()
            assert _status(cluster)["world_size"] == FIRST
        assert ends[0] + 3 <= ends[1]
        first, second = running.end(ends[1] + 3)
        assert first == second
        mean = -float(gradient(0)[0] + gradient(1)[0]) / FIRST
        assert np.allclose(np.diff(first[-3:]), mean), "they go on by themselves"
        assert cluster.metric("pushpull_server_short_updates_total") == 0


def step_beyond(address: str, lane: str, consistency: str, pipe: Connection) -> None:
    """A further worker in a process: steps without end."""
    client = ps.connect(address, lane=lane, request_deadline_s=DEADLINE_S)
    try:
        handle = table(client, consistency)
        client.pull(handle)
        while True:
            client.push_pull(handle, gradient(client.rank))
            pipe.send((client.rank, handle.clock))
    finally:
        os._exit(0)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("lane", ["shm", "grpc"])
def test_one_that_is_killed_holds_nobody_up_for_long(cluster: LaneCluster, lane: str) -> None:
    clients = _first(cluster)
    with ThreadPoolExecutor(FIRST) as pool, ExitStack() as stack:
        running = Running(pool)
        handles = [table(client, "bsp") for client in clients]
        for client, handle in zip(clients, handles, strict=True):
            running.begin(client, handle)
        stack.callback(_close, clients)
        with victim(cluster, lane, "bsp", step_beyond) as dying:
            rank, clock = dying.hear()
            assert rank == FIRST
            dying.process.kill()
            until(lambda: _status(cluster)["world_size"] == FIRST, "it is gone")
        first, second = running.end(max(clock, handles[0].clock) + STEPS)
        assert first == second
        again = ps.connect(cluster.address, request_deadline_s=DEADLINE_S)
        assert (again.rank, again.is_late_joiner) == (FIRST, True)
        again.close(leave=False)


@pytest.mark.timeout(120)
def test_there_are_no_more_than_max_workers() -> None:
    with Launcher() as launcher:
        shape = ClusterShape(1, FIRST, environment=ENVIRONMENT)
        scheduler = start_scheduler(launcher, shape)
        clients = [ps.connect(scheduler.address) for _ in range(4)]
        assert [client.rank for client in clients] == [0, 1, 2, 3]
        with pytest.raises(ps.InvalidConfig, match="beyond the 4 that the cluster takes"):
            ps.connect(scheduler.address)
        _close(clients)


@pytest.mark.timeout(120)
def test_a_local_clusters_shape_says_how_many() -> None:
    with Launcher() as launcher:
        scheduler = start_scheduler(launcher, ClusterShape(1, 1, max_workers=2))
        clients = [ps.connect(scheduler.address) for _ in range(2)]
        assert [client.is_late_joiner for client in clients] == [False, True]
        with pytest.raises(ps.InvalidConfig, match="beyond the 2 that the cluster takes"):
            ps.connect(scheduler.address)
        _close(clients)


@pytest.mark.timeout(120)
def test_what_only_the_workers_have_is_told_to_nobody_else(cluster: LaneCluster) -> None:
    clients = _first(cluster)
    clients[0].create_table("sums", 64, optimizer=ps.Aggregate(torch.optim.SGD))
    with pytest.raises(ps.InvalidConfig, match=r"the parameters of table 'sums' \(Aggregate\)"):
        ps.connect(cluster.address)
    _close(clients)
