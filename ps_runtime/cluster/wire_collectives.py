"""Rounds of collective calls to messages of `pushpull.v1` and back."""

from __future__ import annotations

from ps_core import limits
from ps_core.collective import Round, Share
from ps_core.errors import InvalidConfig, InvalidTensor
from ps_core.keys import Incarnation
from pushpull.v1 import parameters_pb2


def share_to_proto(share: Share) -> parameters_pb2.CollectiveShare:
    return parameters_pb2.CollectiveShare(
        rank=share.rank,
        incarnation=share.incarnation,
        call=share.call,
        clock=share.clock,
        payload=share.payload,
    )


def share_from_proto(message: parameters_pb2.CollectiveShare) -> Share:
    """The share of one worker.

    Raises:
        InvalidConfig: the call's name is empty or too long.
        InvalidTensor: the payload is over the limit.
    """
    call_bytes, payload_bytes = len(message.call.encode()), len(message.payload)
    if not 0 < call_bytes <= limits.MAX_COLLECTIVE_CALL_BYTES:
        raise InvalidConfig(
            f"share.call has {call_bytes} bytes; expected 1 to {limits.MAX_COLLECTIVE_CALL_BYTES}"
        )
    if payload_bytes > limits.MAX_COLLECTIVE_BYTES:
        raise InvalidTensor(
            f"share.payload has {payload_bytes} bytes; expected at most "
            f"{limits.MAX_COLLECTIVE_BYTES}"
        )
    return Share(
        message.rank,
        Incarnation(message.incarnation),
        message.call,
        message.clock,
        message.payload,
    )


def round_to_proto(ended: Round) -> parameters_pb2.CollectiveRound:
    return parameters_pb2.CollectiveRound(
        number=ended.number,
        shares=[share_to_proto(share) for share in ended.shares],
        problem=ended.problem,
    )


def round_from_proto(message: parameters_pb2.CollectiveRound) -> Round:
    """A round that has ended.

    Raises:
        InvalidConfig, InvalidTensor: it is none.
    """
    if not message.number or not message.shares:
        raise InvalidConfig("a round has no number or no shares; expected both")
    shares = tuple(share_from_proto(share) for share in message.shares)
    return Round(message.number, shares, message.problem)
