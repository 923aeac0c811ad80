"""The error tree: one class for each way to be wrong that a caller can tell apart.

Rules:
    - Every error that crosses a process boundary is one of these; `ps_runtime.grpc.errors`
      translates them to gRPC status codes and back, and nothing else does.
    - A message says what came and what was expected.
    - `InvariantViolation` is a bug of ours; it survives ``python -O``.

What it deliberately does not do: know gRPC, or decide who retries.
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
    """There is no such table."""

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
    """The scheduler's cluster is another one than the session's, and was not restored in its place:
    whoever has values of that one has them alone.
    """

    code = "FENCED"


class Recovering(PushpullError):
    """The node is not ready yet: retry later."""

    code = "RECOVERING"


class Draining(PushpullError):
    """The node is going away: retry later, elsewhere if the view says so."""

    code = "DRAINING"


class Overloaded(PushpullError):
    """No room: retry when credit comes."""

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
    """A consistent read asked for a clock that the range has passed; `clock` says where it is."""

    code = "ALREADY_PAST"


class UpdateFailed(PushpullError):
    """An update of the table could not be computed: the table has failed and takes nothing more."""

    code = "UPDATE_FAILED"


class EditRefused(PushpullError):
    """Parameters that a script changed between two steps can be taken in no one sense: the workers
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
    """The scheduler's journal is damaged, of another cluster or version, in the hands of another
    scheduler, or cannot be written. It stays in the process that has the journal.
    """

    code = "INVALID_CONFIG"


class GradientChangedAfterPush(PushpullError):
    """Eager mode: a gradient or a hyperparameter changed after its block had left."""

    code = "INVALID_TENSOR"


class Internal(PushpullError):
    """A bug of the other side's."""

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
"""Every error that a reply may carry, by its name in the catalogue."""


def check(holds: bool, invariant: str, detail: str) -> None:
    """Raise `InvariantViolation` unless `holds`."""
    if not holds:
        raise InvariantViolation(invariant, detail)
