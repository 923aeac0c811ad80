"""A worker's next step on a table: when it may begin, and what is handed over of it at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

from ps_core.errors import InvalidConfig, NotPermitted, WaitExpired
from ps_core.keys import TableId
from ps_core.tables.elements import InitializerKind
from ps_runtime.system.future_waits import wait_until_ended
from ps_runtime.system.interrupts import uninterrupted
from ps_worker.client.connection import ClientConnection
from ps_worker.steps.steps import TableHandle, TableStep, check_own

_NO_STEP_ANY_MORE = (
    "this worker can take no step of it any more: start all workers again from a checkpoint, or "
    "call client.restore at each"
)


class StepTurns:
    """The steps of one client. Thread-safe.

    Args:
        handles: the client's own, as they are made.
    """

    def __init__(
        self, connection: ClientConnection, handles: Mapping[TableId, TableHandle]
    ) -> None:
        self._connection = connection
        self._engine = connection.engine
        self._handles = handles

    @contextmanager
    def turn(self, table: TableHandle, *, is_together: bool = True) -> Iterator[None]:
        """This thread's turn to push to `table` and to seal, once a step may begin; what the block
        posts leaves `together`. Ctrl-C comes before the block or after it, so that no step has a
        clock and no seal.
        """
        with table.steps.turn:
            self.await_step(table)  # before: Ctrl-C interrupts it
            # Encoded blocks leave at once, while the next are encoded.
            together = self._connection.loop.together() if is_together else nullcontext()
            with uninterrupted(), together:
                yield

    def await_step(self, table: TableHandle) -> None:
        """Wait until a step may begin, as `ClientTables.begin_step` says."""
        self._connection.check_may_push("push")
        check_own(table, self._handles)
        refused = self._engine.pushes.refused.get(table.table.table_id)
        if refused is not None:
            raise type(refused)(f"{refused.message}; {_NO_STEP_ANY_MORE}")
        while table.steps.owed_count:
            self._await_oldest(table)
            with uninterrupted():
                table.steps.open_step().seal(skip=True)
                table.steps.owed_count -= 1
        self._await_oldest(table)

    def _await_oldest(self, table: TableHandle) -> None:
        """Wait until fewer than MAX_UNCOMMITTED_STEP_COUNT steps are not committed."""
        oldest = table.steps.oldest_of_too_many()
        # The ticket of a failed step raises its error; here it only has to have ended.
        limit_s = self._connection.config.request_deadline_s
        if oldest is not None:
            self._connection.loop.hand_over()
            wait_until_ended([oldest.future], limit_s)
            if not oldest.future.done():
                raise WaitExpired(self._connection.why_open(oldest, limit_s))

    def begin_assign(self, table: TableHandle) -> TableStep:
        """The step that gives initial values, for `Client.assign`."""
        self._connection.check_may_push("assign")
        check_own(table, self._handles)
        rank = self._engine.session.rank
        if rank != 0:
            raise NotPermitted(f"rank {rank} may not assign initial values; rank 0 does")
        kind = table.spec.initializer.kind
        if kind is not InitializerKind.FROM_RANK_ZERO:
            raise InvalidConfig(
                f"table '{table.name}' starts with {kind.value}; only one that starts FromRank0() "
                "is assigned"
            )
        return table.steps.assign_step()
