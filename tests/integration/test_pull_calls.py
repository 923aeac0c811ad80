"""A client's pulls from one server: how long each may take, and how many are open at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from ps_core.errors import WaitExpired
from ps_worker.transport.links import Answer, ServerLink
from pushpull.v1 import parameters_pb2
from tests.integration.test_dead_addresses import ONE, Answering, Heard, grpc_node, node

SILENCE_S = 0.8
BLOCKS = 4


async def passed(wait_s: float) -> None:
    """Time that a server takes."""
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=wait_s)


def block(number: int) -> bytes:
    value = parameters_pb2.BlockValue(block=number, payload=b"1234")
    return parameters_pb2.PullResponse(block=value).SerializeToString()


class Slow(Answering):
    """Sends a block from time to time, and after the last perhaps nothing more, for ever."""

    def __init__(self, *, ends: bool) -> None:
        super().__init__(ONE)
        self.ends = ends
        self.was_left = asyncio.Event()

    async def pull(self, _request: bytes, _context: Any) -> AsyncIterator[bytes]:
        for number in range(BLOCKS):
            await passed(SILENCE_S / 3)
            yield block(number)
        try:
            if not self.ends:
                await asyncio.Event().wait()
        finally:
            self.was_left.set()


@contextlib.asynccontextmanager
async def linked(answering: Answering, **more: Any) -> AsyncIterator[ServerLink]:
    """A reader's link to it."""
    async with grpc_node(answering) as address:
        link = ServerLink(node(address), replace(Heard().setting, **more))
        yield link
        await link.close()


def test_an_answer_may_take_as_long_as_the_caller_waits_if_its_parts_come() -> None:
    async def scenario() -> None:
        taken: list[Answer] = []
        async with linked(Slow(ends=True), silence_s=SILENCE_S) as link:
            request = parameters_pb2.PullRequest(deadline_ms=1)
            await link.pull(request, 20.0, taken.append, is_small=False)
        assert len(taken) == BLOCKS

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_server_that_falls_silent_in_its_answer_is_given_up() -> None:
    """It may be paused: its caller then says which server it waits for, and asks again."""

    async def scenario() -> None:
        slow, taken = Slow(ends=False), list[Answer]()
        async with linked(slow, silence_s=SILENCE_S) as link:
            request = parameters_pb2.PullRequest(deadline_ms=1)
            with pytest.raises(WaitExpired, match=r"nothing of an answer came for 0\.8 s"):
                await link.pull(request, 20.0, taken.append, is_small=False)
            await slow.was_left.wait()
        assert len(taken) == BLOCKS

    asyncio.run(asyncio.wait_for(scenario(), 20))
