"""`prefetch`: the rows of a loader's next batch are pulled while this one is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from ps_core.errors import InvalidConfig
from ps_worker.client.handed_batches import CountedBatches

BatchT = TypeVar("BatchT")


class Prefetched(Generic[BatchT]):
    """The batches of `prefetch`. It says of its loader what `follow` and `over` ask."""

    def __init__(
        self, loader: Iterable[BatchT], ids: Callable[[BatchT], Mapping[Any, Any]]
    ) -> None:
        if isinstance(loader, CountedBatches):
            raise InvalidConfig(
                "ps.prefetch takes a batch ahead of the training, and was given the batches of "
                f"`{loader.source}`, which counts each when it is taken; expected the other order: "
                f"{loader.source}(ps.prefetch(loader, ...))"
            )
        self._loader = loader
        self._ids = ids

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    @property
    def batch_size(self) -> int | None:
        """The loader's; None if it has none."""
        return getattr(self._loader, "batch_size", None)

    @property
    def batch_sampler(self) -> object:
        """The loader's; None if it has none."""
        return getattr(self._loader, "batch_sampler", None)

    @property
    def in_order(self) -> bool:
        """False if the loader gives its batches as they come."""
        return bool(getattr(self._loader, "in_order", True))

    def __iter__(self) -> Iterator[BatchT]:
        batches = iter(self._loader)
        for present in batches:
            for following in batches:
                for embedding, ids in self._ids(following).items():
                    embedding.prefetch(ids)
                yield present
                present = following
            yield present


def prefetch(
    loader: Iterable[BatchT], ids: Callable[[BatchT], Mapping[Any, Any]]
) -> Prefetched[BatchT]:
    """The batches of a loader, with the rows of the next one on their way.

        for batch in ps.prefetch(loader, lambda batch: {model.users: batch.users}):
            ...

    Args:
        loader: is asked for one batch more than the script has had.
        ids: the ids that a forward pass with a batch looks up, by Embedding: the same values in the
            same order, or the rows are pulled again. `Embedding.prefetch` says how stale they are.
            Of an `EmbeddingBagCollection` the `KeyedJaggedTensor`.

    `sampler.follow`, `batches.over` and `shards.over` count a batch when the script gets it, and so
    go around it: `sampler.follow(ps.prefetch(loader, ...))`.

    Raises:
        InvalidConfig: the loader is what one of these returned.
    """
    return Prefetched(loader, ids)
