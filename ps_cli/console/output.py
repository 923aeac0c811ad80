"""Output of the command line: the roles' lines behind their names, and the tool's own.

A terminal gets colours and a live table; anything else gets plain lines without escape sequences,
so that a log file stays readable.

A line that cannot be written ends nothing: a run, and its last checkpoint, go on when the terminal
is closed, the reader has gone away or the log's disk is full. A disk with space again gets the next
lines. Characters that the stream's encoding lacks are written as escapes.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Self, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

_COLOURS = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green")

FILE_WIDTH = 160
"""Columns of a table that does not go to a terminal."""

_GONE_FOR_GOOD = (errno.EPIPE, errno.EIO)
"""Errors of a pipe whose reader has gone away, and of a terminal that was closed."""


def is_terminal(stream: TextIO) -> bool:
    """True if `stream` is a terminal that understands escape sequences."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class _Console(Console):
    """Raises when the reader has gone away, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class Output:
    """Standard output and standard error of the tool. Thread-safe.

    Args:
        stream: takes all but errors; None: standard output.

    Attributes:
        lost: why lines of `stream` could not be written; None if all were, or its reader went away
            (`| head`).
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        if isinstance(self._stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # it is full already
                self._stream.reconfigure(errors="backslashreplace")
        self.is_terminal = is_terminal(self._stream)
        self.lost: OSError | None = None
        plain = partial(_Console, highlight=False, soft_wrap=True, emoji=False, markup=False)
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
        self.print(Text.assemble((f"[{name}] ", style), Text.from_ansi(line)))

    def say(self, message: str) -> None:
        """Write a line of the tool's own."""
        if self.is_terminal:
            self.print(Text(message, style="bold"))
        else:
            self._write(message)

    def warn(self, message: str) -> None:
        """Report a problem while the tool goes on; the live table stays."""
        if self._live is not None:
            self.print(Text(f"pushpull: {message}", style="bold red"))
        else:
            self.complain(message)

    def print(self, view: RenderableType, *, fits: bool = False) -> None:
        """Write a view; one that `fits` has its lines broken at the width of a terminal."""
        with self._going_on(self._stream):
            self._console.print(view, soft_wrap=not (fits and self.is_terminal))

    def complain(self, message: str) -> None:
        """Write the reason why the tool ends; a terminal shows its first line in red."""
        head, _, rest = message.partition("\n")
        errors = getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # a live table has it
        if is_terminal(errors):
            with self._going_on(errors):
                self._errors.print(Text(f"pushpull: {head}", style="bold red"))
                if rest:
                    self._errors.print(Text(rest))
            return
        with self._going_on(errors), self._lock:
            print(f"pushpull: {message}", file=errors, flush=True)

    def _write(self, line: str) -> None:
        with self._going_on(self._stream), self._lock:
            print(line, file=self._stream, flush=True)

    @contextlib.contextmanager
    def _going_on(self, stream: TextIO) -> Iterator[None]:
        """Neither the training nor the roles' output ends because `stream` cannot be written."""
        try:
            yield
        except OSError as error:
            if error.errno in _GONE_FOR_GOOD:
                _end_in_nothing(stream)
            if self.lost is None and stream is self._stream and error.errno != errno.EPIPE:
                self.lost = error
                self.complain(f"lines of the output are lost: {error.strerror}")

    def show(self, view: RenderableType) -> None:
        """Replace the live table; only on a terminal."""
        with self._going_on(self._stream):
            if self._live is not None:
                self._live.update(view, refresh=True)
                return
            self._live = Live(view, console=self._console, auto_refresh=False, transient=False)
            self._live.start(refresh=True)

    def close(self) -> None:
        """Stop the live table, which stays on the terminal. Idempotent."""
        live, self._live = self._live, None
        if live is not None:
            with self._going_on(self._stream):
                live.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
        for stream in (self._stream, sys.stderr):
            try:
                stream.flush()
            except OSError:
                _end_in_nothing(stream)


def _end_in_nothing(stream: TextIO) -> None:
    """Have what `stream` still holds, and what comes, go nowhere: at the end of the process Python
    would try once more to write it, and change the exit code to 120.
    """
    with contextlib.suppress(OSError):  # it may have no descriptor
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
