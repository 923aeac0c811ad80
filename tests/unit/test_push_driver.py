"""What a worker's push driver makes of views."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import cast

from ps_core.cluster_view import ClusterView, RangeAssignment
from ps_core.errors import PushpullError
from ps_core.keys import AssignmentEpoch, NodeId, RangeId, key_ranges
from ps_worker.steps.counters import Counters
from ps_worker.steps.steps import PushBody
from ps_worker.transport.links import ServerLinks
from ps_worker.transport.pushes import PushDriver
from pushpull.v1 import parameters_pb2
from tests.property.shard_twin import table

MODEL = table([64])
ONE = NodeId(1)


class Links:
    """Links to servers that take all and say nothing."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def find(self, server: NodeId) -> Links:
        assert server == ONE
        return self

    def send(self, message: parameters_pb2.BlockPush, payload: memoryview) -> None:
        assert len(payload) == 256
        self.sent.append(message.assignment_epoch)


def session_ended(error: PushpullError) -> None:
    """It does not end."""
    raise error


def view(number: int, epoch: int) -> ClusterView:
    (slots,) = key_ranges(1)
    assignment = RangeAssignment(RangeId(0), slots, AssignmentEpoch(epoch), ONE, (), ())
    return ClusterView(number, "cluster", 1, 1, (), (assignment,), (MODEL,))


async def turn() -> None:
    """What was to be done soon has been done."""
    done = asyncio.Event()
    asyncio.get_running_loop().call_soon(done.set)
    await done.wait()


def test_a_server_that_may_have_lost_a_range_in_between_is_sent_what_it_had_received() -> None:
    """Views may be left out, and RECEIVED is no promise: nobody else would send it again, and the
    step would never end.
    """

    async def scenario() -> None:
        links = Links()
        driver = PushDriver(
            1 << 20, view(1, 2), cast(ServerLinks, links), Counters(), session_ended
        )
        driver.take_view(view(1, 2))
        driver.stream_opened(ONE)
        driver.open_step(MODEL, 1, Future())
        driver.submit(MODEL, 1, [PushBody(0, memoryview(bytes(256)), b"", None, None)], 0)
        await turn()
        received = parameters_pb2.PushResponse()
        received.replies.add(
            kind=parameters_pb2.REPLY_KIND_RECEIVED, table_id=1, range_id=0, sequence=1
        )
        driver.replies(ONE, received)
        driver.take_view(view(2, 4))  # its backups are others
        await turn()
        assert links.sent == [2]
        driver.take_view(view(5, 7))  # another had it for a while, or not
        await turn()
        assert links.sent == [2, 7]
        assert not driver.refused
        driver.fail(PushpullError("the end"))

    asyncio.run(scenario())
