"""Options of `pushpull compare`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ps_cli.console.options import Script, ServerCount, WorkerCount


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """The command line of `pushpull compare`."""

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
            help="The settings to compare, separated by commas: bsp, bsp:backup=1, ssp:4, asp, "
            "asp:reject=8, asp:damp=0.5, asp:divide, asp:compensate=2,adaptive. Behind + codecs of "
            "pushes and pulls: bsp+int8 (pulls in bf16), bsp+topk:0.01/none. Last, outer steps: "
            "bsp+outer:50, bsp+int8/bf16+outer:50 (DiLoCo: a worker takes 50 steps by itself in "
            "each). Times are relative to the first.",
        ),
    ] = "bsp,ssp:4,asp"
    straggler: Annotated[
        str,
        typer.Option(
            help="Emulated computation of a step: 30ms for every worker; "
            "rotating:30ms,90ms,burst=2,seed=1; permanent:30ms,90ms,rank=0."
        ),
    ] = ""
    seeds: Annotated[
        str, typer.Option(help="Seeds, separated by commas; every mode runs once with each.")
    ] = "0"
    workers: WorkerCount = 2
    servers: ServerCount = 1
    report: Annotated[
        Path,
        typer.Option("--report", "-o", help="The HTML file; a JSON file is written beside it."),
    ] = Path("compare.html")
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the output of the workers, too.")
    ] = False

    @property
    def json_path(self) -> Path:
        return self.report.with_suffix(".json")
