"""What the command line of `pushpull compare` takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ps_cli.console.options import Script, ServerCount, WorkerCount


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """The options as they are given."""

    script: Script
    script_arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- ARGS",
            help="Arguments of the script, after `--`; `{seed}` in them is the run's seed.",
        ),
    ] = None
    modes: Annotated[
        str,
        typer.Option(
            "--modes",
            "-m",
            help="With commas: bsp, bsp:backup=1, ssp:4, asp, asp:reject=8, asp:damp=0.5, "
            "asp:divide, asp:compensate=2,adaptive. Times are set against those of the first.",
        ),
    ] = "bsp,ssp:4,asp"
    straggler: Annotated[
        str,
        typer.Option(
            help="Emulated computation of a step: 30ms for every worker; "
            "rotating:30ms,90ms,burst=2,seed=1; permanent:30ms,90ms,rank=0."
        ),
    ] = ""
    seeds: Annotated[str, typer.Option(help="With commas: every mode runs once with each.")] = "0"
    workers: WorkerCount = 2
    servers: ServerCount = 1
    report: Annotated[
        Path, typer.Option("--report", "-o", help="The HTML file; a JSON file goes beside it.")
    ] = Path("compare.html")
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what the workers say, too.")
    ] = False
