"""docs/guides/RUNBOOK.md names events, codes, variables, metrics and commands that there are."""

from __future__ import annotations

import re
import shlex

import pytest
from typer.testing import CliRunner

from ps_cli.__main__ import app
from ps_core import errors
from ps_runtime.settings.environment import VARIABLES
from tests.tidy.source import ROOT

PAGE = (ROOT / "docs/guides/RUNBOOK.md").read_text(encoding="utf-8")
SOURCES = "\n".join(
    path.read_text(encoding="utf-8")
    for package in ("ps_cli", "ps_runtime", "ps_server", "ps_worker", "scheduler")
    for path in (ROOT / package).rglob("*.py")
)
CODES = {
    kind.code for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.PushpullError)
}  # fmt: skip


@pytest.mark.parametrize("event", sorted(set(re.findall(r"event=(\w+)", PAGE))))
def test_an_event_is_logged(event: str) -> None:
    assert f'"{event}"' in SOURCES


def test_codes_variables_and_metrics_are_there() -> None:
    named = set(re.findall(r"`([A-Z][A-Z_]+)`", PAGE))
    assert named
    for name in named:
        assert name in CODES | VARIABLES.keys() | {"OMP_NUM_THREADS"}, name
    for metric in re.findall(r"`(pushpull_\w+)`", PAGE):
        assert f'"{metric}"' in SOURCES, metric


@pytest.mark.parametrize("line", sorted(set(re.findall(r"`(pushpull [a-z][^`]*)`", PAGE))))
def test_a_command_is_there(line: str) -> None:
    words = shlex.split(line)[1:]
    path = [word for word in words if word.isalpha() and word.islower()]
    found = CliRunner().invoke(app, [*path, "--help"], terminal_width=200)
    assert found.exit_code == 0, line
    for option in (word for word in words if word.startswith("--")):
        assert option in found.output, line
