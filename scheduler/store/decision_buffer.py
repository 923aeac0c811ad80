"""Decisions that are not durable yet, and so must not be published.

    decided --next write takes it--> writing --written--> published

Rules:
    - One write runs at a time. It has every decision made before it was taken; later ones go with
      the next write.
    - A write is published with the view of the moment at which it was taken.
    - A restore replaces the cluster: decisions of the old cluster that no write has taken are void.

Invariants:
    JR-2  Published decisions are durable, and are published in the order in which they were made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ps_core.cluster_view import ClusterView
from ps_core.errors import check
from scheduler.machine.state import JournaledCluster, Transition
from scheduler.store.records import Differences, JournalDelta


@dataclass(slots=True)
class DecisionBatch:
    """Decisions that become durable together; `is_news` if the view changed."""

    number: int
    transitions: list[Transition] = field(default_factory=list)
    is_news: bool = False


@dataclass(frozen=True, slots=True)
class DurableBatch:
    """Decisions that may be published, with the view as it was when their write was taken."""

    number: int
    view: ClusterView
    transitions: tuple[Transition, ...]
    is_news: bool


class DecisionBuffer:
    """The decisions of one scheduler that are not durable."""

    def __init__(self) -> None:
        self._differences = Differences()
        self._deciding: DecisionBatch | None = None
        self._writing: DecisionBatch | None = None
        self._view: ClusterView | None = None
        self._count = 0

    @property
    def newest(self) -> int:
        """Number of the newest batch that is not durable; 0 if all are."""
        batch = self._deciding or self._writing
        return 0 if batch is None else batch.number

    def decided(self, transitions: tuple[Transition, ...], *, is_news: bool) -> None:
        """Add a decision to the next batch."""
        if self._deciding is None:
            self._count += 1
            self._deciding = DecisionBatch(self._count)
        self._deciding.transitions += transitions
        self._deciding.is_news |= is_news

    def cluster_replaced(self) -> None:
        """Another cluster takes the place of this one: void the decisions that no write has."""
        if self._deciding is not None:
            self._deciding.transitions.clear()

    def take(
        self, journaled: Callable[[], JournaledCluster], view: ClusterView
    ) -> JournalDelta | None:
        """The next write; None if nothing changed, or a write is running.

        Args:
            journaled: returns the state to write.
            view: the cluster's view now.
        """
        if self._deciding is None or self._writing is not None:
            return None
        self._writing, self._deciding = self._deciding, None
        self._view = view
        return self._differences.since(journaled())

    def written(self) -> DurableBatch:
        """End the running write; its decisions may be published."""
        batch, self._writing = self._writing, None
        view, self._view = self._view, None
        check(batch is not None and view is not None, "JR-2", "nothing was being written")
        assert batch is not None  # noqa: S101 - checked
        assert view is not None  # noqa: S101 - checked
        return DurableBatch(batch.number, view, tuple(batch.transitions), batch.is_news)
