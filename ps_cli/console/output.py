"""Output of the command line: the roles' lines behind their names, and the tool's own.

A terminal gets colours and a live table; anything else gets plain lines without escape sequences,
so that a log file stays readable.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from functools import partial
from typing import Self, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

_COLOURS = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green")

FILE_WIDTH = 160
"""Columns of a table that does not go to a terminal."""


def is_terminal(stream: TextIO) -> bool:
    """True if `stream` is a terminal that understands escape sequences."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Output:
    """Standard output and standard error of the tool. Thread-safe.

    Args:
        stream: takes all but errors; None: standard output.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self.is_terminal = is_terminal(self._stream)
        plain = partial(Console, highlight=False, soft_wrap=True, emoji=False, markup=False)
        self._console = plain(file=stream, width=None if self.is_terminal else FILE_WIDTH)
        self._errors = plain(stderr=True)
        self._live: Live | None = None
        # Held for one line at most: several roles' readers write at once.
        self._lock = threading.Lock()

    def role_line(self, name: str, line: str, colour_number: int) -> None:
        if not self.is_terminal:
            self._write(f"[{name}] {line}")
            return
        style = _COLOURS[colour_number % len(_COLOURS)]
        self._console.print(Text.assemble((f"[{name}] ", style), Text.from_ansi(line)))

    def say(self, message: str) -> None:
        """Write a line of the tool's own."""
        if self.is_terminal:
            self._console.print(Text(message, style="bold"))
        else:
            self._write(message)

    def warn(self, message: str) -> None:
        """Report a problem while the tool goes on; the live table stays."""
        if self._live is not None:
            self._console.print(Text(f"pushpull: {message}", style="bold red"))
        else:
            self.complain(message)

    def print(self, view: RenderableType) -> None:
        self._console.print(view)

    def complain(self, message: str) -> None:
        """Write the reason why the tool ends; a terminal shows its first line in red."""
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
        if self._live is not None:
            self._live.update(view, refresh=True)
            return
        self._live = Live(view, console=self._console, auto_refresh=False, transient=False)
        self._live.start(refresh=True)

    def close(self) -> None:
        """Stop the live table, which stays on the terminal. Idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
