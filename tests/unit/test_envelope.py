"""Envelopes: what the data path writes and reads is what protobuf writes and reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core.envelope import join, split, varint
from ps_core.errors import InvalidTensor
from pushpull.v1 import parameters_pb2


@given(st.integers(0, 2**63), st.binary(max_size=300), st.binary(max_size=40))
def test_a_joined_message_is_what_protobuf_would_write(
    sequence: int, payload: bytes, presence: bytes
) -> None:
    rest = parameters_pb2.BlockPush(range_id=7, sequence=sequence, presence=presence)
    joined = join(2, rest.SerializeToString(), 15, memoryview(payload))
    parsed = parameters_pb2.PushRequest.FromString(joined)
    expected = parameters_pb2.BlockPush()
    expected.CopyFrom(rest)
    expected.payload = payload
    assert parsed.block == expected


@given(st.integers(0, 2**63), st.binary(max_size=300), st.binary(max_size=40))
def test_a_split_message_is_what_protobuf_wrote(
    version: int, payload: bytes, presence: bytes
) -> None:
    value = parameters_pb2.BlockValue(block=3, version=version, presence=presence, payload=payload)
    message = parameters_pb2.PullResponse(block=value).SerializeToString()
    found = split(message, 1, 15)
    assert found is not None
    rest, view = found
    assert bytes(view) == payload
    value.ClearField("payload")
    assert parameters_pb2.BlockValue.FromString(rest) == value


def test_the_payload_may_come_first() -> None:
    payload, rest = b"\x7a\x03abc", parameters_pb2.BlockValue(block=3).SerializeToString()
    message = b"\x0a" + varint(len(payload + rest)) + payload + rest
    assert split(message, 1, 15) == (rest, memoryview(b"abc"))


def test_another_part_of_the_oneof_is_left_to_protobuf() -> None:
    message = parameters_pb2.PullResponse(error=parameters_pb2.RangeError(range_id=1))
    assert split(message.SerializeToString(), 1, 15) is None


@given(st.data())
def test_a_message_that_is_cut_off_is_refused(data: st.DataObject) -> None:
    value = parameters_pb2.BlockValue(block=300, version=2**40, payload=b"x" * 100)
    message = parameters_pb2.PullResponse(block=value).SerializeToString()
    length = data.draw(st.integers(0, len(message) - 1))
    with pytest.raises(InvalidTensor, match="message of"):
        split(message[:length], 1, 15)


def test_a_wire_type_that_proto3_lacks_is_refused() -> None:
    with pytest.raises(InvalidTensor, match="wire type 3"):
        split(b"\x0a\x02\x0b\x0b", 1, 15)
