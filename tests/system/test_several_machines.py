"""SEVERAL_MACHINES.md, typed on three machines: network namespaces with a firewall each.

A namespace has its own addresses, ports, firewall and abstract sockets, as a machine has; the
folders that a machine would have of its own are its home and its working folder. In the place of
ssh's copy stands a program that copies from the other machine's home.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.command_line import environment
from tests.system.terminal import ENDED_WITHIN_S, Terminal
from tests.tidy.source import ROOT

PAGE = (ROOT / "docs/guides/SEVERAL_MACHINES.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
PORT = 7070
"""The scheduler's."""

TRAINED_WITHIN_S = 200.0

BLOCK = re.compile(r"^On ((?:`[\d.]+`(?: and )?)+):\n\n```sh\n(.*?)```", re.MULTILINE | re.DOTALL)

# What a machine's firewall refuses before the page: all that it has not asked for itself.
CLOSED = (
    "iptables -A INPUT -i lo -j ACCEPT",
    "iptables -A INPUT -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
    "iptables -P INPUT DROP",
)

SCP = f"""#!{sys.executable}
import shutil, sys
source, target = sys.argv[-2:]
address, _, path = source.partition(":")
shutil.copy2(f"{{HOMES}}/{{address}}/{{path}}", target)
"""

pytestmark = [pytest.mark.timeout(480), pytest.mark.thorough]


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"


class Machine:
    """A namespace, a home, and what was typed there."""

    def __init__(self, address: str, folder: Path, network: str) -> None:
        self.address = address
        self.name = f"{network}-{address.rpartition('.')[2]}"
        self.home = folder / address
        self.home.mkdir()
        self._tools = folder / "bin"
        self._typed: list[Terminal] = []

    def join_network(self, network: str) -> None:
        """Its only interface, whose other end is in the switch."""
        inside, outside = "eth0", self.name[-12:]
        run("ip", "netns", "add", self.name)
        run("ip", "-n", self.name, "link", "add", inside, "type", "veth",
            "peer", "name", outside, "netns", network)  # fmt: skip
        run("ip", "-n", network, "link", "set", outside, "master", "switch", "up")
        run("ip", "-n", self.name, "link", "set", "lo", "up")
        run("ip", "-n", self.name, "address", "add", f"{self.address}/24", "dev", inside)
        run("ip", "-n", self.name, "link", "set", inside, "up")

    def type(self, line: str) -> Terminal:
        """Begin what a line says, in a terminal of its own."""
        paths = os.pathsep.join((str(self._tools), os.environ["PATH"]))
        own = {"HOME": str(self.home), "PUSHPULL_JOIN_SECRET": "", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, "sh", "-c", line],
            cwd=self.home, env=environment() | own | {"PATH": paths}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            process_group=0,
        )  # fmt: skip
        self._typed.append(Terminal(process, f"[{self.address}] {line}"))
        return self._typed[-1]

    def do(self, line: str) -> None:
        """Type a line that ends, and ends well."""
        terminal = self.type(line)
        assert terminal.end(ENDED_WITHIN_S) == 0, terminal.text

    def said(self) -> str:
        """All its terminals."""
        return "\n".join(terminal.text for terminal in self._typed)

    def remove(self) -> None:
        """End what runs there, and take it away."""
        for terminal in self._typed:
            terminal.kill()
        subprocess.run(["ip", "netns", "delete", self.name], capture_output=True, check=False)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    """Three machines at a switch, which nothing else is at; each refuses what comes unasked."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in {
        "pushpull": f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m pushpull "$@"\n',
        "scp": SCP.replace("{HOMES}", str(tmp_path)),
        "sudo": '#!/bin/sh\nexec "$@"\n',
    }.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    network = f"pp{os.getpid()}"
    made = {address: Machine(address, tmp_path, network) for address in ADDRESSES}
    try:
        run("ip", "netns", "add", network)
        run("ip", "-n", network, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", network, "link", "set", "switch", "up")
        for machine in made.values():
            machine.join_network(network)
            for line in CLOSED:
                machine.do(line)
            (machine.home / "train.py").write_text(program())
        yield made
    finally:
        for machine in made.values():
            machine.remove()
        subprocess.run(["ip", "netns", "delete", network], capture_output=True, check=False)


def program() -> str:
    """The README's training script."""
    (found,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return str(found)


def lines_of_page() -> list[tuple[str, str]]:
    """What the page has one type, in its order: the machine's address, and the line."""
    return [
        (address, line)
        for addresses, block in BLOCK.findall(PAGE)
        for address in re.findall(r"[\d.]+\d", addresses)
        for line in block.splitlines()
    ]


def follow(machines: dict[str, Machine]) -> dict[str, Terminal]:
    """Type the page; the terminals of roles, by what they are and where."""
    roles = {}
    for address, line in lines_of_page():
        role = re.match(r"pushpull (scheduler|server|worker) ", line)
        if role is None:
            machines[address].do(line)
            continue
        roles[f"{role[1]} {address}"] = machines[address].type(line)
        if role[1] == "scheduler":  # a person sees the line; the rest of the page needs its secret
            roles[f"{role[1]} {address}"].wait_for("event=cluster_formed")
    return roles


def test_every_block_of_the_page_is_typed() -> None:
    """The one program is `test_ray.py`'s."""
    assert len(BLOCK.findall(PAGE)) == PAGE.count("```sh\n") == PAGE.count("```") // 2 - 1
    assert PAGE.count("```python\n") == 1
    assert {address for address, _ in lines_of_page()} == set(ADDRESSES)


def test_the_page_trains_on_three_machines(machines: dict[str, Machine]) -> None:
    roles = follow(machines)
    assert sorted(roles) == [
        *("scheduler 10.0.0.1", "server 10.0.0.1", "server 10.0.0.2"),
        *("worker 10.0.0.2", "worker 10.0.0.3"),
    ]
    for name, terminal in sorted(roles.items(), key=lambda role: role[0], reverse=True):
        within_s = TRAINED_WITHIN_S if name.startswith("worker") else ENDED_WITHIN_S
        code = terminal.end(within_s)
        said = "\n".join(machine.said() for machine in machines.values())
        assert code == 0, f"{name} ended with {code}\n{said}"
    reached = re.search(r"^loss (\d+\.\d+)$", said, re.MULTILINE)
    assert reached, said
    assert float(reached[1]) < 0.5


def test_a_closed_firewall_is_told_to_a_worker(machines: dict[str, Machine]) -> None:
    """The rule of the page is what lets them in."""
    first, third = machines["10.0.0.1"], machines["10.0.0.3"]
    scheduler = first.type("pushpull scheduler --listen 10.0.0.1:7070 --workers 1 --servers 1")
    scheduler.wait_for("event=cluster_formed")
    third.do("mkdir -p -m 700 ~/.pushpull && scp -p 10.0.0.1:.pushpull/join-secret ~/.pushpull/")
    line = "pushpull worker --connect-deadline-s 2 --scheduler 10.0.0.1:7070 train.py"
    worker = third.type(line)
    assert worker.end(ENDED_WITHIN_S) != 0
    assert "no scheduler answered at 10.0.0.1:7070 within 2.0 s" in worker.text


HYBRID = """
import torch
import pushpull as ps

with ps.connect() as client:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    local = torch.optim.SGD(model[1].parameters(), lr=0.1)
    optimizer = ps.HybridOptimizer(
        client, model, local, served=model[0].parameters(), server_optimizer=ps.SGD(lr=0.1)
    )
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    print("trained", float(model[1].weight.detach().sum()))
"""


def hybrid_workers(
    machines: dict[str, Machine], hosts: Path, first_scheduler: str
) -> list[Terminal]:
    """Two workers of a hybrid run, on machines whose /etc/hosts is `hosts`, when both have ended;
    the first is beside the scheduler.
    """
    first, second, _ = machines.values()
    for machine in (first, second):
        machine.do("sudo iptables -I INPUT -p tcp -s 10.0.0.0/24 -j ACCEPT")
        (machine.home / "hybrid.py").write_text(HYBRID)
    scheduler = first.type(f"pushpull scheduler --listen [::]:{PORT} --workers 2 --servers 1")
    scheduler.wait_for("event=cluster_formed")
    second.do("mkdir -p -m 700 ~/.pushpull && scp -p 10.0.0.1:.pushpull/join-secret ~/.pushpull/")
    first.type("pushpull server --scheduler 10.0.0.1:7070 --listen 10.0.0.1:7071")
    named = f"mount --bind {hosts} /etc/hosts && exec pushpull worker"
    workers = [
        first.type(f"{named} --rank 0 --scheduler {first_scheduler} hybrid.py"),
        second.type(f"{named} --rank 1 --scheduler 10.0.0.1:7070 hybrid.py"),
    ]
    for worker in workers:
        worker.end(TRAINED_WITHIN_S)
    return workers


def test_workers_meet_on_machines_whose_names_lead_to_themselves(
    machines: dict[str, Machine], tmp_path: Path
) -> None:
    """As /etc/hosts of Debian and Ubuntu has it."""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
    workers = hybrid_workers(machines, hosts, "10.0.0.1:7070")
    found = [re.search(r"^trained (\S+)$", worker.text, re.MULTILINE) for worker in workers]
    assert all(found), "\n".join(worker.text for worker in workers)
    assert len({each[1] for each in found if each}) == 1


def test_all_workers_are_told_of_a_first_one_that_others_do_not_reach(
    machines: dict[str, Machine], tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost here\n")
    for worker in hybrid_workers(machines, hosts, "here:7070"):
        assert worker.process.returncode != 0
        assert "workers 1 do not reach worker 0 at 127.0.0.1 port" in worker.text
        assert "give it the one that the others have (--scheduler)" in worker.text
