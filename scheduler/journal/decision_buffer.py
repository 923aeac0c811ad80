"""Decisions that are not durable yet, and so must not be published.

    decided --next write takes it--> writing --written--> published

One write runs at a time. It has every decision made before it was taken, and is published with the
view of that moment; later ones go with the next write. A restore replaces the cluster: decisions of
the old cluster that no write has taken are void.

Invariants:
    JR-2  Published decisions are durable, and are published in the order in which they were made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ps_core.cluster_view import ClusterView
from ps_core.errors import check
from scheduler.journal.records import Differences, JournalDelta
from scheduler.machine.state import JournaledCluster, Transition


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
        self._writing: tuple[DecisionBatch, ClusterView] | None = None
        self._count = 0

    @property
    def newest(self) -> int:
        """Number of the newest batch that is not durable; 0 if all are."""
        return 0 if self._deciding is None and self._writing is None else self._count

    def decided(self, transitions: tuple[Transition, ...], *, is_news: bool) -> None:
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
        """The next write; None if nothing changed, or a write is running."""
        if self._deciding is None or self._writing is not None:
            return None
        self._writing, self._deciding = (self._deciding, view), None
        return self._differences.since(journaled())

    def written(self) -> DurableBatch:
        """End the running write; its decisions may be published."""
        writing, self._writing = self._writing, None
        check(writing is not None, "JR-2", "nothing was being written")
        assert writing is not None  # noqa: S101 - checked
        batch, view = writing
        return DurableBatch(batch.number, view, tuple(batch.transitions), batch.is_news)
