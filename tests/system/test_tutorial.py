"""TUTORIAL.md, typed by somebody who has an empty folder, a clone beside it and two terminals.

The page's environment borrows the packages of this one, so that pip loads nothing; its python3 is
the one of this environment. Its pkill sees the first terminal's processes alone.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.lane_cluster import until
from tests.integration.page_folder import differences
from tests.system.terminal import ENDED_WITHIN_S, STARTED_WITHIN_S, Terminal
from tests.tidy.source import ROOT

PAGE = (ROOT / "docs/tutorial/TUTORIAL.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
SHOWN_ADDRESS = re.compile(r"127\.0\.0\.1:\d+")

# pip installs the clone and nothing else, from nowhere else. A path file inside a borrowed folder
# is not read, so the editable install of this checkout is not borrowed.
OFFLINE = {
    "PYTHONPATH": os.pathsep.join(site.getsitepackages()),
    "PIP_IGNORE_INSTALLED": "1",
    "PIP_NO_BUILD_ISOLATION": "0",  # pip reads a negated option so: it does not isolate
    "PIP_NO_DEPS": "1",
    "PIP_NO_INDEX": "1",
}

pytestmark = pytest.mark.timeout(480)

INSTALLED_WITHIN_S = 180.0
"""A venv and the package's files: 15 s, and longer while images are built beside it."""


class Person:
    """Types the page's blocks, one after the other, in its terminals."""

    def __init__(self, folder: Path, tools: Path) -> None:
        self.folder = folder
        self._tools = tools
        self._blocks = iter(BLOCKS)
        self._typed: list[Terminal] = []

    def next(self, language: str) -> str:
        """The page's next block, which is of that language."""
        found, text = next(self._blocks)
        assert found == language, text
        return str(text)

    def type(self, text: str) -> Terminal:
        """Begin a block in a terminal of its own; the first block has made what activates."""
        ours = ("OMP_NUM_THREADS", "PUSHPULL_", "PYTHON")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        kept["PATH"] = os.pathsep.join((str(self._tools), kept["PATH"]))
        activate = ". venv/bin/activate\n" if (self.folder / "venv").exists() else ""
        process = subprocess.Popen(
            ["bash", "-ec", activate + text],
            cwd=self.folder, env=kept | OFFLINE, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._typed.append(Terminal(process, text.strip()))
        return self._typed[-1]

    def do(self, text: str, within_s: float = ENDED_WITHIN_S) -> str:
        """Type a block that ends, and ends well; returns what it printed."""
        terminal = self.type(text)
        assert terminal.end(within_s) == 0, terminal.text
        return terminal.text

    def compare(self, printed: str) -> None:
        """The page's next block is what was printed."""
        assert not differences(self.next("text"), printed), printed

    def has_typed_all(self) -> bool:
        return next(self._blocks, None) is None

    def leave(self) -> None:
        for terminal in self._typed:
            terminal.kill()


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    """Beside a clone of this repository, in an empty folder."""
    folder, tools = tmp_path / "first", tmp_path / "bin"
    folder.mkdir()
    tools.mkdir()
    python = Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
    write_tool(tools / "python3", f'exec {python} "$@"')
    subprocess.run(["git", "clone", "-q", ROOT, tmp_path / "pushpull"], check=True)
    found = Person(folder, tools)
    yield found
    found.leave()


def write_tool(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def narrow_pkill(tools: Path, terminal: Terminal) -> None:
    """A pkill that sees this terminal's processes, and none of anybody else's on the machine."""
    real = shlex.quote(shutil.which("pkill") or "pkill")
    write_tool(tools / "pkill", f'exec {real} -s {terminal.process.pid} "$@"')


def install(person: Person) -> None:
    person.do(person.next("sh"), INSTALLED_WITHIN_S)
    person.do(person.next("sh"), INSTALLED_WITHIN_S)
    asked = person.do("python -c 'import pushpull; print(pushpull.__file__)'")
    assert f"{person.folder}/venv" in asked


def final_loss(printed: str) -> str:
    (found,) = re.findall(r"after step 300: loss (\d\.\d{6}),", printed)
    return str(found)


@pytest.mark.thorough
def test_the_page_is_typed_to_its_end(person: Person) -> None:
    install(person)
    (person.folder / "train.py").write_text(person.next("python"), encoding="utf-8")
    first = person.do(person.next("sh"), STARTED_WITHIN_S)
    person.compare(first)

    survivor = person.type(person.next("sh"))
    narrow_pkill(person.folder.parent / "bin", survivor)
    address = survivor.wait_for(r"scheduler at (127\.0\.0\.1:\d+);")[1]
    survivor.wait_for(r"step [1-9]\d* of 300")
    look, count = SHOWN_ADDRESS.subn(address, person.next("sh"))
    assert count == 1
    shown = person.next("text")
    until(lambda: not differences(shown, person.do(look)), "the status that the page shows")

    kill, count = re.subn(r"(?<=ps_server\.\*)\d+", address.split(":")[1], person.next("sh"))
    assert count == 1
    person.do(kill)
    survivor.wait_for("it is started again")
    person.compare(survivor.text)
    saved = person.folder / "runs/1"
    until(lambda: any(saved.glob("*/manifest.json")), "a checkpoint of the twentieth step")
    os.killpg(survivor.process.pid, signal.SIGINT)
    assert survivor.end(ENDED_WITHIN_S) == 130, survivor.text
    person.compare(survivor.text)
    person.compare(person.do(person.next("sh")))

    last = person.do(person.next("sh"), STARTED_WITHIN_S)
    person.compare(last)
    assert person.has_typed_all()
    assert final_loss(last) == final_loss(first)


def test_a_line_that_is_not_printed_is_seen() -> None:
    printed = "starting 12 workers; go\n[train] much\nserver 12 was killed\n"
    assert not differences("starting 2 workers; go\n...\nserver 1 was killed\n", printed)
    assert differences("server 1 was killed\nstarting 12 workers; go\n", printed)
    assert differences("server 1 was stopped\n", printed)
