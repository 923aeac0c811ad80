"""Runs a command to its exit code: an error becomes a line for a person."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import typer

from ps_cli.console.output import Output
from ps_core.errors import InvalidConfig, PushpullError

USAGE_EXIT_CODE = 2


def refuse(message: str) -> NoReturn:
    """End the command with one line that says what is wrong with its command line."""
    with Output() as output:
        output.complain(message)
    raise typer.Exit(USAGE_EXIT_CODE)


def guarded(
    command: Callable[[Output], Coroutine[Any, Any, int]], *, may_lose_lines: bool = False
) -> None:
    """Run a command on an event loop, as `reported` does."""
    reported(lambda output: asyncio.run(command(output)), may_lose_lines=may_lose_lines)


def reported(command: Callable[[Output], int], *, may_lose_lines: bool = False) -> None:
    """Run a command to its exit code; an error of the catalogue becomes one line and a code, and so
    does output that could not be written, unless the command is for more than its lines.
    """
    with Output() as output:
        try:
            code = command(output)
        except PushpullError as error:
            output.close()
            output.complain(error.message)
            code = USAGE_EXIT_CODE if isinstance(error, InvalidConfig) else 1
    if output.lost is not None and not may_lose_lines:
        code = code or 1
    raise typer.Exit(code)
