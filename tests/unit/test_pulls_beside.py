"""A pull's requests to several servers beside each other: none waits for another's values."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from ps_core.errors import NotOwner, PushpullError, WaitExpired
from ps_runtime.system.clock import now_s
from ps_worker.transport.links import Answer
from pushpull.v1 import parameters_pb2
from tests.unit.test_puller import Link, Links, check_values, order_of, pulled, puller_of, whole


class Travelling(Link):
    """A server whose values come once `has_come` is set."""

    async def pull(self, *arguments: Any, **more: Any) -> None:
        self.has_come = asyncio.Event()
        await asyncio.wait_for(self.has_come.wait(), 5.0)
        await super().pull(*arguments, **more)


def test_a_server_is_asked_again_while_another_s_values_travel() -> None:
    """Those may take minutes."""

    def moved_once(request: parameters_pb2.PullRequest) -> Sequence[Answer | PushpullError]:
        if len(one.requests) == 1:
            return [NotOwner("moved")]
        other.has_come.set()
        return whole(request)

    one, other = Link(moved_once), Travelling(whole)
    order = order_of(lasts_s=4.0)
    pulled(Links(one, other), order)
    check_values(order)
    assert [len(link.requests) for link in (one, other)] == [2, 1]


def test_an_attempt_that_one_server_has_lost_does_not_wait_for_another_s_values() -> None:
    async def scenario() -> None:
        puller = puller_of(Links(Link(lambda _: [WaitExpired("worker 2 is late")]), travelling))
        order = order_of(consistent=True, attempt_end_s=now_s() + 0.2)
        with pytest.raises(WaitExpired, match="worker 2 is late"):
            await puller.pull_at(order)

    travelling = Travelling(whole)
    began_s = now_s()
    asyncio.run(scenario())
    assert now_s() - began_s < 3.0
    assert travelling.requests == []
