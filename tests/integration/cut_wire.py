"""A server behind a wire that can be cut: a relay of bytes that drops its connections on demand."""

from __future__ import annotations

import random
import re
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import ps_worker as ps
from ps_runtime.launch.cluster_shape import ClusterShape
from ps_runtime.launch.launcher import Launcher, RoleCommand, start_scheduler
from tests.integration.lane_cluster import LaneCluster, Served
from tests.integration.open_files import open_files

_CHUNK_BYTES = 65_536
_LISTENING = "0A"
_HOST = "127.0.0.2"


_PORTS = range(20_000, 32_000)
"""Below those that systems give to whoever connects, or asks for any."""


def _listener_beside_a_free_port() -> socket.socket:
    """A listener whose port's number is free on the server's address, too, and stays so."""
    for port in random.sample(_PORTS, 100):
        try:
            socket.create_server(("127.0.0.1", port)).close()
            return socket.create_server((_HOST, port))
        except OSError:
            continue
    raise AssertionError(f"none of 100 ports in {_PORTS} is free")


class CutWire:
    """The relay, on a thread of its own, and the cluster whose server is behind it."""

    def __init__(self) -> None:
        self.cluster = LaneCluster("")
        self.rank_0: ps.Client
        self.cut_count = 0
        # Its own address, where it has the number of the server's stream port too.
        self._listener = socket.create_server((_HOST, 0))
        self._streams = _listener_beside_a_free_port()
        self.stream_port: int = self._streams.getsockname()[1]
        self._upstreams: dict[socket.socket, tuple[str, int]] = {}
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._left_bytes: int | None = None
        self._free_bytes: int | None = None
        self._released = threading.Event()
        self._is_cut = False
        self._is_over = False
        self._thread = threading.Thread(target=self._relay, daemon=True)

    @property
    def address(self) -> str:
        """Where the server is reached."""
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def close(self) -> None:
        """Nothing was relayed."""
        for each in (self._listener, self._streams, self._wake, self._woken, self._selector):
            each.close()

    def close_streams(self) -> None:
        """Let nobody reach the server's stream port."""
        self._streams.close()

    def start(self, port: int, stream_port: int = 0) -> None:
        """Relay to a server on loopback from now on; to another's stream port, if one is named."""
        upstreams = (port, stream_port or self.stream_port)
        for listener, upstream in zip((self._listener, self._streams), upstreams, strict=True):
            if listener.fileno() >= 0:
                self._upstreams[listener] = ("127.0.0.1", upstream)
        for source in (*self._upstreams, self._woken):
            self._selector.register(source, selectors.EVENT_READ)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and every connection."""
        self._is_over = True
        self.release()
        self._wake.send(b"x")
        self._thread.join()
        self._drop()
        for made in (self._listener, self._streams, self._wake, self._woken):
            made.close()
        self._selector.close()

    def cut(self) -> None:
        """Drop all connections now; new ones are let in."""
        with self._lock:
            self._is_cut = True
        self._wake.send(b"x")

    def cut_after(self, byte_count: int) -> None:
        """Drop all connections once so many bytes more have gone to the server."""
        with self._lock:
            self._left_bytes = byte_count

    def hold_after(self, byte_count: int) -> None:
        """Pass nothing on, either way, once so many bytes more have come from the server."""
        with self._lock:
            self._free_bytes = byte_count

    def release(self) -> None:
        """Hold nothing any more."""
        with self._lock:
            self._free_bytes = None
        self._released.set()

    def go_on(self) -> None:
        """Cut no more."""
        with self._lock:
            self._left_bytes = None

    def _relay(self) -> None:
        while not self._is_over:
            for key, _ in self._selector.select():
                source = key.fileobj
                assert isinstance(source, socket.socket)
                if source is self._woken:
                    source.recv(1)
                elif source in self._upstreams:
                    self._let_in(source)
                elif source in self._peers:
                    self._pass_on(source)
            with self._lock:
                is_cut, self._is_cut = self._is_cut, False
            if is_cut:
                self._drop()
                self.cut_count += 1

    def _let_in(self, listener: socket.socket) -> None:
        near, _ = listener.accept()
        far = socket.create_connection(self._upstreams[listener])
        for one, other in ((near, far), (far, near)):
            self._peers[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _pass_on(self, source: socket.socket) -> None:
        target = self._peers[source]
        try:
            passed = source.recv(_CHUNK_BYTES)
            target.sendall(passed)
        except OSError:
            passed = b""
        if not passed:
            self._forget(source, target)
            return
        is_upstream = target.getpeername() in self._upstreams.values()
        with self._lock:
            if is_upstream and self._left_bytes is not None:
                self._left_bytes -= len(passed)
                if self._left_bytes <= 0:
                    self._left_bytes, self._is_cut = None, True
            is_held = False
            if not is_upstream and self._free_bytes is not None:
                self._free_bytes -= len(passed)
                is_held = self._free_bytes <= 0
        if is_held:
            self._released.wait()

    def _forget(self, *pair: socket.socket) -> None:
        for one in pair:
            if self._peers.pop(one, None) is not None:
                self._selector.unregister(one)
                one.close()

    def _drop(self) -> None:
        self._forget(*list(self._peers))


def _grpc_port(pid: int, others: set[int]) -> int:
    """The port that a process listens on beside these; it only says what it advertises."""
    inodes = {
        found[1] for link in open_files(pid) if (found := re.match(r"socket:\[(\d+)\]", link))
    }
    ports = set()
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    (port,) = ports - others
    return port


def start_behind(
    wire: CutWire, launcher: Launcher, scheduler: str, *, streams: bool = True, index: int = 0
) -> Served:
    """Start a server that is reached through a wire; with a stream port or not."""
    role = RoleCommand("server", index, "ps_server")
    arguments = (
        "--listen=127.0.0.1:0",
        "--http-listen=127.0.0.1:0",
        f"--advertise={wire.address}",
        f"--stream-listen=127.0.0.1:{wire.stream_port}" if streams else "--stream-listen=off",
        f"--scheduler={scheduler}",
        f"--ready-file={launcher.ready_file(role)}",
    )
    process = launcher.start(RoleCommand("server", index, "ps_server", arguments))
    ready = launcher.wait_ready(process)
    wire.cluster.address = scheduler
    wire.cluster.servers.append(Served(process, ready.address, ready.http_address))
    return wire.cluster.servers[0]


def grpc_port(wire: CutWire, server: Served) -> int:
    """The port that the server behind a wire listens on."""
    others = {wire.stream_port, int(server.http_address.rpartition(":")[2])}
    return _grpc_port(server.process.pid, others)


@contextmanager
def cut_wire(workers: int, *, streams: bool) -> Iterator[CutWire]:
    """A cluster of one server behind a wire, and a client of rank 0; with a stream port or not."""
    wire = CutWire()
    with Launcher() as launcher, ExitStack() as stack:
        scheduler = start_scheduler(launcher, ClusterShape(1, workers))
        try:
            server = start_behind(wire, launcher, scheduler.address, streams=streams)
            wire.start(grpc_port(wire, server))
        except BaseException:
            wire.close()
            raise
        stack.callback(wire.stop)
        wire.rank_0 = stack.enter_context(ps.connect(scheduler.address, rank=0, lane="grpc"))
        yield wire
