"""A folder in which the blocks of a page are saved and typed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.integration.command_line import Tool, environment, run_warm
from tests.tidy.source import ROOT

ENDED_WITHIN_S = 100.0

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


class PageFolder:
    """A page of docs/, and a folder for its programs and commands."""

    def __init__(self, page: str, folder: Path) -> None:
        self.text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        self.path = folder

    def blocks(self, language: str) -> list[str]:
        found = re.findall(rf"```{language}\n(.*?)```", self.text, re.DOTALL)
        return [str(block) for block in found]

    def commands(self) -> list[str]:
        """The lines of the page's shell blocks, those that go on in the next one as one."""
        lines = "".join(self.blocks("sh")).replace("\\\n", " ")
        return lines.strip().splitlines()

    def save(self, *names: str) -> None:
        """Write the page's programs under these names, in its order."""
        for name, program in zip(names, self.blocks("python"), strict=True):
            (self.path / name).write_text(program, encoding="utf-8")

    def start(self, line: str, *, is_warm: bool = True) -> Tool:
        """Begin a line that says `pushpull`, after variables perhaps, in warm processes or not."""
        words = shlex.split(line)
        at = words.index("pushpull")
        variables = dict(word.split("=", 1) for word in words[:at])
        return Tool(*words[at + 1 :], cwd=self.path, variables=variables, is_warm=is_warm)

    def type(self, line: str) -> str:
        """Type a line that ends, and ends well; returns what it prints."""
        if "pushpull" in shlex.split(line):
            with self.start(line) as tool:
                assert tool.end(ENDED_WITHIN_S) == 0, tool.text
            return tool.text
        words = shlex.split(line)
        at = next(i for i, word in enumerate(words) if "=" not in word)
        variables = dict(word.split("=", 1) for word in words[:at])
        variables = {"OMP_NUM_THREADS": "1"} | variables
        if words[at] == "torchrun":
            run = run_warm(*words[at + 1 :], cwd=self.path, module="torchrun", variables=variables)
        else:
            assert words[at] == "python"
            run = subprocess.run(
                [sys.executable, *words[at + 1 :]], cwd=self.path, env=environment() | variables,
                capture_output=True, text=True, timeout=ENDED_WITHIN_S, check=False,
            )  # fmt: skip
        assert run.returncode == 0, run.stderr
        return run.stdout
