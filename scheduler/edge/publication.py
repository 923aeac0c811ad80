"""Publishes decisions once the journal has them.

Rules:
    - A view is published, and a call answered or refused, after everything decided before is
      durable. Without a journal that is at once.
    - A thread writes the journal, one write at a time; decisions made meanwhile share the next.
    - A store that takes no write for now is retried without limit: nothing is published meanwhile,
      and calls are refused with the reason. So they are while a write lasts too long, which is not
      made again. A store that another scheduler has claimed, or a damaged one, ends the scheduler
      (`failed`).
    - Nobody is served before the first write, so that may last, and is said to.
    - The end waits as long for a disk, and no longer: what was not written nobody was told.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

from ps_core.cluster_view import ClusterView
from ps_core.errors import InvalidJournal, PushpullError, Recovering
from ps_runtime.observe import logs
from ps_runtime.system import clock
from scheduler.journal.decision_buffer import DecisionBuffer
from scheduler.journal.records import JournalDelta
from scheduler.journal.state_store import StateStore
from scheduler.machine.cluster import Cluster
from scheduler.machine.state import Transition

_RETRY_S = 0.5

STALL_S = 5.0
"""Wait for a write until the journal's disk is said not to answer."""

Publish = Callable[[Cluster, ClusterView, tuple[Transition, ...]], None]
"""Receives the cluster that was served, its durable view, and the transitions that led to it."""


class JournalWriter:
    """A store, and the thread that writes it."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._is_closed = False
        self._works: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        # A daemon: the end of the process does not wait for a disk that does not answer.
        threading.Thread(target=self._work, name="journal", daemon=True).start()

    @property
    def name(self) -> str:
        return self._store.name

    async def write(self, delta: JournalDelta) -> None:
        """As `StateStore.write`, without blocking the loop."""
        await self._run(lambda: self._store.write(delta.encoded(), delta.removed))

    async def forget(self) -> None:
        """Delete all records after the end of the cluster: the next scheduler begins another."""
        await self._run(lambda: self._store.write({}, list(self._store.read())))

    async def close(self) -> None:
        """Close the store. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            await self._run(self._store.close)
            self._works.put(None)

    async def _run(self, work: Callable[[], None]) -> None:
        told: Future[None] = Future()
        self._works.put((work, told))
        await asyncio.wrap_future(told)

    def _work(self) -> None:
        while (found := self._works.get()) is not None:
            work, told = found
            if told.set_running_or_notify_cancel():
                try:
                    work()
                except BaseException as error:  # noqa: BLE001 - it is raised where it is awaited
                    told.set_exception(error)
                else:
                    told.set_result(None)


def nothing() -> None:
    """The default of a callback."""


class Publication:
    """Publishes decisions in order; without a journal at once.

    Attributes:
        problem: the reason why the journal is not written now, or None.
        failed: set when the journal can never be written again, for the reason in `problem`.
        on_problem: called when `problem` has changed.
    """

    def __init__(
        self,
        cluster: Callable[[], Cluster],
        publish: Publish,
        journal: JournalWriter | None,
        stall_s: float = STALL_S,
    ) -> None:
        self._cluster = cluster
        self._publish = publish
        self._journal = journal
        self._stall_s = stall_s
        self._has_written = False
        self._buffer = DecisionBuffer()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None
        self.problem: PushpullError | None = None
        self.failed = asyncio.Event()
        self.on_problem: Callable[[], None] = nothing

    def decided(self, transitions: tuple[Transition, ...], *, is_news: bool = True) -> None:
        """The cluster's state has changed; `is_news` if the view did."""
        if self._journal is None:
            if is_news:
                cluster = self._cluster()
                self._publish(cluster, cluster.view, transitions)
            return
        self._buffer.decided(transitions, is_news=is_news)
        if self._task is None and not self.failed.is_set():
            self._task = asyncio.get_running_loop().create_task(self._write_all(self._journal))

    def cluster_replaced(self) -> None:
        """A restore replaces the cluster: its decisions that are not durable are void."""
        self._buffer.cluster_replaced()

    async def flushed(self) -> None:
        """Wait until all earlier decisions are durable and published, or raise `problem`."""
        newest = self._buffer.newest
        if not newest:
            return
        if self.problem is not None:
            raise self.problem
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((newest, told))
        await told

    async def _write_all(self, journal: JournalWriter) -> None:
        try:
            while True:
                cluster = self._cluster()
                kept = partial(cluster.journaled, clock.now_s())
                delta = self._buffer.take(kept, cluster.view)
                if delta is None:
                    return
                await self._write_durably(journal, delta)
                told = self._buffer.written()
                if told.is_news:
                    self._publish(cluster, told.view, told.transitions)
                self._wake_waiting(told.number)
        except PushpullError as error:
            self.fail(error)
        except Exception as error:  # noqa: BLE001 - else whoever waits would wait for ever
            logs.exception("journal_failed", error)
            self.fail(InvalidJournal(f"the journal cannot be written: {error!r}"))
        finally:
            self._task = None  # before anything else can be decided

    async def _write_durably(self, journal: JournalWriter, delta: JournalDelta) -> None:
        while True:
            try:
                await self._write(journal, delta)
            except Recovering as error:
                self._hold(error)
                await asyncio.sleep(_RETRY_S)
            else:
                if self.problem is not None:
                    logs.info("journal_written_again")
                    self.problem = None
                    self.on_problem()
                return

    async def _write(self, journal: JournalWriter, delta: JournalDelta) -> None:
        """As `JournalWriter.write`; one that lasts is a problem until it ends."""
        writing = asyncio.ensure_future(journal.write(delta))
        try:
            done, _ = await asyncio.wait((writing,), timeout=self._stall_s)
            if not done and self._has_written:
                self._hold(Recovering(self._unanswered(journal)))
            elif not done:
                logs.error("journal_not_written", error=self._unanswered(journal))
            await writing
            self._has_written = True
        finally:
            writing.cancel()

    def _unanswered(self, journal: JournalWriter) -> str:
        return (
            f"the disk of {journal.name} has not answered for {self._stall_s:g} s: mend the disk; "
            "nothing, if it is only slow; the last complete write is intact"
        )

    def _wake_waiting(self, number: int) -> None:
        waiting, self._waiting = self._waiting, []
        for awaited, told in waiting:
            if awaited > number:
                self._waiting.append((awaited, told))
            elif not told.done():
                told.set_result(None)

    def _hold(self, error: Recovering) -> None:
        """Nothing is published for now."""
        if self.problem is None:
            logs.error("journal_not_written", error=error.message)
        self._refuse(error)

    def _refuse(self, error: PushpullError) -> None:
        """Fail every waiting call with the error of the write."""
        self.problem = error
        self.on_problem()
        waiting, self._waiting = self._waiting, []
        for _, told in waiting:
            if not told.done():
                told.set_exception(error)

    def fail(self, error: PushpullError) -> None:
        """End publication for good: this scheduler cannot use its journal any more."""
        self._refuse(error)
        self.failed.set()

    async def close(self, *, has_ended: bool) -> None:
        """Cancel the running write, whose decisions were never published, and close the journal."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._journal is not None:
            try:
                async with asyncio.timeout(self._stall_s):
                    await _end(self._journal, has_ended=has_ended)
            except TimeoutError:
                logs.error("journal_not_closed", error=self._unanswered(self._journal))


async def _end(journal: JournalWriter, *, has_ended: bool) -> None:
    if has_ended:
        try:
            await journal.forget()
        except PushpullError as error:
            logs.warning("journal_not_emptied", error=error.message)
    await journal.close()
