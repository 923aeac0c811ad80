"""The tool's output where it cannot be written: the tool goes on."""

from __future__ import annotations

import io
import os
import pty
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.text import Text

from ps_cli.console.output import Output


@pytest.fixture
def closed_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Output]:
    """On a terminal with a live table, whose window was closed then."""
    monkeypatch.setenv("TERM", "xterm-256color")
    master, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream, Output(stream) as output:
        output.show(Text("step 1"))
        with os.fdopen(master, "rb", buffering=0) as window:
            shown = b""
            while b"step 1" not in shown:
                shown += window.read(1 << 16) or b""
        yield output


def test_a_terminal_that_was_closed_ends_nothing(
    closed_terminal: Output, capsys: pytest.CaptureFixture[str]
) -> None:
    output = closed_terminal
    for _ in range(2):
        output.say("a line")
        output.role_line("worker 0", "its line", 0)
        output.warn("a problem")
        output.print(Text("a view"))
        output.show(Text("step 2"))
    output.close()
    output.show(Text("another table"))
    output.close()
    output.complain("the reason")
    assert output.lost is not None
    told = [line for line in capsys.readouterr().err.splitlines() if "are lost" in line]
    assert told == ["pushpull: lines of the output are lost: Input/output error"]


def test_a_full_disk_loses_lines_says_so_once_and_ends_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Path("/dev/full").open("w") as stream, Output(stream) as output:
        output.say("a line")
        output.role_line("worker 0", "its line", 0)
        output.print(Text("a view"))
        assert output.lost is not None
    assert capsys.readouterr().err == (
        "pushpull: lines of the output are lost: No space left on device\n"
    )


def test_a_disk_with_space_again_gets_the_next_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Path("/dev/full").open("w") as stream, Output(stream) as output:
        output.say("before")
        with log.open("w") as space:
            os.dup2(space.fileno(), stream.fileno())
        output.say("after")
    assert log.read_text().endswith("after\n")


def test_what_the_encoding_lacks_is_written_as_an_escape() -> None:
    written = io.BytesIO()
    output = Output(io.TextIOWrapper(written, encoding="latin-1"))
    output.role_line("worker 0", "caf\N{REPLACEMENT CHARACTER}", 0)
    output.say("a path: \udce9")
    output.print(Text("\N{EURO SIGN}"))
    assert written.getvalue() == b"[worker 0] caf\\ufffd\na path: \\udce9\n\\u20ac\n"
