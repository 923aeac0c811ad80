"""Finds parameters that a script has changed between two steps (SEMANTICS S16).

    p.data.fill_(0.0); module.load_state_dict(...); nn.init.orthogonal_(p)   --step()--> an edit

Rules:
    - A parameter is edited if its bits differ from those that this worker wrote into it last,
      whatever autograd's version counter or the tensor's address say.
    - On the CPU it is compared with the pulled values, bit by bit. On a device its sums of bits by
      column are compared with those of the moment when it was written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from ps_worker.spec.flat_layout import FlatLayout
from ps_worker.training.tables.inspection import (
    BitViews,
    ColumnSums,
    is_same_memory,
    place_of,
    same_bits,
    true_numbers,
)
from ps_worker.training.tables.staging import FlatBuffer


class WrittenValues:
    """The values that this worker wrote last into the parameters of a table, from `received`.

    Attributes:
        is_known: the parameters were written, and no pull is in flight: `received` does not change.
    """

    def __init__(self, layout: FlatLayout, received: FlatBuffer) -> None:
        self._layout = layout
        self._received = received
        counts = [view.numel() for view in received.views]
        self._sums, self._sums_now = ColumnSums(counts), ColumnSums(counts)
        self._views = BitViews()
        self._summed: set[int] = set()  # the parameters whose `_sums` are known
        self._marks: list[tuple[int, int, tuple[int, ...]]] = []
        self._left: tuple[ColumnSums, list[torch.Size]] | None = None
        self.is_known = False

    def left(self) -> None:
        """A wait for new values was given up: changes from now on are made after that step."""
        if self._left is None:
            tensors = [entry.tensor.detach() for entry in self._layout.placed]
            shapes = [tensor.shape for tensor in tensors]
            sums = ColumnSums(map(torch.Size.numel, shapes))
            sums.take(list(enumerate(tensors)))
            self._left = sums, shapes

    def changed_since_sealed(self, indexes: Iterable[int]) -> set[int]:
        """Those of these parameters that were changed since a step was sealed whose values come
        elsewhere than into `received`; if it was not known what they had then, since `left`.
        """
        if self.is_known:
            return set(self.edited(indexes))
        return self.changed_since_left(indexes)

    def changed_since_left(self, indexes: Iterable[int] | None = None) -> set[int]:
        """Those of the parameters `indexes`, or of all, that were changed since the first `left`
        after they were written. Reads them, if a wait was given up.
        """
        if self._left is None:
            return set()
        before, shapes = self._left
        changed: set[int] = set()
        others: list[tuple[int, torch.Tensor]] = []
        for index in range(len(shapes)) if indexes is None else indexes:
            tensor = self._layout.placed[index].tensor
            if tensor.shape != shapes[index]:
                changed.add(index)
            else:  # one that has only moved is as it was
                others.append((index, tensor.detach().to(before.device_of(index))))
        now = ColumnSums(map(torch.Size.numel, shapes))
        return changed | true_numbers(now.differing(before, others))

    def forget_left(self) -> None:
        """No new values come, or they are merged: a later write is of all parameters."""
        self._left = None

    def begin(self) -> None:
        """A pull begins: the received values change."""
        self.is_known = False
        self._summed = set()

    def wrote(self, indexes: Iterable[int]) -> None:
        """These parameters have the received values. Queues sums on the devices."""
        tensors = [(index, self._layout.placed[index].tensor.detach()) for index in indexes]
        far = [(index, tensor) for index, tensor in tensors if not tensor.is_cpu]
        self._summed.update(index for index, _ in far)
        self._sums.take(far, self._views)

    def passed_over(self, indexes: Iterable[int]) -> None:
        """These parameters keep what the script has given them: no sums of them are known."""
        self._summed.difference_update(indexes)

    def wrote_all(self, but: Collection[int] = ()) -> None:
        """The parameters, except `but`, have the received values."""
        self.wrote(index for index in range(len(self._layout.placed)) if index not in but)
        self.end()

    def end(self) -> None:
        """All parameters have the received values, but for those that the script has changed."""
        self.is_known = True
        self._left = None
        self._views.keep(self._summed)
        self.mark()

    def mark(self) -> None:
        """Note the versions and addresses of the parameters, which are as they were written."""
        self._marks = [place_of(entry.tensor) for entry in self._layout.placed]

    @property
    def is_touched(self) -> bool:
        """True if versions or addresses have changed since `mark`. Costs next to nothing, and
        misses changes that bypass both (`.data`, numpy).
        """
        marks = zip(self._layout.placed, self._marks, strict=True)
        return any(place_of(entry.tensor) != mark for entry, mark in marks)

    def edited(self, indexes: Iterable[int] | None = None) -> list[int]:
        """Those of the parameters `indexes`, or of all, that have other values now."""
        found = []
        on_device: list[tuple[int, torch.Tensor]] = []
        for index in range(len(self._layout.placed)) if indexes is None else indexes:
            tensor = self._layout.placed[index].tensor
            source, byte_count, dtype = self._received.sources[index]
            if (
                tensor.is_cpu
                and tensor.dtype is dtype
                and tensor.is_contiguous()
                and tensor.nbytes == byte_count
                and is_same_memory(tensor.data_ptr(), source, byte_count)
            ):
                continue  # the fast path: a model may have thousands
            now = tensor.detach()
            if self._has_sums(index, now):
                on_device.append((index, now))
            elif not self._is_same(index, now):
                found.append(index)
        # A tensor of another layout has other sums, and perhaps the same values.
        differing = true_numbers(self._sums_now.differing(self._sums, on_device, self._views))
        found += [
            index
            for index in differing
            if not self._is_same(index, self._layout.placed[index].tensor.detach())
        ]
        return sorted(found)

    def _has_sums(self, index: int, now: torch.Tensor) -> bool:
        """True if sums tell whether a parameter has changed."""
        expected = self._received.views[index]
        is_there = index in self._summed and self._sums.device_of(index) == now.device
        return is_there and now.shape == expected.shape and now.dtype is expected.dtype

    def _is_same(self, index: int, now: torch.Tensor) -> bool:
        expected = self._received.views[index]
        if now.shape != expected.shape:
            return False
        if now.dtype is not expected.dtype:  # as it was rounded when it was written
            expected = expected.to(now.dtype)
        return same_bits(expected, now.cpu())
