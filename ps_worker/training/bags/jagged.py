"""Tensors of bags under keys, as TorchRec has them, for scripts without TorchRec.

A batch of three examples and two features, of which each example may have any number of ids:

    feature   lengths    values
    "clicks"  2 0 1      7 3 | | 5
    "buys"    1 1 0      3 | 9 |

    KeyedJaggedTensor.from_lengths_sync(["clicks", "buys"], values, lengths)

has `values` [7, 3, 5, 3, 9] and `lengths` [2, 0, 1, 1, 1, 0]: bag by bag, feature by feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol, Self

import torch
from torch import Tensor

from ps_core.errors import InvalidKeys, InvalidTensor


class SupportsBags(Protocol):
    """`KeyedJaggedTensor`, TorchRec's or this module's."""

    def keys(self) -> Sequence[str]: ...
    def values(self) -> Tensor: ...
    def lengths(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...
    def stride(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingBagConfig:
    """One table of an `EmbeddingBagCollection`, as TorchRec's class of that name.

    Attributes:
        name: of the table.
        embedding_dim: elements of a row.
        feature_names: the features that look rows up in it; without any, one of the table's name.
        pooling: "SUM" or "MEAN".
        num_embeddings: is not read. A table has no size.
    """

    name: str
    embedding_dim: int
    feature_names: Sequence[str] = ()
    pooling: str = "SUM"
    num_embeddings: int | None = None


class JaggedTensor:
    """Bags of values, one behind the other.

    Args:
        values: of all bags.
        weights: one for each value, or None.
        lengths: of each bag. Give these or `offsets`.
        offsets: where each bag begins, and where the last one ends.

    Raises:
        InvalidTensor: the lengths, or the offsets, are not those of the values.
    """

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        if lengths is None:
            if offsets is None:
                raise InvalidTensor("there are neither lengths nor offsets; expected one of them")
            _check_offsets(offsets, len(values))
            lengths = offsets.diff()
        self._values, self._weights = values, weights
        self._lengths, self._offsets = lengths, offsets
        check_lengths(lengths, values, weights)

    @classmethod
    def from_dense(cls, values: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> Self:
        """The bags of a list, one tensor each."""
        lengths = torch.tensor([len(each) for each in values], dtype=torch.int64)
        return cls(_joined(values), None if weights is None else _joined(weights), lengths)

    def values(self) -> Tensor:
        """The values of all bags."""
        return self._values

    def weights(self) -> Tensor:
        """The weights of all values; InvalidTensor if there are none."""
        if self._weights is None:
            raise InvalidTensor("there are no weights; expected one for each value")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """The weights of all values, or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """The number of values of each bag."""
        return self._lengths

    def offsets(self) -> Tensor:
        """The beginning of each bag, and the end of the last one."""
        if self._offsets is None:
            self._offsets = _offsets_of(self._lengths)
        return self._offsets

    def to_dense(self) -> list[Tensor]:
        """The bags as a list, one tensor each."""
        return [self._values[begin:end] for begin, end in pairwise(self.offsets().tolist())]


class KeyedJaggedTensor:
    """The bags of several features of a batch.

    Args:
        keys: the features.
        values: of all bags: those of the first feature, then those of the second one.
        weights: one for each value, or None.
        lengths: of each bag. Give these or `offsets`.
        offsets: where each bag begins, and where the last one ends.
        stride: the number of bags of each feature, if there are no keys.

    Raises:
        InvalidTensor: the lengths, or the offsets, are not those of the values and keys.
        InvalidKeys: a key comes twice.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
    ) -> None:
        self._keys = list(keys)
        self._bags = JaggedTensor(values, weights, lengths, offsets)
        count = self._bags.lengths().numel()
        if stride is None:
            stride = count // len(self._keys) if self._keys else 0
        self._stride = stride
        self._counts = counts_per_key(self)

    @classmethod
    def from_lengths_sync(
        cls,
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
    ) -> Self:
        """Bags of these lengths."""
        return cls(keys, values, weights, lengths, None, stride)

    @classmethod
    def from_offsets_sync(
        cls,
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
    ) -> Self:
        """Bags that begin at these places; the last offset is where the last one ends."""
        return cls(keys, values, weights, None, offsets, stride)

    @classmethod
    def from_jt_dict(cls, features: Mapping[str, JaggedTensor]) -> Self:
        """The bags of these features; all have weights, or none has."""
        each = list(features.values())
        weights = [found for one in each if (found := one.weights_or_none()) is not None]
        return cls(
            list(features),
            _joined([one.values() for one in each]),
            _joined(weights) if weights else None,
            _joined([one.lengths() for one in each]),
        )

    def keys(self) -> list[str]:
        """The features."""
        return self._keys

    def values(self) -> Tensor:
        """The values of all bags."""
        return self._bags.values()

    def weights(self) -> Tensor:
        """The weights of all values; InvalidTensor if there are none."""
        return self._bags.weights()

    def weights_or_none(self) -> Tensor | None:
        """The weights of all values, or None."""
        return self._bags.weights_or_none()

    def lengths(self) -> Tensor:
        """The number of values of each bag."""
        return self._bags.lengths()

    def offsets(self) -> Tensor:
        """The beginning of each bag, and the end of the last one."""
        return self._bags.offsets()

    def stride(self) -> int:
        """The number of bags of each feature."""
        return self._stride

    def length_per_key(self) -> list[int]:
        """The number of values of each feature."""
        return self._counts

    def offset_per_key(self) -> list[int]:
        """The beginning of each feature's values, and the end of the last one's."""
        return bounds_of(self._counts)

    def to_dict(self) -> dict[str, JaggedTensor]:
        """The bags of each feature."""
        return {key: self[key] for key in self._keys}

    def __getitem__(self, key: str) -> JaggedTensor:
        """The bags of a feature; InvalidKeys if there are none."""
        at = _place_of(key, self._keys)
        begin, end = self.offset_per_key()[at : at + 2]
        weights = self.weights_or_none()
        return JaggedTensor(
            self.values()[begin:end],
            None if weights is None else weights[begin:end],
            self.lengths()[at * self._stride : (at + 1) * self._stride],
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedJaggedTensor:
        """The same on another device."""
        move = partial(Tensor.to, device=device, non_blocking=non_blocking)
        weights = self.weights_or_none()
        return KeyedJaggedTensor(
            self._keys,
            move(self.values()),
            None if weights is None else move(weights),
            move(self.lengths()),
            stride=self._stride,
        )

    def __repr__(self) -> str:
        """The features, with the number of ids of each."""
        counts = dict(zip(self._keys, self._counts, strict=True))
        return f"KeyedJaggedTensor({self._stride} bags a feature, values: {counts})"


class KeyedTensor:
    """Tensors under keys, joined along a dimension.

    Args:
        keys: their names.
        length_per_key: the size of each along `key_dim`.
        values: all of them, in the order of the keys.
        key_dim: the dimension along which they are joined.
    """

    def __init__(
        self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor, key_dim: int = 1
    ) -> None:
        self._keys, self._lengths = list(keys), list(length_per_key)
        self._values, self._key_dim = values, key_dim

    def keys(self) -> list[str]:
        """Their names."""
        return self._keys

    def values(self) -> Tensor:
        """All of them, in the order of the keys."""
        return self._values

    def key_dim(self) -> int:
        """The dimension along which they are joined."""
        return self._key_dim

    def length_per_key(self) -> list[int]:
        """The size of each along `key_dim`."""
        return self._lengths

    def offset_per_key(self) -> list[int]:
        """The beginning of each along `key_dim`, and the end of the last one."""
        return bounds_of(self._lengths)

    def to_dict(self) -> dict[str, Tensor]:
        """Each by its name."""
        parts = self._values.split(self._lengths, self._key_dim)
        return dict(zip(self._keys, parts, strict=True))

    def __getitem__(self, key: str) -> Tensor:
        """The one of that name; InvalidKeys if there is none."""
        at = _place_of(key, self._keys)
        return self._values.narrow(self._key_dim, self.offset_per_key()[at], self._lengths[at])

    def __repr__(self) -> str:
        """The keys, with the size of each."""
        return f"KeyedTensor({dict(zip(self._keys, self._lengths, strict=True))})"


def counts_per_key(features: SupportsBags) -> list[int]:
    """The number of values of each feature.

    Raises:
        InvalidKeys: a key comes twice.
        InvalidTensor: the lengths are not those of the values and keys.
    """
    keys, lengths, stride = list(features.keys()), features.lengths(), features.stride()
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InvalidKeys(f"feature '{twice}' comes twice in the batch; expected it once")
    if lengths.numel() != len(keys) * stride:
        raise InvalidTensor(
            f"there are {lengths.numel()} lengths for {len(keys)} features; expected {stride} of "
            "each, one for each example of the batch"
        )
    check_lengths(lengths, features.values(), features.weights_or_none())
    counts: list[int] = lengths.reshape(len(keys), stride).sum(1).tolist()
    return counts


def check_lengths(lengths: Tensor, values: Tensor, weights: Tensor | None) -> None:
    """Raise InvalidTensor if the lengths of bags, or the weights, are not those of the values."""
    if lengths.dtype.is_floating_point or values.dim() != 1:
        raise InvalidTensor(
            f"lengths are of {lengths.dtype}, and values have {values.dim()} dimensions; expected "
            "whole numbers, and one dimension"
        )
    if lengths.numel() and int(lengths.min()) < 0:
        raise InvalidTensor(f"a bag has length {int(lengths.min())}; expected 0 or more")
    if int(lengths.sum()) != len(values):
        raise InvalidTensor(
            f"the lengths of the bags sum to {int(lengths.sum())}, and there are {len(values)} "
            "values; expected as many"
        )
    if weights is not None and len(weights) != len(values):
        raise InvalidTensor(
            f"there are {len(weights)} weights for {len(values)} values; expected one for each"
        )


def bounds_of(counts: Sequence[int]) -> list[int]:
    """The beginning of each of several parts, and the end of the last one."""
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return bounds


def _check_offsets(offsets: Tensor, count: int) -> None:
    ends = (int(offsets[0]), int(offsets[-1])) if offsets.numel() else ()
    if ends != (0, count):
        raise InvalidTensor(
            f"the offsets of {count} values are {offsets.tolist()[:3]} and so on; expected them to "
            f"begin with 0 and to end with {count}"
        )


def _offsets_of(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.empty(0, dtype=torch.int64)


def _place_of(key: str, keys: Sequence[str]) -> int:
    if key not in keys:
        raise InvalidKeys(f"there is no '{key}'; expected one of {', '.join(keys) or 'none'}")
    return keys.index(key)
