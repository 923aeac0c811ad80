"""Options of `pushpull plan`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

MEASURED_BYTES = 64 * 2**20
"""The table of --measure, and the model of --check."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The command line of `pushpull plan`."""

    workers: Annotated[int, typer.Option("--workers", "-w", min=1, help="Workers that train.")] = 1
    servers: Annotated[
        int, typer.Option("--servers", "-s", min=1, help="Servers that share the parameters.")
    ] = 1
    model: Annotated[
        str, typer.Option(metavar="COUNT", help="The model's parameters, such as 7e9.")
    ] = ""
    compute: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Forward and backward of one step, and the worker's own optimizer where a mode "
            "has outer steps: 300ms for every worker. With stragglers, as "
            "--straggler of `pushpull compare` has them: rotating:300ms,900ms,burst=2,seed=1; "
            "permanent:300ms,900ms,rank=0.",
        ),
    ] = ""
    bandwidth: Annotated[
        str, typer.Option(metavar="RATE", help="Each node's link, each way: 25Gbit, 100Mbit.")
    ] = "10Gbit"
    latency: Annotated[
        str, typer.Option(metavar="TIME", help="A message there and back in the network.")
    ] = "100us"
    modes: Annotated[
        str,
        typer.Option(
            "--modes", "-m", help="The settings to plan, as --modes of `pushpull compare`."
        ),
    ] = "bsp,ssp:4,asp,bsp+bf16,bsp+int8,bsp+sign,bsp+topk:0.01"
    dtype: Annotated[
        str, typer.Option(help="The parameters' dtype: float32, bfloat16 or float16.")
    ] = "float32"
    optimizer: Annotated[
        str,
        typer.Option(
            help="On the servers: sgd, adam, adamw, adagrad or rmsprop. Modes with outer steps "
            "have sgd there, and their own one in --compute."
        ),
    ] = "adam"
    replicas: Annotated[
        int, typer.Option(min=1, max=2, help="Servers that hold each range: 1 or 2.")
    ] = 1
    backward: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="The last share of the computation, in which gradients leave. 0: all leave at "
            "its end.",
        ),
    ] = 0.67
    one_host: Annotated[
        int,
        typer.Option(
            "--one-host",
            metavar="CORES",
            min=0,
            help="All roles share one host of so many cores, without a network; the computation of "
            "each worker takes one of them. 0: each node has a host of its own.",
        ),
    ] = 0
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu",
            help="With --one-host: workers compute on GPUs, and take no core for it.",
        ),
    ] = False
    worker_price: Annotated[
        float, typer.Option(min=0.0, help="The price of a worker's host, an hour.")
    ] = 0.0
    server_price: Annotated[
        float, typer.Option(min=0.0, help="The price of a server's host, an hour.")
    ] = 0.0
    steps: Annotated[
        int,
        typer.Option(
            min=1,
            help="Steps of each worker, for the cost. Steps that a mode discards are not counted.",
        ),
    ] = 1000
    report: Annotated[
        Path | None,
        typer.Option("--report", "-o", help="Write an HTML page with curves to this file."),
    ] = None
    costs: Annotated[
        Path | None,
        typer.Option(help="Measured costs of the processor, as --measure writes them."),
    ] = None
    measure: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measure the costs on this machine, in a minute or two, write them to FILE, and "
            "end.",
        ),
    ] = None
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Train on clusters of 1, 2 and 4 workers here, compare their steps with the "
            "plan's, and end. Takes minutes; --costs are those of this machine.",
        ),
    ] = False

    @property
    def given(self) -> dict[str, object]:
        """The options that have not their default, by name."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    @property
    def command(self) -> str:
        """The command line, without what has its default."""
        pairs = [
            (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
            for name, value in self.given.items()
        ]
        return shlex.join(("pushpull", "plan", *(word for pair in pairs for word in pair)))

    @property
    def has_prices(self) -> bool:
        return self.worker_price > 0 or self.server_price > 0
