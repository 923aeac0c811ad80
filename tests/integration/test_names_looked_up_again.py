"""Nodes whose names lead to other IP addresses when they are back, as those of pods do."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from ps_core.errors import Recovering
from ps_runtime.cluster.registration import Addresses, answer_of
from ps_runtime.grpc.channels import aio_channel
from ps_runtime.system import clock
from pushpull.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.integration.test_runtime_scheduler_link import Scheduler, run

DEADLINE_S = 10.0
REQUEST = scheduler_pb2.GetJoinChallengeRequest()
NO_SUCH_NAME = 3


class Names(asyncio.DatagramProtocol):
    """A DNS server that has one address for every name, or none."""

    def __init__(self) -> None:
        self.ip = ""
        self.asked_count = 0
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.asked_count += 1
        question = data[12 : data.index(0, 12) + 5]
        is_ipv4 = question[-4:-2] == b"\0\1"
        answer = b"\xc0\x0c\0\1\0\1\0\0\0\0\0\4" + socket.inet_aton(self.ip) if self.ip else b""
        count = int(is_ipv4 and bool(answer))
        flags = 0x8180 | (0 if self.ip else NO_SUCH_NAME)
        header = data[:2] + struct.pack(">5H", flags, 1, count, 0, 0)
        self._transport.sendto(header + question + answer * count, addr)


@contextlib.asynccontextmanager
async def named_scheduler(first_ip: str) -> AsyncIterator[tuple[Names, str]]:
    """A scheduler at 127.0.0.2, and its address with a name that leads to `first_ip`."""
    loop = asyncio.get_running_loop()
    udp, names = await loop.create_datagram_endpoint(Names, local_addr=("127.0.0.1", 0))
    names.ip = first_ip
    scheduler = Scheduler()
    try:
        port = (await scheduler.open("127.0.0.2:0")).rpartition(":")[2]
        dns_port = udp.get_extra_info("sockname")[1]
        yield names, f"dns://127.0.0.1:{dns_port}/scheduler.test:{port}"
    finally:
        await scheduler.close()
        udp.close()


async def until_answered(ask: Callable[[], Awaitable[object]]) -> None:
    """Ask again and again, as nodes do."""
    end_s = clock.now_s() + DEADLINE_S
    while True:
        try:
            await ask()
        except Recovering:
            assert clock.now_s() < end_s, "its name is not looked up again"
            is_next = asyncio.Event()
            asyncio.get_running_loop().call_later(0.05, is_next.set)
            await is_next.wait()
        else:
            return


@pytest.mark.parametrize("first_ip", ["127.0.0.3", ""], ids=["another address", "none"])
def test_a_scheduler_that_is_back_is_found_by_its_name(first_ip: str) -> None:
    """gRPC looks again after half a minute or more, and workers were given up meanwhile."""

    async def main() -> None:
        async with named_scheduler(first_ip) as (names, address):
            addresses = Addresses([address])

            async def ask() -> None:
                if names.asked_count >= 10:
                    names.ip = "127.0.0.2"
                try:
                    await answer_of(addresses.stub().GetJoinChallenge(REQUEST, timeout=1.0))
                except Recovering:
                    addresses.leave(address)
                    raise

            try:
                await until_answered(ask)
            finally:
                await addresses.close()

    run(main())


def test_a_server_whose_name_led_to_its_address_of_before_is_found() -> None:
    """A name server may say so for seconds after a pod has another."""

    async def main() -> None:
        async with (
            named_scheduler("127.0.0.3") as (names, address),
            aio_channel(address) as channel,
        ):
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            with pytest.raises(Recovering):
                await answer_of(stub.GetJoinChallenge(REQUEST, timeout=1.0))
            names.ip = "127.0.0.2"
            await until_answered(lambda: answer_of(stub.GetJoinChallenge(REQUEST, timeout=1.0)))

    run(main())
