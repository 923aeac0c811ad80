"""EmbeddingBagCollection against torch's EmbeddingBags, with batches of ours and of TorchRec's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ps_worker as ps
from ps_worker.embedding.rows import rows_of
from ps_worker.training.bags.collection import SupportsConfig
from pushpull.jagged import EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

IDS, STRIDE, DEADLINE_S = 12, 5, 30.0
FEATURES = ["buys", "clicks", "country", "seller"]


@pytest.fixture(scope="module")
def client() -> Iterator[ps.Client]:
    with (
        ps.local_cluster(servers=2, workers=1) as cluster,
        ps.connect(cluster.address, request_deadline_s=DEADLINE_S) as client,
    ):
        yield client


class PoolingType(Enum):
    """TorchRec's."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


class DataType(Enum):
    """TorchRec's."""

    FP32 = "FP32"
    FP16 = "FP16"


UNIFORM = partial(nn.init.uniform_, a=-0.25, b=0.25)


@dataclass
class TorchRecConfig:
    """TorchRec's EmbeddingBagConfig, which has an `init_fn` also if none is given."""

    num_embeddings: int
    embedding_dim: int
    name: str
    feature_names: list[str] = field(default_factory=list)
    data_type: DataType = DataType.FP32
    pooling: PoolingType = PoolingType.SUM
    init_fn: Any = UNIFORM


class TorchRecBatch:
    """TorchRec's KeyedJaggedTensor: its methods, as far as a lookup calls them."""

    def __init__(self, features: KeyedJaggedTensor, inverse: object = None) -> None:
        self.keys = features.keys
        self.values = features.values
        self.lengths = features.lengths
        self.offsets = features.offsets
        self.weights_or_none = features.weights_or_none
        self.stride = features.stride
        self.inverse_indices_or_none = lambda: inverse


def tables(prefix: str, pooling: str) -> list[EmbeddingBagConfig]:
    """One that two features share, one of a feature that has two, and one without a list."""
    return [
        EmbeddingBagConfig(
            name=f"{prefix}/items", embedding_dim=4, feature_names=["clicks", "buys"],
            pooling=pooling,
        ),
        EmbeddingBagConfig(
            name=f"{prefix}/sellers", embedding_dim=3, feature_names=["seller"], pooling=pooling
        ),
        EmbeddingBagConfig(
            name=f"{prefix}/others", embedding_dim=2, feature_names=["seller", "country"],
            pooling=pooling,
        ),
    ]  # fmt: skip


def batch(step: int, *, is_weighted: bool = False) -> KeyedJaggedTensor:
    """Bags of up to four ids, many empty, many ids in several features and bags."""
    draws = torch.Generator().manual_seed(step)
    lengths = torch.randint(5, (len(FEATURES) * STRIDE,), generator=draws) - 1
    lengths = lengths.clamp(min=0)
    count = int(lengths.sum())
    ids = torch.randint(IDS, (count,), generator=draws)
    weights = torch.rand(count, generator=draws) if is_weighted else None
    return KeyedJaggedTensor.from_lengths_sync(FEATURES, ids, lengths, weights)


class Twin(nn.Module):
    """torch's EmbeddingBag of each table, with the rows that the servers begin with."""

    def __init__(self, model: ps.EmbeddingBagCollection) -> None:
        super().__init__()
        self.features = [list(each.feature_names) for each in model.embedding_bag_configs()]
        self.is_weighted = model.is_weighted()
        bags = [
            nn.EmbeddingBag.from_pretrained(
                all_rows(bag), freeze=False, mode=bag.mode, include_last_offset=True
            )
            for bag in model.embedding_bags.values()
        ]
        self.bags = nn.ModuleList(bags)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        found = []
        for bag, names in zip(self.bags, self.features, strict=True):
            for each in (features[name] for name in names):
                weights = each.weights() if self.is_weighted else None
                found.append(bag(each.values(), each.offsets(), weights))
        return torch.cat(found, 1)


def all_rows(bag: ps.EmbeddingBag) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = bag(torch.arange(IDS), torch.arange(IDS + 1))
        return found


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["sums", "means", "weighted sums", "batches of TorchRec's"])
def test_it_computes_and_trains_as_torchs_bags(client: ps.Client, kind: str) -> None:
    is_weighted = kind == "weighted sums"
    given = tables(kind, "MEAN" if kind == "means" else "SUM")
    model = ps.EmbeddingBagCollection(client, given, is_weighted, optimizer=ps.SGD(lr=0.1), seed=4)
    twin = Twin(model)
    optimizer = ps.DistributedOptimizer(client, model, ps.SGD(), name=kind)
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(8):
        features = batch(step, is_weighted=is_weighted)
        found = model(TorchRecBatch(features) if kind.startswith("batches") else features)
        expected = twin(features)
        torch.testing.assert_close(found.values(), expected)
        for each, values in ((optimizer, found.values()), (reference, expected)):
            each.zero_grad()
            (values - 1.0).square().sum().backward()
        assert [len(bag.trained._passes) for bag in model.embedding_bags.values()] == [1, 1, 1]
        optimizer.step()
        reference.step()
    for ours, theirs in zip(model.embedding_bags.values(), twin.bags, strict=True):
        torch.testing.assert_close(all_rows(ours), theirs.state_dict()["weight"])


@pytest.mark.thorough
def test_results_are_named_as_torchrec_names_them(client: ps.Client) -> None:
    model = ps.EmbeddingBagCollection(client, tables("names", "SUM"), optimizer=ps.SGD())
    features = batch(3)
    found = model(features)
    assert isinstance(found, KeyedTensor)
    keys = ["clicks", "buys", "seller@names/sellers", "seller@names/others", "country"]
    assert (found.keys(), found.length_per_key()) == (keys, [4, 4, 3, 2, 2])
    assert found.values().shape == (STRIDE, 15)
    by_name = found.to_dict()
    assert list(by_name) == keys
    assert torch.equal(torch.cat(list(by_name.values()), 1), found.values())
    assert torch.equal(found["seller@names/others"], found.values()[:, 11:13])
    bag = model.embedding_bags["names/items"]
    buys = features["buys"]
    assert torch.equal(found["buys"], bag(buys.values(), buys.offsets()))
    assert str(model).startswith(f"EmbeddingBagCollection(\n  {', '.join(map(repr, keys))}\n")


def test_empty_bags_are_zeros_and_a_batch_may_be_empty(client: ps.Client) -> None:
    model = ps.EmbeddingBagCollection(client, tables("empty", "MEAN"), optimizer=ps.SGD(lr=0.1))
    nothing = torch.empty(0, dtype=torch.int64)
    lengths = torch.zeros(len(FEATURES) * STRIDE, dtype=torch.int64)
    found = model(KeyedJaggedTensor(FEATURES, nothing, lengths=lengths)).values()
    assert found.shape == (STRIDE, 15)
    assert not found.any()
    optimizer = ps.DistributedOptimizer(client, model, ps.SGD(), name="empty")
    found.sum().backward()
    optimizer.step()
    assert optimizer.clock == 1
    assert model(KeyedJaggedTensor(FEATURES, nothing, lengths=nothing)).values().shape == (0, 15)


@pytest.mark.thorough
def test_settings_are_for_all_tables_or_for_one(client: ps.Client) -> None:
    given = [
        TorchRecConfig(IDS, 4, "items", ["clicks"], pooling=PoolingType.MEAN),
        TorchRecConfig(IDS, 2, "set/for.one"),
    ]
    model = ps.EmbeddingBagCollection(
        client, given, optimizer=ps.Adagrad(lr=0.1), partitions=2, consistency="ssp:3",
        per_table={"set/for.one": {"partitions": 5, "optimizer": ps.SGD(), "init": ps.Zeros()}},
    )  # fmt: skip
    first, second = model.embedding_bags.values()
    assert [rows_of(bag.table.table).partition_count for bag in (first, second)] == [2, 5]
    assert [bag.mode for bag in (first, second)] == ["mean", "sum"]
    assert (first.embedding_dim, second.embedding_dim) == (4, 2)
    rows = all_rows(first)
    assert 0.15 < rows.abs().max() < 0.25  # as TorchRec would draw them
    assert not all_rows(second).any()
    lengths = torch.ones(2, dtype=torch.int32)
    features = KeyedJaggedTensor(["set/for.one", "clicks"], torch.tensor([1, 2]), lengths=lengths)
    found = model(features)
    assert found.keys() == ["clicks", "set/for.one"]
    assert torch.equal(found["clicks"], rows[2:3])


def test_tables_of_one_seed_begin_with_other_rows_each(client: ps.Client) -> None:
    def rows(seed: int, own: dict[str, int]) -> list[torch.Tensor]:
        names = [f"seed {seed} {len(own)} {letter}" for letter in "ab"]
        given = [TorchRecConfig(IDS, 3, name) for name in names]
        model = ps.EmbeddingBagCollection(
            client, given, optimizer=ps.SGD(), seed=seed, per_table={names[1]: own}
        )
        return [all_rows(bag) for bag in model.embedding_bags.values()]

    first, second = rows(0, {})
    assert not torch.equal(first, second)
    assert not torch.equal(first, rows(1, {})[0])
    assert torch.equal(rows(0, {"seed": 5})[1], rows(1, {"seed": 5})[1])


def test_the_pulls_of_all_tables_are_under_way_before_one_is_waited_for(client: ps.Client) -> None:
    """The first table's rows, here ones, come as soon as those of the last are asked for."""
    model = ps.EmbeddingBagCollection(
        client, tables("at once", "SUM"), optimizer=ps.SGD(), consistency="asp"
    )
    features = batch(6)
    expected = model(features).values()[:, 8:]
    model.prefetch(features)
    first, _, last = model.embedding_bags.values()
    asked: Future[Any] = Future()

    class Noticed(deque[Any]):
        def remove(self, value: Any) -> None:
            super().remove(value)
            asked.set_result(np.ones((len(pull.batch.ids), 4), np.float32))

    pull = first._ahead[0].pull
    pull.parts[0] = replace(pull.parts[0], ticket=ps.PullTicket(first.table.table, asked))
    last._ahead = Noticed(last._ahead)
    with torch.no_grad():
        found = model(features)
    assert found["clicks"][:, 0].tolist() == features["clicks"].lengths().tolist()
    assert torch.equal(found.values()[:, 8:], expected)


def test_a_loaders_next_batch_is_prefetched(client: ps.Client) -> None:
    model = ps.EmbeddingBagCollection(client, tables("ahead", "SUM"), optimizer=ps.SGD(lr=0.1))
    twin = Twin(model)
    optimizer = ps.DistributedOptimizer(client, model, ps.SGD(), name="ahead")
    reference = torch.optim.SGD(twin.parameters(), lr=0.1)
    batches = [batch(step) for step in range(4)]
    for number, features in enumerate(ps.prefetch(batches, lambda each: {model: each})):
        bags = model.embedding_bags.values()
        found, expected = model(features).values(), twin(features)
        assert [len(bag._ahead) for bag in bags] == [1 if number < 3 else 0] * 3
        torch.testing.assert_close(found, expected)
        for each, values in ((optimizer, found), (reference, expected)):
            each.zero_grad()
            values.square().sum().backward()
            each.step()


WRONG_TABLES: list[tuple[Sequence[SupportsConfig], dict[str, Any], str]] = [
    ([], {}, "no tables"),
    ([TorchRecConfig(9, 2, "a"), TorchRecConfig(9, 2, "a")], {}, "two tables 'a'"),
    ([TorchRecConfig(9, 2, "a", ["x", "y", "x"])], {}, "table 'a' lists feature 'x' twice"),
    ([TorchRecConfig(9, 2, "a", pooling=PoolingType.NONE)], {}, "expected SUM or MEAN"),
    (
        [TorchRecConfig(9, 2, "a", pooling=PoolingType.MEAN)], {"is_weighted": True},
        "expected SUM with weights",
    ),
    ([TorchRecConfig(9, 2, "a")], {"per_table": {"b": {}}}, "settings of 'b'; expected one of a"),
    ([TorchRecConfig(9, 2, "a", init_fn=nn.init.normal_)], {}, "expected init="),
    ([TorchRecConfig(9, 2, "a", init_fn=partial(nn.init.uniform_, a=0.0, b=1.0))], {}, "init="),
    ([TorchRecConfig(9, 2, "a", data_type=DataType.FP16)], {}, "is FP16; expected FP32"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "options", "words"), WRONG_TABLES)
def test_wrong_tables_are_refused(
    client: ps.Client, given: Sequence[SupportsConfig], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ps.InvalidConfig, match=words):
        ps.EmbeddingBagCollection(client, given, optimizer=ps.SGD(), **options)


class Broken(TorchRecBatch):
    """Lengths that nothing has checked."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(KeyedJaggedTensor(["x"], torch.arange(3), lengths=torch.tensor([1, 2])))
        self.lengths = lambda: torch.tensor(lengths)


def ids_of(key: str) -> KeyedJaggedTensor:
    return KeyedJaggedTensor([key], torch.arange(3), lengths=torch.tensor([1, 2]))


WRONG_BATCHES: list[tuple[Any, type[ps.PushpullError], str]] = [
    (ids_of("y"), ps.InvalidKeys, "no feature 'x', which a table looks up; it has y"),
    (Broken([1, 1]), ps.InvalidTensor, "sum to 2, and there are 3 values"),
    (Broken([1, 1, 1]), ps.InvalidTensor, "3 lengths for 1 features; expected 2"),
    (TorchRecBatch(ids_of("x"), inverse=()), ps.InvalidTensor, "inverse indices"),
]


@pytest.mark.parametrize(("features", "error", "words"), WRONG_BATCHES)
def test_wrong_batches_are_refused(
    client: ps.Client, features: Any, error: type[ps.PushpullError], words: str
) -> None:
    model = ps.EmbeddingBagCollection(
        client, [TorchRecConfig(9, 2, "wrong", ["x"])], optimizer=ps.SGD()
    )
    with pytest.raises(error, match=words):
        model(features)


def test_weights_are_expected_where_they_count_and_not_read_elsewhere(client: ps.Client) -> None:
    given = [TorchRecConfig(9, 2, "weights", ["x"])]
    weighted = ps.EmbeddingBagCollection(client, given, True, optimizer=ps.SGD())
    with pytest.raises(ps.InvalidTensor, match=r"no weights; .* since is_weighted is True"):
        weighted(ids_of("x"))
    plain = ps.EmbeddingBagCollection(client, given, optimizer=ps.SGD())
    weights = torch.tensor([1.0, 2.0, 3.0])
    features = KeyedJaggedTensor(["x"], torch.arange(3), weights, torch.tensor([1, 2]))
    assert torch.equal(plain(features).values(), plain(ids_of("x")).values())
    assert not torch.equal(weighted(features).values(), plain(features).values())
