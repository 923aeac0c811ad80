"""The HTTP/2 of our own: peers that break its rules, ask too much, or say what nobody expects; and
what gRPC says in headers.
"""

from __future__ import annotations

import hpack
import pytest

from ps_runtime.http2.protocol import frames as wire
from ps_runtime.http2.protocol import grpc_fields
from ps_runtime.http2.protocol.connection import Http2Connection
from ps_runtime.http2.protocol.frames import ConnectionBroken, ErrorCode, Flag, FrameType, Setting
from ps_runtime.http2.protocol.streams import Fields, Stream
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
    Server,
    body,
    check_credits,
    feed,
    frames_of,
    taken,
    whole,
)

pytestmark = pytest.mark.slow

END = Flag.END_STREAM

# --- peers that break the rules


HEADERS = FrameType.HEADERS
WRONG: dict[str, tuple[bytes, ErrorCode]] = {
    "data on no stream": (body(0, b""), ErrorCode.PROTOCOL_ERROR),
    "data on a stream to come": (body(7, b""), ErrorCode.PROTOCOL_ERROR),
    "data on a server's stream": (body(2, b""), ErrorCode.PROTOCOL_ERROR),
    "data that is all padding": (
        wire.frame(FrameType.DATA, Flag.PADDED, 3, b"\x05abc"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "data of no bytes with padding": (
        wire.frame(FrameType.DATA, Flag.PADDED, 3) + OPENING,
        ErrorCode.PROTOCOL_ERROR,
    ),
    "data above the largest frame": (
        wire.head(100_006, FrameType.DATA, 0, 3),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "data behind the end": (body(3, b"", END) + body(3, b""), ErrorCode.STREAM_CLOSED),
    "headers behind the end": (
        body(3, b"", END) + wire.frame(HEADERS, 5, 3, BLOCK),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "headers in the middle": (wire.frame(HEADERS, 4, 3, BLOCK), ErrorCode.PROTOCOL_ERROR),
    "headers on a server's stream": (wire.frame(HEADERS, 4, 4, BLOCK), ErrorCode.PROTOCOL_ERROR),
    "headers that are all padding": (
        wire.frame(HEADERS, Flag.PADDED | 4, 5, b"\x09" + BLOCK[:8]),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "headers that are no headers": (
        wire.frame(HEADERS, 4, 5, b"\xff\xff\xff\xff\xff"),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "more headers than there may be": (
        wire.frame(
            HEADERS, 4, 5, hpack.Encoder().encode([(b"x", b"x" * 9000), (b"y", b"y" * 9000)])
        ),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "a block without an end": (
        wire.frame(HEADERS, 0, 5, bytes(17_000))
        + wire.frame(FrameType.CONTINUATION, 0, 5, bytes(17_000)),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "continuations of nothing": (
        wire.frame(HEADERS, 0, 5, b"") + wire.frame(FrameType.CONTINUATION, 0, 5),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "a block that is cut in two": (
        wire.frame(HEADERS, 0, 5, BLOCK) + OPENING,
        ErrorCode.PROTOCOL_ERROR,
    ),
    "another stream's continuation": (
        wire.frame(HEADERS, 0, 5, BLOCK) + wire.frame(FrameType.CONTINUATION, 4, 7, b""),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a continuation of no block": (
        wire.frame(FrameType.CONTINUATION, 4, 3, BLOCK),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a long ping": (wire.frame(FrameType.PING, 0, 0, bytes(9)), ErrorCode.FRAME_SIZE_ERROR),
    "a ping on a stream": (wire.frame(FrameType.PING, 0, 3, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "a short priority": (wire.frame(FrameType.PRIORITY, 0, 3, b""), ErrorCode.FRAME_SIZE_ERROR),
    "a short reset": (wire.frame(FrameType.RST_STREAM, 0, 3, b""), ErrorCode.FRAME_SIZE_ERROR),
    "a reset of no stream": (wire.reset(9, 0), ErrorCode.PROTOCOL_ERROR),
    "a promise": (wire.frame(FrameType.PUSH_PROMISE, 4, 3, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "a short goaway": (wire.frame(FrameType.GOAWAY, 0, 0, bytes(7)), ErrorCode.PROTOCOL_ERROR),
    "a window of nothing": (wire.window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
    "a window to come": (wire.window_update(9, 5), ErrorCode.PROTOCOL_ERROR),
    "settings on a stream": (
        wire.frame(FrameType.SETTINGS, 0, 3, b""),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "settings in an answer": (
        wire.frame(FrameType.SETTINGS, 1, 0, bytes(6)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "half a setting": (wire.frame(FrameType.SETTINGS, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
    "a window setting": (
        wire.settings({Setting.INITIAL_WINDOW_SIZE: 1 << 31}),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
    "a frame setting": (wire.settings({Setting.MAX_FRAME_SIZE: 16_383}), ErrorCode.PROTOCOL_ERROR),
    "a push setting": (wire.settings({Setting.ENABLE_PUSH: 2}), ErrorCode.PROTOCOL_ERROR),
    "a control frame that is large": (
        wire.head(40_000, FrameType.GOAWAY, 0, 0),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("wrong", WRONG)
def test_a_peer_that_breaks_the_rules_is_told_which(wrong: str) -> None:
    sent, code = WRONG[wrong]
    raw = Raw()
    raw.open(3)
    assert raw.broken_by(sent) == code


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n", wire.PREFACE + body(0, b"")])
def test_who_does_not_speak_the_protocol_is_told_so(sent: bytes) -> None:
    server = Server()
    with pytest.raises(ConnectionBroken, match="PROTOCOL_ERROR"):
        feed(server.connection, sent, [3])


def test_unknown_frames_and_settings_and_priorities_are_passed_over() -> None:
    raw = Raw()
    heard = raw.open()
    raw.feed(
        wire.frame(200, 255, 77, bytes(100_000)) + wire.frame(FrameType.PRIORITY, 0, 9, bytes(5))
    )
    raw.feed(wire.frame(FrameType.SETTINGS, 0, 0, bytes((0, 99, 1, 2, 3, 4))))
    raw.feed(body(1, whole(b"still here")))
    assert heard.messages == [b"still here"]


def test_a_ping_is_answered_and_an_answer_is_not() -> None:
    raw = Raw()
    raw.feed(wire.ping(b"12345678", is_ack=True))
    assert taken(raw.connection) == b""
    raw.feed(wire.ping(b"12345678", is_ack=False))
    assert taken(raw.connection) == wire.ping(b"12345678", is_ack=True)


FLOODS = {
    "pings": wire.ping(bytes(8), is_ack=False),
    "settings": OPENING,
    "windows of one byte": wire.window_update(1, 1),
}


@pytest.mark.thorough
@pytest.mark.parametrize("flood", FLOODS)
def test_a_peer_that_asks_and_does_not_read_is_given_up(flood: str) -> None:
    raw = Raw()
    heard = raw.open()
    raw.feed(wire.settings({Setting.INITIAL_WINDOW_SIZE: 0}) + wire.window_update(0, 1 << 30))
    for _ in range(20):
        raw.connection.output.message(heard.opened, (LARGE,))
    with pytest.raises(ConnectionBroken, match="ENHANCE_YOUR_CALM"):
        raw.feed(FLOODS[flood] * 1_000_000)
    assert len(taken(raw.connection)) < 4 * 1024 * 1024


def test_a_peer_that_asks_now_and_then_may_ask_forever() -> None:
    raw = Raw()
    for _ in range(30):
        raw.feed(wire.ping(bytes(8), is_ack=False) * 1000)
        assert len(taken(raw.connection)) == 1000 * 17
        raw.connection.renew()


VAIN = {
    "pings": wire.ping(bytes(8), is_ack=False),
    "settings": OPENING,
    "windows of one byte": wire.window_update(1, 1),
    "data of no bytes": body(1, b""),
    "data of no bytes with padding": body(1, b"", padding=9),
    "data of a byte": body(1, b"\0"),
    "data on a stream that has gone": body(3, b""),
    "the end of a stream that has gone": body(3, b"", END),
    "resets of a stream that has gone": wire.reset(3, ErrorCode.CANCEL),
    "trailers of a stream that has gone": wire.frame(HEADERS, Flag.END_HEADERS | END, 3, BLOCK),
    "priorities": wire.frame(FrameType.PRIORITY, 0, 9, bytes(5)),
    "frames of no type": wire.frame(200, 255, 77, b"x"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("vain", VAIN)
def test_a_flood_of_frames_that_bring_nothing_is_cut(vain: str) -> None:
    raw = Raw()
    raw.open()
    raw.feed(body(1, wire.prefix(90_000)))
    gone = raw.open(3)
    raw.connection.reset(gone.opened, ErrorCode.CANCEL)
    taken(raw.connection)
    raw.feed(VAIN[vain] * 1900)
    assert raw.broken_by(VAIN[vain] * 200) == ErrorCode.ENHANCE_YOUR_CALM


def test_what_is_said_and_heard_pays_for_frames_that_bring_nothing() -> None:
    """A reader widens two windows for every frame of an answer, and a sender may write the prefix
    of a message by itself.
    """
    raw = Raw()
    heard = raw.open()
    answer = whole(bytes(100))
    for _ in range(3000):
        raw.connection.output.message(heard.opened, (answer,))
        taken(raw.connection)
        raw.feed(wire.window_update(1, 200) + wire.window_update(0, 200))
        raw.feed(wire.ping(bytes(8), is_ack=False))
        message = whole(b"abc")
        raw.feed(body(1, message[:5]) + body(1, message[5:]))
        raw.connection.consumed(heard.opened, heard.pieces[-1])
    assert len(heard.messages) == 3000


def test_a_stream_number_that_goes_back_breaks_the_connection() -> None:
    """One that was never opened, one that its peer has ended, and one that its peer has reset."""
    for number in (3, 5, 7):
        raw = Raw()
        ended = raw.open(5, END)
        raw.connection.end(ended.opened, TRAILERS)
        raw.open(7)
        raw.feed(wire.reset(7, ErrorCode.CANCEL))
        raw.open(9)
        taken(raw.connection)
        opening = wire.frame(HEADERS, Flag.END_HEADERS, number, BLOCK)
        assert raw.broken_by(opening) == ErrorCode.PROTOCOL_ERROR


def test_trailers_that_were_on_their_way_when_a_stream_was_ended_mean_nothing() -> None:
    raw = Raw()
    heard = raw.open(5)
    raw.connection.end(heard.opened, TRAILERS)  # answered in full, before the client's own end
    assert not raw.connection.streams
    taken(raw.connection)
    raw.feed(wire.frame(HEADERS, Flag.END_HEADERS | END, 5, BLOCK))
    assert taken(raw.connection) == b""


@pytest.mark.thorough
def test_a_peer_that_opens_and_does_not_read_is_given_up() -> None:
    """Calls that end at once count among no open streams, and their answers are many."""
    connection: Http2Connection

    class Refuses(Heard):
        def on_open(self, stream: Stream, fields: Fields) -> None:
            super().on_open(stream, fields)
            connection.end(stream, (*ANSWER, *TRAILERS, (b"grpc-message", b"there is none")))

    connection = Http2Connection(BOUNDS, Refuses)
    feed(connection, wire.PREFACE + OPENING)
    opening = wire.frame(HEADERS, Flag.END_HEADERS | END, 1, BLOCK)
    sent = b"".join(
        opening[:5] + number.to_bytes(4) + opening[9:] for number in range(1, 100_000, 2)
    )
    with pytest.raises(ConnectionBroken, match="ENHANCE_YOUR_CALM"):
        feed(connection, sent)
    assert len(taken(connection)) < 2 * 1024 * 1024


def test_a_peer_that_opens_and_resets_is_given_up() -> None:
    raw = Raw()
    for number in range(1, 2001, 2):
        raw.open(number)
        raw.feed(wire.reset(number, ErrorCode.CANCEL))
    raw.open(2001)
    assert raw.broken_by(wire.reset(2001, ErrorCode.CANCEL)) == ErrorCode.ENHANCE_YOUR_CALM


def test_resets_among_calls_that_end_are_no_abuse() -> None:
    raw = Raw()
    for number in range(1, 6000, 4):
        raw.open(number)
        raw.feed(wire.reset(number, ErrorCode.CANCEL))
        heard = raw.open(number + 2, END)
        raw.connection.end(heard.opened, TRAILERS)
        taken(raw.connection)


def test_a_header_table_that_shrank_stays_small_and_costs_nothing() -> None:
    raw = Raw()
    heard = raw.open()
    sizes = [(100, 50), (4096, 50), (50, 4096), (0, 4096)] * 50
    for pair in sizes:
        for size in pair:
            raw.feed(wire.settings({Setting.HEADER_TABLE_SIZE: size}))
            taken(raw.connection)
    raw.connection.output.fields(heard.opened, ANSWER)
    ((_, block),) = frames_of(taken(raw.connection))
    assert len(block) < 12
    decoder = hpack.Decoder()
    assert decoder.decode(block, raw=True) == list(ANSWER)
    assert decoder.header_table_size == 0


def test_a_stream_above_the_limit_is_refused_and_headers_stay_readable() -> None:
    raw = Raw()
    for number in range(4):
        raw.open(1 + 2 * number)
    raw.open(9)
    raw.feed(body(9, whole(b"for nobody")))
    assert len(raw.server.heard) == 4
    ((head, code),) = frames_of(taken(raw.connection))
    assert (head.kind, head.stream_id) == (FrameType.RST_STREAM, 9)
    assert int.from_bytes(code) == ErrorCode.REFUSED_STREAM
    check_credits(raw.connection)
    raw.feed(wire.reset(1, ErrorCode.CANCEL))
    assert raw.open(11).fields == [REQUEST]


def test_frames_of_streams_that_have_gone_mean_nothing() -> None:
    raw = Raw()
    raw.open(5)
    raw.feed(wire.reset(5, ErrorCode.CANCEL))
    raw.feed(body(5, whole(b"late"), padding=3) + wire.window_update(5, 1))
    raw.feed(wire.reset(5, ErrorCode.CANCEL) + body(3, b"never opened, and passed over"))
    assert len(raw.server.heard) == 1
    assert taken(raw.connection) == b""
    check_credits(raw.connection)


def test_the_reserved_bit_of_a_goaway_means_nothing() -> None:
    pair = Pair()
    _, at_client, _ = pair.open()
    feed(pair.client, wire.go_away(1 << 31, ErrorCode.NO_ERROR, "bye"))
    assert at_client.broken == [(ErrorCode.REFUSED_STREAM, "the server goes away: bye")]


def test_why_a_server_goes_is_heard() -> None:
    pair = Pair()
    _, at_client, _ = pair.open()
    feed(pair.client, wire.go_away(0, ErrorCode.ENHANCE_YOUR_CALM, "too much"))
    assert at_client.broken == [(ErrorCode.ENHANCE_YOUR_CALM, "the server goes away: too much")]


# --- what gRPC says in headers


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("value", "seconds"),
    [(b"1H", 3600.0), (b"2M", 120.0), (b"3S", 3.0), (b"4m", 0.004), (b"5u", 5e-6), (b"6n", 6e-9),
     (b"99999999n", 0.099999999), (b"123456789S", None), (b"1", None), (b"S", None), (b"", None),
     (b"-1S", None), (b"1s", None)],
)  # fmt: skip
def test_a_timeout_means_seconds(value: bytes, seconds: float | None) -> None:
    assert grpc_fields.timeout_s(value) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("seconds", "value"), [(0.0, b"1m"), (0.0011, b"2m"), (2.5, b"2500m"), (1e9, b"99999999m")]
)
def test_seconds_become_a_timeout(seconds: float, value: bytes) -> None:
    assert dict(grpc_fields.request_fields("/a/b", "h:1", seconds))[b"grpc-timeout"] == value


def test_trailers_are_read_as_they_were_written() -> None:
    metadata: grpc_fields.Metadata = (("retry-after-ms", "5"), ("error-bin", bytes(range(256))))
    text = "100 % of it: \n\t\u00fc\u20ac"
    fields = grpc_fields.trailers(13, text, metadata)
    assert all(value.isascii() for _, value in fields)
    assert grpc_fields.read_trailers(fields) == (13, text, metadata)


@pytest.mark.parametrize("status", [b"", b"-1", b"x", b"1 ", b"9" * 5000])
def test_what_is_no_status_is_none(status: bytes) -> None:
    assert grpc_fields.read_trailers([(b"grpc-status", status)]) is None


def test_binary_metadata_that_is_none_is_left_out() -> None:
    fields = [(b"grpc-status", b"0"), (b"a-bin", b"*"), (b"b-bin", b"AAE"), (b"c", b"\xff")]
    assert grpc_fields.read_trailers(fields) == (0, "", (("b-bin", b"\x00\x01"), ("c", "\ufffd")))
