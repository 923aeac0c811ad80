"""A server's loop touches no file while it keeps a log, writes a checkpoint and loads one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ps_runtime.system.disk import DISK
from ps_server.lane.lane_socket import SharedLanes
from ps_server.stores import Shards
from ps_server.update_log.recovery import open_log
from tests.loop_files import watched
from tests.unit.logged_server import KERNELS, LoggedServer, Setting
from tests.unit.test_checkpoint_parts import Server


def test_what_is_done_on_the_loop_is_seen(tmp_path: Path) -> None:
    async def scene() -> None:
        (tmp_path / "file").write_text("")
        DISK.remove(tmp_path / "file")
        await asyncio.to_thread((tmp_path / "file").write_text, "")

    with watched() as found:
        asyncio.run(scene())
    assert found == [f"open {tmp_path}/file", "Disk.remove", f"os.remove {tmp_path}/file"]


def test_the_loop_touches_no_file_of_a_checkpoint_with_and_without_room(tmp_path: Path) -> None:
    async def drive(buffer_bytes: int, directory: str) -> None:
        server = Server(f"file://{tmp_path}/{directory}")
        server.begin_parts(buffer_bytes)
        server.propose()
        server.cut(2)
        for clock in (1, 2, 3, 4):
            server.step(clock)
        assert not (await server.report()).problem
        server.give_up()
        server.propose(2)  # into the place of the first: it fails
        server.cut(4, 2)
        await server.parts.close()

    with watched() as found:
        asyncio.run(drive(0, "00000001-c"))
        asyncio.run(drive(1 << 20, "00000002-c"))
    assert found == []


def test_the_loop_touches_no_file_of_an_update_log(tmp_path: Path) -> None:
    async def scene() -> None:
        server = LoggedServer(tmp_path, 1, Setting(bound_bytes=1))
        with watched() as found:
            for step in range(1, 9):
                await server.push(step)
                server.node.tick()
                await server.written()
            await server.end()
            recovered = await open_log(tmp_path, Shards(SharedLanes(), {}), KERNELS, 9.0)
            assert len(recovered.replicas) == 2
            await asyncio.to_thread(recovered.directory.close)
        assert found == []
        assert not (tmp_path / "00000001.log").exists(), "no segment went"

    asyncio.run(scene())
