"""The two ends of a connection in a twin test: our machine, and one of the package h2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from random import Random

import h2.config
import h2.connection
import h2.events
from h2.settings import SettingCodes, Settings
from hypothesis import strategies as st

from ps_runtime.http2.protocol import frames as wire
from ps_runtime.http2.protocol.bounds import Bounds
from ps_runtime.http2.protocol.connection import Http2Connection
from ps_runtime.http2.protocol.streams import Fields, MessagePiece, Stream
from tests.unit.http2_peers import ANSWER, REQUEST, TRAILERS, Heard, whole

MAX_BYTES = 300_000
CONTENT = Random(1).randbytes(2 * MAX_BYTES)
SIZES = st.integers(0, 40) | st.integers(0, MAX_BYTES) | st.just(MAX_BYTES)
CALLS = st.lists(st.lists(SIZES, max_size=4), min_size=1, max_size=3)


@dataclass(frozen=True, slots=True)
class Plan:
    """One conversation: what goes over it, and how it is cut and held up.

    Attributes:
        to_us: sizes of the messages to our machine, by stream.
        to_twin: those that our machine sends.
        extra_window: what our stream windows have beyond what they need.
        window: what the twin gives a stream at first.
        windows: what it gives them later, one after the other.
        cuts: of the bytes to us.
        pieces: sizes of the twin's frames.
        padding: of those frames.
        holds: how many messages each side leaves unconsumed, in turn.
    """

    max_bytes: int
    to_us: list[list[int]]
    to_twin: list[list[int]]
    extra_window: int
    window: int
    windows: list[int]
    cuts: list[int]
    pieces: list[int]
    padding: list[int | None]
    holds: list[int]

    @property
    def bounds(self) -> Bounds:
        least = max(2 * (self.max_bytes + wire.PREFIX_BYTES), wire.DEFAULT_WINDOW_BYTES)
        return Bounds(self.max_bytes, least + self.extra_window, stream_count=3)

    def messages_to_us(self, number: int) -> list[bytes]:
        sizes = self.to_us[number] if number < len(self.to_us) else []
        return [message(number, min(size, self.max_bytes)) for size in sizes]

    def messages_to_twin(self, number: int) -> list[bytes]:
        sizes = self.to_twin[number] if number < len(self.to_twin) else []
        return [message(number, size) for size in sizes]


PLANS = st.builds(
    Plan,
    max_bytes=st.integers(1, MAX_BYTES) | st.just(MAX_BYTES),
    to_us=CALLS,
    to_twin=CALLS,
    extra_window=st.integers(0, 200_000),
    window=st.sampled_from((0, 1, 5, 1000, 65_535, 1_000_000)),
    windows=st.lists(st.sampled_from((0, 1, 4, 20_000, 500_000)), max_size=3),
    cuts=st.lists(st.integers(1, 20) | st.integers(1, 70_000), max_size=8),
    pieces=st.lists(st.integers(1, 20) | st.integers(1, 400_000), min_size=1, max_size=6),
    padding=st.lists(st.none() | st.integers(0, 255), min_size=1, max_size=4),
    holds=st.lists(st.integers(0, 3), min_size=1, max_size=4),
)


def message(number: int, size: int) -> bytes:
    first = 1 + number * 7 + size % 1000
    return CONTENT[first : first + size]


class Ours:
    """Our machine: what it still has to send, and what it has not consumed."""

    def __init__(self, plan: Plan, *, is_server: bool) -> None:
        self.heard: list[Heard] = []
        self._plan = plan
        self._is_server = is_server
        self.connection = Http2Connection(plan.bounds, self._accept if is_server else None)
        self._to_send: dict[int, list[bytes]] = {}
        self._consumed: dict[int, int] = {}
        self._holds = cycle((*plan.holds, 0))

    def _accept(self) -> Heard:
        self.heard.append(Heard())
        return self.heard[-1]

    def open(self) -> None:
        """As a client: all streams."""
        for _ in self._plan.to_us:
            heard = self._accept()
            heard.stream = self.connection.open(REQUEST, heard)

    def step(self) -> bool:
        """Consume and send a little; whether there was anything."""
        did, hold = False, next(self._holds)
        for number, heard in enumerate(self.heard):
            if heard.stream is not None:
                did |= self._consume(heard, heard.stream, hold) | self._send(
                    number, heard, heard.stream
                )
        return did

    def _consume(self, heard: Heard, stream: Stream, hold: int) -> bool:
        first = self._consumed.get(stream.stream_id, 0)
        last = len(heard.pieces) - hold
        for piece in heard.pieces[first:last]:
            self.connection.consumed(stream, piece)
        self._consumed[stream.stream_id] = max(first, last)
        return first < len(heard.pieces)

    def _send(self, number: int, heard: Heard, stream: Stream) -> bool:
        if stream.stream_id not in self._to_send:
            self._to_send[stream.stream_id] = self._plan.messages_to_twin(number)
            if self._is_server:
                self.connection.output.fields(stream, ANSWER)
        if stream.queued_bytes or stream.tail is not None:
            return False
        rest = self._to_send[stream.stream_id]
        if rest:
            sent = rest.pop(0)
            self.connection.output.message(stream, (sent[:100], memoryview(sent)[100:]))
            return True
        if not self._is_server:
            self.connection.end(stream)
        elif "end" in heard.calls:
            self.connection.end(stream, TRAILERS)
        return stream.tail is not None


class Twin:
    """The package's machine, with nothing in it that is ours but what it says."""

    def __init__(self, plan: Plan, *, is_server: bool) -> None:
        self.got: dict[int, bytearray] = {}
        self.ended: set[int] = set()
        self.fields: dict[int, list[Fields]] = {}
        self._plan = plan
        self._is_server = is_server
        config = h2.config.H2Configuration(client_side=not is_server, header_encoding=None)
        self.connection = h2.connection.H2Connection(config)
        self.connection.local_settings = Settings(
            client=not is_server, initial_values={SettingCodes.INITIAL_WINDOW_SIZE: plan.window}
        )
        self.connection.initiate_connection()
        self._to_send: dict[int, bytes] = {}
        self._owed: list[tuple[int, int]] = []
        self._windows = [*plan.windows, 65_535]
        if is_server:  # h2 takes no empty DATA, as a client's end is, where its window is negative
            self._windows = sorted(each for each in self._windows if each >= plan.window)
        self._sizes, self._padding = cycle((*plan.pieces, 100_000)), cycle(plan.padding)
        self._holds = cycle((*plan.holds, 0))

    def open(self) -> None:
        """As a client: all streams."""
        for number in range(len(self._plan.to_us)):
            self._begin(1 + 2 * number, list(REQUEST))

    def _begin(self, stream_id: int, fields: list[tuple[bytes, bytes]]) -> None:
        self.connection.send_headers(stream_id, fields)
        content = map(whole, self._plan.messages_to_us(stream_id // 2))
        self._to_send[stream_id] = b"".join(content)
        self.got.setdefault(stream_id, bytearray())

    def take(self, raw: bytes) -> None:
        """What our machine sent."""
        for event in self.connection.receive_data(raw):
            if isinstance(event, h2.events.RequestReceived):
                self._begin(event.stream_id, list(ANSWER))
            elif isinstance(event, h2.events.DataReceived):
                self.got[event.stream_id] += event.data
                self._owed.append((event.stream_id, event.flow_controlled_length))
            elif isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                self.fields.setdefault(event.stream_id, []).append(tuple(event.headers))
            elif isinstance(event, h2.events.StreamEnded):
                self.ended.add(event.stream_id)
            else:
                harmless = h2.events.StreamReset, h2.events.ConnectionTerminated
                assert not isinstance(event, harmless), event

    def step(self) -> bool:
        """Give window and send a little; whether there was anything."""
        did, hold = bool(self._owed or self._windows), next(self._holds)
        while len(self._owed) > hold:
            stream_id, count = self._owed.pop(0)
            if count:
                self.connection.increment_flow_control_window(count)
            if count and stream_id not in self.ended:
                self.connection.increment_flow_control_window(count, stream_id)
        if self._windows and not self._owed:
            value = self._windows.pop(0)
            self.connection.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: value})
        for stream_id in list(self._to_send):
            did |= self._send(stream_id)
        return did

    def _send(self, stream_id: int) -> bool:
        rest, padding = self._to_send[stream_id], next(self._padding)
        window = self.connection.local_flow_control_window(stream_id)
        window = min(window, self.connection.max_outbound_frame_size)
        window -= 0 if padding is None else padding + 1
        count = min(window, len(rest), next(self._sizes))
        if rest and count <= 0:
            return False
        self._to_send[stream_id] = rest[count:]
        if rest:
            self.connection.send_data(stream_id, rest[:count], pad_length=padding)
        elif not self._is_server:
            del self._to_send[stream_id]
            self.connection.end_stream(stream_id)
        elif stream_id in self.ended:
            del self._to_send[stream_id]
            self.connection.send_headers(stream_id, list(TRAILERS), end_stream=True)
        else:
            return False
        return True


def pieces_of(raw: bytes | bytearray) -> Iterator[MessagePiece]:
    """The messages of a stream of whole ones."""
    at = 0
    while at < len(raw):
        flag, length = wire.read_prefix(raw, at)
        assert flag == 0
        at += wire.PREFIX_BYTES + length
        yield bytes(raw[at - length : at])
    assert at == len(raw)
