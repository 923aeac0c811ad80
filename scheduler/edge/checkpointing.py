"""The edge of checkpoints: starts those that are due, writes manifests, removes old directories.

Rules:
    - The directory of a failed checkpoint is removed, and again when the next one is complete,
      because a node that had not heard may have written into it. Whatever remains has no manifest
      and is ignored.
    - The manifest is written only if every file is where the scheduler looks, as it was reported:
      hosts may have a directory of that name each.
    - A checkpoint fails if the state of a worker that has left cannot be copied, or was never where
      the scheduler looks: it looks once when the worker reports it. A state whose file was there,
      and is missing or damaged later, is lost, and checkpoints are made without it.
    - The manifest of an incremental checkpoint is written only while every checkpoint that it
      refers to has its own, so removing checkpoints by hand leaves no chain without its first.
    - Old checkpoints are pruned after each complete one, but not by a cluster that a restore has
      replaced: the new one reads one of them. A restore waits for a prune that has begun.

`scheduler.machine.checkpoint_schedule` decides when one is due, `scheduler.machine.checkpoints` who
takes part; nodes write their own parts.
"""

from __future__ import annotations

import asyncio
import calendar
import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict

from ps_core.change import Checkpoint
from ps_core.cluster_view import Session
from ps_core.errors import (
    Fenced,
    InvalidCheckpoint,
    InvalidConfig,
    PushpullError,
    StaleAssignment,
    WaitExpired,
)
from ps_core.keys import NodeId, TableId
from ps_core.manifest import (
    Manifest,
    PartReport,
    ReportedTable,
    SavedPart,
    SavedTable,
    SavedWorker,
    left_directory_name,
    number_of,
)
from ps_core.tables.elements import Initializer, InitializerKind
from ps_core.tables.table import Table
from ps_runtime.checkpoint.directory import CheckpointDirectory, locate
from ps_runtime.checkpoint.pruning import prune
from ps_runtime.checkpoint.references import check_files
from ps_runtime.checkpoint.roots import check_root
from ps_runtime.checkpoint.store import CheckpointStore
from ps_runtime.checkpoint.worker_copies import SourceLost, SourceMissing, WorkerCopies
from ps_runtime.cluster import wire
from ps_runtime.observe import logs
from ps_runtime.observe.metrics import SchedulerMetrics
from ps_runtime.system import clock
from pushpull.v1 import scheduler_pb2
from scheduler.edge.restoring import lineage_of, record, restored_from, run_of
from scheduler.machine.checkpoint_schedule import RETRY_S, CheckpointPolicy, CheckpointSchedule
from scheduler.machine.checkpoint_state import (
    Attempt,
    CheckpointBegunAgain,
    CheckpointCut,
    CheckpointFailed,
    CheckpointMade,
    CheckpointUnneeded,
    CheckpointWritten,
    CompleteCheckpoint,
)
from scheduler.machine.checkpoints import LEAVING, UNNAMED, without_parameters
from scheduler.machine.cluster import STARTED_AGAIN, Cluster, Decision
from scheduler.machine.membership import REGISTER_AGAIN_MS
from scheduler.machine.state import ClusterSettings, Restored, Transition

ReplyT = TypeVar("ReplyT")

_REMEMBERED_COUNT = 100  # complete checkpoints that are remembered for their requesters
_GIVEN_UP_COUNT = 16  # failed checkpoints whose directories are removed once more
_NAMED_COUNT = 5  # tables that a log line names
_MAX_REASON_CHARACTERS = 2_000  # length of a failure's reason in status answers
_ASKED_AGAIN_S = 1.0  # interval of the questions for a manifest that cannot be read, in seconds
_TOLD_AGAIN_S = 60.0  # interval of the warnings meanwhile, in seconds
_CREATED = "%Y-%m-%dT%H:%M:%SZ"  # form of a manifest's `created`
_POLL_S = 0.02  # interval of the check for the end of a checkpoint, in seconds


@dataclass(slots=True, eq=False)
class _Waits:
    """A call of a node that waits for the checkpoint of that number; 0: for the next one."""

    node_id: NodeId | None
    number: int = 0


class Checkpointing:
    """The checkpoints of one cluster. Belongs to the scheduler's event loop; `carry_out` logs and
    publishes a decision of the machine.

    Attributes:
        pruning: held while checkpoints are pruned, by a restore from its choice to `end`, and while
            one is recorded.
        schedule: when one is due.
    """

    def __init__(
        self,
        cluster: Cluster,
        policy: CheckpointPolicy,
        carry_out: Callable[[Decision[Any]], Any],
        metrics: SchedulerMetrics,
        given_up: Collection[str] = (),
    ) -> None:
        """`given_up` are those of the cluster that this one replaces; see `end`."""
        self._metrics = metrics
        begun_s = clock.now_s()
        metrics.checkpoint_age_seconds.set_function(lambda: clock.now_s() - begun_s)
        metrics.checkpoint_bytes.set(0)  # a restore may have replaced the cluster that had one
        for result in ("complete", "failed"):  # from 0 on, so that `increase` sees the first one
            metrics.checkpoints.labels(result=result)
        self._cluster = cluster
        self._keep = policy.keep
        self.schedule = CheckpointSchedule(policy, cluster.settings)
        cluster.checkpoints.reached = self.schedule.reached
        self._carry_out = carry_out
        # By number: the answer to those who asked, or why there is none.
        self._made: dict[int, scheduler_pb2.CreateCheckpointResponse | str] = {}
        self._waits: set[_Waits] = set()
        self._cut_in_view = 0
        self._given_up = deque(given_up, maxlen=_GIVEN_UP_COUNT)
        self._tasks: set[asyncio.Task[None]] = set()
        self._looks: set[asyncio.Task[None]] = set()  # for files of workers that leave
        self._saved_beside_log: set[NodeId] = set()
        self._recording: asyncio.Task[None] | None = None
        self._is_over = False
        self._closing = asyncio.Event()
        self.pruning = asyncio.Lock()
        self._failed_count = 0
        self._newest: tuple[CompleteCheckpoint, float] | None = None
        self._is_resumed = False
        self._failed: tuple[CheckpointFailed, float] | None = None
        self._unknown: CheckpointFailed | None = None  # written, and its manifest cannot be read
        self._unknown_since_s = 0.0

    def history(self, now_s: float) -> scheduler_pb2.CheckpointHistory:
        """Counts, and the newest complete and the newest failed one, for the status answer. One of
        which the store does not say for a while whether it is complete counts as failed until then.
        """
        is_long = now_s >= self._unknown_since_s + RETRY_S
        unknown = self._unknown if is_long else None
        told = scheduler_pb2.CheckpointHistory(
            url=self._cluster.settings.checkpoint_url,
            unknown_before=self._is_resumed and self._newest is None,
            failed_count=self._failed_count + (unknown is not None),
        )
        if self._newest is not None:
            made, complete_s = self._newest
            told.complete_count, told.complete_url = made.count, made.url
            told.complete_ms = max(0, round((now_s - complete_s) * 1000))
        newest = self._failed if unknown is None else (unknown, now_s)
        if newest is not None:
            failed, failed_s = newest
            told.failed_number = failed.number
            told.failed_reason = failed.reason[:_MAX_REASON_CHARACTERS]
            told.failed_ms = round((now_s - failed_s) * 1000)
        return told

    @property
    def left_url(self) -> str:
        """Directory for the state of workers that leave; empty: none."""
        settings = self._cluster.settings
        url = settings.checkpoint_url
        return f"{url}/{left_directory_name(settings.cluster_id)}" if url else ""

    # --- when one is due

    def heard(self, node_id: NodeId, said: scheduler_pb2.NodeProgress) -> None:
        clocks = {TableId(table.table_id): table.clock for table in said.tables}
        self.schedule.heard(node_id, clocks)

    def look(self, now_s: float) -> None:
        reason = self.schedule.look(self._cluster.view, now_s)
        if reason and self._carried_out(self._cluster.begin_checkpoint(reason, now_s)).number:
            self.schedule.begun(now_s)

    def end(self) -> list[str]:
        """A restore has replaced the cluster: its checkpoints decide nothing any more, no other is
        pruned for them, and calls that wait for one fail with Fenced. Returns the directories of
        those that were given up, of the unfinished one, too.
        """
        ended = self._cluster.give_up_checkpoint("a restore has replaced the cluster")
        self._is_over = True
        failed = [each.url for each in ended.transitions if isinstance(each, CheckpointFailed)]
        return [*self._given_up, *failed]

    async def restored_from(self, url: str, roots: Sequence[str]) -> Restored:
        """The checkpoint that the cluster is about to be restored from, at a URL within `roots`, or
        empty: under the cluster's own.

        Raises:
            NotPermitted: it lies in none of the roots.
            InvalidCheckpoint: there is no good one.
        """

        def permit(source: str) -> None:
            check_root(source, roots)

        url = url or self._cluster.settings.checkpoint_url
        if url:
            permit(url)
        return await asyncio.to_thread(restored_from, url, permit)

    def served(self) -> None:
        """The cluster is durable, so no later start goes on from the one before it: record the
        restore that began it, where the next start looks for the newest checkpoint. Idempotent.
        """
        if self._recording is None and self._cluster.settings.left_timelines:
            self._recording = self._start(self._record())

    async def _record(self) -> None:
        async with self.pruning:  # which goes by what is recorded
            await asyncio.to_thread(record, self._cluster.settings)

    async def until_recorded(self) -> None:
        if self._recording is not None:
            await asyncio.wait((self._recording,))

    # --- parts

    def report(self, session: Session, number: int, part: PartReport) -> None:
        """A node has written its part, or cannot. The file of a worker that leaves is looked for:
        later checkpoints need it where this scheduler finds it.
        """
        self._carried_out(self._cluster.report_part(session, number, part))
        if number == LEAVING and part.file and not session.run:
            looking = self._start(self._look_for(session, part.file))
            self._looks.add(looking)
            looking.add_done_callback(self._looks.discard)

    async def _look_for(self, worker: Session, file: str) -> None:
        directory = CheckpointDirectory(locate(self.left_url))
        try:
            is_there = await asyncio.to_thread(directory.has_file, file)
        except PushpullError as error:
            logs.warning("worker_state_not_looked_for", rank=worker.rank, reason=error.message)
            return
        if is_there:
            self._cluster.checkpoints.found(worker.rank, worker.node_id)
            return
        logs.warning(
            "worker_state_not_found",
            rank=worker.rank,
            file=f"{directory.url}/{file}",
            remedy="no checkpoint is complete without it: is the place shared by all hosts?",
        )

    def _carried_out(self, decision: Decision[ReplyT]) -> ReplyT:
        return decision.reply if self._is_over else self._carry_out(decision)

    # --- one that somebody asked for

    async def create(
        self,
        request: scheduler_pb2.CreateCheckpointRequest,
        deadline_s: float,
        node_id: NodeId | None = None,
    ) -> scheduler_pb2.CreateCheckpointResponse:
        """Make a checkpoint for that node, or take the running one if it covers the request, and
        wait until it is complete, at most until this moment of the clock.

        Raises:
            Fenced: a restore has replaced the cluster.
            StaleAssignment: a checkpoint was cut that the caller does not know, and that may do.
            InvalidConfig: the cluster has no checkpoint URL.
            InvalidCheckpoint: the checkpoint failed, values are lost that it would have, or nothing
                has moved since the one that the cluster began from, and that cannot be read.
            WaitExpired: it was not complete in time; it may still complete.
        """
        waits = _Waits(node_id)
        self._waits.add(waits)
        try:
            return await self._made_for(request, deadline_s, waits)
        finally:
            self._waits.discard(waits)

    def is_waited_for(self, number: int, node_id: NodeId) -> bool:
        """True if a call of this node waits for that checkpoint, or for one after it: not if it has
        been answered, however late the node hears that.
        """
        return any(each.node_id == node_id and each.number in (0, number) for each in self._waits)

    async def _made_for(
        self, request: scheduler_pb2.CreateCheckpointRequest, deadline_s: float, waits: _Waits
    ) -> scheduler_pb2.CreateCheckpointResponse:
        if not self._cluster.settings.checkpoint_url:
            raise InvalidConfig(
                "this cluster has no place for checkpoints; start the scheduler with "
                "checkpoint_url (PUSHPULL_CHECKPOINT_URL, or --checkpoint-url of pushpull train)"
            )
        reason = request.reason[:200] or "asked for"
        number = covered_by = request.covered_by
        while True:
            self._check_not_over()
            number, covered_by = map(self._cluster.checkpoints.newest_of, (number, covered_by))
            under_way = self._cluster.view.checkpoint
            may_come = number in self._made or (under_way and under_way.number == number)
            if number == covered_by and not may_come:
                number = covered_by = 0
            if not number:
                if 0 < request.view_number < self._cut_in_view:
                    raise StaleAssignment(
                        f"a checkpoint was cut in view {self._cut_in_view}; the caller's newest "
                        f"view was {request.view_number}"
                    )
                if self._cluster.checkpoints.lost_words:
                    lost = self._cluster.checkpoints.lost_words
                    raise InvalidCheckpoint(f"no checkpoint can be made: {lost}")
                pending = self._carried_out(self._cluster.begin_checkpoint(reason, clock.now_s()))
                number, said = pending.number, pending.reason
            else:
                said = self._cluster.checkpoints.reason(clock.now_s())
            waits.number = number
            problem = self._cluster.checkpoints.problem_of(number) if number else None
            if problem:
                raise InvalidCheckpoint(f"checkpoint {number} was not made: {problem}")
            if problem is not None and number in self._made:
                made = self._made[number]
                if isinstance(made, str):
                    raise InvalidCheckpoint(f"checkpoint {number} was not made: {made}")
                return made
            if clock.now_s() >= deadline_s:
                raise WaitExpired(
                    self._with_refusal(said or f"checkpoint {number} is not complete")
                )
            await asyncio.sleep(min(_POLL_S, max(deadline_s - clock.now_s(), 0.0)))

    async def create_beside_log(self, node_id: NodeId, deadline_s: float) -> None:
        """Make a checkpoint, or wait for the running one, before a server leaves whose update log
        alone has values; once for a server, and not while others are awaited. The log has them, so
        no failure keeps the server.
        """
        checkpoints = self._cluster.checkpoints
        if node_id in self._saved_beside_log or not checkpoints.all_is_here:
            return
        self._saved_beside_log.add(node_id)
        running = self._cluster.view.checkpoint
        request = scheduler_pb2.CreateCheckpointRequest(
            reason=f"server {node_id} leaves", covered_by=0 if running is None else running.number
        )
        try:
            await self.create(request, deadline_s)
        except PushpullError as error:
            logs.warning("leaves_without_checkpoint", node_id=node_id, reason=error.message)

    def _with_refusal(self, said: str) -> str:
        """The message on what a checkpoint waits for, and why the store does not say of one whether
        it is complete.
        """
        return said if self._unknown is None else f"{said}: {self._unknown.reason}"

    def _check_not_over(self) -> None:
        if self._is_over:
            raise Fenced(
                "a restore has replaced the cluster whose checkpoint this was to be",
                retry_after_ms=REGISTER_AGAIN_MS,
            )

    async def until_none_is_under_way(self, deadline_s: float) -> None:
        """Wait until no checkpoint is running; WaitExpired at `deadline_s` says why one is."""
        while self._cluster.view.checkpoint is not None:
            self._check_not_over()
            if clock.now_s() >= deadline_s:
                raise WaitExpired(
                    self._with_refusal(self._cluster.checkpoints.reason(clock.now_s()))
                )
            await asyncio.sleep(_POLL_S)

    # --- what becomes of it

    def resume(self) -> None:
        """Go on with a cluster of the journal, and end its written checkpoint: complete if its
        directory has a manifest, and failed if it has none. Remove what the cluster before this one
        gave up.
        """
        self._is_resumed = bool(self._cluster.view.of_run(UNNAMED).tables)  # a new one has none
        if self._is_resumed:
            made, newest = self._cluster.checkpoints.newest, None
            if made is not None:
                newest = made.clock, self._show(made)
            self.schedule.resumed(self._cluster.view, newest, clock.now_s())
        if self._given_up:
            self._start(self._remove_given_up())
        under_way = self._cluster.view.checkpoint
        if under_way is not None:
            self._start(self._end_written(under_way))

    async def _end_written(self, written: Checkpoint) -> None:
        """Ask until the store answers, or this scheduler ends: a failed one would be removed."""
        directory, tells_s = CheckpointDirectory(locate(written.url)), clock.now_s()
        self._unknown_since_s = tells_s
        while True:
            try:
                is_complete = await asyncio.to_thread(directory.has_manifest)
                break
            except PushpullError as error:
                reason = f"{error.message}; no other is made until its manifest can be read"
                self._unknown = CheckpointFailed(written.number, written.url, reason)
                if clock.now_s() >= tells_s:
                    tells_s = clock.now_s() + _TOLD_AGAIN_S
                    logs.warning("manifest_not_read", number=written.number, reason=error.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ASKED_AGAIN_S):
                    await self._closing.wait()
            if self._closing.is_set() or self._is_over:
                return
        self._unknown = None
        problem = "" if is_complete else "its manifest was not written; " + STARTED_AGAIN
        made = await asyncio.to_thread(_found, directory) if is_complete else None
        if is_complete and not self._is_over:
            self._metrics.checkpoints.labels(result="complete").inc()
        if made is not None and not self._is_over:
            made = self._counted(made)
            self.schedule.made(made.clock, self._show(made))
        self._carried_out(self._cluster.end_checkpoint(written.number, problem, made))
        if problem and self._is_over:
            await self._remove(written.url)

    def _counted(self, made: CompleteCheckpoint) -> CompleteCheckpoint:
        before = 0 if self._newest is None else self._newest[0].count
        return replace(made, count=before + 1)

    def _show(self, made: CompleteCheckpoint) -> float:
        """Show the newest complete checkpoint; returns the moment when it was complete."""
        complete_s = clock.now_s() - max(0.0, time.time() - made.complete_s)
        self._newest = made, complete_s
        self._metrics.checkpoint_bytes.set(made.byte_count)
        self._metrics.checkpoint_age_seconds.set_function(lambda: clock.now_s() - complete_s)
        return complete_s

    def published(self, transition: Transition, now_s: float) -> None:
        if isinstance(transition, CheckpointCut):
            self._cut_in_view = self._cluster.view.view_number
        elif isinstance(transition, CheckpointWritten):
            self._start(self._complete(transition.attempt, now_s))
        elif isinstance(transition, CheckpointMade):
            self._start(self._remove_given_up())
        elif isinstance(transition, CheckpointUnneeded):
            self.schedule.unneeded(now_s)
            self._start(self._answer_with_source(transition))
        elif isinstance(transition, CheckpointBegunAgain | CheckpointFailed):
            self._given_up.append(transition.url)
            self._start(self._remove(transition.url))
        if isinstance(transition, CheckpointFailed):
            self._metrics.checkpoints.labels(result="failed").inc()
            self._failed_count += 1
            self._failed = transition, now_s

    async def _answer_with_source(self, unneeded: CheckpointUnneeded) -> None:
        """Nothing has moved since the checkpoint that the cluster began from: it is the result."""
        directory = CheckpointDirectory(locate(unneeded.source))
        try:
            byte_count = (await asyncio.to_thread(directory.read_manifest)).byte_count
        except PushpullError as error:
            logs.warning("checkpoint_not_read", url=unneeded.source, reason=error.message)
            self._keep_answer(
                unneeded.number,
                f"no step was taken since {unneeded.source}, from which the cluster began, and "
                f"that cannot be read: {error.message}. Put it back, or ask again once all "
                "workers have taken a step",
            )
            return
        made = scheduler_pb2.CreateCheckpointResponse(
            number=number_of(directory.name) or 0, url=unneeded.source, byte_count=byte_count
        )
        self._keep_answer(unneeded.number, made)

    def _keep_answer(self, number: int, made: scheduler_pb2.CreateCheckpointResponse | str) -> None:
        newest = list(self._made.items())[-_REMEMBERED_COUNT:]
        self._made = {**dict(newest), number: made}

    def _tell_missing(self, manifest: Manifest) -> None:
        """Log the tables that the cluster began with, and that nobody has created again."""
        restored = self._cluster.settings.restored
        before = set() if restored is None else set(restored.tables)
        missing = sorted(before - {table.name for table in manifest.tables})
        if missing and restored is not None:
            logs.warning(
                "tables_not_in_checkpoint",
                number=manifest.number,
                tables=",".join(missing[:_NAMED_COUNT]),
                count=len(missing),
                remedy=f"nobody has created them since the start; {restored.url} has them",
            )

    async def _complete(self, attempt: Attempt, now_s: float) -> None:
        problem, complete = "", None
        cluster = self._cluster
        try:
            if self._looks:
                await asyncio.wait(self._looks)
            world_size = cluster.view.of_run(UNNAMED).world_size
            manifest = manifest_of(cluster.settings, attempt, world_size)
            manifest = await asyncio.to_thread(
                _with_left, attempt, manifest, self.left_url, cluster.checkpoints.unfound
            )
            states = ((each.rank, each.file, each.problem) for each in manifest.workers)
            lost = without_parameters(states) if cluster.checkpoints.needs_states(attempt) else ""
            if lost:
                raise InvalidCheckpoint(lost)
            directory = await asyncio.to_thread(write_manifest, attempt.url, manifest)
            made = scheduler_pb2.CreateCheckpointResponse(
                number=attempt.number, url=directory.url, byte_count=manifest.byte_count
            )
            self._keep_answer(attempt.number, made)
            _tell_lost(manifest)
            self._tell_missing(manifest)
            complete = self._counted(_complete_one(directory.url, manifest, time.time()))
            if not self._is_over:
                self.schedule.made(complete.clock, now_s)
                self._show(complete)
                self._metrics.checkpoints.labels(result="complete").inc()
            logs.info(
                "checkpoint_complete",
                url=directory.url,
                bytes=manifest.byte_count,
                referred_bytes=manifest.referred_byte_count,
                bases=len(manifest.bases),
            )
        except PushpullError as error:
            problem = error.message
        except Exception as error:  # noqa: BLE001 - else it would be made for ever, and no other
            logs.exception("checkpoint_not_completed", error, number=attempt.number)
            problem = f"{type(error).__name__}: {error}"
        self._carried_out(cluster.end_checkpoint(attempt.number, problem, complete))
        if problem and self._is_over:
            await self._remove(attempt.url)
        if not problem and self._keep:
            await self._prune()

    async def _prune(self) -> None:
        url, keep = self._cluster.settings.checkpoint_url, self._keep
        settings = self._cluster.settings
        run = run_of(settings)
        source = "" if settings.restored is None else settings.restored.url.rpartition("/")[2]
        try:
            async with self.pruning:
                if self._is_over:
                    return
                removed = await asyncio.to_thread(prune, CheckpointStore(url), keep, run, source)
            for name in removed:
                logs.info("checkpoint_removed", name=name)
        except PushpullError as error:
            logs.warning("checkpoints_not_pruned", url=url, reason=error.message)

    async def _remove_given_up(self) -> None:
        for url in tuple(self._given_up):
            await self._remove(url)

    async def _remove(self, url: str) -> None:
        try:
            await asyncio.to_thread(lambda: CheckpointDirectory(locate(url)).remove())
        except PushpullError as error:
            logs.warning("checkpoint_not_removed", url=url, reason=error.message)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def give_up(self, reason: str) -> None:
        """Fail the running checkpoint, unless only its manifest is missing."""
        self._carried_out(self._cluster.give_up_checkpoint(reason))

    async def close(self, *, goes_on: bool) -> None:
        """Wait for running file operations, and remove the state of workers that left, unless the
        cluster goes on with another scheduler: also of those that had left before a restore.
        """
        self._closing.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._remove_given_up()
        is_restored = bool(self._cluster.settings.left_timelines)
        may_be_there = self._cluster.checkpoints.has_left_parts or is_restored
        if may_be_there and self.left_url and not goes_on:
            await self._remove(self.left_url)


def _complete_one(url: str, manifest: Manifest, complete_s: float) -> CompleteCheckpoint:
    reached = max((table.clock for table in manifest.tables), default=0)
    return CompleteCheckpoint(url, manifest.byte_count, reached, complete_s, count=1)


def _found(directory: CheckpointDirectory) -> CompleteCheckpoint | None:
    """A checkpoint that an earlier scheduler completed; None if its manifest cannot be read, which
    is logged. Blocking.
    """
    try:
        manifest = directory.read_manifest()
        complete_s = float(calendar.timegm(time.strptime(manifest.created, _CREATED)))
    except (PushpullError, ValueError) as error:
        logs.warning("checkpoint_not_read", url=directory.url, reason=str(error))
        return None
    return _complete_one(directory.url, manifest, complete_s)


def _with_left(
    attempt: Attempt, manifest: Manifest, left_url: str, unfound: Collection[int]
) -> Manifest:
    """Copy the state of workers that have left into a checkpoint; the files of the `unfound` ranks
    were never seen. Blocking.

    Raises:
        InvalidCheckpoint: a state that is there cannot be copied, or one was never there.
    """
    source = CheckpointDirectory(locate(left_url))
    copies = WorkerCopies(CheckpointDirectory(locate(attempt.url)), manifest)
    workers = list(manifest.workers)
    for rank, part in attempt.left.items():
        clock = max((written.clock for written in part.tables.values()), default=0)
        if part.problem:
            workers.append(SavedWorker(rank, clock, problem=part.problem))
            continue
        left = SavedWorker(rank, clock, part.file, part.byte_count, part.header_sha256)
        try:
            workers.append(copies.copy_from(source, left))
        except SourceLost as error:
            if rank in unfound and isinstance(error, SourceMissing):
                raise InvalidCheckpoint(
                    f"the state of worker {rank}, which has left, was never there: "
                    f"{error.message}; is the place shared by all hosts?"
                ) from error
            workers.append(SavedWorker(rank, clock, problem=error.message))
        except PushpullError as error:
            raise InvalidCheckpoint(
                f"the state of worker {rank}, which has left, cannot be copied: {error.message}"
            ) from error
    return replace(manifest, workers=tuple(sorted(workers, key=lambda each: each.rank)))


def _tell_lost(manifest: Manifest) -> None:
    """Log the workers whose states are lost in the checkpoint, and why."""
    for worker in manifest.workers:
        if worker.problem:
            logs.warning(
                "checkpoint_state_lost",
                number=manifest.number,
                rank=worker.rank,
                reason=worker.problem,
            )


def write_manifest(url: str, manifest: Manifest) -> CheckpointDirectory:
    """Complete a checkpoint whose parts are all written. Blocking: until it is durable.

    Raises:
        InvalidCheckpoint: it cannot be written, or a file or a checkpoint that it refers to is
            missing.
    """
    directory = CheckpointDirectory(locate(url))
    try:
        check_files(directory, manifest)
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(f"{error.message}; is the place shared by all hosts?") from error
    for base in manifest.bases:
        if not directory.sibling(base).has_manifest():
            raise InvalidCheckpoint(
                f"{directory.url} refers to {base}, which is gone; the next checkpoint is full"
            )
    directory.write_manifest(manifest)
    return directory


def manifest_of(settings: ClusterSettings, attempt: Attempt, worker_count: int) -> Manifest:
    """The manifest of a checkpoint whose parts are all written, without workers that have left."""
    parts, workers = [], dict[int, SavedWorker]()
    names = {table_id: table.spec.name for table_id, table in attempt.cuts.items()}
    torn: set[TableId] = set()
    for node_id in sorted(attempt.servers):
        part = attempt.parts[node_id]
        torn |= {table_id for table_id, written in part.tables.items() if written.is_torn}
        counts = {names[table_id]: written.block_count for table_id, written in part.tables.items()}
        referred = part.referred_block_count, part.referred_byte_count
        parts.append(SavedPart(part.file, part.byte_count, part.header_sha256, counts, *referred))
    for node_id, place in attempt.workers.items():
        if place.rank in attempt.left:
            continue
        part = attempt.parts.get(node_id, PartReport())
        clocks = [written.clock for written in part.tables.values()] or [*place.clocks.values()]
        saved = SavedWorker(
            place.rank,
            max(clocks, default=0),
            part.file,
            part.byte_count,
            part.header_sha256,
            part.problem,
        )
        other = workers.get(place.rank, saved)  # the one that it replaces, or its replacement
        workers[place.rank] = max(saved, other, key=lambda each: (each.file, each.problem))
    return Manifest(
        number=attempt.number,
        created=time.strftime(_CREATED, time.gmtime()),
        reason=attempt.reason,
        cluster_id=settings.cluster_id,
        timeline=settings.timeline,
        lineage=lineage_of(settings),
        worker_count=worker_count,
        tables=tuple(_saved_table(table, torn) for table in attempt.cuts.values()),
        parts=tuple(parts),
        workers=tuple(workers[rank] for rank in sorted(workers)),
        bases=tuple(sorted({base for n in attempt.servers for base in attempt.parts[n].bases})),
        data_sets=attempt.data_sets,
    )


def _saved_table(table: Table, torn: set[TableId]) -> SavedTable:
    spec = table.spec
    if spec.initializer.kind is InitializerKind.INLINE:
        spec = replace(spec, initializer=Initializer(InitializerKind.ZEROS))
    return SavedTable(
        name=spec.name,
        spec=MessageToDict(wire.spec_to_proto(spec), preserving_proto_field_name=True),
        consistency=str(table.consistency),
        clock=0 if table.cut is None else table.cut.after_clock,
        is_torn=table.table_id in torn,
        block_count=table.block_count,
    )


def part_from_proto(said: scheduler_pb2.ReportCheckpointPartRequest) -> PartReport:
    tables = {
        TableId(table.table_id): ReportedTable(table.block_count, table.clock, table.is_torn)
        for table in said.tables
    }
    file = said.file, said.byte_count, said.header_sha256.hex()
    referred = said.referred_block_count, said.referred_byte_count
    return PartReport(
        *file, tables, said.problem, *referred, tuple(said.bases), said.has_parameters
    )
