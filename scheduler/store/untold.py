"""What was decided and may not be told yet: it is not durable.

    decided --next write takes it--> writing --written--> told

Rules:
    - One write at a time. It has all that was decided before it was taken, and what is decided
      meanwhile goes with the next.
    - What a write makes durable is told with the view of the moment at which the write was taken,
      not with one of what was decided since.
    - Where another cluster takes the place of one (a restore), what was decided in that one and is
      not taken yet is void: no write will have it.

Invariants:
    JR-2  What is told is durable, and is told in the order in which it was decided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ps_core.cluster_view import ClusterView
from ps_core.errors import check
from scheduler.machine.state import Kept, Transition
from scheduler.store.records import Delta, Differences


@dataclass(slots=True)
class Batch:
    """Decisions that become durable together. `is_news` where a view has changed."""

    number: int
    transitions: list[Transition] = field(default_factory=list)
    is_news: bool = False


@dataclass(frozen=True, slots=True)
class Told:
    """What may be told now."""

    number: int
    view: ClusterView
    transitions: tuple[Transition, ...]
    is_news: bool


class Untold:
    """The decisions of one scheduler that are not durable."""

    def __init__(self) -> None:
        self._differences = Differences()
        self._deciding: Batch | None = None
        self._writing: Batch | None = None
        self._view: ClusterView | None = None
        self._count = 0

    @property
    def newest(self) -> int:
        """The number of the newest batch that is not durable; 0: all is."""
        batch = self._deciding or self._writing
        return 0 if batch is None else batch.number

    def decided(self, transitions: tuple[Transition, ...], *, is_news: bool) -> None:
        """The cluster has changed."""
        if self._deciding is None:
            self._count += 1
            self._deciding = Batch(self._count)
        self._deciding.transitions += transitions
        self._deciding.is_news |= is_news

    def begun_anew(self) -> None:
        """Another cluster has the place of the one before."""
        if self._deciding is not None:
            self._deciding.transitions.clear()

    def take(self, kept: Callable[[], Kept], view: ClusterView) -> Delta | None:
        """What is to be written next; None: nothing is, or a write is on its way.

        Args:
            kept: gives all that there is.
            view: the cluster's, as it is.
        """
        if self._deciding is None or self._writing is not None:
            return None
        self._writing, self._deciding = self._deciding, None
        self._view = view
        return self._differences.since(kept())

    def written(self) -> Told:
        """The write is durable."""
        batch, self._writing = self._writing, None
        view, self._view = self._view, None
        check(batch is not None and view is not None, "JR-2", "nothing was being written")
        assert batch is not None  # noqa: S101 - checked
        assert view is not None  # noqa: S101 - checked
        return Told(batch.number, view, tuple(batch.transitions), batch.is_news)
