"""What the cluster decided is told when the journal has it.

Rules:
    - A view is published, and a call answered, with an answer or a refusal, after everything that
      the machine had decided by then is durable. Without a journal that is at once.
    - The journal is written on a thread, one write at a time. Whatever is decided meanwhile goes
      together with the next.
    - A store that takes nothing for now is tried again for as long as it takes: what was decided is
      told to nobody meanwhile, and calls are refused with the reason. A store that is in other
      hands, or damaged, ends the scheduler (`failed`).

Belongs to the scheduler's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ps_core.cluster_view import ClusterView
from ps_core.errors import InvalidJournal, PushpullError, Recovering
from ps_runtime.observe import logs
from ps_runtime.system import clock
from scheduler.machine.cluster import Cluster
from scheduler.machine.state import Transition
from scheduler.store.records import Delta
from scheduler.store.state_store import StateStore
from scheduler.store.untold import Untold

_RETRY_S = 0.5

Publish = Callable[[Cluster, ClusterView, tuple[Transition, ...]], None]
"""Called with a cluster whose view is durable, that view, and what led to it."""


class Journal:
    """A store that is written on a thread of its own."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")

    async def write(self, delta: Delta) -> None:
        """Blocking, Raises: as `StateStore.write`; the loop goes on."""

        def write() -> None:
            self._store.write(delta.encoded(), delta.removed)

        await asyncio.get_running_loop().run_in_executor(self._thread, write)

    async def forget(self) -> None:
        """The cluster has ended: the next scheduler begins another.

        Blocking, Raises: as `StateStore.write`.
        """

        def forget() -> None:
            self._store.write({}, list(self._store.read()))

        await asyncio.get_running_loop().run_in_executor(self._thread, forget)

    async def close(self) -> None:
        """Give the store out of hand, after what is being written."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        self._thread.shutdown()


def _nothing() -> None:
    """What whoever does not care does about a problem."""


class Publication:
    """Tells what was decided, in order.

    Args:
        cluster: gives the one that is served.
        publish: tells what is durable.
        journal: where it is kept; None: nowhere.

    Attributes:
        problem: why the journal cannot be written at present; None: it can.
        failed: set when it never will be; `problem` says why.
        on_problem: called when `problem` has changed.
    """

    def __init__(
        self, cluster: Callable[[], Cluster], publish: Publish, journal: Journal | None
    ) -> None:
        self._cluster = cluster
        self._publish = publish
        self._journal = journal
        self._untold = Untold()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None
        self.problem: PushpullError | None = None
        self.failed = asyncio.Event()
        self.on_problem: Callable[[], None] = _nothing

    def decided(self, transitions: tuple[Transition, ...], *, is_news: bool = True) -> None:
        """The cluster's state has changed; without news, in what no view has."""
        if self._journal is None:
            if is_news:
                cluster = self._cluster()
                self._publish(cluster, cluster.view, transitions)
            return
        self._untold.decided(transitions, is_news=is_news)
        if self._task is None and not self.failed.is_set():
            self._task = asyncio.get_running_loop().create_task(self._write_all(self._journal))

    def begun_anew(self) -> None:
        """Another cluster is served: what was decided in the one before is void, unless it is
        durable.
        """
        self._untold.begun_anew()

    async def settled(self) -> None:
        """Wait until all that was decided before is durable and told.

        Raises:
            Recovering: the store takes nothing at present; the reason says why.
            InvalidJournal: it never will.
        """
        newest = self._untold.newest
        if not newest:
            return
        if self.problem is not None:
            raise self.problem
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((newest, told))
        await told

    async def _write_all(self, journal: Journal) -> None:
        try:
            while True:
                cluster = self._cluster()
                kept = partial(cluster.kept, clock.now_s())
                delta = self._untold.take(kept, cluster.view)
                if delta is None:
                    return
                await self._written(journal, delta)
                told = self._untold.written()
                if told.is_news:
                    self._publish(cluster, told.view, told.transitions)
                self._let_go(told.number)
        except PushpullError as error:
            self.fail(error)
        except Exception as error:  # noqa: BLE001 - else whoever waits would wait for ever
            logs.exception("journal_failed", error)
            self.fail(InvalidJournal(f"the journal cannot be written: {error!r}"))
        finally:
            self._task = None  # before anything else can be decided

    async def _written(self, journal: Journal, delta: Delta) -> None:
        while True:
            try:
                await journal.write(delta)
            except Recovering as error:
                if self.problem is None:
                    logs.error("journal_not_written", error=error.message)
                self._refuse(error)
                await asyncio.sleep(_RETRY_S)
            else:
                if self.problem is not None:
                    logs.info("journal_written_again")
                    self.problem = None
                    self.on_problem()
                return

    def _let_go(self, number: int) -> None:
        """What was decided up to this is told: nobody waits for it any more."""
        waiting, self._waiting = self._waiting, []
        for awaited, told in waiting:
            if awaited > number:
                self._waiting.append((awaited, told))
            elif not told.done():
                told.set_result(None)

    def _refuse(self, error: PushpullError) -> None:
        """Nothing could be written: who waits hears why."""
        self.problem = error
        self.on_problem()
        waiting, self._waiting = self._waiting, []
        for _, told in waiting:
            if not told.done():
                told.set_exception(error)

    def fail(self, error: PushpullError) -> None:
        """Nothing will ever be told again: the journal is of no use to this scheduler."""
        self._refuse(error)
        self.failed.set()

    async def close(self, *, has_ended: bool) -> None:
        """End; what is not written is lost, and was told to nobody. Of a cluster that `has_ended`
        nothing is kept.
        """
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._journal is not None:
            try:
                if has_ended:
                    await self._journal.forget()
            except PushpullError as error:
                logs.warning("journal_not_emptied", error=error.message)
            finally:
                await self._journal.close()
