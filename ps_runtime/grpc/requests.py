"""What comes is parsed only if that is quick: millions of empty entries fit a message."""

from __future__ import annotations

from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from ps_core import limits

MessageT = TypeVar("MessageT", bound=Message)


class RequestReader(Generic[MessageT]):
    """A deserializer of requests without payloads.

    Args:
        message: what they are.
        most_bytes: how long they may be.
    """

    def __init__(self, message: type[MessageT], most_bytes: int = limits.MAX_ENTRY_BYTES) -> None:
        self._message = message
        self._most_bytes = most_bytes

    def __call__(self, raw: bytes) -> MessageT:
        """The request.

        Raises:
            DecodeError: the bytes are no such message, or so many that they are not looked at.
        """
        if len(raw) > self._most_bytes:
            raise DecodeError(f"it has {len(raw)} bytes; expected at most {self._most_bytes}")
        return self._message.FromString(raw)
