"""Several embedding tables in one module: TorchRec's `EmbeddingBagCollection`, on the servers."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self, Unpack

import torch
from torch import Tensor

from ps_core.errors import InvalidConfig, InvalidKeys, InvalidTensor
from ps_core.tables.optimizers import OptimizerSpec
from ps_worker.client.client import Client
from ps_worker.spec.settings import EmbeddingOptions, RowsInitial, SupportsSpec, Uniform
from ps_worker.training.bags.jagged import KeyedTensor, SupportsBags, bounds_of, counts_per_key
from ps_worker.training.embedding import EmbeddingBag

MODES = {"SUM": "sum", "MEAN": "mean"}


class SupportsConfig(Protocol):
    """`EmbeddingBagConfig`, TorchRec's or that of `pushpull.jagged`. It has a `pooling`, too."""

    @property
    def name(self) -> str: ...
    @property
    def embedding_dim(self) -> int: ...
    @property
    def feature_names(self) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class _Bags:
    """The bags of one table, feature by feature. Shapes: offsets (bags + 1,)."""

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None


class EmbeddingBagCollection(torch.nn.Module):
    """Embedding tables for the features of a batch: TorchRec's class of that name, with the rows on
    the servers.

        model.features = ps.EmbeddingBagCollection(client, tables, optimizer=ps.RowwiseAdagrad())
        model.features(batch)["clicks"]

    Each table is an `EmbeddingBag`, with all that it has: optimizers of modules step it. A forward
    pass pulls the rows of all features of a table in one lookup, and the tables at the same time.

    Attributes:
        embedding_bags: the `EmbeddingBag` of each table, by its name.

    Args:
        client: as of `Embedding`.
        tables: an `EmbeddingBagConfig` of each, TorchRec's or that of `pushpull.jagged`. Of
            TorchRec's `num_embeddings` is not read. An `init_fn` must be uniform on both sides of 0
            unless `init` is given; without one rows are drawn as TorchRec does, from
            `Uniform(embedding_dim ** -0.5)`.
        is_weighted: batches have weights, by which rows are multiplied; only with SUM.
        optimizer, hashed_ids, options: of all tables, as of `Embedding`.
        per_table: those that a table has for itself, by its name, as in
            `{"users": {"partitions": 64}}`. A `seed` for all is added to a checksum of each name.

    Raises:
        InvalidConfig: two tables of one name, a feature twice in one table, or a setting that
            `Embedding` refuses.

    Blocking: as `Embedding`.
    """

    def __init__(
        self,
        client: Client,
        tables: Sequence[SupportsConfig],
        is_weighted: bool = False,
        *,
        optimizer: SupportsSpec | OptimizerSpec,
        hashed_ids: bool = False,
        per_table: Mapping[str, Mapping[str, Any]] | None = None,
        **options: Unpack[EmbeddingOptions],
    ) -> None:
        super().__init__()
        own = per_table or {}
        _check(tables, own)
        self._configs, self._is_weighted = list(tables), is_weighted
        self._features = [list(each.feature_names) or [each.name] for each in tables]
        self._keys = _keys_of(tables, self._features)
        modes = [_mode_of(each, is_weighted=is_weighted) for each in tables]
        common = {"optimizer": optimizer, "hashed_ids": hashed_ids, **options}
        seed = options.get("seed", 0)
        given = [
            {**common, "seed": _seed_of(each.name, seed), **own.get(each.name, {})}
            for each in tables
        ]
        for config, settings in zip(tables, given, strict=True):
            _check_dtype(config, settings)
            if "init" not in settings:
                settings["init"] = _initial_of(config)
        # No ModuleDict: it takes no name with a dot, nor "items".
        self._bags = torch.nn.ModuleList(
            EmbeddingBag(
                client,
                each.name,
                each.embedding_dim,
                mode=mode,
                include_last_offset=True,
                **settings,
            )
            for each, mode, settings in zip(tables, modes, given, strict=True)
        )

    @property
    def embedding_bags(self) -> dict[str, EmbeddingBag]:
        """The `EmbeddingBag` of each table, by its name."""
        return {bag.table.name: bag for bag in self._each()}

    def embedding_bag_configs(self) -> list[SupportsConfig]:
        """The tables, as they were given."""
        return self._configs

    def is_weighted(self) -> bool:
        """True if batches have weights."""
        return self._is_weighted

    def forward(self, features: SupportsBags) -> KeyedTensor:
        """Sums or means of rows, one for each example and feature; zeros for an empty bag.

        Args:
            features: a `KeyedJaggedTensor`, TorchRec's or that of `pushpull.jagged`. Features that
                no table has are not read.

        Returns:
            A `pushpull.jagged.KeyedTensor` with values of shape (examples, sum of all dims). Its
            keys are the features, table by table; one that several tables have is `feature@table`.

        Raises:
            InvalidKeys: a feature of a table is not in the batch.
            InvalidTensor: lengths that do not sum to the number of values; no weights where
                `is_weighted`.
        """
        batch, stride = self._bags_of(features), features.stride()
        lookups = [bag.begin_lookup(of.ids) for bag, of in zip(self._each(), batch, strict=True)]
        found, lengths = [], []
        for bag, names, lookup, of in zip(
            self._each(), self._features, lookups, batch, strict=True
        ):
            rows = bag.pooled(lookup, of.offsets, of.weights)
            found.append(_beside(rows, len(names), stride))
            lengths += [bag.embedding_dim] * len(names)
        return KeyedTensor(self._keys, lengths, torch.cat(found, 1))

    def prefetch(self, features: SupportsBags) -> None:
        """Begin to pull the rows that the next step looks up with these features, as
        `Embedding.prefetch`.

        Blocking: no.
        """
        for bag, of in zip(self._each(), self._bags_of(features), strict=True):
            bag.prefetch(of.ids)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze the rows of all tables, or unfreeze them, as `Embedding.requires_grad_`.

        Blocking: no.
        """
        for bag in self._each():
            bag.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    def _each(self) -> list[EmbeddingBag]:
        return [each for each in self._bags if isinstance(each, EmbeddingBag)]

    def _bags_of(self, features: SupportsBags) -> list[_Bags]:
        """The bags of each table."""
        places = {key: at for at, key in enumerate(features.keys())}
        missing = [name for names in self._features for name in names if name not in places]
        if missing:
            raise InvalidKeys(
                f"the batch has no feature '{missing[0]}', which a table looks up; it has "
                f"{', '.join(places) or 'none'}"
            )
        inverse_indices_or_none = getattr(features, "inverse_indices_or_none", None)
        if inverse_indices_or_none is not None and inverse_indices_or_none() is not None:
            raise InvalidTensor("the batch has inverse indices; expected one without them")
        weights = features.weights_or_none() if self._is_weighted else None
        if self._is_weighted and weights is None:
            raise InvalidTensor(
                "the batch has no weights; expected one for each value, since is_weighted is True"
            )
        bounds = bounds_of(counts_per_key(features))
        lengths = features.lengths().reshape(len(places), features.stride())
        values, made = features.values(), []
        for names in self._features:
            chosen = [places[name] for name in names]
            spans = [slice(bounds[at], bounds[at + 1]) for at in chosen]
            counts = lengths[chosen].reshape(-1).cumsum(0)
            made.append(
                _Bags(
                    torch.cat([values[span] for span in spans]),
                    torch.nn.functional.pad(counts, (1, 0)),
                    None if weights is None else torch.cat([weights[span] for span in spans]),
                )
            )
        return made

    def extra_repr(self) -> str:
        """The keys of the results, for `print(model)`."""
        return ", ".join(map(repr, self._keys))


def _check(tables: Sequence[SupportsConfig], own: Mapping[str, object]) -> None:
    names = Counter(each.name for each in tables)
    if not names:
        raise InvalidConfig("there are no tables; expected one or more")
    if max(names.values()) > 1:
        name = names.most_common(1)[0][0]
        raise InvalidConfig(f"there are two tables '{name}'; expected each name once")
    for each in tables:
        features = Counter(each.feature_names)
        if features and max(features.values()) > 1:
            name = features.most_common(1)[0][0]
            raise InvalidConfig(
                f"table '{each.name}' lists feature '{name}' twice; expected it once in a table"
            )
    unknown = sorted(set(own) - set(names))
    if unknown:
        raise InvalidConfig(
            f"per_table has settings of '{unknown[0]}'; expected one of {', '.join(names)}"
        )


def _mode_of(config: SupportsConfig, *, is_weighted: bool) -> str:
    pooling = getattr(config, "pooling", "SUM")
    name = str(getattr(pooling, "name", pooling)).upper()
    if name not in MODES:
        raise InvalidConfig(f"pooling of table '{config.name}' is {pooling}; expected SUM or MEAN")
    if is_weighted and name != "SUM":
        raise InvalidConfig(
            f"pooling of table '{config.name}' is {name}, and is_weighted is True; expected SUM "
            "with weights"
        )
    return MODES[name]


def _keys_of(tables: Sequence[SupportsConfig], features: Sequence[Sequence[str]]) -> list[str]:
    """The keys of the results, as TorchRec names them."""
    table_counts = Counter(name for names in features for name in names)
    return [
        f"{name}@{table.name}" if table_counts[name] > 1 else name
        for table, names in zip(tables, features, strict=True)
        for name in names
    ]


def _seed_of(name: str, seed: int) -> int:
    """A seed for each table: of one seed, rows of equal ids would be equal in all of them."""
    return seed + zlib.crc32(name.encode())


def _check_dtype(config: SupportsConfig, settings: Mapping[str, object]) -> None:
    """Raise InvalidConfig for a type of TorchRec's that the servers do not have."""
    given = getattr(config, "data_type", None)
    name = getattr(given, "name", given)
    if "dtype" not in settings and name not in (None, "FP32"):
        raise InvalidConfig(
            f"data_type of table '{config.name}' is {name}; expected FP32, or dtype= with the type "
            "that its rows shall have"
        )


def _initial_of(config: SupportsConfig) -> RowsInitial:
    """The initial values that TorchRec would draw; the servers call no function."""
    init_fn = getattr(config, "init_fn", None)
    if init_fn is None:
        return Uniform(config.embedding_dim**-0.5)
    if isinstance(init_fn, partial) and init_fn.func is torch.nn.init.uniform_:
        low, high = init_fn.keywords.get("a", 0.0), init_fn.keywords.get("b", 1.0)
        if low == -high and not init_fn.args:
            return Uniform(high)
    raise InvalidConfig(
        f"table '{config.name}' has an init_fn, and the servers draw the initial values of rows; "
        "expected init=, such as ps.Normal(0.01)"
    )


def _beside(rows: Tensor, feature_count: int, stride: int) -> Tensor:
    """The rows of each example beside each other, which lie feature by feature."""
    dim = rows.shape[1]
    by_feature = rows.reshape(feature_count, stride, dim)
    return by_feature.transpose(0, 1).reshape(stride, feature_count * dim)
