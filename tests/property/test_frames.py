"""What the server reads and writes by hand is what the generated code reads and writes."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from ps_core.envelope import ALIGNMENT_BYTES, join
from ps_server.wire import parameter_wire as frames
from pushpull.v1 import parameters_pb2

READ = frames.entry_reader(parameters_pb2.PushRequest, small_bytes=0)
UINT32, UINT64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
SEALS = st.builds(
    parameters_pb2.Seal,
    table_id=UINT32,
    clock=UINT64,
    skip=st.booleans(),
    ranges=st.lists(st.builds(parameters_pb2.RangeSeal, range_id=UINT32), max_size=2),
)
BLOCKS = st.builds(
    parameters_pb2.BlockPush,
    range_id=UINT32,
    table_id=UINT32,
    block=UINT64,
    sequence=UINT64,
    presence=st.binary(max_size=200),
    payload=st.binary(max_size=300),
    padding=st.binary(max_size=20),
    seal=st.one_of(st.none(), SEALS),
)


def block_of(entry: frames.Entry) -> frames.BlockFrame:
    """The block of an entry, however it was read."""
    if isinstance(entry, frames.BlockFrame):
        return entry
    return frames.BlockFrame(entry.block, memoryview(entry.block.payload))


@given(BLOCKS)
def test_a_block_is_read_as_the_generated_parser_reads_it(block: parameters_pb2.BlockPush) -> None:
    found = block_of(READ(parameters_pb2.PushRequest(block=block).SerializeToString()))
    assert bytes(found.payload) == block.payload
    found.block.payload = block.payload
    assert found.block == block


@given(SEALS)
def test_other_entries_are_the_generated_messages(seal: parameters_pb2.Seal) -> None:
    message = parameters_pb2.PushRequest(seal=seal)
    assert READ(message.SerializeToString()) == message


@given(BLOCKS, SEALS)
def test_an_unusual_message_means_what_protobuf_says(
    block: parameters_pb2.BlockPush, seal: parameters_pb2.Seal
) -> None:
    """Two members of a oneof: the last one counts."""
    raw = (
        parameters_pb2.PushRequest(block=block).SerializeToString()
        + parameters_pb2.PushRequest(seal=seal).SerializeToString()
    )
    assert READ(raw) == parameters_pb2.PushRequest.FromString(raw)


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_read_as_the_generated_parser_does(raw: bytes) -> None:
    try:
        expected = parameters_pb2.PushRequest.FromString(raw)
    except DecodeError:
        with pytest.raises(DecodeError):
            READ(raw)
        return
    found = READ(raw)
    assert frames.kind_of(found) == expected.WhichOneof("entry")
    if frames.kind_of(found) == "block":
        assert bytes(block_of(found).payload) == expected.block.payload
    else:
        assert found == expected


@pytest.mark.parametrize("count", [20, 62, 64])
def test_a_read_may_follow_as_many_blocks_as_a_batch_has(count: int) -> None:
    """The read is parsed: it may be long, and what is payload before it is not of its bytes."""
    block = parameters_pb2.BlockPush(range_id=1, sequence=7, payload=bytes(4096))
    batch = parameters_pb2.BlockBatch(blocks=[block] * count)
    ranges = [parameters_pb2.RangePull(range_id=1, blocks=range(30_000))]
    read = parameters_pb2.PullRequest(ranges=ranges)
    message = parameters_pb2.PushPullRequest(batch=batch, then_pull=read)
    reader = frames.entry_reader(parameters_pb2.PushPullRequest)
    assert reader(message.SerializeToString()) == message


@given(
    st.builds(
        parameters_pb2.BlockValue, block=UINT64, version=UINT64, presence=st.binary(max_size=9)
    ),
    st.binary(max_size=300),
)
def test_an_answer_is_written_as_the_generated_code_writes_it(
    value: parameters_pb2.BlockValue, payload: bytes
) -> None:
    raw = frames.block_answer(value, memoryview(payload))
    expected = parameters_pb2.BlockValue()
    expected.CopyFrom(value)
    expected.payload = payload
    assert parameters_pb2.PullResponse.FromString(raw).block == expected
    part = parameters_pb2.PushPullResponse.FromString(frames.pull_part(raw))
    assert part.pull.block == expected


@given(BLOCKS, st.sampled_from((1, 1000, 262_144, 1_048_576)))
def test_a_padded_payload_begins_aligned(block: parameters_pb2.BlockPush, size: int) -> None:
    block.ClearField("padding")
    block.ClearField("payload")
    payload = bytes(size)
    raw = join(
        2, block.SerializeToString(), 15, payload, parameters_pb2.BlockPush.PADDING_FIELD_NUMBER
    )
    assert len(raw) - size == raw.rindex(payload) or size == 1
    assert (len(raw) - size) % ALIGNMENT_BYTES == 0
    found = READ(raw)
    assert isinstance(found, frames.BlockFrame)
    if size >= 4096:
        assert np.frombuffer(found.payload, np.float32).flags.aligned
