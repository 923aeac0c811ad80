"""The works of one server: one after the other, each in steps, as far as there is time (S15).

    added --nothing is under way--> under way --steps, over some turns--> ended
      +-- else: waits for its turn --^

Rules:
    - A work begins at once where none is under way.
    - What is called between two works finds none under way, and what it begins is done before what
      waits: it is as if it were a work itself.
    - What cannot wait lets what is under way be done first (`finish`).
    - A work that failed has ended: who waits for it hears of that, and else `on_failure` does.

Invariants:
    WK-1  Works are done in the order in which they came; none begins while another is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ps_core.errors import check
from ps_core.work import Work

HasTime = Callable[[], bool]
"""Asked after each step: whether the next may follow at once."""
OnEnd = Callable[[Any, Exception | None], None]
"""Told what a work returned, or raised."""


class _Job(NamedTuple):
    """A work that waits, or what is called between two; and who waits for its end."""

    work: Work[Any] | Callable[[], None]
    on_end: OnEnd | None = None


class WorkQueue:
    """Works, in the order in which they came.

    Args:
        on_failure: called with what a work raised when nobody waits for it any more.
    """

    def __init__(self, on_failure: Callable[[Exception], None]) -> None:
        self._on_failure = on_failure
        self._jobs: deque[_Job] = deque()
        self._is_running = False

    @property
    def is_busy(self) -> bool:
        """Whether a work is under way, or waits."""
        return bool(self._jobs)

    @property
    def count(self) -> int:
        """Works that are under way, or wait."""
        return len(self._jobs)

    def add(self, work: Work[Any], has_time: HasTime, on_end: OnEnd | None = None) -> None:
        """Do it now, if nothing is under way, as far as there is time; the rest in its turn.

        Raises:
            Exception: what it raised, if that was now and nobody waits for its end.
        """
        is_next = not self._jobs
        self._jobs.append(_Job(work, on_end))
        if is_next:
            try:
                if self._is_done(self._jobs[0], has_time):
                    self._jobs.popleft()
            except Exception:
                self._jobs.popleft()
                raise

    def between(self, callback: Callable[[], None]) -> None:
        """Call it when nothing is under way: now, or in its turn."""
        if self.is_busy:
            self._jobs.append(_Job(callback))
        else:
            callback()

    def go_on(self, has_time: HasTime) -> None:
        """Go on with what is under way, and with what waits, as far as there is time."""
        while self._jobs and self._has_next_ended(has_time):
            pass

    def finish(self) -> None:
        """What is under way, or waits, is done now."""
        if self.is_busy:
            check(not self._is_running, "WK-1", "a work begins while another is under way")
            self.go_on(always)

    def _has_next_ended(self, has_time: HasTime) -> bool:
        job = self._jobs[0]
        if callable(job.work):
            self._jobs.popleft()
            self._call(job.work)
            return True
        try:
            is_done = self._is_done(job, has_time)
        except Exception as failure:  # noqa: BLE001 - whoever asked for it has gone on
            self._jobs.popleft()
            self._on_failure(failure)
            return True
        if is_done:
            self._jobs.popleft()
        return is_done

    def _call(self, callback: Callable[[], None]) -> None:
        """Between two works: what waits is out of sight."""
        behind, self._jobs = self._jobs, deque()
        try:
            callback()
        except Exception as failure:  # noqa: BLE001 - as above
            self._on_failure(failure)
        finally:
            self._jobs.extend(behind)

    def _is_done(self, job: _Job, has_time: HasTime) -> bool:
        """Take steps of a job, one at least, to its end or until there is no time.

        Raises:
            Exception: what it raised, if nobody waits for its end.
        """
        self._is_running = True
        work = job.work
        try:
            while True:
                next(work)  # type: ignore[arg-type]
                if not has_time():
                    return False
        except StopIteration as end:
            if job.on_end is not None:
                job.on_end(end.value, None)
            return True
        except Exception as failure:
            if job.on_end is None:
                raise
            job.on_end(None, failure)
            return True
        finally:
            self._is_running = False


def always() -> bool:
    """There is time for all of it."""
    return True
