"""Envelopes: what the data path writes and reads is what protobuf writes and reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core.envelope import (
    ALIGNMENT_BYTES,
    is_frugal,
    join,
    pieces_of_several,
    split,
    split_several,
    varint,
    wrap,
)
from ps_core.errors import InvalidTensor
from ps_core.limits import MAX_ENTRY_BYTES
from ps_core.tables.elements import Codec
from pushpull.v1 import parameters_pb2, replication_pb2


@given(st.integers(0, 2**63), st.binary(max_size=300), st.binary(max_size=40))
def test_a_joined_message_is_what_protobuf_would_write(
    sequence: int, payload: bytes, presence: bytes
) -> None:
    """ENV-1, with the next."""
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


@pytest.mark.parametrize("length", range(490, 516))
def test_fields_lie_anywhere_in_a_message(length: int) -> None:
    """Also across the end of the part that is read in another way."""
    value = parameters_pb2.BlockValue(presence=bytes(length), block=5)
    inner = value.SerializeToString() + b"\x08\x07\x10\x81\x01\x7a\x02ab\x08\x06"
    found = split(wrap(1, inner), 1, 15)
    assert found is not None
    assert (found[0], bytes(found[1])) == (inner.replace(b"\x7a\x02ab", b""), b"ab")


def test_a_number_in_the_payloads_place_is_left_to_protobuf() -> None:
    for number in (5, 300):
        field = b"\x78" + varint(number)
        assert split(wrap(1, field), 1, 15) == (field, memoryview(b""))


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
    """ENV-1."""
    batch = replication_pb2.ReplicatedBatch(more_follow=True)
    batch.head.range_id = len(head)
    blocks = [replication_pb2.BlockElements(block=n, presence=head) for n in range(len(payloads))]
    parts = [(b.SerializeToString(), p) for b, p in zip(blocks, payloads, strict=True)]
    joined = b"".join(
        pieces_of_several(BATCH, batch.SerializeToString(), BLOCKS, parts, PAYLOAD, PADDING)
    )
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


# --- numbers


@pytest.mark.parametrize("number", [0, 1, 126, 127, 128, 129, 255, 256, 16_383, 16_384, 2**64 - 1])
def test_a_number_is_what_protobuf_writes_and_reads(number: int) -> None:
    field = parameters_pb2.BlockPush.DESCRIPTOR.fields_by_name["sequence"]
    written = parameters_pb2.BlockPush(sequence=number).SerializeToString()
    key = varint(field.number << 3)
    assert written == (key + varint(number) if number else b"")
    message = wrap(1, key + varint(number))
    assert split(message, 1, 15) == (key + varint(number), memoryview(b""))


def test_a_number_of_more_than_ten_bytes_is_none() -> None:
    """64 bits take ten groups of seven: what goes on beyond is no number, however it ends."""
    longest, beyond = b"\xff" * 9 + b"\x01", b"\xff" * 10 + b"\x01"
    assert split(wrap(1, b"\x10" + longest), 1, 15) is not None
    with pytest.raises(InvalidTensor, match="ends inside a number at byte 11"):
        split(wrap(1, b"\x10" + beyond), 1, 15)


# --- fields of every kind


def test_fields_of_fixed_width_are_kept_whole_around_a_payload() -> None:
    """Nothing of ours has such fields today; a newer peer's message may."""
    eight, four = b"\x11" + bytes(range(8)), b"\x1d" + bytes(range(4))
    message = wrap(1, eight + b"\x7a\x02hi" + four)
    assert split(message, 1, 15) == (eight + four, memoryview(b"hi"))


@pytest.mark.parametrize("field", [b"\x11" + bytes(7), b"\x1d" + bytes(3), b"\x12\x03ab", b"\x12"])
def test_a_field_that_is_cut_off_is_refused(field: bytes) -> None:
    for part in (field, b"\x08\x01" + field):
        with pytest.raises(InvalidTensor, match=r"message of .* ends inside"):
            split(wrap(1, part), 1, 15)
        with pytest.raises(InvalidTensor, match=r"message of .* ends inside"):
            split_several(wrap(1, part), 1, 2, 4)


@pytest.mark.parametrize("wire_type", [3, 4, 6, 7])
def test_wire_types_that_proto3_lacks_are_refused_anywhere(wire_type: int) -> None:
    for inner in (varint(5 << 3 | wire_type), b"\x08\x01" + varint(5 << 3 | wire_type)):
        with pytest.raises(InvalidTensor, match=f"wire type {wire_type}"):
            split_several(wrap(2, inner), 2, 2, 4)


def test_a_number_in_the_field_of_the_parts_is_no_part() -> None:
    assert split_several(wrap(2, b"\x10\x07"), 2, 2, 4) == (b"\x10\x07", [])


def test_a_message_has_one_field_and_nothing_behind_it() -> None:
    message = wrap(1, b"\x08\x05")
    assert message == b"\x0a\x02\x08\x05"
    for came in (message + b"\x08\x01", message[:3]):
        with pytest.raises(InvalidTensor, match=f"a message of {len(came)} bytes announces 4"):
            split(came, 1, 15)


# --- where a payload lies


def _offset(message: bytes, payload: bytes) -> int:
    assert message.count(payload) == 1
    return message.index(payload)


SMALL = list(range(16, 48))
LARGE = [*range(200, 232), 1000, 20_000, 70_000]
"""With what is beside them and up to 15 bytes of padding, all of these stay clear of 128 and 16,384
bytes, where the padding may make a length's own varint longer: then a payload lies anywhere.
"""


@pytest.mark.parametrize("rest_count", [0, 1, 5, 17])
@pytest.mark.parametrize("size", SMALL + LARGE)
def test_with_padding_a_payload_begins_where_its_receiver_can_compute_on_it(
    size: int, rest_count: int
) -> None:
    rest, payload = b"\x08\x01" * rest_count, b"\xff" * size
    joined = join(1, rest, 15, payload, 14)
    assert _offset(joined, payload) % ALIGNMENT_BYTES == 0
    padding_bytes = len(joined) - len(join(1, rest, 15, payload))
    assert 2 <= padding_bytes < 2 + ALIGNMENT_BYTES
    found = split(joined, 1, 15)
    assert found is not None
    assert found[1] == payload
    assert found[0] == rest + b"\x72" + bytes((padding_bytes - 2,)) + bytes(padding_bytes - 2)


@pytest.mark.parametrize(
    ("size", "count"), [(size, 1) for size in SMALL] + [(n, c) for n in LARGE for c in (1, 2, 3)]
)
def test_of_several_payloads_each_begins_there(size: int, count: int) -> None:
    parts = [(b"\x08" + bytes((n,)), bytes((200 + n,)) * size) for n in range(count)]
    joined = b"".join(pieces_of_several(BATCH, b"\x08\x01", BLOCKS, parts, PAYLOAD, PADDING))
    for _, payload in parts:
        assert _offset(joined, payload) % ALIGNMENT_BYTES == 0
    assert len(joined) < count * (size + ALIGNMENT_BYTES + 16) + 8


def test_an_element_of_any_codec_may_begin_there() -> None:
    assert all(ALIGNMENT_BYTES % codec.element_bytes == 0 for codec in Codec)
    assert ALIGNMENT_BYTES & (ALIGNMENT_BYTES - 1) == 0  # else it would be no bound of an address


# --- what may be parsed

_SIZE = 5000


def _padded(padding: int, *, is_plain: bool) -> bytes:
    """A part with a payload, and so many bytes that are none."""
    head = b"\x08\x96\x01\x10\x80\x80\x04" + (b"" if is_plain else b"\x5a\x01\xff")
    behind = wrap(16, bytes(padding)) if padding else b""
    return wrap(1, head + wrap(15, b"\x7f" * _SIZE) + behind)


def _is_frugal(batch: bytes) -> bool:
    return is_frugal(wrap(4, batch), (4, 1, 15), 64, (3, 15))


@pytest.mark.parametrize("is_plain", [True, False])
def test_what_lies_beside_payloads_is_counted_to_the_byte(is_plain: bool) -> None:
    parts = [_padded(0, is_plain=is_plain) for _ in range(63)]
    beside = sum(map(len, parts)) - 63 * _SIZE
    last = _padded(70_000, is_plain=is_plain)
    more = MAX_ENTRY_BYTES - beside - (len(last) - _SIZE)
    for count, expected in ((70_000 + more, True), (70_001 + more, False)):
        assert _is_frugal(b"".join([*parts, _padded(count, is_plain=is_plain)])) is expected
    assert more > 0


def test_more_parts_than_a_message_has_are_not_parsed() -> None:
    parts = [_padded(0, is_plain=True)] * 79
    assert _is_frugal(b"".join(parts))
    assert not _is_frugal(b"".join(parts * 5))


def test_a_small_message_is_parsed_whatever_it_is() -> None:
    assert _is_frugal(b"\x0a\x00" * 1000)
    assert is_frugal(bytes(MAX_ENTRY_BYTES), (4, 1, 15), 64, (3, 15))
    assert not _is_frugal(b"\x0a\x00" * (MAX_ENTRY_BYTES // 2 + 1))


def test_a_part_whose_payload_ends_behind_it_is_no_message() -> None:
    parts = [_padded(0, is_plain=True)] * 60
    for broken in (b"\x0a\x03\x08\x01\x7a", b"\x0a\x04\x08\x01\x7a\x05"):
        with pytest.raises(InvalidTensor, match="ends inside"):
            _is_frugal(b"".join([broken, *parts]))
