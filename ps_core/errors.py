"""Errors: one class for each case that a caller can tell apart.

Rules:
    - Every error that crosses a process boundary is one of these; only `ps_runtime.grpc.errors`
      translates them to gRPC status codes and back.
    - A message names the value that came and the expected one.
    - `InvariantViolation` is a bug of ours; it survives ``python -O``.
"""

from __future__ import annotations

from typing import ClassVar


class PushpullError(Exception):
    """Base of every error that pushpull raises on purpose."""

    code: ClassVar[str] = "INTERNAL"
    """The name of the error in the catalogue (`pushpull.v1.ErrorCode` without its prefix)."""

    def __init__(self, message: str, *, retry_after_ms: int = 0, clock: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms
        self.clock = clock


class InvalidTensor(PushpullError):
    """A payload or its description is wrong: codec, dtype, length, shape, non-finite values."""

    code = "INVALID_TENSOR"


class InvalidKeys(PushpullError):
    """A block, range or position does not exist or does not belong where the request puts it."""

    code = "INVALID_KEYS"


class InvalidConfig(PushpullError):
    """A setting is wrong or contradicts another's."""

    code = "INVALID_CONFIG"


class TableNotFound(PushpullError):
    """The table does not exist."""

    code = "TABLE_NOT_FOUND"


class TableExists(PushpullError):
    """A table of that name exists with another layout or other settings."""

    code = "TABLE_EXISTS"


class StaleAssignment(PushpullError):
    """The request's assignment_epoch is not the range's: refresh the view and send again."""

    code = "STALE_ASSIGNMENT"


class NotOwner(PushpullError):
    """The server is not the range's primary: refresh the view and send again."""

    code = "NOT_OWNER"


class Fenced(PushpullError):
    """The session's incarnation or timeline has been replaced: register again."""

    code = "FENCED"


class ForeignCluster(Fenced):
    """The scheduler has another cluster than the session's, which was not restored in its place:
    a server's values exist nowhere else.
    """

    code = "FENCED"


class Recovering(PushpullError):
    """The node is not ready yet: retry later."""

    code = "RECOVERING"


class Draining(PushpullError):
    """The node is stopping: retry later, elsewhere if the view says so."""

    code = "DRAINING"


class Overloaded(PushpullError):
    """Over quota: retry when credit comes."""

    code = "OVERLOADED"


class WaitExpired(PushpullError):
    """A deadline passed; the message names who is missing. Nothing changed."""

    code = "WAIT_EXPIRED"


class Unauthenticated(PushpullError):
    """The session token is missing or wrong."""

    code = "UNAUTHENTICATED"


class NotPermitted(PushpullError):
    """The session may not do this."""

    code = "NOT_PERMITTED"


class AlreadyPast(PushpullError):
    """The range has passed the clock of a consistent read; `clock` is where the range is."""

    code = "ALREADY_PAST"


class UpdateFailed(PushpullError):
    """An update of the table could not be computed: the table has failed and takes nothing more."""

    code = "UPDATE_FAILED"


class EditRefused(PushpullError):
    """Parameters that a script changed between two steps have no single meaning: the workers
    changed them differently, or the consistency setting has no step of all workers. Nothing of the
    step was applied.
    """

    code = "EDIT_REFUSED"


class ValuesLost(PushpullError):
    """No server that is there, or may come back, has the values any more: restore a checkpoint."""

    code = "VALUES_LOST"


class InvalidCheckpoint(PushpullError):
    """A checkpoint, or a file of one, is torn, damaged, missing or of another table or version."""

    code = "INVALID_CHECKPOINT"


class InvalidUpdateLog(PushpullError):
    """A server's update log is damaged, of another version, or cannot be written. It stays in the
    process that has the log.
    """

    code = "INVALID_CHECKPOINT"


class InvalidJournal(PushpullError):
    """The scheduler's journal is damaged, of another cluster or version, open in another scheduler,
    or cannot be written. It stays in the process that has the journal.
    """

    code = "INVALID_CONFIG"


class GradientChangedAfterPush(PushpullError):
    """A gradient or hyperparameter changed after its block was sent (eager mode)."""

    code = "INVALID_TENSOR"


class Internal(PushpullError):
    """A bug of the other side."""

    code = "INTERNAL"


class InvariantViolation(PushpullError):
    """A numbered invariant of a machine does not hold: a bug of ours."""

    code = "INTERNAL"

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"invariant {invariant} violated: {detail}")
        self.invariant = invariant


CATALOGUE: dict[str, type[PushpullError]] = {
    error.code: error
    for error in (
        InvalidTensor,
        InvalidKeys,
        InvalidConfig,
        TableNotFound,
        TableExists,
        StaleAssignment,
        NotOwner,
        Fenced,
        Recovering,
        Draining,
        Overloaded,
        WaitExpired,
        Unauthenticated,
        NotPermitted,
        AlreadyPast,
        UpdateFailed,
        EditRefused,
        ValuesLost,
        InvalidCheckpoint,
        Internal,
    )
}
"""Errors that a reply may carry, by code."""


def check(holds: bool, invariant: str, detail: str) -> None:
    """Raise `InvariantViolation` unless `holds`."""
    if not holds:
        raise InvariantViolation(invariant, detail)
