"""The HTTP/2 of our own, one behaviour at a time: two machines on a link, and raw frames to one."""

from __future__ import annotations

import hpack
import pytest

from ps_runtime.http2.protocol import frames as wire
from ps_runtime.http2.protocol.bounds import Bounds
from ps_runtime.http2.protocol.connection import Http2Connection
from ps_runtime.http2.protocol.frames import ErrorCode, Flag, FrameType, Setting
from ps_runtime.http2.protocol.streams import Fields, MessagePiece, Stream
from tests.unit.http2_peers import (
    ANSWER,
    BLOCK,
    BOUNDS,
    LARGE,
    OPENING,
    REQUEST,
    TRAILERS,
    Heard,
    Pair,
    Raw,
    body,
    check_credits,
    feed,
    frames_of,
    kinds_of,
    taken,
    whole,
)

END = Flag.END_STREAM


# --- messages


def test_a_call_there_and_back() -> None:
    pair = Pair()
    stream, at_client, at_server = pair.open()
    assert at_server.fields == [REQUEST]
    assert pair.client.output.message(stream, (b"hello, ", memoryview(b"world")))
    pair.client.end(stream)
    pair.carry()
    assert at_server.messages == [b"hello, world"]
    assert at_server.calls == ["fields", "message", "end"]
    answers = pair.server.connection.output
    answers.fields(at_server.opened, ANSWER)
    answers.message(at_server.opened, (b"",))
    pair.server.connection.end(at_server.opened, TRAILERS)
    pair.carry()
    assert at_client.fields == [ANSWER, TRAILERS]
    assert at_client.messages == [b""]
    assert at_client.calls == ["fields", "message", "fields", "end"]
    assert not pair.client.streams
    assert not pair.server.connection.streams


@pytest.mark.parametrize("step", [1, 2, 5, 6, 14, 4096, 70_000])
def test_messages_arrive_however_the_bytes_are_cut(step: int) -> None:
    raw, messages = Raw(), [b"", b"a", LARGE[:90_000], b"", LARGE[:40_000], b"bc"]
    heard = raw.open()
    content = b"".join(map(whole, messages))
    cuts = [content[at : at + 16_000] for at in range(0, len(content), 16_000)]
    sent = b"".join(body(1, piece) for piece in cuts) + body(1, b"", END)
    feed(raw.connection, sent, [step] * (len(sent) // step))
    assert heard.messages == messages
    assert heard.calls[-1] == "end"


def test_a_large_message_is_received_where_it_stays() -> None:
    raw = Raw()
    heard = raw.open()
    sent = body(1, whole(LARGE))
    feed(raw.connection, sent[:100])
    target = raw.connection.buffer()
    assert len(target) == len(sent) - 100
    feed(raw.connection, sent[100:])
    (message,) = heard.pieces
    assert isinstance(message, memoryview)
    assert message.readonly
    assert message.obj is target.obj


def test_the_memory_of_a_message_is_left_when_its_stream_goes() -> None:
    raw = Raw()
    heard = raw.open()
    raw.feed(body(1, whole(LARGE))[:5000])
    had_begun = heard.opened.incoming.has_begun
    raw.connection.reset(heard.opened, ErrorCode.CANCEL)
    assert (had_begun, heard.opened.incoming.has_begun) == (True, False)
    raw.feed(body(1, whole(LARGE))[5000:])  # the rest of the frame is for nobody
    second = raw.open(3)
    raw.feed(body(3, whole(b"next")))
    assert (heard.messages, second.messages) == ([], [b"next"])
    check_credits(raw.connection)


def test_a_message_of_the_limit_is_taken_and_one_above_it_is_not() -> None:
    raw = Raw()
    heard = raw.open()
    most = bytes(BOUNDS.max_message_bytes)
    raw.feed(body(1, whole(most)))
    assert heard.messages == [most]
    raw.feed(body(1, whole(b"ok") + wire.prefix(len(most) + 1) + b"begins") + body(1, most[:9]))
    assert heard.messages[1:] == [b"ok"]
    assert heard.problems == ["a message of 100001 bytes is larger than max (100000)"]
    assert heard.calls[-1] == "unreadable"
    raw.connection.reset(heard.opened, ErrorCode.CANCEL)
    check_credits(raw.connection)


def test_nothing_more_is_heard_behind_what_cannot_be_read() -> None:
    raw = Raw()
    heard = raw.open()
    raw.feed(body(1, whole(b"zipped", flag=1) + whole(b"plain")) + body(1, whole(b"x"), END))
    assert heard.problems == ["a message has the flag 1; compression is not supported"]
    assert heard.calls == ["fields", "unreadable"]


def test_a_stream_that_ends_inside_of_a_message_is_broken() -> None:
    raw = Raw()
    for number, part in ((1, whole(b"cut off")[:3]), (3, whole(b"cut off")[:8])):
        heard = raw.open(number)
        raw.feed(body(number, part, END))
        assert heard.calls == ["fields", "broken"]
    trailing = raw.open(5)
    raw.feed(body(5, whole(b"cut off")[:8]))
    raw.open(5, END)
    assert trailing.calls == ["fields", "broken"]
    assert raw.connection.streams == {}
    resets = [head.stream_id for head, _ in frames_of(taken(raw.connection))]
    assert resets == [1, 3, 5]


def test_a_call_is_not_whole_with_a_message_cut_off_before_its_trailers() -> None:
    pair = Pair()
    _, at_client, at_server = pair.open()
    block = hpack.Encoder().encode(list(TRAILERS))
    feed(pair.client, body(1, whole(b"cut off")[:8]))
    feed(pair.client, wire.frame(FrameType.HEADERS, Flag.END_HEADERS | END, 1, block))
    assert at_client.calls == ["broken"]
    assert at_client.broken[0][0] == ErrorCode.PROTOCOL_ERROR
    pair.carry()
    assert at_server.broken[0][0] == ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize("padding", [0, 1, 255])
def test_padding_is_no_part_of_a_message(padding: int) -> None:
    raw = Raw()
    heard = raw.open()
    sent = body(1, whole(b"first"), padding=padding) + body(1, whole(b"second"), END, padding)
    feed(raw.connection, sent, [1] * len(sent))
    assert heard.messages == [b"first", b"second"]
    assert heard.calls[-1] == "end"
    check_credits(raw.connection)


def test_padding_that_begins_behind_the_buffers_end_is_waited_for() -> None:
    raw = Raw()
    heard = raw.open()
    sent = body(1, whole(b"padded"), padding=9)
    feed(raw.connection, sent[: wire.FRAME_HEAD_BYTES])
    feed(raw.connection, sent[wire.FRAME_HEAD_BYTES :])
    assert heard.messages == [b"padded"]


def test_a_long_header_block_goes_in_continuations() -> None:
    pair = Pair()
    fields: Fields = ((b"x", bytes(range(48, 112)) * 100), *REQUEST, (b"y", b"!" * 9000))
    pair.client.open(fields, Heard())
    sent = taken(pair.client)
    assert max(head.length for head, _ in frames_of(sent)) <= wire.DEFAULT_MAX_FRAME_BYTES
    feed(pair.server.connection, sent)
    assert pair.server.heard[-1].fields == [fields]
    block = wire.header_frames(7, bytes(20_000), 16_384, ends=True)
    (first, head), (second, rest) = frames_of(block)
    assert (first.kind, first.flags, len(head)) == (FrameType.HEADERS, END, 16_384)
    assert (second.kind, second.flags) == (FrameType.CONTINUATION, Flag.END_HEADERS)
    assert len(rest) == 20_000 - 16_384


def test_headers_may_be_padded_have_a_priority_and_be_cut() -> None:
    raw = Raw()
    payload = b"\x03" + bytes(5) + BLOCK[:4] + bytes(3)
    flags = Flag.PADDED | Flag.PRIORITY | END
    raw.feed(wire.frame(FrameType.HEADERS, flags, 1, payload))
    raw.feed(wire.frame(FrameType.CONTINUATION, Flag.END_HEADERS, 1, BLOCK[4:]))
    assert raw.server.heard[0].fields == [REQUEST]
    assert raw.server.heard[0].calls == ["fields", "end"]


def test_nothing_is_written_for_a_piece_of_nothing() -> None:
    pair = Pair()
    stream, _, at_server = pair.open()
    pair.client.output.message(stream, (b"", b"a", memoryview(b"")))
    pair.client.output.message(stream, ())
    pieces = pair.client.output.take()
    assert all(len(piece) for piece in pieces)
    feed(pair.server.connection, b"".join(pieces))
    assert at_server.messages == [b"a", b""]


# --- what receivers do in the middle of it


class Abrupt(Heard):
    """Ends, resets or consumes from inside of its first message."""

    def __init__(self, connection: Http2Connection, action: str) -> None:
        super().__init__()
        self._connection = connection
        self._action = action

    def on_message(self, message: MessagePiece) -> None:
        super().on_message(message)
        self._connection.consumed(self.opened, message)
        if self._action == "reset":
            self._connection.reset(self.opened, ErrorCode.CANCEL)
        elif self._action == "end":
            self._connection.end(self.opened)


@pytest.mark.parametrize("action", ["reset", "end", "consume"])
@pytest.mark.parametrize("size", [10, 99_000])
def test_a_receiver_may_act_on_its_stream_from_inside_of_a_message(action: str, size: int) -> None:
    made: list[Abrupt] = []
    connection: Http2Connection

    def accept() -> Abrupt:
        made.append(Abrupt(connection, action))
        return made[-1]

    connection = Http2Connection(BOUNDS, accept)
    opening = wire.frame(FrameType.HEADERS, Flag.END_HEADERS, 1, BLOCK)
    feed(connection, wire.PREFACE + OPENING + opening)
    content = whole(bytes(size)) * 2
    feed(connection, body(1, content[: size + 3]) + body(1, content[size + 3 :], END, 7))
    assert len(made[0].messages) == (2 if action == "consume" else 1)
    assert (1 in connection.streams) == (action == "consume")
    check_credits(connection)
    reset = ErrorCode.CANCEL if action == "reset" else ErrorCode.NO_ERROR
    resets = [rest for head, rest in frames_of(taken(connection)) if head.kind == 3]
    assert resets == ([] if action == "consume" else [int(reset).to_bytes(4)])


class Careless(Heard):
    """Resets another stream when it hears of its own end."""

    def __init__(self, connection: Http2Connection, others: list[Stream]) -> None:
        super().__init__()
        self._connection = connection
        self._others = others

    def on_broken(self, code: int | None, text: str) -> None:
        super().on_broken(code, text)
        for other in self._others:
            self._connection.reset(other, ErrorCode.CANCEL)


def test_a_lost_connection_breaks_every_stream_once() -> None:
    client, streams = Http2Connection(BOUNDS), list[Stream]()
    heard = [Careless(client, streams) for _ in range(3)]
    streams += [client.open(REQUEST, each) for each in heard]
    client.broken("it was lost")
    assert [each.broken for each in heard] == [[(None, "it was lost")], [], []]
    assert not client.streams
    assert not client.can_open
    client.broken("it was lost")


# --- windows


def test_what_does_not_fit_the_window_waits_and_leaves_in_order() -> None:
    """HST-1."""
    pair = Pair()
    stream, _, at_server = pair.open()
    sent = [LARGE, b"", LARGE, LARGE, LARGE, b"last"]
    left = [pair.client.output.message(stream, (message,)) for message in sent]
    assert left == [True, True, True, True, False, False]
    pair.client.end(stream)
    pair.carry()
    assert at_server.messages == sent[:4]
    assert "writable" not in at_server.calls
    for piece in at_server.pieces:
        pair.server.connection.consumed(at_server.opened, piece)
    pair.carry()
    assert at_server.messages == sent
    assert at_server.calls[-1] == "end"
    check_credits(pair.server.connection)


def test_a_sender_may_write_once_all_has_left() -> None:
    pair = Pair()
    stream, at_client, at_server = pair.open()
    while pair.client.output.message(stream, (LARGE,)):
        pair.carry()
    pair.carry()
    assert "writable" not in at_client.calls
    for piece in at_server.pieces:
        pair.server.connection.consumed(at_server.opened, piece)
    pair.carry()
    assert at_client.calls == ["writable"]
    assert stream.queued_bytes == 0


def test_trailers_leave_behind_a_message_that_waits() -> None:
    """HST-1."""
    pair = Pair()
    _, at_client, at_server = pair.open()
    server = pair.server.connection
    for _ in range(4):
        server.output.message(at_server.opened, (LARGE,))
    server.end(at_server.opened, TRAILERS)
    server.end(at_server.opened, ((b"grpc-status", b"13"),))  # too late
    server.output.message(at_server.opened, (b"too late",))
    pair.carry()
    assert at_client.fields == []
    for piece in at_client.pieces:
        pair.client.consumed(at_client.opened, piece)
    pair.carry()
    assert at_client.messages == [LARGE] * 4
    assert at_client.fields == [TRAILERS]


def test_messages_of_all_streams_may_be_incomplete_at_once() -> None:
    """As senders do that give each stream its turn; none may wait for another's end."""
    pair = Pair()
    calls = [pair.open() for _ in range(BOUNDS.stream_count)]
    content = whole(LARGE)
    for first in range(0, len(content), 30_000):
        for stream, _, _ in calls:
            feed(pair.server.connection, body(stream.stream_id, content[first : first + 30_000]))
    assert all(at_server.messages == [LARGE] for *_, at_server in calls)
    check_credits(pair.server.connection)
    usual = Bounds(4 << 20)
    assert usual.connection_window_bytes >= usual.stream_count * len(whole(bytes(4 << 20)))


def test_bounds_that_could_not_go_on_are_refused() -> None:
    Bounds(50_000, window_bytes=100_010)
    for wrong in ((50_000, 100_009), (10, 65_534), (1 << 20, 1 << 31), (1 << 26, 1 << 27)):
        with pytest.raises(ValueError, match="expected a window of"):
            Bounds(*wrong)


def test_the_settings_say_the_bounds() -> None:
    client, server = Http2Connection(Bounds(10)), Http2Connection(BOUNDS, Heard)
    (first, raw), (_, window) = frames_of(taken(client))
    assert first.kind == FrameType.SETTINGS
    assert dict(wire.read_settings(raw)) == {
        Setting.ENABLE_PUSH: 0,
        Setting.MAX_CONCURRENT_STREAMS: 100,
        Setting.INITIAL_WINDOW_SIZE: 16 * 1024 * 1024,
        Setting.MAX_FRAME_SIZE: wire.DEFAULT_MAX_FRAME_BYTES,
        Setting.MAX_HEADER_LIST_SIZE: 16 * 1024,
    }
    assert int.from_bytes(window) == 16 * 1024 * 1024 + 100 * 15 - wire.DEFAULT_WINDOW_BYTES
    (_, raw), _ = frames_of(taken(server))
    found = dict(wire.read_settings(raw))
    assert Setting.ENABLE_PUSH not in found
    assert found[Setting.MAX_FRAME_SIZE] == 100_005


def test_the_window_of_a_stream_that_went_is_given_back() -> None:
    pair = Pair()
    for number in range(40):
        stream, _, at_server = pair.open()
        pair.client.output.message(stream, (LARGE,))
        pair.client.output.message(stream, (LARGE,))
        pair.carry()
        assert at_server.messages == [LARGE] * 2, number
        pair.client.reset(stream, ErrorCode.CANCEL)
        pair.carry()
        check_credits(pair.server.connection)


def test_more_than_a_window_breaks_the_connection() -> None:
    raw = Raw()
    raw.open()
    for _ in range(3):
        raw.feed(body(1, whole(bytes(99_990))))
    assert raw.broken_by(body(1, whole(bytes(50)))) == ErrorCode.FLOW_CONTROL_ERROR


def test_more_than_all_windows_together_breaks_the_connection() -> None:
    bounds = Bounds(30_000, window_bytes=100_000, stream_count=1)
    raw = Raw(bounds)
    raw.open()
    raw.feed(wire.reset(1, ErrorCode.CANCEL))
    size = 0
    raw.open(3)
    while size + 30_005 <= bounds.window_bytes:
        raw.feed(body(3, whole(bytes(30_000))))
        size += 30_005
    assert size + 30_005 > bounds.window_bytes
    check_credits(raw.connection)
    assert raw.broken_by(body(1, bytes(30_005)) * 2) == ErrorCode.FLOW_CONTROL_ERROR


def test_a_window_that_shrinks_below_what_left_holds_everything_back() -> None:
    pair = Pair()
    stream, _, _ = pair.open()
    output = pair.client.output
    output.message(stream, (LARGE,))
    taken(pair.client)
    feed(pair.client, wire.settings({Setting.INITIAL_WINDOW_SIZE: 1000}))
    assert stream.send_window == 1000 - len(whole(LARGE)) < 0
    assert not output.message(stream, (b"waits",))
    feed(pair.client, wire.window_update(1, len(whole(LARGE)) - 1000))
    assert kinds_of(taken(pair.client)) == ["SETTINGS"]
    feed(pair.client, wire.window_update(1, 4))
    assert frames_of(taken(pair.client)).__next__()[1] == wire.prefix(5)[:4]
    feed(pair.client, wire.settings({Setting.INITIAL_WINDOW_SIZE: 2000}))
    assert [payload for _, payload in frames_of(taken(pair.client))] == [b"", b"\x05waits"]
    assert pair.client.open(REQUEST, Heard()).send_window == 2000


def test_frames_are_no_larger_than_the_peer_takes() -> None:
    pair = Pair()
    stream, _, _ = pair.open()
    feed(pair.client, wire.settings({Setting.MAX_FRAME_SIZE: 20_000}))
    taken(pair.client)
    assert pair.client.output.message(stream, (LARGE,))
    sizes = [head.length for head, _ in frames_of(taken(pair.client))]
    assert sizes == [20_000] * 4 + [len(whole(LARGE)) - 80_000]


@pytest.mark.parametrize("stream_id", [0, 1])
def test_a_window_above_the_largest_breaks_the_connection(stream_id: int) -> None:
    raw = Raw()
    raw.open()
    raw.feed(wire.window_update(stream_id, wire.MAX_WINDOW_BYTES - wire.DEFAULT_WINDOW_BYTES))
    update = wire.window_update(stream_id, 1)
    assert raw.broken_by(update) == ErrorCode.FLOW_CONTROL_ERROR


# --- ends of streams


def test_a_client_that_goes_on_after_its_answer_is_stopped_without_an_error() -> None:
    pair = Pair()
    stream, at_client, at_server = pair.open()
    server = pair.server.connection
    server.end(at_server.opened, (*ANSWER, *TRAILERS))
    pair.client.output.message(stream, (b"on its way",))
    sent = taken(pair.client)
    assert kinds_of(taken(server)) == ["HEADERS", "RST_STREAM"]
    feed(server, sent)
    assert at_server.messages == []
    assert not server.streams
    assert at_client.broken == []
    check_credits(server)


def test_a_reset_is_heard_with_its_code() -> None:
    pair = Pair()
    stream, at_client, at_server = pair.open()
    pair.server.connection.reset(at_server.opened, ErrorCode.ENHANCE_YOUR_CALM)
    pair.server.connection.reset(at_server.opened, ErrorCode.CANCEL)
    pair.carry()
    assert at_client.broken == [(ErrorCode.ENHANCE_YOUR_CALM, "the stream was reset")]
    assert pair.client.output.message(stream, (b"for nobody",))
    pair.client.end(stream)
    assert taken(pair.client) == b""


def test_a_client_opens_as_many_streams_as_the_server_takes() -> None:
    pair = Pair()
    streams = [pair.open()[0] for _ in range(4)]
    assert not pair.client.can_open
    pair.client.reset(streams[0], ErrorCode.CANCEL)
    assert pair.client.can_open


def test_a_server_that_goes_takes_no_more_streams_and_ends_those_it_has() -> None:
    pair = Pair()
    stream, at_client, at_server = pair.open()
    pair.server.connection.go_away()
    late = Heard()
    pair.client.open(REQUEST, late)
    pair.carry()
    assert not pair.client.can_open
    assert late.broken == [(ErrorCode.REFUSED_STREAM, "the server goes away: ")]
    assert len(pair.server.heard) == 1
    pair.client.end(stream)
    pair.server.connection.end(at_server.opened, TRAILERS)
    pair.carry()
    assert at_client.calls == ["fields", "end"]


def test_a_client_whose_numbers_are_spent_opens_nothing_more() -> None:
    client = Http2Connection(BOUNDS)
    client._next_id = wire.MAX_WINDOW_BYTES
    assert client.can_open
    client.open(REQUEST, Heard())
    assert not client.can_open
