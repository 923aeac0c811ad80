"""The translator between the error tree and gRPC: only this file knows both.

A failed call carries its error twice: as a gRPC status that any client understands, and as the
serialized `pushpull.v1.Error` in the trailing metadata key `pushpull-error-bin`. A method wrapped
with `translated` never ends as UNKNOWN: an exception outside the catalogue is logged with its
traceback and answered as INTERNAL.

Invariants:
    ERR-1  `grpc.aio`'s context.abort never returns.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, NoReturn, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ps_core import errors as tree
from ps_core.limits import MAX_ERROR_MESSAGE_BYTES
from ps_runtime.observe import logs
from pushpull.v1 import types_pb2

ERROR_METADATA_KEY = "pushpull-error-bin"
RETRY_METADATA_KEY = "retry-after-ms"

STATUS: dict[str, grpc.StatusCode] = {
    "INVALID_TENSOR": grpc.StatusCode.INVALID_ARGUMENT,
    "INVALID_KEYS": grpc.StatusCode.INVALID_ARGUMENT,
    "INVALID_CONFIG": grpc.StatusCode.INVALID_ARGUMENT,
    "TABLE_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "TABLE_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
    "STALE_ASSIGNMENT": grpc.StatusCode.ABORTED,
    "NOT_OWNER": grpc.StatusCode.ABORTED,
    "FENCED": grpc.StatusCode.FAILED_PRECONDITION,
    "ALREADY_PAST": grpc.StatusCode.FAILED_PRECONDITION,
    "UPDATE_FAILED": grpc.StatusCode.FAILED_PRECONDITION,
    "EDIT_REFUSED": grpc.StatusCode.FAILED_PRECONDITION,
    "VALUES_LOST": grpc.StatusCode.DATA_LOSS,
    "TABLE_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "INVALID_CHECKPOINT": grpc.StatusCode.FAILED_PRECONDITION,
    "RECOVERING": grpc.StatusCode.UNAVAILABLE,
    "DRAINING": grpc.StatusCode.UNAVAILABLE,
    "OVERLOADED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "WAIT_EXPIRED": grpc.StatusCode.DEADLINE_EXCEEDED,
    "UNAUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
    "NOT_PERMITTED": grpc.StatusCode.PERMISSION_DENIED,
    "INTERNAL": grpc.StatusCode.INTERNAL,
}
"""The gRPC status of each error of the catalogue."""

_WITHOUT_DETAIL: dict[grpc.StatusCode, type[tree.PushpullError]] = {
    grpc.StatusCode.UNAVAILABLE: tree.Recovering,
    # A stopping server cuts calls that outlast its grace; the next attempt finds out more.
    grpc.StatusCode.CANCELLED: tree.Recovering,
    grpc.StatusCode.DEADLINE_EXCEEDED: tree.WaitExpired,
    grpc.StatusCode.UNAUTHENTICATED: tree.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: tree.NotPermitted,
    grpc.StatusCode.RESOURCE_EXHAUSTED: tree.Overloaded,
    # No node of the expected role answers: the address is wrong.
    grpc.StatusCode.UNIMPLEMENTED: tree.InvalidConfig,
}
_OVER_THE_LIMIT = "larger than max"
"""gRPC's words for a message over the limit: it has an overload's status, but no retry helps."""

MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def error_to_proto(error: tree.PushpullError) -> types_pb2.Error:
    """The error as a message; its text is cut to MAX_ERROR_MESSAGE_BYTES: metadata is limited."""
    return types_pb2.Error(
        code=cast(types_pb2.ErrorCode, types_pb2.ErrorCode.Value(f"ERROR_CODE_{error.code}")),
        message=_bounded(error.message),
        retry_after_ms=error.retry_after_ms,
        clock=error.clock,
        is_foreign=isinstance(error, tree.ForeignCluster),
    )


def error_from_proto(message: types_pb2.Error) -> tree.PushpullError:
    """The error of a message; a code that this version does not know becomes Internal."""
    text = message.message
    try:
        name = types_pb2.ErrorCode.Name(message.code).removeprefix("ERROR_CODE_")
    except ValueError:
        name = str(message.code)
    kind = tree.CATALOGUE.get(name)
    if kind is tree.Fenced and message.is_foreign:
        kind = tree.ForeignCluster
    if kind is None:
        kind, text = tree.Internal, f"error code {name}, which is not in the catalogue: {text}"
    return kind(text, retry_after_ms=message.retry_after_ms, clock=message.clock)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: tree.PushpullError) -> NoReturn:
    """End the call with the error's status and message, and the error itself in the metadata."""
    carried = error_to_proto(error)
    metadata: dict[str, str | bytes] = {ERROR_METADATA_KEY: carried.SerializeToString()}
    if error.retry_after_ms:
        metadata[RETRY_METADATA_KEY] = str(error.retry_after_ms)
    await context.abort(STATUS[error.code], carried.message, tuple(metadata.items()))
    raise tree.InvariantViolation("ERR-1", "context.abort returned")


def from_rpc_error(failure: grpc.RpcError) -> tree.PushpullError:
    """The error of a failed call. Without `pushpull-error-bin` the failure is gRPC's own, such as a
    passed deadline, and its status decides.
    """
    call = cast(grpc.Call, failure)
    for key, value in cast("Iterable[tuple[str, str | bytes]]", call.trailing_metadata() or ()):
        if key == ERROR_METADATA_KEY and isinstance(value, bytes):
            try:
                return error_from_proto(types_pb2.Error.FromString(value))
            except DecodeError:
                break
    status, details = call.code(), call.details() or "no details"
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and _OVER_THE_LIMIT in details:
        return tree.InvalidTensor(f"a message is over the limit: {details}")
    kind = _WITHOUT_DETAIL.get(status, tree.Internal)
    return kind(f"{status.name}: {details}")


def has_expired_unheard(error: tree.PushpullError) -> bool:
    """True if gRPC's own deadline ended the call: nobody has answered it."""
    own = f"{grpc.StatusCode.DEADLINE_EXCEEDED.name}:"
    return isinstance(error, tree.WaitExpired) and error.message.startswith(own)


def translated(method: MethodT) -> MethodT:
    """Wrap a servicer method (coroutine or async generator) so that its exceptions become statuses.

    A `PushpullError` ends the call by the catalogue; a message that does not parse is an
    InvalidTensor. Another exception is a bug of ours: it is logged with its traceback, and answered
    as INTERNAL without its text, which may be private.
    """
    if inspect.isasyncgenfunction(method):

        @functools.wraps(method)
        async def stream(self: object, request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                async with contextlib.aclosing(method(self, request, context)) as responses:
                    async for response in responses:
                        yield response
            except Exception as failure:  # noqa: BLE001 - a status for every failure is the point
                await _end(method, context, failure)

        return cast(MethodT, stream)

    @functools.wraps(method)
    async def unary(self: object, request: Any, context: Any) -> Any:
        try:
            return await method(self, request, context)
        except Exception as failure:  # noqa: BLE001 - as above
            await _end(method, context, failure)

    return cast(MethodT, unary)


async def _end(
    method: Callable[..., Any], context: grpc.aio.ServicerContext[Any, Any], failure: Exception
) -> NoReturn:
    """Abort as `failure` says, unless the call has ended."""
    if isinstance(failure, grpc.aio.AbortError) or context.done():
        raise failure
    if isinstance(failure, DecodeError):
        failure = tree.InvalidTensor(f"a message of the stream does not parse: {failure}")
    if isinstance(failure, tree.PushpullError):
        if failure.code == "INTERNAL":
            logs.exception("call_failed", failure, method=method.__qualname__)
        await abort(context, failure)
    logs.exception("call_failed", failure, method=method.__qualname__)
    hidden = f"{method.__name__} failed with {type(failure).__name__}; the node's log has the rest"
    await abort(context, tree.Internal(hidden))


def _bounded(text: str) -> str:
    encoded = text.encode()
    if len(encoded) <= MAX_ERROR_MESSAGE_BYTES:
        return text
    return encoded[: MAX_ERROR_MESSAGE_BYTES - 3].decode(errors="ignore") + "..."
