"""Planned steps against what arithmetic says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import simpy
from simpy.events import ProcessGenerator

import ps_worker as ps
from ps_cli.compare.modes import ComparedMode
from ps_cli.plan.cluster import PlannedCluster
from ps_cli.plan.costs import REFERENCE, Costs, Ends
from ps_cli.plan.simulation import Cores, Latch, Station, Thread
from ps_cli.plan.steps import PlannedStep, planned_step
from ps_core.codecs.choices import PUSH_CHOICES, PushCodec
from ps_core.errors import InvalidConfig
from ps_core.limits import DEFAULT_BLOCK_ELEMENTS, MAX_BLOCK_ELEMENTS, MAX_TABLE_BLOCK_COUNT
from ps_core.tables.elements import DType

GB = 1e9
ELEMENT_COUNT = 2**28
"""A table of 2^30 bytes: 1024 blocks, in equal numbers in each of 64, 128 or 256 ranges."""

TABLE_BYTES = 4 * ELEMENT_COUNT
SEGMENT_TOLERANCE = 0.06
"""A transfer passes two links in up to 32 pieces, so it takes up to two pieces longer."""

FREE = Costs(
    machine="an ideal one",
    push={"none": Ends(0.0, 0.0), "bf16": Ends(0.0, 0.0), "int8": Ends(0.0, 0.0)},
    pull={"none": Ends(0.0, 0.0), "bf16": Ends(0.0, 0.0)},
    push_block=Ends(0.0, 0.0),
    pull_block=Ends(0.0, 0.0),
    update_s={"sgd": 0.0},
    replica_s=0.0,
    staged_s=0.0,
    loaded_s=0.0,
    call_s=0.0,
)

CLUSTER = PlannedCluster(
    worker_count=1,
    server_count=1,
    bytes_per_s=GB,
    latency_s=0.0,
    element_count=ELEMENT_COUNT,
    dtype=DType.FLOAT32,
    optimizer="sgd",
    compute=ps.ComputeTime.parsed("1s"),
    backward_share=0.0,
)
FAST = replace(CLUSTER, bytes_per_s=1e18)


def step(cluster: PlannedCluster, mode: str = "bsp", costs: Costs = FREE) -> PlannedStep:
    return planned_step(cluster.validated(), ComparedMode.parsed(mode), costs)


def visits(
    simulation: simpy.Environment, asked: Sequence[tuple[str, Station]]
) -> list[tuple[str, float]]:
    """Names and times of the ends of visits of one second, all asked for at once."""
    ended_s: list[tuple[str, float]] = []
    all_ended = Latch(simulation, len(asked))

    def visit(name: str, station: Station) -> ProcessGenerator:
        yield station.serve(1.0)
        ended_s.append((name, simulation.now))
        all_ended.arrive()

    def last() -> ProcessGenerator:
        yield all_ended.opened
        yield simulation.timeout(0.5)
        ended_s.append(("all", simulation.now))

    simulation.process(last())
    for name, station in asked:
        simulation.process(visit(name, station))
    simulation.run()
    return ended_s


def test_visits_of_a_station_follow_each_other() -> None:
    simulation = simpy.Environment()
    one, two = Station(simulation), Station(simulation)
    ended_s = visits(simulation, [("a", one), ("b", one), ("c", two)])
    assert ended_s == [("a", 1.0), ("c", 1.0), ("b", 2.0), ("all", 2.5)]
    assert (one.busy_s, two.busy_s) == (2.0, 1.0)


def test_a_station_is_busy_for_the_part_that_it_has_done() -> None:
    simulation = simpy.Environment()
    station = Station(simulation)
    station.serve(2.0)
    station.serve(2.0)
    simulation.run(until=3.0)
    assert station.busy_s == 3.0
    simulation.run(until=5.0)
    station.serve(1.0)
    simulation.run(until=7.0)
    assert station.busy_s == 5.0


def test_threads_share_cores() -> None:
    """a and c take the two cores; d waits for one, and b for its own thread and then for a core."""
    simulation = simpy.Environment()
    cores = Cores(simulation, 2)
    one, two, three = (Thread(simulation, cores) for _ in range(3))
    ended_s = visits(simulation, [("a", one), ("b", one), ("c", two), ("d", three)])
    assert ended_s == [("a", 1.0), ("c", 1.0), ("d", 2.0), ("b", 2.0), ("all", 2.5)]
    assert one.busy_s == 2.0
    assert cores.busy_s == 4.0


def test_computations_share_cores_and_lose_them_to_threads() -> None:
    """One core: a second of computation waits for two turns of a thread, which has begun later."""
    simulation = simpy.Environment()
    cores = Cores(simulation, 1)
    thread = Thread(simulation, cores)
    ended_s = {}

    def computation(name: str) -> ProcessGenerator:
        yield cores.compute(1.0)
        ended_s[name] = simulation.now

    def turns() -> ProcessGenerator:
        yield simulation.timeout(0.25)
        yield thread.serve(0.5) & thread.serve(0.5)
        ended_s["thread"] = simulation.now

    for each in (computation("one"), computation("two"), turns()):
        simulation.process(each)
    simulation.run(until=1.5)
    assert cores.busy_s == 1.5
    simulation.run()
    assert ended_s == {"thread": 1.25, "one": 2.0, "two": 3.0}
    assert cores.busy_s == 3.0


def test_without_costs_a_step_takes_the_time_of_its_computation() -> None:
    found = step(FAST)
    assert found.step_s == pytest.approx(1.0)
    assert found.bottleneck == "compute"
    assert found.busy["compute"] == pytest.approx(1.0)
    assert found.steps_per_s == pytest.approx(1.0)


@pytest.mark.parametrize("backward_share", [0.0, 1.0])
def test_one_worker_computes_then_pushes_then_pulls(backward_share: float) -> None:
    """What leaves while backward runs takes no time of its own, but for the last piece."""
    found = step(replace(CLUSTER, compute=ps.ComputeTime(4.0), backward_share=backward_share))
    transfers = 2.0 if backward_share == 0.0 else 1.0
    ideal_s = 4.0 + transfers * TABLE_BYTES / GB
    assert ideal_s < found.step_s < ideal_s + 2 * SEGMENT_TOLERANCE * TABLE_BYTES / GB
    assert found.bottleneck == "compute"


def test_each_way_there_and_back_takes_the_latency_and_a_call() -> None:
    """The push and the pull each cross the network once, and the seal waits for what came."""
    found = step(replace(FAST, latency_s=0.1), costs=replace(FREE, call_s=0.01))
    assert found.step_s == pytest.approx(1.0 + 0.05 + 0.11 + 0.05)


def test_the_links_of_a_server_limit_many_workers() -> None:
    found = step(replace(CLUSTER, worker_count=16))
    assert found.step_s == pytest.approx(1.0 + 16 * 2 * TABLE_BYTES / GB, rel=SEGMENT_TOLERANCE)
    assert found.bottleneck == "server's link"
    assert found.server_in_bytes == found.server_out_bytes == 16 * TABLE_BYTES


def test_a_worker_s_link_limits_many_servers() -> None:
    found = step(replace(CLUSTER, server_count=16, compute=ps.ComputeTime(0.1)))
    assert found.step_s == pytest.approx(0.1 + 2 * TABLE_BYTES / GB, rel=SEGMENT_TOLERANCE)
    assert found.bottleneck == "worker's link"


def test_the_loop_of_a_server_limits_many_workers() -> None:
    """Under BSP a step has one update, under ASP one for each worker."""
    gb = TABLE_BYTES / GB
    costs = replace(
        FREE, push={"none": Ends(0.0, 2.0)}, pull={"none": Ends(0.0, 1.0)}, update_s={"sgd": 4.0}
    )
    bsp = step(replace(FAST, worker_count=8), "bsp", costs)
    assert bsp.step_s == pytest.approx(1.0 + gb * (8 * 3 + 4), rel=SEGMENT_TOLERANCE)
    assert bsp.bottleneck == "server's CPU"
    asp = step(replace(FAST, worker_count=8), "asp", costs)
    assert asp.step_s == pytest.approx(gb * 8 * (3 + 4), rel=SEGMENT_TOLERANCE)
    assert asp.busy["server's CPU"] == pytest.approx(1.0, rel=SEGMENT_TOLERANCE)


def test_blocks_cost_beside_their_bytes() -> None:
    costs = replace(FREE, push_block=Ends(0.0, 0.01), pull_block=Ends(0.0, 0.02))
    blocks = ELEMENT_COUNT / DEFAULT_BLOCK_ELEMENTS
    assert step(FAST, "bsp", costs).step_s == pytest.approx(1.0 + blocks * 0.03, rel=0.01)


def test_the_processor_of_a_worker_limits_it() -> None:
    costs = replace(
        FREE,
        push={"none": Ends(2.0, 0.0)},
        pull={"none": Ends(1.0, 0.0)},
        staged_s=2.0,
        loaded_s=1.0,
    )
    found = step(replace(FAST, server_count=4), "bsp", costs)
    assert found.step_s == pytest.approx(1.0 + TABLE_BYTES / GB * 6, rel=0.01)
    assert found.bottleneck == "worker's CPU"


@pytest.mark.parametrize(
    ("mode", "expected_s"),
    [
        ("bsp", 3.0),
        ("ssp:2", 3.0),
        ("bsp:backup=1", 1.0),
        ("bsp:backup=1,grace=500ms", 1.5),
        ("asp", 8 / (7 / 1.0 + 1 / 3.0)),
    ],
)
def test_a_worker_that_is_always_slow(mode: str, expected_s: float) -> None:
    slow = ps.ComputeTime.parsed("permanent:1s,3s,rank=5")
    found = step(replace(FAST, worker_count=8, compute=slow), mode)
    assert found.step_s == pytest.approx(expected_s, rel=0.05)
    if mode in ("bsp", "ssp:2"):
        assert found.bottleneck == "stragglers"
        assert found.busy["stragglers"] == pytest.approx(7 / 8 * 2 / 3, rel=0.05)
    if mode == "bsp:backup=1":
        assert found.steps_per_s == pytest.approx(7.0, rel=1e-6)
        assert found.discarded_share == pytest.approx(1 / 22, rel=0.1), "one in three updates"
    elif "backup" not in mode:
        assert found.steps_per_s == pytest.approx(8 / found.step_s)
        assert found.discarded_share == 0.0


@pytest.mark.parametrize("backward_share", [0.0, 1.0])
def test_an_outer_step_moves_the_model_once_after_all_inner_steps(backward_share: float) -> None:
    """Nothing of it leaves while backward runs."""
    found = step(replace(CLUSTER, backward_share=backward_share), "bsp+outer:10")
    expected_s = 1.0 + 2 * TABLE_BYTES / GB / 10
    assert found.step_s == pytest.approx(expected_s, rel=SEGMENT_TOLERANCE)
    assert found.steps_per_s == pytest.approx(1 / found.step_s)
    assert found.pushed_bytes == found.pulled_bytes == TABLE_BYTES / 10
    assert found.server_in_bytes == found.server_out_bytes == TABLE_BYTES / 10


@pytest.mark.parametrize("mode", ["bsp", "ssp:1", "ssp:4", "asp"])
def test_a_rate_counts_the_steps_that_a_step_s_time_counts(mode: str) -> None:
    """Workers apart, so that at any time some are sealed and not pulled."""
    turns = ps.ComputeTime.parsed("rotating:1s,3s,burst=2,seed=1")
    found = step(replace(CLUSTER, worker_count=5, compute=turns), mode)
    assert found.steps_per_s == pytest.approx(5 / found.step_s)


def test_an_outer_step_of_one_inner_step_is_a_step() -> None:
    cluster = replace(CLUSTER, worker_count=3)
    assert step(cluster, "bsp+outer:1") == step(cluster)


def test_the_servers_of_outer_steps_have_sgd() -> None:
    costs = replace(FREE, update_s={"sgd": 1.0, "adam": 100.0})
    found = step(replace(FAST, optimizer="adam"), "bsp+outer:4", costs)
    assert found.step_s == pytest.approx(1.0 + TABLE_BYTES / GB / 4)


def test_slow_inner_steps_that_take_turns_cost_an_outer_step_less() -> None:
    """All wait for the slowest worker, whose fast inner steps make up for slow ones."""
    turns = ps.ComputeTime.parsed("rotating:1s,3s,seed=1")
    cluster = replace(FAST, worker_count=4, compute=turns)
    assert step(cluster, "bsp").step_s == pytest.approx(3.0)
    assert step(cluster, "bsp+outer:100").step_s == pytest.approx(1.5, rel=0.05)


def test_turns_of_slow_workers_cost_bsp_the_slowest_and_asp_the_mean() -> None:
    turns = ps.ComputeTime.parsed("rotating:1s,3s,seed=1")
    cluster = replace(FAST, worker_count=4, compute=turns)
    assert step(cluster, "bsp").step_s == pytest.approx(3.0)
    assert step(cluster, "asp").step_s == pytest.approx(1.5, rel=0.05)
    assert 1.5 < step(cluster, "ssp:1").step_s < 3.0


def test_a_worker_whose_step_was_discarded_goes_on_where_the_others_are() -> None:
    """Each is slow for three clocks, in which the others make the updates without it."""
    turns = ps.ComputeTime.parsed("rotating:1s,3200ms,burst=3,seed=1")
    found = step(replace(FAST, worker_count=4, compute=turns), "bsp:backup=1")
    assert found.step_s == pytest.approx(1.0, rel=0.1)
    assert found.steps_per_s * found.step_s == pytest.approx(3.0), "each update has three steps"


def test_a_replica_takes_an_update_under_bsp_and_each_push_under_asp() -> None:
    cluster = replace(CLUSTER, worker_count=4, server_count=2, replica_count=2)
    costs = replace(FREE, replica_s=1.0)
    alone, pairs = (
        [step(replace(cluster, replica_count=count), mode, costs) for mode in ("bsp", "asp")]
        for count in (1, 2)
    )
    more_bytes = [
        two.server_out_bytes - one.server_out_bytes for one, two in zip(alone, pairs, strict=True)
    ]
    assert more_bytes == [TABLE_BYTES / 2, 4 * TABLE_BYTES / 2]
    assert pairs[0].step_s - alone[0].step_s == pytest.approx(
        TABLE_BYTES / 2 / GB * 3, rel=SEGMENT_TOLERANCE
    ), "its work, and its bytes out and in"


@pytest.mark.slow
def test_more_servers_and_faster_links_are_never_slower() -> None:
    costs = replace(
        FREE, push={"none": Ends(0.3, 0.4)}, pull={"none": Ends(0.3, 0.2)}, update_s={"sgd": 0.1}
    )
    cluster = replace(CLUSTER, worker_count=6, backward_share=0.5)
    for mode in ("bsp", "asp"):
        for changed in ("server_count", "bytes_per_s"):
            clusters = (
                replace(cluster, **{changed: count * getattr(cluster, changed)})
                for count in (1, 2, 3, 4, 5, 8, 9, 16, 31, 100)
            )
            found = [step(each, mode, costs).step_s for each in clusters]
            for slow_s, fast_s in pairwise(found):
                assert fast_s <= slow_s * (1 + 1e-9), (mode, changed, found)


@pytest.mark.parametrize(
    ("server_count", "element_count", "shares"),
    [
        (1, ELEMENT_COUNT, [1.0]),
        (4, ELEMENT_COUNT, [0.25] * 4),
        (100, ELEMENT_COUNT, [3 / 256] * 56 + [2 / 256] * 44),
        (4, DEFAULT_BLOCK_ELEMENTS, [1.0]),
        (4, 5 * DEFAULT_BLOCK_ELEMENTS, [2 / 5, 1 / 5, 1 / 5, 1 / 5]),
    ],
)
def test_servers_have_whole_ranges(
    server_count: int, element_count: int, shares: list[float]
) -> None:
    cluster = replace(CLUSTER, server_count=server_count, element_count=element_count)
    assert cluster.shares == shares


@pytest.mark.parametrize(
    ("mode", "dtype", "pushed", "pulled"),
    [
        ("bsp", DType.FLOAT32, 4, 4),
        ("bsp+bf16", DType.FLOAT32, 2, 2),
        ("bsp+int8/none", DType.FLOAT32, 1 + 4 / 256, 4),
        ("bsp", DType.BFLOAT16, 2, 2),
        ("bsp+bf16/fp32", DType.BFLOAT16, 2, 2),
    ],
)
def test_bytes_are_those_of_the_codecs(
    mode: str, dtype: DType, pushed: float, pulled: float
) -> None:
    found = step(replace(FAST, dtype=dtype), mode)
    assert found.pushed_bytes == pushed * ELEMENT_COUNT
    assert found.pulled_bytes == pulled * ELEMENT_COUNT


def test_a_table_of_as_many_elements_as_it_may_have_is_planned() -> None:
    largest = replace(FAST, element_count=MAX_TABLE_BLOCK_COUNT * MAX_BLOCK_ELEMENTS)
    assert largest.validated().block_elements == MAX_BLOCK_ELEMENTS
    with pytest.raises(InvalidConfig, match="the elements of one table"):
        replace(largest, element_count=largest.element_count + 1).validated()
    defaults = replace(FAST, element_count=MAX_TABLE_BLOCK_COUNT * DEFAULT_BLOCK_ELEMENTS)
    assert defaults.block_elements == DEFAULT_BLOCK_ELEMENTS


def test_a_sparse_push_is_that_after_its_warm_up() -> None:
    costs = replace(FREE, push={"topk": Ends(0.0, 0.0)})
    found = step(FAST, "bsp+topk:0.01:500/none", costs)
    assert found.pushed_bytes == PushCodec.parsed("topk:0.01").payload_bytes(ELEMENT_COUNT, 1)


def test_every_codec_has_costs() -> None:
    for choice in (each for each in PUSH_CHOICES if each not in ("none", "fp32")):
        assert REFERENCE.of("push", PushCodec.parsed(choice).codec) != Ends(0.0, 0.0)


def test_what_was_not_measured_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="a push in the codec sign has no measured cost"):
        step(CLUSTER, "bsp+sign")
    with pytest.raises(
        InvalidConfig, match="the optimizer adam has no measured cost; expected sgd"
    ):
        step(replace(CLUSTER, optimizer="adam"))


def test_roles_on_one_host_share_its_cores_and_need_no_network() -> None:
    costs = replace(FREE, push={"none": Ends(1.0, 0.0)})
    gb = TABLE_BYTES / GB
    host = replace(CLUSTER, worker_count=8, bytes_per_s=1.0, has_gpus=True)
    for cores, expected_s in ((1, 8 * gb), (2, 4 * gb), (8, gb), (100, gb)):
        found = step(replace(host, host_cores=cores), "bsp", costs)
        assert found.step_s == pytest.approx(1.0 + expected_s, rel=0.02)


@pytest.mark.parametrize("mode", ["bsp", "asp", "bsp+outer:4"])
@pytest.mark.parametrize("backward_share", [0.0, 0.67])
def test_computations_on_one_host_share_its_cores(mode: str, backward_share: float) -> None:
    """One core for each worker, beside what the roles do; GPUs compute beside the cores."""
    costs = replace(FREE, push={"none": Ends(0.5, 0.5)})
    host = replace(CLUSTER, worker_count=8, backward_share=backward_share)
    moved_s = 8 * TABLE_BYTES / GB / (4 if "outer" in mode else 1)
    for cores, expected_s in ((1, 8.0 + moved_s), (2, 4.0 + moved_s / 2)):
        found = step(replace(host, host_cores=cores), mode, costs)
        assert found.step_s == pytest.approx(expected_s, rel=0.05)
        assert found.bottleneck == "host's cores"
        assert found.busy["host's cores"] == pytest.approx(1.0, abs=0.05)
    for shared in (replace(host, host_cores=100), replace(host, host_cores=100, has_gpus=True)):
        assert step(shared, mode).step_s == pytest.approx(1.0)
    assert "host's cores" not in step(host, mode, costs).busy


def test_servers_on_one_host_share_its_cores() -> None:
    costs = replace(FREE, push={"none": Ends(0.0, 1.0)})
    cluster = replace(CLUSTER, server_count=4, host_cores=2, has_gpus=True)
    assert step(cluster, "bsp", costs).step_s == pytest.approx(1.0 + TABLE_BYTES / GB / 2, rel=0.05)


@pytest.mark.parametrize("mode", ["bsp", "asp"])
@pytest.mark.parametrize("block_count", [1, 5])
def test_each_server_on_one_host_has_its_own_share(mode: str, block_count: int) -> None:
    """Together they do a model's work, however few blocks it has for them."""
    costs = replace(
        FREE,
        push={"none": Ends(0.0, 100.0)},
        pull={"none": Ends(0.0, 100.0)},
        update_s={"sgd": 100.0},
    )
    cluster = replace(
        CLUSTER,
        element_count=block_count * DEFAULT_BLOCK_ELEMENTS,
        server_count=4,
        host_cores=1,
        has_gpus=True,
    )
    gb = 4 * cluster.element_count / GB
    assert step(cluster, mode, costs).step_s == pytest.approx(1.0 + 300.0 * gb, rel=0.01)


@pytest.mark.thorough
def test_a_thousand_workers_are_planned() -> None:
    costs = replace(FREE, push={"none": Ends(0.0, 1.0)})
    found = step(replace(FAST, worker_count=1000, server_count=128), "bsp", costs)
    assert found.step_s == pytest.approx(1.0 + 1000 * TABLE_BYTES / GB / 128, rel=0.01)
