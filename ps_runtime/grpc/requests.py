"""Requests are parsed only if that is quick: a large message has space for millions of entries."""

from __future__ import annotations

from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from ps_core import limits

MessageT = TypeVar("MessageT", bound=Message)


class RequestReader(Generic[MessageT]):
    """A deserializer of requests without payloads, of at most `most_bytes`."""

    def __init__(self, message: type[MessageT], most_bytes: int = limits.MAX_ENTRY_BYTES) -> None:
        self._message = message
        self._most_bytes = most_bytes

    def __call__(self, raw: bytes) -> MessageT:
        if len(raw) > self._most_bytes:
            raise DecodeError(f"it has {len(raw)} bytes; expected at most {self._most_bytes}")
        return self._message.FromString(raw)
