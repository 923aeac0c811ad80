"""Envelopes: what the data path writes and reads is what protobuf writes and reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core.envelope import join, join_several, split, split_several, varint
from ps_core.errors import InvalidTensor
from pushpull.v1 import parameters_pb2, replication_pb2


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


BATCH, BLOCKS, PAYLOAD, PADDING = 2, 2, 4, 3


@given(st.binary(max_size=300), st.lists(st.binary(max_size=300), max_size=4))
def test_several_joined_are_what_protobuf_would_write(head: bytes, payloads: list[bytes]) -> None:
    batch = replication_pb2.ReplicatedBatch(more_follow=True)
    batch.head.range_id = len(head)
    blocks = [replication_pb2.BlockElements(block=n, presence=head) for n in range(len(payloads))]
    parts = [(b.SerializeToString(), p) for b, p in zip(blocks, payloads, strict=True)]
    joined = join_several(BATCH, batch.SerializeToString(), BLOCKS, parts, PAYLOAD, PADDING)
    found = split_several(joined, BATCH, BLOCKS, PAYLOAD)
    parsed = replication_pb2.ReplicateRequest.FromString(joined).batch
    for block, payload in zip(parsed.blocks, payloads, strict=True):
        assert block.payload == payload
    assert found is not None
    assert replication_pb2.ReplicatedBatch.FromString(found[0]) == batch
    assert [bytes(view) for _, view in found[1]] == payloads
    for (rest, _), block in zip(found[1], blocks, strict=True):
        came = replication_pb2.BlockElements.FromString(rest)
        came.ClearField("padding")
        assert came == block


def test_several_of_another_kind_are_left_to_protobuf() -> None:
    message = replication_pb2.ReplicateRequest(beat=replication_pb2.Beat(sent_s=1.0))
    assert split_several(message.SerializeToString(), BATCH, BLOCKS, PAYLOAD) is None
