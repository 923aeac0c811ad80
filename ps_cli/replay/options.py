"""Options of `pushpull replay`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

EVERY = "*"
"""The pattern of all tables."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The command line of `pushpull replay`."""

    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="The directory of --update-log, with all servers' logs, or the log of one server.",
        ),
    ]
    table: Annotated[
        str,
        typer.Option(
            help="A table's name, or a pattern such as 'model*' for several, which are replayed "
            "together. Without it: all tables, of several runs those of the run without a name."
        ),
    ] = EVERY
    every: Annotated[
        int, typer.Option(min=0, help="Show every N-th version; 0: about 40 in all.")
    ] = 0
    first: Annotated[
        int | None, typer.Option("--from", min=0, metavar="V", help="The first version to show.")
    ] = None
    to: Annotated[
        int | None, typer.Option("--to", min=0, metavar="V", help="The last version to show.")
    ] = None
    last: Annotated[int, typer.Option(min=0, help="Show the last N versions; 0: all.")] = 0
    evaluate: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="A function that returns the loss of a version; it is called with a dict of "
            "tensors by name, of a table of rows NAME/ids and NAME/rows, for each version that is "
            "shown. FILE.py:FUNCTION works, too.",
        ),
    ] = ""
    json_path: Annotated[
        Path | None,
        typer.Option("--json", dir_okay=False, help="Write the versions to this JSON file, too."),
    ] = None
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw the versions in this SVG file.")
    ] = None
    export: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Write the tensors of a version (--at or --clock) to this safetensors file, as "
            "`pushpull checkpoint export` does.",
        ),
    ] = None
    at: Annotated[
        int | None,
        typer.Option(min=0, metavar="V", help="The version of --export; the newest by default."),
    ] = None
    clock: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="The clock of --export: every update up to it, and none beyond it, under any "
            "consistency.",
        ),
    ] = None
    against: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Compare parameters, rows and optimizer state with a checkpoint, bit by bit.",
        ),
    ] = ""
