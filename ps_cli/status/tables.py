"""`pushpull tables`: a cluster's tables and their consistency."""

from __future__ import annotations

import fnmatch
from typing import Annotated

import typer

from ps_cli.console.output import Output
from ps_cli.console.scheduler_query import first_status
from ps_core.errors import TableNotFound, listed
from ps_core.runs import words
from ps_runtime.cluster import wire

SchedulerAddress = Annotated[
    str,
    typer.Option(
        envvar="PUSHPULL_SCHEDULER",
        help="host:port of the scheduler, or several, separated by commas.",
    ),
]

_NAMED_COUNT = 8
"""The most tables that an error names."""


async def matching_tables(scheduler: str, pattern: str, run: str) -> list[str]:
    """The names of a run's tables that match a shell pattern; a name matches itself."""
    response = (await first_status(scheduler)).response
    names = [table.spec.name for table in response.view.tables if table.run == run]
    found = [name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)]
    if not found:
        there = listed([f"'{name}'" for name in names], _NAMED_COUNT) or "no table"
        whose = words(run) if run or response.view.runs else "the cluster"
        raise TableNotFound(f"no table is '{pattern}'; {whose} has {there}")
    return found


async def list_tables(scheduler: str, output: Output) -> int:
    response = (await first_status(scheduler)).response
    for message in response.view.tables:
        table = wire.table_from_proto(message)
        since = f" from clock {table.change.after_clock + 1} on" if table.change else ""
        proposed = f"; to become {table.proposed.consistency}" if table.proposed else ""
        output.say(
            f"{table.title}: {table.spec.size_words}, {table.spec.optimizer.label}, "
            f"{table.consistency}{since}{proposed}"
        )
    return 0
