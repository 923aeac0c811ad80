"""`pushpull runs`: the runs of a cluster, their end and their removal."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer

from ps_cli.console.options import SchedulerAddress
from ps_cli.console.output import Output
from ps_cli.console.reported import reported
from ps_cli.console.scheduler_query import first_answer, first_status
from ps_cli.runs.entries import run_entries, run_line
from ps_runtime.cluster import wire

runs_app = typer.Typer(help="List, end and remove the runs of a cluster.", no_args_is_help=True)


@runs_app.command(name="list")
def runs_list(
    scheduler: SchedulerAddress = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """List the runs of a cluster, each with its state, its workers and its tables.

    A worker names its run with --run or PUSHPULL_RUN. See docs/guides/RUNS.md.
    """

    def show(output: Output) -> int:
        response = asyncio.run(first_status(scheduler)).response
        entries = run_entries(wire.view_from_proto(response.view))
        if as_json:
            output.say(json.dumps(entries, indent=2))
            return 0
        for entry in entries:
            output.say(run_line(entry))
        return 0

    reported(show)


@runs_app.command(name="end")
def runs_end(
    run: Annotated[str, typer.Argument(help="The run's name.")], scheduler: SchedulerAddress = ""
) -> None:
    """End the run RUN of a cluster; other runs go on.

    The next call of each of its workers fails, and no worker can join it again. Its tables can be
    read until the run is removed.

    Example: `pushpull runs end nightly --scheduler 127.0.0.1:7000`
    """

    def end(output: Output) -> int:
        count = asyncio.run(first_answer(scheduler, lambda query: query.end_run(run)))
        output.say(f"run '{run}' has ended; {count} workers were in it")
        return 0

    reported(end)


@runs_app.command(name="remove")
def runs_remove(
    run: Annotated[str, typer.Argument(help="The run's name.")], scheduler: SchedulerAddress = ""
) -> None:
    """Remove the run RUN of a cluster, with its tables; the run must be over.

    This cannot be undone. The servers free the memory of its tables, pulls by its readers fail,
    and no other run can have its name.

    Example: `pushpull runs remove nightly --scheduler 127.0.0.1:7000`
    """

    def remove(output: Output) -> int:
        had = asyncio.run(first_answer(scheduler, lambda query: query.remove_run(run)))
        count, megabytes = had.table_count, had.byte_count / 1e6
        of_tables = f"; it had {count} tables, for which the servers had up to {megabytes:.1f} MB"
        of_tables += ", without rows of embeddings"
        output.say(f"run '{run}' is removed{of_tables if count else ''}")
        return 0

    reported(remove)
