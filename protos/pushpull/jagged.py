"""Batches and results of an `EmbeddingBagCollection`, as TorchRec has them, for scripts without it.

A batch of three examples and two features, of which each example may have any number of ids:

    feature   lengths   values
    clicks    2 0 1     7 3, none, 5
    buys      1 1 0     3, 9, none

is `KeyedJaggedTensor.from_lengths_sync(["clicks", "buys"], values, lengths)` with `values` [7, 3,
5, 3, 9] and `lengths` [2, 0, 1, 1, 1, 0]: bag by bag, feature by feature.
"""

from ps_worker.training.bags.jagged import (
    EmbeddingBagConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
)

__all__ = ["EmbeddingBagConfig", "JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]
