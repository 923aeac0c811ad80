"""Carries out the push window's effects: builds messages, writes them, completes the tickets.

Only the background loop calls this. The pure machine (`ps_worker.window.push_window`) decides what
is sent and when; this side has the messages, timers and futures.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from ps_core.cluster_view import ClusterView
from ps_core.errors import Fenced, NotPermitted, PushpullError, Recovering, Unauthenticated
from ps_core.keys import NodeId, RangeId, TableId
from ps_core.ledger import Ending, Outcome, ReplyKind
from ps_core.tables.elements import NATIVE_CODEC
from ps_core.tables.table import Table
from ps_runtime.cluster import wire
from ps_runtime.grpc.errors import error_from_proto
from ps_runtime.system.clock import now_s
from ps_worker.steps.counters import Counters
from ps_worker.steps.steps import PushBody, StepFuture, StepResult
from ps_worker.transport.links import ServerLinks
from ps_worker.transport.metrics import MEASURES
from ps_worker.transport.push_pull_stream import StreamEntry
from ps_worker.window.primaries import take_primaries
from ps_worker.window.push_window import (
    POLLED_COUNT,
    BlockPlace,
    Effect,
    PushWindow,
    Reply,
    SealRange,
    SendPush,
    SendSeal,
    SendWithdrawal,
    StepEnded,
    StepRefused,
    StepTerms,
)
from pushpull.v1 import parameters_pb2, types_pb2

TICK_INTERVAL_S = 0.05
"""The window looks for due retries so often, while a step is not committed."""

_KINDS = {parameters_pb2.ReplyKind.Value(f"REPLY_KIND_{kind.name}"): kind for kind in ReplyKind}
_OUTCOMES = {parameters_pb2.Outcome.Value(f"OUTCOME_{end.name}"): end for end in Outcome}
_KIND_GRADIENT, _KIND_ASSIGN = parameters_pb2.PUSH_KIND_GRADIENT, parameters_pb2.PUSH_KIND_ASSIGN
_RECEIVED, _COMMITTED = ReplyKind.RECEIVED, ReplyKind.COMMITTED
_APPLIED = Ending(Outcome.APPLIED)


@dataclass(frozen=True, slots=True, eq=False)
class _TablePlan:
    """The range of each block of a table, and its own codec."""

    range_of_block: tuple[RangeId, ...]
    blocks_of: Mapping[RangeId, tuple[int, ...]]
    codec: types_pb2.Codec

    @classmethod
    def of(cls, table: Table, range_count: int) -> _TablePlan:
        by_block = tuple(
            table.range_of_block(block, range_count) for block in range(table.block_count)
        )
        blocks_of = table.blocks_by_range(range_count)
        codec = wire.codec_to_proto(NATIVE_CODEC[table.spec.dtype])
        return cls(by_block, blocks_of, codec)


class PushDriver:
    """A worker's pushes and seals; `session_ended`: a server accepts this client no more."""

    def __init__(
        self,
        window: PushWindow,
        view: ClusterView,
        links: ServerLinks,
        counters: Counters,
        session_ended: Callable[[PushpullError], None],
    ) -> None:
        # The error of a seal that a server has refused for good: this worker's clock stops there.
        self.refused: dict[TableId, PushpullError] = {}  # any thread reads it
        self._window = window
        self._links = links
        self._counters = counters
        self._session_ended = session_ended
        self._loop = asyncio.get_running_loop()
        self._view = view
        self._plans: dict[TableId, _TablePlan] = {}
        self._futures: dict[tuple[TableId, int], Future[StepResult]] = {}
        self._final_seals: set[tuple[TableId, int]] = set()
        self._failure: PushpullError | None = None
        self._handed: deque[Callable[[], object]] = deque()  # pieces of long work, and what follows
        self._pump_is_due = False
        self._timer: asyncio.TimerHandle | None = None

    # --- from the training thread

    def open_step(self, table: Table, clock: int, future: Future[StepResult]) -> None:
        if self._failure is not None:
            future.set_exception(self._failure)
            return
        if table.table_id not in self._plans:
            self._plans[table.table_id] = _TablePlan.of(table, len(self._view.ranges))
        self._futures[(table.table_id, clock)] = future

    def submit(self, table: Table, clock: int, bodies: Sequence[PushBody]) -> None:
        if self._failure is not None:
            return
        submit, count = partial(self._submit, table.table_id, clock), POLLED_COUNT
        if len(bodies) > count:
            pieces = (bodies[at : at + count] for at in range(0, len(bodies), count))
            self._handed.extend(partial(submit, piece) for piece in pieces)
        else:
            self._in_order(partial(submit, bodies))
        self._pump_soon()

    def _submit(self, table_id: TableId, clock: int, bodies: Sequence[PushBody]) -> None:
        range_of_block = self._plans[table_id].range_of_block
        for body in bodies:
            place = BlockPlace(table_id, range_of_block[body.block], body.block)
            self._window.submit(place, clock, body, byte_count=body.payload.nbytes)

    def withdraw(self, table: Table, clock: int, but: Collection[int]) -> None:
        if self._failure is None:
            self._in_order(partial(self._window.withdraw, table.table_id, clock, but=but))
            self._pump_soon()

    def together(self, steps: Sequence[tuple[Table, int]]) -> None:
        if self._failure is None:
            keys = [(table.table_id, clock) for table, clock in steps]
            self._in_order(partial(self._window.together, keys))

    def seal(self, table: Table, clock: int, terms: StepTerms) -> None:
        if self._failure is not None:
            return
        if terms.last:
            self._final_seals.add((table.table_id, clock))
        elif clock and terms.update_scale is None:
            MEASURES.steps.inc()
        ranges = self._plans[table.table_id].blocks_of
        self._in_order(partial(self._window.seal, table.table_id, clock, ranges, terms))
        self._pump_soon()

    def _in_order(self, work: Callable[[], object]) -> None:
        """Do this after what waits: long work is done in pieces, one a turn."""
        if self._handed:
            self._handed.append(work)
        else:
            work()

    def fail(self, error: PushpullError) -> None:
        """Send no more; every step that has not ended fails with `error`."""
        self._failure = error
        self._handed.clear()
        futures, self._futures = list(self._futures.values()), {}
        for future in futures:
            if not future.done():
                future.set_exception(error)
        if self._timer is not None:
            self._timer.cancel()

    # --- from the network

    def take_view(self, view: ClusterView) -> None:
        """Take a newer view, perhaps after views that this client did not get."""
        known, self._view = {r.range_id: r.assignment_epoch for r in self._view.ranges}, view
        take_primaries(self._window, known, view.ranges)
        self._pump_soon()

    def stream_opened(self, server: NodeId) -> None:
        self._window.connected(server)
        self._pump_soon()

    def stream_closed(self, server: NodeId) -> None:
        lost_count = self._window.disconnected(server)
        if lost_count and self._failure is None:
            MEASURES.resent_entries.labels(Recovering.code).inc(lost_count)

    def replies(self, server: NodeId, response: parameters_pb2.PushResponse) -> None:
        came_s = now_s()
        for message in response.replies:
            reply = _reply(message)
            if reply is not None:
                if reply.error is not None and reply.kind is not ReplyKind.COMMITTED:
                    MEASURES.resent_entries.labels(reply.error.code).inc()
                for effect in self._window.reply(server, reply, came_s):
                    self._carry_out(effect)
        if self._window.has_steps:
            self._pump_soon()

    # --- carrying out

    @property
    def in_flight_bytes(self) -> int:
        """Payload bytes sent and not yet received by a server. Any thread."""
        return self._window.in_flight_bytes

    def _pump_soon(self) -> None:
        """Ask the window what to send, once for all that happens in this turn of the loop."""
        if not self._pump_is_due and self._failure is None:
            self._pump_is_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_is_due = False
        if self._failure is not None:
            return
        pushed_bytes = self._counters.pushed_bytes
        if self._handed:
            self._handed.popleft()()
        effects = self._window.poll(now_s())
        for effect in effects:
            self._carry_out(effect)
        if self._handed or len(effects) >= POLLED_COUNT:
            self._pump_soon()
        MEASURES.pushed_bytes.inc(self._counters.pushed_bytes - pushed_bytes)
        if self._timer is None and self._futures:
            self._timer = self._loop.call_later(TICK_INTERVAL_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._window.tick(now_s(), self._links.unwritten_counts())
        self._pump_soon()

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, SendPush):
            self._send_push(effect)
        elif isinstance(effect, SendSeal):
            self._send(effect.server, self._sealed(effect))
        elif isinstance(effect, SendWithdrawal):
            withdrawal = parameters_pb2.Withdrawal(
                table_id=effect.key.table_id,
                range_id=effect.key.range_id,
                assignment_epoch=self._epoch(effect.key.range_id),
                sequence=effect.key.sequence,
            )
            self._send(effect.server, withdrawal)
        elif isinstance(effect, StepEnded):
            self._step_ended(effect)
        elif isinstance(effect, StepRefused):
            self.refused.setdefault(effect.table_id, effect.error)
            self._finish(effect.table_id, effect.clock, effect.error)

    def _send(self, server: NodeId, entry: StreamEntry) -> None:
        link = self._links.find(server)
        if link is not None:
            link.send(entry)

    def _send_push(self, effect: SendPush) -> None:
        body: PushBody = effect.body
        key, plan = effect.key, self._plans[effect.key.table_id]
        message = parameters_pb2.BlockPush(
            range_id=key.range_id,
            assignment_epoch=self._epoch(key.range_id),
            table_id=key.table_id,
            block=effect.block,
            clock=effect.clock,
            sequence=key.sequence,
            confirmed_sequence=effect.confirmed_sequence,
            codec=plan.codec if body.codec is None else wire.codec_to_proto(body.codec),
            kind=_KIND_ASSIGN if body.is_assign else _KIND_GRADIENT,
            pulled_peer_version=body.pulled_peer_version,
        )
        if effect.replaces:
            message.replaces = effect.replaces
        if body.presence:
            message.presence = body.presence
        if effect.was_received:
            message.was_received = True
        if body.eager is not None:
            message.eager.SetInParent()
            message.eager.hyperparameters.extend(wire.hyperparameters_to_proto(body.eager))
        if effect.inline_seal is not None:
            sequence, terms = effect.inline_seal
            sealed = SealRange(key.range_id, sequence, effect.confirmed_sequence)
            message.seal.table_id, message.seal.clock = key.table_id, effect.clock
            self._fill(message.seal, (sealed,), terms)
        link = self._links.find(effect.server)
        if link is not None:
            self._counters.pushed_bytes += body.payload.nbytes
            link.send(message, body.payload)

    def _sealed(self, effect: SendSeal) -> parameters_pb2.Seal | parameters_pb2.UpdateScale:
        table_id, clock, terms = effect.table_id, effect.clock, effect.terms
        if terms.update_scale is not None:
            scale = terms.update_scale
            message = parameters_pb2.UpdateScale(table_id=table_id, clock=clock, scale=scale)
            self._add_ranges(message, effect.ranges)
            return message
        seal = parameters_pb2.Seal(table_id=table_id, clock=clock)
        self._fill(seal, effect.ranges, terms)
        return seal

    def _fill(
        self, seal: parameters_pb2.Seal, ranges: tuple[SealRange, ...], terms: StepTerms
    ) -> None:
        self._add_ranges(seal, ranges)
        if terms.hyperparameters:
            seal.hyperparameters.extend(wire.hyperparameters_to_proto(terms.hyperparameters))
        seal.skip, seal.last = terms.skip, terms.last
        if terms.contribution_scale != 1.0:
            seal.contribution_scale = terms.contribution_scale
        if terms.clip_scale is not None:
            seal.clip_scale = terms.clip_scale
        if terms.array:
            seal.array = terms.array
        if terms.edit:
            seal.edit = terms.edit

    def _add_ranges(
        self, entry: parameters_pb2.Seal | parameters_pb2.UpdateScale, ranges: tuple[SealRange, ...]
    ) -> None:
        for each in ranges:
            entry.ranges.add(
                range_id=each.range_id,
                assignment_epoch=self._epoch(each.range_id),
                sequence=each.sequence,
                confirmed_sequence=each.confirmed_sequence,
            )

    def _epoch(self, range_id: RangeId) -> int:
        return self._view.ranges[range_id].assignment_epoch

    def _step_ended(self, ended: StepEnded) -> None:
        failures = [error for _, error in ended.problems]
        for error in failures:
            if isinstance(error, Fenced | Unauthenticated | NotPermitted):
                self._session_ended(error)
        if failures:
            for error in failures[1:4]:
                failures[0].add_note(f"also: {error.message}")
            future = self._futures.get((ended.table_id, ended.clock))
            has_ended = all(block is not None for block, _ in ended.problems)  # not so: seals
            if isinstance(future, StepFuture) and has_ended:
                future.squares = self._squares(ended)
            self._finish(ended.table_id, ended.clock, failures[0])
            return
        # A final seal is not a step of the script.
        if (ended.table_id, ended.clock) not in self._final_seals:
            finished = max(self._counters.finished_step_count, ended.clock)
            self._counters.finished_step_count = finished
        self._counters.staleness = ended.staleness
        result = StepResult(
            ended.clock,
            ended.applied,
            ended.staleness,
            ended.rejected,
            ended.discarded,
            ended.discarded_blocks,
            self._squares(ended),
        )
        MEASURES.rejected_blocks.inc(len(ended.rejected))
        MEASURES.discarded_steps.inc(int(ended.discarded))
        self._finish(ended.table_id, ended.clock, result)

    def _squares(self, ended: StepEnded) -> dict[int, float]:
        blocks_of = self._plans[ended.table_id].blocks_of
        return {
            block: square
            for range_id, squares in ended.squares
            for block, square in zip(blocks_of[range_id], squares, strict=True)
        }

    def _finish(self, table_id: TableId, clock: int, result: StepResult | PushpullError) -> None:
        future = self._futures.pop((table_id, clock), None)
        if future is None or future.done():
            return
        if isinstance(result, StepResult):
            future.set_result(result)
        else:
            future.set_exception(result)


def _reply(message: parameters_pb2.EntryReply) -> Reply | None:
    """The window's event of a message; None for a kind that this version does not know."""
    kind = _KINDS.get(message.kind)
    error = ending = None
    if kind is _COMMITTED:
        outcome, staleness, squares = message.outcome, message.staleness, message.squares
        if outcome == parameters_pb2.OUTCOME_APPLIED and not staleness and not squares:
            ending = _APPLIED
        else:
            error = _error(message)
            known = _OUTCOMES.get(outcome, Outcome.INVALID)
            ending = Ending(known, error, staleness, tuple(squares))
    elif kind is None:
        return None
    elif kind is not _RECEIVED:
        error = _error(message)
    return Reply(
        kind, TableId(message.table_id), RangeId(message.range_id), message.sequence, ending, error
    )


def _error(message: parameters_pb2.EntryReply) -> PushpullError | None:
    return error_from_proto(message.error) if message.HasField("error") else None
