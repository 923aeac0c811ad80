"""Tickets: what a push or an unfinished pull hands back, and what `wait` waits on.

Rules:
    - A step has one future, completed on the background thread when every entry of the step has its
      outcome; all tickets of the step share it.
    - A ticket of a step that has not been sealed is never waited for: that would hang, so it
      raises.

What it deliberately does not do: know the network; `ps_worker.client.client` adds who is missing to
a wait that expires.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ps_core.errors import InvalidConfig, WaitExpired

if TYPE_CHECKING:
    from ps_core.tables import Table

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class StepResult:
    """How a step ended: `applied` is False where it was sealed with skip."""

    clock: int
    applied: bool
    staleness: int
    """SSP, ASP: the most updates by others to one of its blocks since this worker pulled it."""
    rejected: tuple[int, ...] = ()
    """ASP with a bound: the blocks that were too stale. Pull, then compute and push them anew."""
    discarded: bool = False
    """BSP with backup workers: some part of the table formed its update without the step."""
    squares: Mapping[int, float] = field(default_factory=dict)
    """BSP with `clip_scale`: of each block, the sum of the squares of the reduced gradient; the
    update waits for `Client.scale_update`. Else empty."""
    round_count: int = 0
    """`DistributedOptimizer.step(closure)`: how often it computed rejected blocks anew. `clock` is
    that of the last time, and `rejected` what was given up."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull brought beside the values.

    Shapes:
        versions: block -> updates applied to it so far.
        presence: block -> bitmap of the tensors that had a gradient in this sum (AGGREGATE tables
            only, `ps_core.tables.unpack_presence` reads it); blocks where all had one are absent.
    """

    clock: int
    """The lowest clock of the ranges read. BSP: the newest update that all of it holds; else the
    slowest worker's clock."""
    versions: dict[int, int] = field(default_factory=dict)
    presence: dict[int, bytes] = field(default_factory=dict)


@dataclass(eq=False)
class PushTicket:
    """A step on one table, or a part of it; `client.wait` blocks until the servers committed it."""

    table: Table
    clock: int
    future: Future[StepResult]
    is_sealed: Callable[[], bool]

    def done(self) -> bool:
        """Whether every entry of the step has its outcome; never blocks."""
        return self.future.done()

    def check_sealed(self) -> None:
        """Refuse to wait for a step that nobody has sealed.

        Raises:
            InvalidConfig: the step is still open.
        """
        if not self.is_sealed():
            raise InvalidConfig(
                f"step {self.clock} of table '{self.table.spec.name}' has not been sealed, so it "
                "would never be committed; call client.seal(table) first, or push with seal=True"
            )


@dataclass(eq=False)
class PullTicket(Generic[ResultT]):
    """A pull on its way; `client.wait` blocks until its values are there and returns them."""

    table: Table
    future: Future[ResultT]

    def done(self) -> bool:
        """Whether the pull has ended; never blocks."""
        return self.future.done()

    @property
    def has_expired(self) -> bool:
        """Whether the pull has ended because its time was up."""
        return self.done() and isinstance(self.future.exception(), WaitExpired)


def wait_until_ended(futures: Sequence[Future[Any]], timeout_s: float) -> None:
    """Wait until all are done, or the first has failed, or time is up: as
    `concurrent.futures.wait` does, in fewer calls, which a small `push_pull` feels.

    Blocking: up to `timeout_s`; Ctrl-C interrupts it.
    """
    numbers = itertools.count(1)
    ended = threading.Lock()
    ended.acquire()

    def note(future: Future[Any]) -> None:
        if next(numbers) == len(futures) or future.cancelled() or future.exception() is not None:
            with contextlib.suppress(RuntimeError):  # a failure has ended the wait before
                ended.release()

    for future in futures:
        future.add_done_callback(note)
    if futures:
        ended.acquire(timeout=timeout_s)
