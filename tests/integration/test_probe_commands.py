"""The commands by which an engine of containers asks whether a role is well: docker-compose.yml has
one for all roles, and the image another.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys

import pytest
import yaml

from ps_runtime.grpc import channels
from ps_runtime.grpc.node_server import NodeServer
from ps_runtime.observe.metrics import new_registry
from tests.tidy.source import ROOT

pytestmark = pytest.mark.slow

WELL, NOT_WELL = 0, 1


def of_compose() -> list[str]:
    """The command of all three roles, without the word that says how it is started."""
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    services = yaml.safe_load(text)["services"]
    command, *others = (
        services[role]["healthcheck"]["test"] for role in ("scheduler", "server", "worker")
    )
    assert others == [command, command]
    assert command[0] == "CMD"
    return list(command[1:])


def of_the_image() -> list[str]:
    """The Dockerfile's command."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")
    (found,) = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", text, re.MULTILINE)
    command: list[str] = json.loads(found)
    return command


async def ask(command: list[str], address: str) -> int:
    """The exit status of a command whose role serves there, and not at the port that it has in a
    container.
    """
    program, *arguments = command
    assert program == "python"
    port = address.rpartition(":")[2]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *(each.replace("8080", port) for each in arguments),
        env=os.environ | {"PUSHPULL_HTTP_LISTEN": f"0.0.0.0:{port}" if address else ""},
    )  # fmt: skip
    return await process.wait()


@pytest.mark.parametrize("command", [of_compose(), of_the_image()], ids=["compose", "image"])
def test_the_command_succeeds_while_the_role_is_well_and_fails_else(command: list[str]) -> None:
    async def main() -> None:
        node = await NodeServer.start(registry=new_registry())
        address = node.http_address
        try:
            assert await ask(command, address) == NOT_WELL
            node.set_serving(True)
            assert await ask(command, address) == WELL
        finally:
            await node.stop(0.0)
        assert await ask(command, address) == NOT_WELL

    channels.run(main())


def test_a_container_that_serves_nothing_has_nothing_to_be_asked() -> None:
    async def main() -> None:
        assert await ask(of_the_image(), "") == WELL

    channels.run(main())
