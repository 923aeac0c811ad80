"""Where the command line writes: the roles' lines with a prefix, and what the tool itself says.

On a terminal there are colours and a live table; anywhere else plain lines and never an escape
sequence, so that a log file stays readable.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

_COLOURS = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green")

FILE_WIDTH = 160
"""Columns of a table where there is no terminal that has a width."""


def is_terminal(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that understands escape sequences."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Output:
    """Standard output and standard error of the tool. Thread-safe.

    Args:
        stream: where everything but reasons goes; None means standard output.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self.is_terminal = is_terminal(self._stream)
        self._console = Console(
            file=stream,
            width=None if self.is_terminal else FILE_WIDTH,
            highlight=False,
            soft_wrap=True,
            emoji=False,
            markup=False,
        )
        self._errors = Console(
            highlight=False, soft_wrap=True, emoji=False, markup=False, stderr=True
        )
        self._live: Live | None = None
        # Held for one line at most: readers of several roles write side by side.
        self._lock = threading.Lock()

    def role_line(self, name: str, line: str, colour_number: int) -> None:
        """A line of a role's output, behind its name."""
        if not self.is_terminal:
            self._write(f"[{name}] {line}")
            return
        style = _COLOURS[colour_number % len(_COLOURS)]
        text = Text.assemble((f"[{name}] ", style))
        text.append_text(Text.from_ansi(line))
        self._console.print(text)

    def say(self, message: str) -> None:
        """Something that the tool itself says."""
        if self.is_terminal:
            self._console.print(Text(message, style="bold"))
        else:
            self._write(message)

    def warn(self, message: str) -> None:
        """Something that went wrong while the tool goes on; the live table stays."""
        if self._live is not None:
            self._console.print(Text(f"pushpull: {message}", style="bold red"))
        else:
            self.complain(message)

    def print(self, view: RenderableType) -> None:
        """Something with a form of its own, such as a table."""
        self._console.print(view)

    def complain(self, message: str) -> None:
        """Why the tool ends: the first line stands out on a terminal."""
        head, _, rest = message.partition("\n")
        if is_terminal(sys.stderr):
            self._errors.print(Text(f"pushpull: {head}", style="bold red"))
            if rest:
                self._errors.print(Text(rest))
            return
        with self._lock, contextlib.suppress(BrokenPipeError):
            print(f"pushpull: {message}", file=sys.stderr, flush=True)

    def _write(self, line: str) -> None:
        # A reader that went away (`| head`) ends neither the training nor the roles' output.
        with self._lock, contextlib.suppress(BrokenPipeError):
            print(line, file=self._stream, flush=True)

    def show(self, view: RenderableType) -> None:
        """Replace the live table; only on a terminal."""
        if self._live is None:
            self._live = Live(view, console=self._console, auto_refresh=False, transient=False)
            self._live.start(refresh=True)
            return
        self._live.update(view, refresh=True)

    def close(self) -> None:
        """Leave the live table as it is and give the terminal back. Idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
