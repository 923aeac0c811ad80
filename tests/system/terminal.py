"""A line that was typed, its process, and what it prints; and whether a page shows the same."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading

STARTED_WITHIN_S = 60.0
ENDED_WITHIN_S = 30.0

_VARYING = re.compile(
    r"(?P<any>\.\.\.)|(?P<hex>\b(?=[a-f]*\d)[0-9a-f]{8,16}\b)|(?P<unit>\bKiB\b)"
    r"|(?P<number>\d[\d.,]*(?<!,)(?<!\.))|(?P<space>\s+)"
)
_PATTERNS = {
    "any": r".*",
    "hex": r"[0-9a-f]+",
    "unit": r"\w+",
    "number": r"[\d.,]+",
    "space": r"\s+",
}


def differences(shown: str, printed: str) -> list[str]:
    """Lines of a page's block that a program did not print, in the block's order.

    Numbers, identities and the width of gaps may differ; "..." stands for anything, and as a line
    of its own for any number of lines.
    """
    missing, lines = [], iter(printed.splitlines())
    for line in shown.splitlines():
        wanted = _pattern(line.strip())
        if line.strip() and line != "..." and not any(wanted.fullmatch(x.strip()) for x in lines):
            missing.append(line)
            lines = iter(())
    return missing


def _pattern(line: str) -> re.Pattern[str]:
    parts, at = [], 0
    for found in _VARYING.finditer(line):
        parts += [re.escape(line[at : found.start()]), _PATTERNS[found.lastgroup or ""]]
        at = found.end()
    return re.compile("".join((*parts, re.escape(line[at:]))))


class Terminal:
    """A line that was typed at a machine, what it prints, and its process."""

    def __init__(self, process: subprocess.Popen[str], line: str) -> None:
        self.process = process
        self._lines = [f"$ {line}\n"]
        self._arrived = threading.Condition()
        self._has_ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                with self._arrived:
                    self._lines.append(line)
                    self._arrived.notify_all()
        with self._arrived:
            self._has_ended = True
            self._arrived.notify_all()

    @property
    def text(self) -> str:
        with self._arrived:
            return "".join(self._lines)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until it shows the pattern."""

        def found() -> re.Match[str] | None:
            return re.search(pattern, "".join(self._lines))

        with self._arrived:
            self._arrived.wait_for(lambda: self._has_ended or found(), STARTED_WITHIN_S)
            match = found()
        assert match, f"{pattern!r} did not come\n{self.text}"
        return match

    def end(self, within_s: float) -> int:
        """Wait for its end, and all that it prints."""
        code = self.process.wait(within_s)
        self._reader.join(ENDED_WITHIN_S)
        return code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.end(ENDED_WITHIN_S)
