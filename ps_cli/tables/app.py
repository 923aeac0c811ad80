"""`pushpull tables`: a cluster's tables, their hottest rows and their consistency."""

from __future__ import annotations

import fnmatch
from typing import Annotated

import typer

from ps_cli.console.json_text import json_text
from ps_cli.console.options import SchedulerAddress
from ps_cli.console.output import Output
from ps_cli.console.reported import guarded
from ps_cli.console.scheduler_query import (
    QUERY_DEADLINE_S,
    first_status,
    operator_link,
    server_answers,
)
from ps_cli.tables.hot_rows import hot_rows_document, hot_rows_view
from ps_cli.tables.new_settings import new_settings
from ps_core.consistency import parsed
from ps_core.errors import TableNotFound, listed
from ps_core.runs import words
from ps_core.tables.table import Table
from ps_runtime.cluster import wire

_NAMED_COUNT = 8
"""The most tables that an error names."""

tables_app = typer.Typer(
    help="List a cluster's tables, show their hottest rows, and change their consistency.",
    no_args_is_help=True,
)


@tables_app.command(name="list")
def tables_list(scheduler: SchedulerAddress = "") -> None:
    """List a cluster's tables, each with its optimizer and its consistency."""
    guarded(lambda output: list_tables(scheduler, output))


@tables_app.command(name="top")
def tables_top(
    table: Annotated[
        str, typer.Argument(help="The table's name, or a pattern such as 'user*'.")
    ] = "*",
    scheduler: SchedulerAddress = "",
    run: Annotated[
        str,
        typer.Option(envvar="PUSHPULL_RUN", help="The table's run; empty: the run without a name."),
    ] = "",
    rows: Annotated[
        int, typer.Option(min=1, max=16, help="The most rows and ranges to show of each table.")
    ] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program.")] = False,
) -> None:
    """Show the hottest rows of embedding tables, and what each range has.

    Counts begin when a server begins to serve a range. Shares of rows are estimated from one id of
    32; recent ones weigh most.

    Example: `pushpull tables top users --scheduler 127.0.0.1:7000`
    """

    async def show(output: Output) -> int:
        names, _ = await matching_tables(scheduler, table, run)
        answer = await first_status(scheduler)
        answers = await server_answers(answer)
        document = hot_rows_document(answer.response, answers, names, rows, run)
        if as_json:
            output.say(json_text(document))
        else:
            output.print(hot_rows_view(document), fits=True)
        return 0

    guarded(show)


@tables_app.command(name="set")
def tables_set(
    table: Annotated[
        str, typer.Argument(help="The table's name, or a pattern such as 'model*' for several.")
    ],
    consistency: Annotated[
        str, typer.Argument(help="bsp, bsp:backup=1, ssp:4, asp, asp:divide, asp:reject=8, ...")
    ],
    scheduler: SchedulerAddress = "",
    run: Annotated[
        str,
        typer.Option(envvar="PUSHPULL_RUN", help="The table's run; empty: the run without a name."),
    ] = "",
    after_clock: Annotated[
        int,
        typer.Option(
            min=0, help="The new setting begins after this clock at the earliest; 0: soon."
        ),
    ] = 0,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait for the servers, for each table.")
    ] = 10.0,
) -> None:
    """Change the consistency of TABLE while it is trained.

    Every server changes at the same clock, which is printed. In a change from ssp or asp to bsp,
    workers that are ahead wait at that clock for the others. If a server does not answer in time,
    the error names it; nothing has changed, unless it says that the change may still be made. If
    one of several tables cannot have the setting, none is changed. For the settings see
    docs/explanation/CONSISTENCY.md.

    Example: `pushpull tables set 'model*' ssp:4 --scheduler 127.0.0.1:7000`
    """

    async def change(output: Output) -> int:
        wanted = parsed(consistency).as_requested
        names, tables = await matching_tables(scheduler, table, run)
        settings = new_settings(tables, names, wanted)
        async with operator_link(scheduler, QUERY_DEADLINE_S, run) as link:
            for name, setting in settings.items():
                made = await link.set_consistency(name, setting, after_clock, timeout)
                output.say(f"{name}: {setting} from clock {made.after_clock + 1} on")
        return 0

    guarded(change)


async def matching_tables(scheduler: str, pattern: str, run: str) -> tuple[list[str], list[Table]]:
    """The names of a run's tables that match a shell pattern, and all tables of that run; a name
    matches itself.
    """
    response = (await first_status(scheduler)).response
    tables = [wire.table_from_proto(each) for each in response.view.tables if each.run == run]
    names = [table.spec.name for table in tables]
    found = [name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)]
    if not found:
        there = listed([f"'{name}'" for name in names], _NAMED_COUNT) or "no table"
        whose = words(run) if run or response.view.runs else "the cluster"
        raise TableNotFound(f"no table is '{pattern}'; {whose} has {there}")
    return found, tables


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
