"""Whatever a peer sends, an end of our HTTP/2 takes it or breaks off, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import hpack
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_runtime.http2.protocol import frames as wire
from ps_runtime.http2.protocol.bounds import Bounds
from ps_runtime.http2.protocol.connection import Http2Connection
from ps_runtime.http2.protocol.frames import ConnectionBroken, ErrorCode, Flag, FrameType
from ps_runtime.http2.protocol.streams import Fields, MessagePiece
from tests.examples import examples
from tests.unit.http2_peers import (
    ANSWER,
    OPENING,
    REQUEST,
    TRAILERS,
    Heard,
    body,
    check_credits,
    feed,
    whole,
)

BOUNDS = Bounds(40_000, window_bytes=100_000, stream_count=3)
ACTIONS = ("", "", "consume", "consume", "reset", "end", "answer", "go away")
MAX_OUTPUT_BYTES = 3 << 20
BLOCKS = [hpack.Encoder().encode(list(each)) for each in (REQUEST, ANSWER, TRAILERS)]

STREAM_IDS = st.sampled_from((0, 1, 1, 1, 3, 3, 5, 2, 7, 9, 1 << 30, (1 << 31) + 1))
FLAGS = st.sampled_from((0, 1, 4, 5, 8, 9, 12, 13, 0x20, 0x2D, 0xFF)) | st.integers(0, 255)
MESSAGES = st.integers(0, 60) | st.integers(0, 41_000)


def _message(size: int, flag: int, cut: int) -> bytes:
    return whole(bytes(size), flag)[: -cut or None]


CONTENTS = st.binary(max_size=30) | st.builds(
    _message, MESSAGES, st.sampled_from((0, 0, 0, 0, 1, 7)), st.sampled_from((0, 0, 0, 1, 9000))
)
WORDS = st.sampled_from((0, 1, 2, 100, 65_535, 1 << 20, (1 << 31) - 1, 1 << 31))
PAYLOADS = st.one_of(
    CONTENTS,
    st.sampled_from(BLOCKS),
    st.builds(lambda word: word.to_bytes(4), WORDS),
    st.builds(lambda name, word: name.to_bytes(2) + word.to_bytes(4), st.integers(0, 7), WORDS),
    st.binary(min_size=8, max_size=8),
)
FRAMES = st.one_of(
    st.builds(wire.frame, st.integers(0, 11), FLAGS, STREAM_IDS, PAYLOADS),
    st.builds(
        lambda stream_id, block, ends: wire.header_frames(stream_id, block, 16_384, ends=ends),
        st.sampled_from((1, 3, 5, 7, 9, 11, 13)), st.sampled_from(BLOCKS), st.booleans(),
    ),
    st.builds(
        body, st.sampled_from((1, 1, 3, 5)), CONTENTS, st.sampled_from((0, 0, 0, 1)),
        st.none() | st.integers(0, 255),
    ),
    st.builds(wire.window_update, st.sampled_from((0, 1, 3)), st.integers(1, 100_000)),
    st.builds(wire.reset, st.sampled_from((1, 3, 5)), st.integers(0, 20)),
)  # fmt: skip
SESSIONS = st.lists(FRAMES, max_size=25).map(lambda frames: OPENING + b"".join(frames))
CUTS = st.lists(st.integers(1, 12) | st.integers(1, 70_000), max_size=20)
CHANGES = st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=3))


class Restless(Heard):
    """Does something at whatever it hears."""

    def __init__(self, connection: Http2Connection, actions: Iterator[str]) -> None:
        super().__init__()
        self._connection = connection
        self._actions = actions

    def on_fields(self, fields: Fields) -> None:
        super().on_fields(fields)
        self._act()

    def on_message(self, message: MessagePiece) -> None:
        super().on_message(message)
        self._act()

    def on_unreadable(self, problem: str) -> None:
        super().on_unreadable(problem)
        self._act()

    def on_end(self) -> None:
        super().on_end()
        self._act()

    def on_writable(self) -> None:
        super().on_writable()
        self._act()

    def on_broken(self, code: int | None, text: str) -> None:
        super().on_broken(code, text)
        self._act()

    def _act(self) -> None:
        action, stream = next(self._actions), self.stream
        if stream is None:
            return
        if action == "reset":
            self._connection.reset(stream, ErrorCode.CANCEL)
        elif action == "end":
            self._connection.end(stream, TRAILERS)
        elif action == "go away":
            self._connection.go_away()
        elif action == "answer" and not stream.queued_bytes:
            self._connection.output.message(stream, (bytes(20_000),))
        elif action == "consume":
            for piece in self.pieces:
                self._connection.consumed(stream, piece)
            self.pieces.clear()


class Attacked:
    """An end, and a hostile peer's bytes."""

    def __init__(self, actions: list[str], *, is_server: bool) -> None:
        self.heard: list[Restless] = []
        self._actions = cycle(actions)
        self.connection = Http2Connection(BOUNDS, self._accept if is_server else None)
        self.opening = wire.PREFACE if is_server else b""
        for _ in range(0 if is_server else 3):
            heard = self._accept()
            heard.stream = self.connection.open(REQUEST, heard)

    def _accept(self) -> Restless:
        self.heard.append(Restless(self.connection, self._actions))
        return self.heard[-1]

    def suffer(self, raw: bytes, cuts: list[int]) -> None:
        """Any bytes at all."""
        try:
            feed(self.connection, raw, cuts)
        except ConnectionBroken:
            assert self.connection.is_going_away
        else:
            check_credits(self.connection)
        self._check_memory()
        self.connection.broken("it is over")
        assert self.connection.streams == {}
        for heard in self.heard:
            assert heard.calls.count("end") <= 1
            assert heard.calls.count("broken") <= 1
            assert heard.stream is None or not heard.stream.incoming.has_begun or heard.calls

    def _check_memory(self) -> None:
        connection = self.connection
        assert len(connection.streams) <= BOUNDS.stream_count
        held = sum(stream.unconsumed for stream in connection.streams.values())
        assert held <= BOUNDS.connection_window_bytes
        for stream in connection.streams.values():
            memory = stream.incoming.memory
            assert memory is None or len(memory) <= BOUNDS.max_message_bytes
        assert sum(map(len, connection.output.pieces)) < MAX_OUTPUT_BYTES
        assert len(connection._blocks._block) < 1 << 16


ENDS = st.builds(
    Attacked, st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=8), is_server=st.booleans()
)


@settings(max_examples=examples(300))
@given(end=ENDS, session=SESSIONS, cuts=CUTS)
def test_any_frames_are_taken_or_end_the_connection(
    end: Attacked, session: bytes, cuts: list[int]
) -> None:
    end.suffer(end.opening + session, cuts)


@settings(max_examples=examples(150))
@given(
    end=ENDS,
    session=SESSIONS,
    cuts=CUTS,
    changes=st.lists(CHANGES, max_size=4),
)
def test_frames_with_changed_bytes_are_taken_or_end_the_connection(
    end: Attacked, session: bytes, cuts: list[int], changes: list[tuple[float, bytes]]
) -> None:
    raw = bytearray(session)
    for place, new in changes:
        at = int(place * len(raw))
        raw[at : at + 1] = new
    end.suffer(end.opening + bytes(raw), cuts)


@given(end=ENDS, raw=st.binary(max_size=200))
def test_any_bytes_are_taken_or_end_the_connection(end: Attacked, raw: bytes) -> None:
    end.suffer(raw, [])


@given(block=st.binary(max_size=60) | st.lists(st.sampled_from(BLOCKS)).map(b"".join))
def test_any_header_block_is_read_or_ends_the_connection(block: bytes) -> None:
    end = Attacked(["consume"], is_server=True)
    frame = wire.frame(FrameType.HEADERS, Flag.END_HEADERS, 1, block)
    end.suffer(end.opening + OPENING + frame, [])
