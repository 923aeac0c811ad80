"""The translator: every error of the catalogue crosses the wire and comes back as itself."""

from __future__ import annotations

import grpc
import pytest
from grpc.aio import Metadata

from ps_core import errors as tree
from ps_core.limits import MAX_ERROR_MESSAGE_BYTES
from ps_runtime.grpc.errors import (
    ERROR_METADATA_KEY,
    STATUS,
    error_from_proto,
    error_to_proto,
    from_rpc_error,
)
from pushpull.v1 import types_pb2


def failed_call(
    status: grpc.StatusCode, details: str = "", metadata: Metadata | None = None
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(status, Metadata(), metadata or Metadata(), details)


@pytest.mark.parametrize("kind", tree.CATALOGUE.values())
def test_every_error_survives_the_message(kind: type[tree.PushpullError]) -> None:
    error = kind("what came and what was expected", retry_after_ms=250, clock=7)
    back = error_from_proto(error_to_proto(error))
    assert type(back) is kind
    assert (back.message, back.retry_after_ms, back.clock) == (error.message, 250, 7)


def test_every_code_of_the_contract_is_in_the_catalogue_and_has_a_status() -> None:
    codes = {name.removeprefix("ERROR_CODE_") for name in dict(types_pb2.ErrorCode.items())}
    assert codes - {"UNSPECIFIED"} == set(tree.CATALOGUE) == set(STATUS)
    assert grpc.StatusCode.UNKNOWN not in STATUS.values()


def test_errors_outside_the_catalogue_travel_under_a_code_of_it() -> None:
    foreign = error_from_proto(error_to_proto(tree.ForeignCluster("p")))
    assert type(foreign) is tree.ForeignCluster
    assert type(error_from_proto(error_to_proto(tree.Fenced("p")))) is tree.Fenced
    changed = error_from_proto(error_to_proto(tree.GradientChangedAfterPush("p")))
    broken = error_from_proto(error_to_proto(tree.InvariantViolation("X-1", "d")))
    assert type(changed) is tree.InvalidTensor
    assert type(broken) is tree.Internal
    assert "X-1" in broken.message


@pytest.mark.parametrize("code", [0, 4711])
def test_an_unknown_code_becomes_internal_and_keeps_the_text(code: int) -> None:
    message = types_pb2.Error(message="from a later version")
    message.code = code  # type: ignore[assignment]  # what a newer peer may send
    error = error_from_proto(message)
    assert type(error) is tree.Internal
    assert "from a later version" in error.message


@pytest.mark.parametrize("text", ["x" * 5_000, "ü" * 5_000])
def test_a_long_message_is_cut_at_a_character(text: str) -> None:
    carried = error_to_proto(tree.InvalidKeys(text)).message
    assert len(carried.encode()) <= MAX_ERROR_MESSAGE_BYTES
    assert carried.endswith("...")
    assert carried[0] == text[0]


def test_the_metadata_wins_over_the_status() -> None:
    carried = error_to_proto(tree.Draining("goes", retry_after_ms=9)).SerializeToString()
    metadata = Metadata((ERROR_METADATA_KEY, carried))
    error = from_rpc_error(failed_call(grpc.StatusCode.UNAVAILABLE, "goes", metadata))
    assert type(error) is tree.Draining
    assert error.retry_after_ms == 9


def test_metadata_that_does_not_parse_is_passed_over() -> None:
    metadata = Metadata((ERROR_METADATA_KEY, b"\xff\xff"))
    error = from_rpc_error(failed_call(grpc.StatusCode.UNAVAILABLE, "away", metadata))
    assert type(error) is tree.Recovering


@pytest.mark.parametrize(
    ("status", "details", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connection refused", tree.Recovering),
        (grpc.StatusCode.CANCELLED, "server stopped", tree.Recovering),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", tree.WaitExpired),
        (grpc.StatusCode.UNAUTHENTICATED, "", tree.Unauthenticated),
        (grpc.StatusCode.PERMISSION_DENIED, "", tree.NotPermitted),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls", tree.Overloaded),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "CLIENT: Received message larger than max (9 vs. 4)",
            tree.InvalidTensor,
        ),
        (grpc.StatusCode.UNIMPLEMENTED, "no such method", tree.InvalidConfig),
        (grpc.StatusCode.UNKNOWN, "somebody's bug", tree.Internal),
    ],
)
def test_a_failure_of_grpc_itself_is_told_by_its_status(
    status: grpc.StatusCode, details: str, kind: type[tree.PushpullError]
) -> None:
    error = from_rpc_error(failed_call(status, details))
    assert type(error) is kind
    assert details in error.message
