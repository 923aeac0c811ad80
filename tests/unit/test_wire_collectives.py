"""Rounds of collective calls on the wire."""

from __future__ import annotations

import pytest

from ps_core import limits
from ps_core.collective_calls import Round, Share
from ps_core.errors import InvalidConfig, InvalidTensor
from ps_core.keys import Incarnation
from ps_runtime.cluster.wire import (
    round_from_proto,
    round_to_proto,
    share_from_proto,
    share_to_proto,
)
from pushpull.v1 import parameters_pb2

SHARE = Share(3, Incarnation(7), "barrier 'é'", 41, b"\x00\xff")


def test_a_round_comes_back_as_it_was() -> None:
    ended = Round(5, (SHARE, Share(4, Incarnation(8), "gather")), "too much")
    assert round_from_proto(round_to_proto(ended)) == ended
    assert share_from_proto(share_to_proto(SHARE)) == SHARE


@pytest.mark.parametrize("call", ["", "x" * (limits.MAX_COLLECTIVE_CALL_BYTES + 1)])
def test_a_call_without_words_or_with_too_many_is_refused(call: str) -> None:
    with pytest.raises(InvalidConfig, match=r"share.call has .* expected 1 to 1024"):
        share_from_proto(parameters_pb2.CollectiveShare(call=call))


def test_too_long_a_payload_is_refused() -> None:
    payload = bytes(limits.MAX_COLLECTIVE_BYTES + 1)
    with pytest.raises(InvalidTensor, match=r"share.payload has 524289 bytes"):
        share_from_proto(parameters_pb2.CollectiveShare(call="gather", payload=payload))


@pytest.mark.parametrize("number", [0, 1])
def test_a_round_without_number_or_shares_is_refused(number: int) -> None:
    shares = [] if number else [share_to_proto(SHARE)]
    message = parameters_pb2.CollectiveRound(number=number, shares=shares)
    with pytest.raises(InvalidConfig, match="no number or no shares"):
        round_from_proto(message)
