"""Tables whose gradients and values travel in fewer bits: the same on every lane, and exact."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import ps_worker as ps
from ps_core.codecs.choices import PushCodec
from ps_core.tables.elements import Codec
from ps_worker.compression.table_codecs import TableCodecs

pytestmark = pytest.mark.slow

Floats = npt.NDArray[np.float32]

SIZE, BLOCK = 300_000, 65_536
DEADLINE_S = 30.0
LANES = ("shm", "grpc")

_numbers = itertools.count()


@pytest.fixture(scope="module")
def pairs() -> Iterator[dict[str, list[ps.Client]]]:
    """Two workers of one cluster for each lane."""
    with ps.local_cluster(servers=2, workers=4) as cluster:
        ranks = itertools.count()
        found = {
            lane: [
                ps.connect(
                    cluster.address, rank=next(ranks), lane=lane, request_deadline_s=DEADLINE_S
                )
                for _ in range(2)
            ]
            for lane in LANES
        }
        yield found
        for client in itertools.chain(*found.values()):
            client.close(leave=False)


def created(clients: list[ps.Client], **options: Any) -> list[ps.TableHandle]:
    """A new table of each of these workers, under ASP: nobody waits for the others."""
    terms: Any = {"optimizer": ps.SGD(lr=1.0), "consistency": "asp", "block_elements": BLOCK}
    name = f"table {next(_numbers)}"
    return [client.create_table(name, SIZE, **(terms | options)) for client in clients]


def gradient(number: int) -> Floats:
    draw = np.random.default_rng(number)
    return draw.standard_normal(SIZE, np.float32) * np.float32(10.0 ** (number % 3))


def trained(client: ps.Client, table: ps.TableHandle, count: int = 12) -> Floats:
    """The values after some steps of one worker."""
    for number in range(count):
        values = client.push_pull(table, gradient(number))
    return np.asarray(values)


def left_of(table: ps.TableHandle) -> Floats:
    residuals = table.steps.residuals
    assert residuals is not None
    state = residuals.state_dict()
    assert state["scale"] == 1.0
    return np.asarray(state["residuals"].numpy())


def test_values_are_all_gradients_but_what_is_left_of_them(
    pairs: dict[str, list[ps.Client]],
) -> None:
    """RES-1, on both lanes with the same bits."""
    expected = -sum(gradient(number).astype(np.float64) for number in range(12))
    found = []
    for lane in LANES:
        (table,) = created(pairs[lane][:1], push_codec="int8")
        values = trained(pairs[lane][0], table)
        left = left_of(table)
        assert np.abs(left).max() > 0.01
        np.testing.assert_allclose(values - left, expected, atol=1e-2)
        found.append(values)
    # The draws are of the rank, which differs; the sums do not.
    np.testing.assert_allclose(found[0], found[1], atol=10.0)


@pytest.mark.parametrize("codec", ["bf16", "fp16", "int8"])
def test_both_lanes_give_the_same_rounded_values(
    pairs: dict[str, list[ps.Client]], codec: str
) -> None:
    name = f"table {next(_numbers)}"
    clients = [pairs[lane][0] for lane in LANES]
    tables = [
        client.create_table(
            name,
            SIZE,
            optimizer=ps.SGD(lr=1.0),
            consistency="asp",
            block_elements=BLOCK,
            pull_codec=codec,
        )
        for client in clients
    ]
    clients[0].wait(clients[0].push(tables[0], gradient(1)))
    shared, sent = (client.pull(table) for client, table in zip(clients, tables, strict=True))
    assert np.array_equal(shared, sent)
    exact = -gradient(1)
    step = {"bf16": 2.0**-8, "fp16": 2.0**-11, "int8": 1 / 120}[codec] * np.abs(exact).max()
    assert 0 < np.abs(shared - exact).max() <= step
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(codec)
    if dtype is not None:
        rounded = torch.from_numpy(exact).to(dtype).to(torch.float32)
        assert np.array_equal(shared, rounded.numpy())
    part = clients[1].pull(tables[1], slice=slice(100_000, 100_100))
    assert np.array_equal(part, shared[100_000:100_100])


def test_fewer_bytes_travel(pairs: dict[str, list[ps.Client]]) -> None:
    client = pairs["grpc"][0]
    for codec, ratio in (("none", 1.0), ("bf16", 0.5), ("fp16", 0.5), ("int8", 65 / 256)):
        (table,) = created([client], push_codec=codec, pull_codec=codec)
        before = client.progress()
        client.push_pull(table, gradient(0))
        after = client.progress()
        expected = pytest.approx(4 * SIZE * ratio, rel=1e-3)
        assert after.pushed_bytes - before.pushed_bytes == expected
        assert after.pulled_bytes - before.pulled_bytes == expected


def test_signs_take_a_bit_an_element_and_all_else_comes_later(
    pairs: dict[str, list[ps.Client]],
) -> None:
    """RES-1. A pull has no feedback, and is refused: by the worker, and by servers."""
    expected = -sum(gradient(number).astype(np.float64) for number in range(12))
    client = pairs["grpc"][0]
    (table,) = created([client], push_codec="sign")
    before = client.progress().pushed_bytes
    values = trained(client, table)
    pushed_bytes = client.progress().pushed_bytes - before
    assert pushed_bytes == pytest.approx(12 * SIZE * 4 / 28.44, rel=1e-3)
    np.testing.assert_allclose(values - left_of(table), expected, atol=1e-1)
    with pytest.raises(ps.PushpullError, match="pull_codec is 'sign'; expected one of none, fp32"):
        created([client], pull_codec="sign")


@pytest.mark.parametrize("way", ["topk", "randomk"])
def test_a_hundredth_of_the_elements_goes_and_all_else_comes_later(
    pairs: dict[str, list[ps.Client]], way: str
) -> None:
    """RES-1, on both lanes."""
    expected = -sum(gradient(number).astype(np.float64) for number in range(12))
    for lane in LANES:
        client = pairs[lane][0]
        (table,) = created([client], push_codec=f"{way}:0.01")
        before = client.progress().pushed_bytes
        values = trained(client, table)
        pushed_bytes = client.progress().pushed_bytes - before
        assert pushed_bytes == pytest.approx(12 * SIZE * 0.08, rel=1e-2)
        np.testing.assert_allclose(values - left_of(table), expected, atol=1e-2)
        assert np.count_nonzero(values) <= 12 * SIZE * 0.0101


def test_two_factors_of_each_block_go_and_all_else_comes_later(
    pairs: dict[str, list[ps.Client]],
) -> None:
    """RES-1, on both lanes. A block of 256 x 256 elements takes 4 * 512 numbers."""
    expected = -sum(gradient(number).astype(np.float64) for number in range(12))
    for lane in LANES:
        client = pairs[lane][0]
        (table,) = created([client], push_codec="lowrank:4")
        before = client.progress().pushed_bytes
        values = trained(client, table)
        pushed_bytes = client.progress().pushed_bytes - before
        assert pushed_bytes == pytest.approx(12 * (4 * 8204 + 6252), rel=1e-2)
        np.testing.assert_allclose(values - left_of(table), expected, atol=1e-2)


def test_a_block_that_falls_back_to_a_denser_codec_is_told_of_once(
    pairs: dict[str, list[ps.Client]], caplog: pytest.LogCaptureFixture
) -> None:
    """One element has nearly all of each block's gradient, of which a sign says little."""
    client, steep = pairs["grpc"][0], np.zeros(SIZE, np.float32)
    steep[::BLOCK] = 1.0
    (table,) = created([client], push_codec="sign")
    for _ in range(100):
        values = client.push_pull(table, steep)
    assert caplog.text.count("residual_outgrew_gradients") == 1
    np.testing.assert_allclose(values - left_of(table), -100 * steep, atol=0.01)
    assert np.abs(left_of(table)).max() < 20


def test_a_gradient_that_is_not_finite_is_refused_as_any_and_changes_nothing(
    pairs: dict[str, list[ps.Client]],
) -> None:
    """Its finite blocks neither: what was left of earlier ones stays (RES-1)."""
    client = pairs["grpc"][1]
    (table,) = created([client], push_codec="int8")
    client.push_pull(table, gradient(0))
    left = left_of(table)
    bad = gradient(1)
    bad[BLOCK + 7] = np.nan
    with pytest.raises(ps.PushpullError, match="non-finite gradient"):
        client.wait(client.push(table, bad))
    assert np.array_equal(left_of(table), left)
    values = client.push_pull(table, gradient(2))
    expected = -(gradient(0).astype(np.float64) + gradient(2))
    np.testing.assert_allclose(values - left_of(table), expected, atol=1e-2)


@pytest.mark.parametrize(
    "optimizer",
    [
        ps.SGD(lr=1e-3),
        pytest.param(ps.Aggregate(partial(torch.optim.SGD, lr=1e-3)), marks=pytest.mark.thorough),
        pytest.param(ps.Add(partial(torch.optim.SGD, lr=1.0)), marks=pytest.mark.thorough),
        ps.Outer(partial(torch.optim.SGD, lr=1.0), 1),
    ],
    ids=["sgd", "aggregate", "add", "outer"],
)
def test_a_gradient_that_fp16_cannot_hold_skips_the_step_and_the_others_go_on(
    pairs: dict[str, list[ps.Client]], optimizer: Any
) -> None:
    """It may be clipped after `backward`: then it counts."""
    name, clients = f"model {next(_numbers)}", [*itertools.chain(*pairs.values())]

    def work(client: ps.Client) -> tuple[str, torch.Tensor]:
        model, said = torch.nn.Linear(8, 1, bias=False), ""
        trained = ps.DistributedOptimizer(client, model, optimizer, name=name, push_codec="fp16")
        for step in range(3):
            trained.zero_grad()
            is_large = step == 1 and client.rank in (0, 1)
            (model(torch.ones(1, 8)) * (1e5 if is_large else 1.0)).sum().backward()
            if client.rank == 0:
                torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
            try:
                trained.step()
            except ps.InvalidTensor as error:
                said = error.message
        assert trained.clock == 3
        return said, model.weight.detach()

    with ThreadPoolExecutor(len(clients)) as threads:
        clipped, too_large, *others = threads.map(work, clients)
    assert "is beyond what push_codec fp16 can hold (65504), unlike bf16 and int8" in too_large[0]
    assert "The step was skipped on every server" in too_large[0]
    for said, values in (clipped, *others):
        assert not said
        assert torch.equal(values, too_large[1])


def test_of_an_eager_step_that_fp16_cannot_hold_what_has_left_counts(
    pairs: dict[str, list[ps.Client]],
) -> None:
    """Not the rest, and none of it twice: the step ends, and the next one goes on."""
    one, other = torch.nn.Parameter(torch.zeros(64)), torch.nn.Parameter(torch.zeros(512))
    trained = ps.DistributedOptimizer(
        pairs["shm"][0],
        [("one", one), ("other", other)],
        ps.SGD(lr=1.0),
        name=f"model {next(_numbers)}",
        consistency="asp",
        mode="eager",
        push_codec="fp16",
        block_elements=64,
    )
    for last in (1e5, 1.0):
        trained.zero_grad()
        factors = torch.ones(512)
        factors[-1] = last
        (one.sum() + (other * factors).sum()).backward()
        if last > 1.0:
            with pytest.raises(ps.InvalidTensor, match="Blocks that had left before were applied"):
                trained.step()
            assert not other.detach().any()
        else:
            trained.step()
    assert torch.all(one == -2.0)
    assert torch.all(other == -1.0)


def test_tensors_that_are_left_out_are_as_without_a_codec(
    pairs: dict[str, list[ps.Client]],
) -> None:
    client = pairs["shm"][1]
    table = client.create_table(
        f"table {next(_numbers)}",
        [("a", (100,)), ("b", (200,))],
        optimizer=ps.SGD(lr=1.0, momentum=0.5),
        consistency="asp",
        push_codec="int8",
    )
    for _ in range(4):
        client.wait(client.push(table, {"a": np.ones(100, np.float32)}))
    values = client.pull(table)
    np.testing.assert_allclose(values[:100], -(1 + 1.5 + 1.75 + 1.875), rtol=1e-4)
    assert not values[100:].any()


def test_initial_values_and_optimizer_state_travel_whole() -> None:
    """A cluster of its own: rank 0 gives the values."""
    with (
        ps.local_cluster(servers=1, workers=1) as cluster,
        ps.connect(cluster.address, push_codec="int8", pull_codec="bf16") as client,
    ):
        torch.manual_seed(3)
        model = torch.nn.Linear(16, 16)
        before = model.weight.detach().clone()
        optimizer = ps.DistributedOptimizer(client, model, ps.Adam(lr=0.1))
        assert torch.equal(model.weight, before.to(torch.bfloat16).to(torch.float32)), "as others"
        (table, *_) = client.tables.handles
        with ps.connect(cluster.address, role="reader") as reader:
            values = np.asarray(reader.pull(reader.table(table.name)))
        assert before.flatten().numpy().tobytes() in values.tobytes()
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        moments = optimizer.state_dict()["state"][0]["exp_avg"]
        assert moments.dtype is torch.float32
        assert torch.isfinite(moments).all()
        assert moments.abs().sum() > 0


def test_choices_that_cannot_be_are_refused_with_the_remedy(
    pairs: dict[str, list[ps.Client]],
) -> None:
    client = pairs["shm"][0]
    for options, words in (
        ({"push_codec": "int4"}, "push_codec is 'int4'; expected one of none, fp32, fp16, bf16"),
        ({"push_codec": "fp32"}, "float32 takes no more bytes; expected none"),
        ({"push_codec": "bf16", "optimizer": ps.Assign()}, "ASSIGN takes values"),
    ):
        with pytest.raises(ps.PushpullError, match=words):
            created([client], **options)
    (table,) = created([client], push_codec="int8")
    assert client.table(table.name) is table
    with pytest.raises(ps.PushpullError, match="is bf16, but this client opened it with int8"):
        client.table(table.name, push_codec="bf16")


def test_a_codec_that_a_server_does_not_name_is_refused_or_left_out() -> None:
    """As if that server were an older one. A choice is refused; the client's own is left out."""
    with (
        ps.local_cluster(servers=2, workers=2) as cluster,
        ps.connect(cluster.address) as first,
        ps.connect(cluster.address, push_codec="int8", pull_codec="int8") as client,
    ):
        for name in ("met", "table"):
            first.create_table(name, SIZE, optimizer=ps.SGD(lr=1.0), block_elements=BLOCK)
        met = client.table("met")
        assert (met.codecs.push, met.codecs.pull) == (PushCodec.parsed("int8"), Codec.INT8)
        links = client.engine.pulls.links_of(met.table)
        for link in links:
            assert {"codec-int8", "codec-sign", "codec-low-rank"} <= link.features
        links[0].features -= {"codec-int8"}
        older = links[0].node.node_id
        with pytest.raises(ps.InvalidConfig, match=f"'table' is int8, which server {older} does"):
            client.table("table", pull_codec="int8")
        assert client.table("table", pull_codec="bf16").codecs == TableCodecs(None, Codec.BF16)
