"""`prefetch`: the rows of a loader's next batch are pulled while this one is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

BatchT = TypeVar("BatchT")


class Prefetched(Generic[BatchT]):
    """The batches of `prefetch`."""

    def __init__(
        self, loader: Iterable[BatchT], ids: Callable[[BatchT], Mapping[Any, Any]]
    ) -> None:
        self._loader = loader
        self._ids = ids

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

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
    """
    return Prefetched(loader, ids)
