"""Requests to the scheduler: what takes long is done beside its loop, or not at all."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.message import DecodeError

from ps_core import limits
from ps_core.envelope import has_few, wrap
from ps_core.errors import InvalidConfig, InvalidTensor
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table_spec import TableSpec, TensorSpec, TupleCache
from ps_runtime.cluster import wire
from pushpull.v1 import scheduler_pb2
from scheduler.edge.requests import spec_of, table_request_of
from scheduler.edge.servicer import handlers_of
from scheduler.machine import view_size
from tests.unit.measured_loop import most_turn_s, turns_of

pytestmark = pytest.mark.slow

COUNT = 60_000


def _spec() -> TableSpec:
    tensors = tuple(TensorSpec(f"layer.{index}", (1,), index) for index in range(COUNT))
    return TableSpec("model", DType.FLOAT32, COUNT, OptimizerSpec(OptimizerKind.SGD), 64, tensors)


@pytest.mark.thorough
def test_a_long_layout_is_looked_through_beside_the_loop_and_once() -> None:
    message = wire.spec_to_proto(_spec())
    found: list[TableSpec] = []

    async def read() -> None:
        found.append(await spec_of(message, ()))

    asyncio.run(read())

    async def asked() -> None:
        """What the cluster asks of it at each attempt."""
        found.append(found[0].validated())
        view_size.table_bytes(found[1])
        wire.spec_to_proto(found[1])

    assert min(turns_of(asked())[0] for _ in range(3)) < most_turn_s()


@pytest.mark.parametrize(
    "spec",
    [b"\x2a\x00" * (limits.MAX_TENSOR_COUNT + 1), wrap(6, b"\x12\x00" * 500_000)],
    ids=["tensors", "numbers"],
)
def test_a_request_of_too_many_entries_is_not_parsed(spec: bytes) -> None:
    with pytest.raises(InvalidConfig, match="cannot be parsed, or has over"):
        asyncio.run(table_request_of(wrap(2, spec)))


def test_a_request_that_is_cut_off_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="cannot be parsed"):
        asyncio.run(table_request_of(wrap(2, b"\x2a\x05")))
    with pytest.raises(InvalidTensor):
        has_few(wrap(2, b"\x2a\x05"), 2, 5, 10, 8)


def test_of_many_only_those_that_count_are_counted() -> None:
    few = b"\x2a\x00" * 10 + wrap(8, bytes(2 * limits.MAX_ENTRY_BYTES)) + b"\x50\x01"
    assert has_few(wrap(2, few), 2, 5, 10, 8)
    assert not has_few(wrap(2, few), 2, 5, 9, 8)
    assert not has_few(wrap(2, few), 2, 5, 10, 7)
    assert not has_few(wrap(1, bytes(limits.MAX_ENTRY_BYTES)) + wrap(2, few), 2, 5, 10, 8)


def test_no_other_request_is_parsed_beyond_a_size() -> None:
    heartbeat = handlers_of(_AnyServicer())["Heartbeat"].request_deserializer  # type: ignore[arg-type]
    assert heartbeat is not None
    with pytest.raises(DecodeError, match="expected at most"):
        heartbeat(b"\x12\x00" * limits.MAX_ENTRY_BYTES)
    assert heartbeat(b"") == scheduler_pb2.HeartbeatRequest()


class _AnyServicer:
    """Has every method."""

    def __getattr__(self, name: str) -> object:
        return name


def test_what_was_found_of_the_newest_few_is_remembered() -> None:
    kept = TupleCache[int]()
    keys = [tuple(range(index)) for index in range(3, 69)]
    for index, key in enumerate(keys):
        assert kept.find(key) is None
        assert kept.put(key, index) == index
    assert [kept.find(key) for key in keys] == [None, None, *range(2, 66)]
