"""Our HTTP/2 against that of the package h2, both ways and from both sides."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.examples import examples
from tests.property.http2_twin import PLANS, Ours, Plan, Twin, pieces_of
from tests.unit.http2_peers import ANSWER, TRAILERS, check_credits, feed, taken

MAX_TURN_COUNT = 5000


def _converse(ours: Ours, twin: Twin, plan: Plan) -> None:
    """Until neither has anything to do."""
    for _ in range(MAX_TURN_COUNT):
        did = ours.step() | twin.step()
        to_twin = taken(ours.connection)
        twin.take(to_twin)
        to_us = twin.connection.data_to_send()
        feed(ours.connection, to_us, plan.cuts)
        check_credits(ours.connection)
        if not (did or to_twin or to_us):
            return
    raise AssertionError("it does not end")


@settings(max_examples=examples(150))
@pytest.mark.parametrize("is_server", [True, False])
@given(plan=PLANS)
def test_all_messages_arrive_both_ways_and_all_windows_add_up(is_server: bool, plan: Plan) -> None:
    ours, twin = Ours(plan, is_server=is_server), Twin(plan, is_server=not is_server)
    twin.take(taken(ours.connection))  # what the windows are is known before the first message
    feed(ours.connection, twin.connection.data_to_send())
    twin.take(taken(ours.connection))  # h2 takes the first answer for that of later settings
    (twin if is_server else ours).open()
    _converse(ours, twin, plan)
    for number, heard in enumerate(ours.heard):
        assert heard.messages == plan.messages_to_us(number)
        assert heard.calls.count("end") == 1
        stream_id = heard.opened.stream_id
        assert list(pieces_of(twin.got[stream_id])) == plan.messages_to_twin(number)
        if is_server:
            assert twin.fields[stream_id] == [ANSWER, TRAILERS]
        else:
            assert heard.fields == [ANSWER, TRAILERS]
    assert len(ours.heard) == len(plan.to_us)
    assert ours.connection.streams == {}
    assert twin.ended == set(twin.got)
    _check_windows(ours, twin, plan)


def _check_windows(ours: Ours, twin: Twin, plan: Plan) -> None:
    """Each end knows of the other what it was told, and the rest is not told yet."""
    told = twin.connection.outbound_flow_control_window
    credit = ours.connection._credit
    assert told == ours.connection._window
    assert told + credit == plan.bounds.connection_window_bytes
    assert ours.connection.output._window == twin.connection.inbound_flow_control_window
