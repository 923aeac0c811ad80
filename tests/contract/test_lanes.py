"""What a lane must do, whichever it is: the same bits arrive, in steps, parts and reads of any
size.

Each test runs with both workers on shared memory, with both on the gRPC stream, and with one on
each. The second worker's window is smaller than a block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import ps_worker as ps
from ps_core import limits
from tests.integration.lane_cluster import LaneCluster, lane_cluster, until
from tests.integration.training_models import Branched, batches, differing, seeded, twin, values

pytestmark = pytest.mark.slow

DEADLINE_S = 40.0
DEFAULT_BLOCK = limits.DEFAULT_BLOCK_ELEMENTS
SMALL_WINDOW_BYTES = 100_000

LANES = {"shm": ("shm", "shm"), "grpc": ("grpc", "grpc"), "mixed": ("shm", "grpc")}

_names = count()
Floats = npt.NDArray[Any]


@dataclass(frozen=True)
class Team:
    """The workers of a cluster of two, and two readers, on the lanes that the test runs over."""

    cluster: LaneCluster
    workers: tuple[ps.Client, ps.Client]
    readers: tuple[ps.Client, ps.Client]
    pool: ThreadPoolExecutor

    def tables(self, layout: Any, optimizer: Any = None, **options: Any) -> list[ps.TableHandle]:
        """A new table, as both workers see it; sums by default: nothing is rounded twice."""
        name = f"table {next(_names)}"
        optimizer = optimizer or ps.SGD(lr=1.0)
        options = {"reduction": "sum", **options}
        return [
            worker.create_table(name, layout, optimizer=optimizer, **options)
            for worker in self.workers
        ]

    def step(self, tables: list[ps.TableHandle], gradients: Any) -> list[Any]:
        """A step of both workers, at the same time; what each pulled."""
        calls = zip(self.workers, tables, gradients, strict=True)
        done = [self.pool.submit(worker.push_pull, table, g) for worker, table, g in calls]
        return [call.result(DEADLINE_S) for call in done]

    def read(self, table: ps.TableHandle, **options: Any) -> list[Any]:
        """What each reader pulls."""
        return [reader.pull(reader.table(table.name), **options) for reader in self.readers]

    def run(self, function: Callable[[ps.Client, int], Any]) -> list[Any]:
        """The function at each worker, at the same time."""
        return list(self.pool.map(function, self.workers, (0, 1), timeout=DEADLINE_S))


@pytest.fixture(scope="module", params=LANES)
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    first, second = LANES[request.param]
    with (
        lane_cluster(servers=2, workers=2) as cluster,
        ThreadPoolExecutor(4) as pool,
        ps.connect(cluster.address, rank=0, lane=first, request_deadline_s=DEADLINE_S) as worker,
        ps.connect(
            cluster.address,
            rank=1,
            lane=second,
            request_deadline_s=DEADLINE_S,
            window_bytes=SMALL_WINDOW_BYTES,
        ) as other,
        ps.connect(cluster.address, role="reader", lane=first) as reader,
        ps.connect(cluster.address, role="reader", lane=second) as other_reader,
    ):
        yield Team(cluster, (worker, other), (reader, other_reader), pool)


def random(element_count: int, seed: int) -> Floats:
    """Gradients that every float of the table's dtype may be."""
    return np.random.default_rng(seed).standard_normal(element_count, dtype=np.float32)


def equal(found: Any, expected: Any) -> bool:
    """Bit for bit."""
    return torch.equal(torch.as_tensor(found), torch.as_tensor(expected))


@pytest.mark.thorough
def test_each_client_is_on_its_lane(team: Team, request: pytest.FixtureRequest) -> None:
    lane = request.node.callspec.params["team"]
    tables = team.tables(64 * 20, block_elements=64)
    team.step(tables, [random(64 * 20, rank) for rank in (0, 1)])
    team.read(tables[0])
    expected = {"shm": 4, "grpc": 0, "mixed": 2}[lane]
    until(lambda: team.cluster.shm_sessions == [expected] * 2, f"{expected} sessions share memory")
    for server in team.cluster.servers:
        rings = [name for name in server.mappings if name == "pushpull-ring"]
        assert len(rings) == {"shm": 2, "grpc": 0, "mixed": 1}[lane], "readers have none"


# --- steps


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_sums_of_every_dtype_are_exact(team: Team, dtype: str) -> None:
    """Two blocks, the last one short and of an odd size; the sum is taken in rank order."""
    kind = getattr(torch, dtype)
    size = DEFAULT_BLOCK + 37_857
    tables = team.tables(size, dtype=dtype)
    master = torch.zeros(size, dtype=torch.float64 if dtype == "float64" else torch.float32)
    for step in range(2):
        gradients = [torch.from_numpy(random(size, 10 * step + r)).to(kind) for r in (0, 1)]
        master -= gradients[0].to(master.dtype) + gradients[1].to(master.dtype)
        for found in [*team.step(tables, gradients), *team.read(tables[0])]:
            assert equal(found, master.to(kind))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "block_elements",
    [
        64,
        limits.LANE_MIN_PAYLOAD_BYTES // 4 - 64,
        limits.LANE_MIN_PAYLOAD_BYTES // 4,
        limits.LANE_MIN_PAYLOAD_BYTES // 4 + 64,
    ],
)
def test_blocks_of_every_size_arrive(team: Team, block_elements: int) -> None:
    size = 400 * block_elements + 17
    if block_elements > 64:
        size = 30 * block_elements + 4_097
    tables = team.tables(size, block_elements=block_elements)
    expected = np.zeros(size, np.float32)
    for step in range(2):
        gradients = [random(size, 10 * step + rank) for rank in (0, 1)]
        expected -= gradients[0] + gradients[1]
        for found in team.step(tables, gradients):
            assert equal(found, expected)


@pytest.mark.thorough
def test_blocks_of_the_largest_size_fill_the_ring(team: Team) -> None:
    """Four of them do; nobody may wait for a fifth before the first are answered."""
    block_elements = limits.MAX_BLOCK_ELEMENTS
    size = 12 * block_elements + 8
    tables = team.tables(size, dtype="float64", block_elements=block_elements)
    assert 4 * 8 * block_elements == limits.LANE_RING_BYTES
    gradients = [random(size, rank).astype(np.float64) for rank in (0, 1)]
    for found in team.step(tables, gradients):
        assert equal(found, -(gradients[0] + gradients[1]))


def test_initial_values_are_assigned(team: Team) -> None:
    size = 2 * DEFAULT_BLOCK + 5
    tables = team.tables(size, init=ps.FromRank0())
    initial = random(size, 1)
    cut = DEFAULT_BLOCK
    team.workers[0].assign(tables[0], initial[:cut], slice=slice(0, cut), seal=False)
    team.workers[0].assign(tables[0], initial[cut:], slice=slice(cut, size))
    for worker, table in zip(team.workers, tables, strict=True):
        assert equal(worker.pull(table), initial)


def test_pushes_of_parts_leave_the_rest_alone(team: Team) -> None:
    layout = [("a", (70_000,)), ("b", (3, 30_000)), ("c", (7,)), ("d", (20_000,))]
    tables = team.tables(layout, ps.SGD(lr=1.0, weight_decay=1.0), init=ps.Constant(2.0),
                         block_elements=65_536)  # fmt: skip
    first, second = team.workers
    b, c = random(90_000, 1).reshape(3, 30_000), random(7, 2)
    first.push(tables[0], {"b": b}, seal=False)
    first.push(tables[0], {"c": c})
    second.push(tables[1], {"c": c}, seal=False)
    second.seal(tables[1], contribution_scale=0.5)
    for worker, table in zip(team.workers, tables, strict=True):
        found = table.tensors(worker.pull(table))
        assert np.all(np.asarray(found["a"]) == 2.0)
        assert np.all(np.asarray(found["d"]) == 2.0)
        assert equal(found["b"], (np.float32(2.0) - (b + np.float32(2.0))))
        scaled = c + c * np.float32(0.5)
        assert equal(found["c"], (np.float32(2.0) - (scaled + np.float32(2.0))))


def test_sums_alone_are_kept_where_workers_optimize(team: Team) -> None:
    size = DEFAULT_BLOCK + 1_001
    tables = team.tables(size, ps.Aggregate())
    for step in range(3):
        gradients = [random(size, 10 * step + rank) for rank in (0, 1)]
        for found in team.step(tables, gradients):
            assert equal(found, gradients[0] + gradients[1])


@pytest.mark.thorough
def test_more_than_the_ring_holds_is_pushed_at_once(team: Team) -> None:
    size = 27_000_001
    assert size * 4 > 6 * limits.LANE_RING_BYTES
    tables = team.tables(size)
    gradient = random(size, 3)
    first, second = team.workers
    ticket = first.push(tables[0], gradient, copy=False)
    second.push(tables[1], gradient[:DEFAULT_BLOCK], slice=slice(0, DEFAULT_BLOCK))
    first.wait(ticket)
    gradient[:DEFAULT_BLOCK] += gradient[:DEFAULT_BLOCK]
    out = np.empty(size, np.float32)
    first.pull(tables[0], out=out)
    assert equal(out, -gradient)


@pytest.mark.thorough
def test_buffers_that_servers_read_are_told_apart(team: Team) -> None:
    """One that takes another's place, at its address and with its descriptor, is not that one."""
    size = DEFAULT_BLOCK + 64
    tables = team.tables(size, consistency=ps.ASP())
    expected = np.zeros(size, np.float32)
    for seed in range(6):
        gradient = ps.empty_shared(size)
        gradient[:] = random(size, seed)
        for _ in range(3):  # the first may go another way, until the server has mapped the buffer
            for worker, table in zip(team.workers, tables, strict=True):
                worker.wait(worker.push(table, gradient, copy=False))
                expected -= gradient
        del gradient
        assert equal(team.workers[0].pull(tables[0]), expected)
    for worker, table in zip(team.workers, tables, strict=True):
        worker.wait(worker.push(table, expected))
    until(
        lambda: not any("pushpull-buffer" in server.mappings for server in team.cluster.servers),
        "what the workers dropped is unmapped",
    )


@pytest.mark.thorough
def test_a_gate_of_two_blocks_refuses_and_gives_back_and_loses_nothing(team: Team) -> None:
    block_elements, block_count = 16_384, 24
    size = block_elements * block_count
    tables = team.tables(size, block_elements=block_elements, gate_bytes=2 * 4 * block_elements)
    refused = "pushpull_server_quota_refusals_total"
    before = team.cluster.metric(refused)
    steps = [[random(size, 10 * step + rank) for rank in (0, 1)] for step in range(3)]

    def push_all(worker: ps.Client, rank: int) -> None:
        for gradients in steps:
            worker.push(tables[rank], gradients[rank])
        worker.pull(tables[rank])

    team.run(push_all)
    expected = np.zeros(size, np.float32)
    for gradients in steps:
        expected -= gradients[0] + gradients[1]
    for found in team.read(tables[0]):
        assert equal(found, expected)
    assert team.cluster.metric(refused) > before


@pytest.mark.thorough
def test_an_optimizer_trains_to_the_bits_of_one_process(team: Team) -> None:
    reference = seeded(Branched)
    local = torch.optim.AdamW(reference.parameters(), lr=0.01, foreach=False)
    inputs = [list(batches(4, rank=rank)) for rank in (0, 1)]
    name = f"model {next(_names)}"

    def train(worker: ps.Client, rank: int) -> Any:
        model = twin(initial)
        optimizer = ps.DistributedOptimizer(
            worker, model, ps.AdamW(lr=0.01), name=name, kernels="exact", block_elements=64
        )
        for x in inputs[rank]:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return values(model)

    initial = twin(reference)
    found = team.run(train)
    for pair in zip(*inputs, strict=True):
        sums: dict[Any, torch.Tensor] = {}
        for x in pair:
            reference.zero_grad()
            reference(x).square().mean().backward()
            for p in reference.parameters():
                sums[p] = sums[p] + p.grad if p in sums else p.grad.clone()
        for p, total in sums.items():
            p.grad = total * torch.tensor(0.5)
        local.step()
    for model in found:
        assert not differing(model, values(reference))


# --- reads


@pytest.mark.thorough
def test_parts_are_read_as_the_whole_is(team: Team) -> None:
    block_elements = 8_192
    size = 12 * block_elements + 1_234
    tables = team.tables(
        [("a", (size - 600,)), ("b", (20, 30))], init=ps.FromRank0(), block_elements=block_elements
    )
    whole = random(size, 5)
    team.workers[0].assign(tables[0], whole)
    dice = np.random.default_rng(6)
    clients = [*zip(team.workers, tables, strict=True)]
    clients += [(reader, reader.table(tables[0].name)) for reader in team.readers]
    for client, table in clients:
        for _ in range(20):
            begin, end = sorted(dice.integers(0, size + 1, 2).tolist())
            part = slice(begin, max(end, begin + 1)) if begin < size else slice(size - 1, size)
            assert equal(client.pull(table, slice=part), whole[part])
        assert equal(client.pull(table, slice="b"), whole[-600:].reshape(20, 30))


@pytest.mark.thorough
def test_consistent_reads_keep_up_with_training(team: Team) -> None:
    """A reader that asks for one clock of all ranges gets it, however fast the clock moves on: here
    in less time than it takes to copy the table, at the block that is copied last.
    """
    block_elements, block_count = 16_384, 300
    tables = team.tables(block_elements * block_count, block_elements=block_elements)
    table = tables[0].table
    hot = max(range(block_count), key=lambda b: table.range_of_block(b, limits.RANGE_COUNT))
    part = slice(hot * block_elements, (hot + 1) * block_elements)
    ones = np.ones(block_elements, np.float32)
    stop = threading.Event()
    turns: SimpleQueue[bool] = SimpleQueue()
    first, second = team.workers

    def lead() -> None:
        while not stop.is_set():
            turns.put(True)
            first.wait(first.push(tables[0], ones, slice=part))
        turns.put(False)

    def follow() -> None:
        while turns.get():
            second.wait(second.push(tables[1], ones, slice=part))

    own = [reader.table(tables[0].name) for reader in team.readers]
    training = [team.pool.submit(lead), team.pool.submit(follow)]
    try:
        for reader, handle in zip(team.readers, own, strict=True):
            for _ in range(3):
                found = np.asarray(reader.pull(handle, consistent=True, timeout_s=10.0))
                clock = -found[part.start] / 2
                assert clock == np.rint(clock)
                assert np.all(found[part] == -2 * clock)
                found[part] = 0
                assert not found.any()
    finally:
        stop.set()
    for steps in training:
        steps.result(DEADLINE_S)


@pytest.mark.thorough
def test_no_read_is_torn_while_others_push(team: Team) -> None:
    """ASP: all that a range holds changes together, so a read of it has one value, a whole one
    (SH-2).
    """
    block_elements, block_count = 16_384, 300
    size = block_elements * block_count
    tables = team.tables(size, consistency=ps.ASP(), block_elements=block_elements)
    ranges: dict[int, list[int]] = {}
    for block in range(block_count):
        ranges.setdefault(tables[0].table.range_of_block(block, limits.RANGE_COUNT), []).append(
            block
        )
    assert any(len(blocks) > 1 for blocks in ranges.values())
    ones = np.ones(size, np.float32)
    stop = threading.Event()

    def push_all(worker: ps.Client, rank: int) -> int:
        clock = 0
        while not stop.is_set():
            worker.wait(worker.push(tables[rank], ones, copy=False))
            clock += 1
        return clock

    training = team.pool.submit(team.run, push_all)
    own = [reader.table(tables[0].name) for reader in team.readers]
    try:
        for _ in range(8):
            for reader, table in zip(team.readers, own, strict=True):
                found = np.asarray(reader.pull(table)).reshape(block_count, block_elements)
                assert np.all(found == found[:, :1]), "a block is torn"
                assert np.all(found[:, 0] == np.rint(found[:, 0]))
                for blocks in ranges.values():
                    assert len(set(found[blocks, 0].tolist())) == 1, "a range is torn"
    finally:
        stop.set()
    total = sum(training.result(DEADLINE_S))
    for found in team.read(tables[0]):
        assert np.all(found == -float(total))
