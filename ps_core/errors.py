"""Errors: one class for each case that a caller can tell apart.

Rules:
    - Every error that crosses a process boundary is one of these; only `ps_runtime.grpc.errors`
      translates them to gRPC status codes and back.
    - A message names the value that came and the expected one.
    - `InvariantViolation` is a bug of ours; it survives ``python -O``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

CATALOGUE: dict[str, type[PushpullError]] = {}
"""Errors that a reply may carry, by code: of several with one code, the first class below."""


class PushpullError(Exception):
    """Base of every error that pushpull raises on purpose."""

    code: ClassVar[str] = "INTERNAL"
    """The name of the error in the catalogue (`pushpull.v1.ErrorCode` without its prefix)."""

    def __init_subclass__(cls, code: str = "") -> None:
        if code:
            cls.code = code
            CATALOGUE.setdefault(code, cls)

    def __init__(self, message: str, *, retry_after_ms: int = 0, clock: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms
        self.clock = clock


class InvalidTensor(PushpullError, code="INVALID_TENSOR"):
    """A payload or its description is wrong: codec, dtype, length, shape, non-finite values."""


class InvalidKeys(PushpullError, code="INVALID_KEYS"):
    """A block, range or position does not exist or does not belong where the request puts it."""


class InvalidConfig(PushpullError, code="INVALID_CONFIG"):
    """A setting is wrong or contradicts another's."""


class TableNotFound(PushpullError, code="TABLE_NOT_FOUND"):
    """The table does not exist."""


class TableExists(PushpullError, code="TABLE_EXISTS"):
    """A table of that name exists with another layout or other settings."""


class StaleAssignment(PushpullError, code="STALE_ASSIGNMENT"):
    """The request's assignment_epoch is not the range's: refresh the view and send again."""


class NotOwner(PushpullError, code="NOT_OWNER"):
    """The server is not the range's primary: refresh the view and send again."""


class Fenced(PushpullError, code="FENCED"):
    """The session's incarnation or timeline has been replaced: register again."""


class ForeignCluster(Fenced):
    """The scheduler has another cluster than the session's, which was not restored in its place:
    a server's values exist nowhere else.
    """


class Recovering(PushpullError, code="RECOVERING"):
    """The node is not ready yet: retry later."""


class Draining(PushpullError, code="DRAINING"):
    """The node is stopping: retry later, elsewhere if the view says so."""


class Overloaded(PushpullError, code="OVERLOADED"):
    """Over quota: retry when credit comes."""


class WaitExpired(PushpullError, code="WAIT_EXPIRED"):
    """A deadline passed; the message names who is missing. Nothing changed."""


class WorkerLost(PushpullError, code="WAIT_EXPIRED"):
    """A worker of a hybrid run, or of one in groups, has ended before the others: start all of them
    again from the last checkpoint. It stays in the process that waited for the worker.
    """


class Unauthenticated(PushpullError, code="UNAUTHENTICATED"):
    """The session token is missing or wrong."""


class NotPermitted(PushpullError, code="NOT_PERMITTED"):
    """The session may not do this."""


class AlreadyPast(PushpullError, code="ALREADY_PAST"):
    """The range has passed the clock of a consistent read; `clock` is where the range is."""


class UpdateFailed(PushpullError, code="UPDATE_FAILED"):
    """An update of the table could not be computed: the table has failed and takes nothing more."""


class EditRefused(PushpullError, code="EDIT_REFUSED"):
    """Parameters that a script changed between two steps have no single meaning: the workers
    changed them differently, or the consistency setting has no step of all workers. Nothing of the
    step was applied.
    """


class ValuesLost(PushpullError, code="VALUES_LOST"):
    """No server that is there, or may come back, has the values any more: restore a checkpoint."""


class TableFull(PushpullError, code="TABLE_FULL"):
    """A step would make rows for which a server has no memory; no server has applied any of it."""


class InvalidCheckpoint(PushpullError, code="INVALID_CHECKPOINT"):
    """A checkpoint, or a file of one, is torn, damaged, missing or of another table or version."""


class InvalidUpdateLog(PushpullError, code="INVALID_CHECKPOINT"):
    """A server's update log is damaged, of another version, or cannot be written. It stays in the
    process that has the log.
    """


class JoinRefused(InvalidConfig, code="INVALID_CONFIG"):
    """This worker joins others that train, and a hybrid run, or one in groups, with `Aggregate` or
    with adaptive batches, takes nobody in: start all workers again, together. It stays in the
    process of that worker.
    """


class InvalidJournal(PushpullError, code="INVALID_CONFIG"):
    """The scheduler's journal is damaged, of another cluster or version, open in another scheduler,
    or cannot be written. It stays in the process that has the journal.
    """


class GradientChangedAfterPush(PushpullError, code="INVALID_TENSOR"):
    """A gradient or hyperparameter changed after its block was sent (eager mode)."""


class Internal(PushpullError, code="INTERNAL"):
    """A bug of the other side."""


class InvariantViolation(PushpullError, code="INTERNAL"):
    """A numbered invariant of a machine does not hold: a bug of ours."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"invariant {invariant} violated: {detail}")
        self.invariant = invariant


def listed(names: Sequence[str], most: int) -> str:
    """The names in a message; those beyond `most` are counted."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def check(holds: bool, invariant: str, detail: str) -> None:
    """Raise `InvariantViolation` unless `holds`."""
    if not holds:
        raise InvariantViolation(invariant, detail)


def check_config(holds: bool, message: str) -> None:
    """Raise `InvalidConfig` unless `holds`."""
    if not holds:
        raise InvalidConfig(message)
