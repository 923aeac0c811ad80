"""Envelopes: what the data path writes and reads is what protobuf writes and reads."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ps_core.envelope import (
    ALIGNMENT_BYTES,
    MAX_BESIDE_BYTES,
    has_few,
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
from ps_core.tables.elements import NATIVE_CODEC
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
    assert all(ALIGNMENT_BYTES % codec.element_bytes == 0 for codec in NATIVE_CODEC.values())
    assert ALIGNMENT_BYTES & (ALIGNMENT_BYTES - 1) == 0  # else it would be no bound of an address


# --- what may be parsed

_SIZE = 5000


def _fields(byte_count: int) -> bytes:
    """A field of so many bytes, with its key and its length."""
    size = byte_count - 3
    field = wrap(16, bytes(size - len(varint(size)) + 1))
    assert len(field) == byte_count
    return field


def _part(size: int, beside: bytes = b"", behind: bytes = b"") -> bytes:
    """A message with a payload of which no byte could begin a field."""
    return wrap(1, beside + wrap(15, b"\x7f" * size) + behind)


def _padded(padding: int, *, is_plain: bool) -> bytes:
    """A part with a payload, and so many bytes that are none."""
    head = b"\x08\x96\x01\x10\x80\x80\x04" + (b"" if is_plain else b"\x5a\x01\xff")
    return _part(_SIZE, head, wrap(16, bytes(padding)) if padding else b"")


def _may_be_parsed(message: bytes, most_count: int = 64) -> bool:
    """Several parts are in field 4, one is in field 3."""
    return is_frugal(message, (4, 1, 15), most_count, (3, 15))


def _is_frugal(batch: bytes, most_count: int = 64) -> bool:
    return _may_be_parsed(wrap(4, batch), most_count)


@pytest.mark.parametrize("is_plain", [True, False])
def test_what_lies_beside_payloads_is_counted_to_the_byte(is_plain: bool) -> None:
    parts = [_padded(0, is_plain=is_plain) for _ in range(63)]
    beside = sum(map(len, parts)) - 63 * _SIZE
    last = _padded(70_000, is_plain=is_plain)
    more = MAX_ENTRY_BYTES - beside - (len(last) - _SIZE)
    for count, expected in ((70_000 + more, True), (70_001 + more, False)):
        assert _is_frugal(b"".join([*parts, _padded(count, is_plain=is_plain)])) is expected
    assert more > 0


FIXED = b"\x49" + b"\xff" * 8 + b"\x4d" + b"\xff" * 4
FIELDS = [
    FIXED,
    *(
        varint(field << 3) + varint(number)
        for field in range(1, 21)
        for number in (0, 8, 10, 0x7A, 0x7F, 0x80, 300, 2**64 - 1)
    ),
    *(wrap(field, bytes(size)) for field in (1, 2, 14, 16, 20) for size in (0, 1, 5)),
]
BESIDE = st.lists(st.sampled_from(FIELDS), max_size=18).map(b"".join)


@example([(b"\x80\x01\x7a", 300, b"")])
@given(st.lists(st.tuples(BESIDE, st.sampled_from([0, 1, 127, 128, 300]), BESIDE), max_size=3))
def test_that_holds_whatever_the_fields_are(drawn: list[tuple[bytes, int, bytes]]) -> None:
    parts = [_part(size, beside, behind) for beside, size, behind in drawn]
    large = _part(MAX_ENTRY_BYTES)  # else all of it would fit
    beside = sum(map(len, parts)) - sum(size for _, size, _ in drawn)
    beside += len(large) - MAX_ENTRY_BYTES
    for more, expected in ((0, True), (1, False)):
        filled = _fields(MAX_ENTRY_BYTES - beside + more)
        assert _is_frugal(b"".join([*parts, filled, large])) is expected


LENGTHS = [
    0b1, 0b1010101, 0b101010, 0b1111111, 0b10000000, 0b10101010101010, 0b1010101010101,
    0b11111111111111, 0b10000000000000000, 0b101010101010101010101,
    0b10101010101010101010, 0b1010101010101010101010,
    0b1101010101010101010101, 0b1111111111111111111111,
]  # fmt: skip
"""Of payloads, so that numbers of one to four bytes have each bit set and clear."""


@pytest.mark.parametrize("size", LENGTHS)
def test_that_holds_for_payloads_of_any_length(size: int) -> None:
    small = _part(size, b"\x08\x05", b"\x10\x06" * 8)
    parts = [small] * (count := min(1000, MAX_ENTRY_BYTES // size + 1))
    large = _part(16 * MAX_ENTRY_BYTES)
    beside = count * (len(small) - size) + len(large) - 16 * MAX_ENTRY_BYTES
    for more, expected in ((0, True), (1, False)):
        filled = _fields(MAX_ENTRY_BYTES - beside + more)
        assert _is_frugal(b"".join([*parts, filled, large]), count) is expected


def test_a_message_with_one_payload_has_few_bytes_beside_it() -> None:
    payload = wrap(15, bytes(MAX_ENTRY_BYTES))
    for more, expected in ((0, True), (1, False)):
        assert _may_be_parsed(wrap(3, payload + _fields(MAX_ENTRY_BYTES + more))) is expected
        behind = _fields(MAX_ENTRY_BYTES + more)
        assert _may_be_parsed(wrap(3, payload) + behind) is expected
        assert _may_be_parsed(behind + wrap(3, payload)) is expected


def test_what_lies_beside_the_payloads_of_all_fields_is_added_up() -> None:
    """A read may follow the blocks in a message."""
    alone = wrap(3, wrap(15, bytes(MAX_ENTRY_BYTES)) + _fields(60_000))
    batch = b"".join([*[_padded(0, is_plain=True)] * 60, _padded(70_000, is_plain=True)])
    beside = 60_000 + len(batch) - 61 * _SIZE
    for more, expected in ((0, True), (1, False)):
        read = _fields(MAX_ENTRY_BYTES - beside + more)
        for fields in ((alone, wrap(4, batch), read), (read, wrap(4, batch), alone)):
            assert _may_be_parsed(b"".join(fields)) is expected


def test_payloads_count_as_such_also_where_they_alone_would_fit() -> None:
    """Blocks that have nearly as many bytes as may lie beside payloads, and a read behind them."""
    batch = b"".join([_padded(0, is_plain=True)] * 52)
    assert MAX_ENTRY_BYTES - 2000 < len(batch) <= MAX_ENTRY_BYTES
    for read in (_fields(2000), _fields(200_000)):
        assert _may_be_parsed(wrap(4, batch) + read)
        assert _may_be_parsed(read + wrap(4, batch))


def test_what_is_no_message_in_the_place_of_blocks_is_a_field_like_others() -> None:
    large = wrap(3, wrap(15, bytes(MAX_ENTRY_BYTES)))
    assert _may_be_parsed(b"\x18\x05\x20\x05" + FIXED + large)
    assert _is_frugal(b"\x08\x05" + FIXED + _part(MAX_ENTRY_BYTES))


def test_more_parts_than_a_message_has_are_not_parsed() -> None:
    parts = [_padded(0, is_plain=True)] * 79
    assert _is_frugal(b"".join(parts))
    large = _part(MAX_ENTRY_BYTES)  # else all of it would fit
    assert _is_frugal(b"".join([*parts[1:], large]))
    assert not _is_frugal(b"".join([*parts, large]))
    assert not _is_frugal(b"".join(parts * 5))


def test_more_fields_than_a_message_has_are_not_parsed() -> None:
    large = wrap(3, wrap(15, bytes(MAX_ENTRY_BYTES)))
    assert _may_be_parsed(b"\x08\x01" * 14 + large)
    assert not _may_be_parsed(b"\x08\x01" * 15 + large)


def test_what_is_called_otherwise_is_no_part_and_no_payload() -> None:
    large = bytes(MAX_ENTRY_BYTES)
    for no_part in (wrap(2, wrap(15, large)), wrap(1, wrap(30, large)), wrap(2, wrap(30, large))):
        assert not _is_frugal(no_part)


def test_what_has_too_much_is_not_read_to_its_end() -> None:
    no_field = b"\xff" * 300_000
    assert not _may_be_parsed(_fields(MAX_ENTRY_BYTES + 1) + no_field)
    assert not _is_frugal(wrap(1, _fields(MAX_ENTRY_BYTES + 1)) + no_field)
    with pytest.raises(InvalidTensor, match="ends inside a number"):
        _may_be_parsed(_fields(MAX_ENTRY_BYTES) + no_field)


def test_a_small_message_is_parsed_whatever_it_is() -> None:
    assert _is_frugal(b"\x0a\x00" * 1000)
    assert _may_be_parsed(bytes(MAX_ENTRY_BYTES))
    assert not _is_frugal(b"\x0a\x00" * (MAX_ENTRY_BYTES // 2 + 1))


def test_a_part_whose_payload_ends_behind_it_is_no_message() -> None:
    parts = [_padded(0, is_plain=True)] * 60
    for broken in (b"\x0a\x03\x08\x01\x7a", b"\x0a\x04\x08\x01\x7a\x05"):
        with pytest.raises(InvalidTensor, match="ends inside"):
            _is_frugal(b"".join([broken, *parts]))
    with pytest.raises(InvalidTensor, match="ends inside"):
        _is_frugal(_part(2 * MAX_ENTRY_BYTES)[:-1])


@pytest.mark.parametrize("wire_type", [3, 4, 6, 7])
def test_fields_of_a_part_have_a_wire_type_of_proto3(wire_type: int) -> None:
    for field in (1, 2, 3, 16):
        beside = varint(field << 3 | wire_type) + b"\x01"
        with pytest.raises(InvalidTensor, match=f"wire type {wire_type}"):
            _is_frugal(_part(MAX_ENTRY_BYTES, beside))


def test_a_payload_far_behind_in_a_message_is_not_searched() -> None:
    """Its length shows to the reader that the message is none of ours."""
    payload = wrap(15, b"ab")
    near, far = _fields(MAX_BESIDE_BYTES) + payload, _fields(MAX_BESIDE_BYTES + 1) + payload
    assert split(wrap(1, near), 1, 15) == (near[: -len(payload)], memoryview(b"ab"))
    assert split(wrap(1, far), 1, 15) == (far, memoryview(b""))
    large = wrap(15, bytes(2 * MAX_BESIDE_BYTES))
    for inner in (large + payload, large + b"\x08\x01" + payload):
        assert split(wrap(1, inner), 1, 15) == (inner[len(large) : -4], memoryview(b"ab"))


# --- requests with many entries


def _has_few(message: bytes) -> bool:
    """The request is in field 2; of its field 5 there are at most 10, and 8 is of any size."""
    return has_few(message, 2, 5, 10, 8)


def test_the_entries_of_a_request_are_counted_and_not_their_bytes() -> None:
    for entry in (wrap(5, b""), wrap(5, bytes(MAX_ENTRY_BYTES))):
        assert _has_few(wrap(2, entry * 10))
        assert not _has_few(wrap(2, entry * 11))
    assert _has_few(b"")


def test_the_entries_of_a_request_in_two_parts_are_counted_together() -> None:
    """A field that comes twice is one, and has what both have."""
    assert _has_few(wrap(2, wrap(5, b"") * 5) * 2)
    assert not _has_few(wrap(2, wrap(5, b"") * 5) + wrap(2, wrap(5, b"") * 6))


def test_what_stands_elsewhere_or_is_a_number_is_no_entry() -> None:
    elsewhere = wrap(5, b"") * 11 + b"\x10\x01" + FIXED
    assert _has_few(elsewhere + wrap(2, b"\x28\x01" * 11 + FIXED + wrap(6, b"") * 11))


def test_what_lies_beside_entries_is_counted_to_the_byte() -> None:
    """But for one field, whose size does not matter: what else there is, however it is spread."""
    free = wrap(8, bytes(2 * MAX_ENTRY_BYTES))
    entries = wrap(5, bytes(100)) * 10
    head = len(wrap(2, bytes(MAX_ENTRY_BYTES // 2))) - MAX_ENTRY_BYTES // 2
    for more, expected in ((0, True), (1, False)):
        other = _fields(MAX_ENTRY_BYTES - head + more)
        assert _has_few(wrap(2, other)) is expected
        assert _has_few(wrap(2, free + entries + other)) is expected
        outside = _fields(MAX_ENTRY_BYTES - 70_000 - 2 * head + more)
        some = wrap(2, _fields(30_000) + entries) + outside + wrap(2, free + _fields(40_000))
        assert _has_few(some) is expected
    full = _fields(MAX_ENTRY_BYTES - head)
    for too_long in (wrap(2, full + b"\x08\x01"), wrap(2, full) + b"\x08\x01"):
        assert not _has_few(too_long)


def test_a_request_with_too_much_is_not_read_to_its_end() -> None:
    entries, beside = wrap(5, b"") * 11, _fields(MAX_ENTRY_BYTES + 1)
    for too_much in (entries, beside):
        assert not _has_few(wrap(2, too_much + b"\xff"))
        assert not _has_few(wrap(2, too_much) + b"\xff")


@pytest.mark.parametrize("message", [b"\xff", wrap(2, b"\xff"), wrap(2, b"\x2a\x05"), b"\x12\x05"])
def test_a_request_that_is_cut_off_is_no_message(message: bytes) -> None:
    with pytest.raises(InvalidTensor, match="ends inside"):
        _has_few(message)
