"""What the command line of `pushpull replay` takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The options as they are given."""

    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="What --update-log was given: the logs of all servers; or one's."
        ),
    ]
    table: Annotated[
        str,
        typer.Option(
            help="A table's name, or a pattern such as 'model*': together. Without it: all."
        ),
    ] = "*"
    every: Annotated[
        int, typer.Option(min=0, help="Show each N-th version; 0: so many that it is a screen.")
    ] = 0
    first: Annotated[
        int | None, typer.Option("--from", min=0, metavar="V", help="Show none before this one.")
    ] = None
    to: Annotated[
        int | None, typer.Option("--to", min=0, metavar="V", help="Show none after this one.")
    ] = None
    last: Annotated[int, typer.Option(min=0, help="Show the last N versions; 0: all.")] = 0
    evaluate: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Called with the tensors of each version that is shown, a dict by name; its "
            "result is the loss. FILE.py:FUNCTION is a file.",
        ),
    ] = ""
    json_path: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write what is shown here, too.")
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Draw what is shown, as an SVG file."),
    ] = None
    export: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Write the tensors at --at, or --clock, as safetensors, for `load_state_dict`.",
        ),
    ] = None
    at: Annotated[
        int | None,
        typer.Option(
            "--at", min=0, metavar="V", help="The version that is meant; else the newest."
        ),
    ] = None
    clock: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Every update up to this clock and none beyond it, whatever its version's number.",
        ),
    ] = None
    against: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Compare with a checkpoint, bit by bit: parameters and what the optimizers keep.",
        ),
    ] = ""
