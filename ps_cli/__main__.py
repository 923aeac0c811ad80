"""The command `pushpull`, also as `python -m pushpull`."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Annotated

import typer

from ps_cli.bench.lanes import chosen_lanes
from ps_cli.bench.settings import BenchOptions, BenchSettings
from ps_cli.checkpoint.app import checkpoint_app
from ps_cli.compare.options import CompareOptions
from ps_cli.console.json_text import json_text
from ps_cli.console.options import SchedulerAddress, ScriptCommand, options_of
from ps_cli.console.output import Output
from ps_cli.console.reported import USAGE_EXIT_CODE, guarded, reported
from ps_cli.console.scheduler_query import first_status, server_answers
from ps_cli.plan.options import PlanOptions
from ps_cli.replay.options import ReplayOptions
from ps_cli.runs.app import runs_app
from ps_cli.status.document import status_document
from ps_cli.status.view import status_view
from ps_cli.tables.app import tables_app
from ps_cli.train.roles import BecomesRole
from ps_cli.train.train import ALL_KINDS, TrainOptions, TrainRun, TrainSettings
from ps_cli.train.up import UpOptions, run_up
from ps_runtime.launch.role_entry import words_for_missing

app = typer.Typer(
    name="pushpull",
    help="A parameter server for PyTorch: train on a local cluster, run a cluster, inspect one.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(cls=ScriptCommand)
@options_of(TrainOptions)
def train(options: TrainOptions) -> None:
    """Train SCRIPT on a local cluster: a scheduler, servers, and workers that each run SCRIPT.

    The script joins its cluster with `pushpull.connect()`, and has its rank in `client.rank` and
    the number of workers in `client.world_size`. Each line of its output follows the name of its
    worker. The run ends when the workers that it started have finished.

    A scheduler that dies is started again and goes on from its journal. When a server dies, the run
    goes on at its backups (--replicas 2), or the server is started again and recovers from its
    update log (--update-log). A worker that dies is started again with --max-restarts.

    Exit code: 0 when every worker has finished; 1 when a role died that the run needs; 3 when every
    worker has finished but a checkpoint failed, periodic or last; 130 after Ctrl-C.

    Example: `pushpull train examples/digits_cnn.py --workers 2 --servers 2 -- --epochs 5`
    """
    settings = TrainSettings(
        script=options.script,
        arguments=tuple(options.script_arguments or ()),
        shape=options.shape,
        max_restarts=options.max_restarts,
        devices=options.devices,
        last_checkpoint_s=options.checkpoint_last_s,
        line_interval_s=options.interval,
        shown_kinds=ALL_KINDS if options.verbose else frozenset({"worker"}),
    )
    guarded(lambda output: TrainRun(settings, output).run(), may_lose_lines=True)


@app.command(cls=ScriptCommand)
@options_of(CompareOptions)
def compare(options: CompareOptions) -> None:
    """Train SCRIPT under several consistency settings, and compare time and quality in a report.

    The runs follow each other on one cluster, which is emptied between them. The script trains with
    `DistributedOptimizer`, names no consistency, and reports with `client.report(loss=...)` and, at
    its end, `client.report(quality={"accuracy": ...})`.

    Exit code: 0 when every run finished; 1 when a run failed, with the reason in the report, or is
    missing from a report that could not be written; 130 after Ctrl-C, with a report of the runs
    until then.

    Example: `pushpull compare examples/digits_cnn.py -m bsp,ssp:4,asp -w 4 --seeds 0,1,2 --
    --seed {seed}`
    """
    # Imported here, because other commands start without numpy.
    from ps_cli.compare.compare import compare as run_comparison

    reported(lambda _: run_comparison(options))


@app.command()
@options_of(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Predict the step time, the bottleneck and the cost of a cluster, before it is there.

    Steps are simulated, with the processor's costs as measured on the reference machine or, with
    --costs, on yours. `docs/guides/PLANNING.md` says what the prediction knows and leaves out.

    Example: `pushpull plan --workers 1000 --servers 100 --bandwidth 25Gbit --model 7e9
    --compute 300ms`
    """
    # Imported here, because other commands start without numpy.
    from ps_cli.plan.plan import plan as run_plan

    reported(lambda output: run_plan(options, output))


@app.command()
@options_of(UpOptions)
def up(options: UpOptions) -> None:
    """Run a local cluster without workers, and print its address for workers started by hand.

    When a server dies, the cluster goes on at its backups (--replicas 2), or the server is started
    again and recovers from its update log (--update-log).
    """
    guarded(lambda output: run_up(options, output), may_lose_lines=True)


@app.command(cls=BecomesRole)
def scheduler() -> None:
    """Run a cluster's scheduler, which keeps its members, its tables and the owners of its ranges.

    Exit code: 0 after a signal to stop, or with --stop-when-done when all workers have left; 2 when
    a setting is wrong; 3 when all workers have left and the last checkpoint failed. With a journal
    the servers keep the values then, and the scheduler that is started again tries once more.

    Example: `pushpull scheduler --listen 0.0.0.0:7070 --workers 4 --servers 2`
    """


@app.command(cls=BecomesRole)
def server() -> None:
    """Run a parameter server of a cluster.

    Exit code: 0 after a signal to stop, or when the cluster has finished; 1 when it failed; 2 when
    a setting is wrong, or the scheduler refuses it.

    Example: `pushpull server --scheduler 10.0.0.1:7070 --listen 0.0.0.0:7071`
    """


@app.command(cls=BecomesRole)
def worker() -> None:
    """Run SCRIPT as one worker of a cluster. Options go before SCRIPT, its own arguments after it.

    The script joins the cluster with `pushpull.connect()`. Its rank is that of --rank, else of
    PUSHPULL_RANK, else of torchrun, Slurm, MPI or Kubernetes, else the lowest free one.

    Exit code: the script's; 1 when an exception ended it, or its last step was not committed; 2
    when a setting is wrong, or the scheduler or the others of a run refuse it (`JoinRefused`); 75
    when a hybrid run, or one in groups, has lost another worker (`WorkerLost`); 130 after Ctrl-C,
    143 after SIGTERM.

    Example: `pushpull worker --scheduler 10.0.0.1:7070 train.py --epochs 5`
    """


@app.command()
def status(
    scheduler: SchedulerAddress = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program.")] = False,
) -> None:
    """Show a cluster's servers, ranges and tables, its workers' clocks, and who waits for whom."""
    guarded(lambda output: _show_status(scheduler, as_json, output))


async def _show_status(scheduler: str, as_json: bool, output: Output) -> int:
    answer = await first_status(scheduler)
    document = status_document(answer.response, await server_answers(answer))
    if as_json:
        output.say(json_text(document))
    else:
        output.print(status_view(document), fits=True)
    return 0


app.add_typer(tables_app, name="tables")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(runs_app, name="runs")


@app.command()
@options_of(ReplayOptions)
def replay(options: ReplayOptions) -> None:
    """Replay a run's updates, version by version, from the update logs of its servers.

    Under BSP a version is a clock. Under SSP and ASP each worker's step makes a version, in the
    order in which the steps were applied. The run may still be going on. Each line has the norm of
    the values, and the norm of what the step gave the optimizer. See docs/reference/UPDATE_LOG.md.

    Exit code: 0; 1 when the log is damaged, or differs from the checkpoint of --against.

    Example: `pushpull replay runs/7-log --evaluate evaluate.py:loss --plot replay.svg`
    """
    # Imported here, because other commands start without torch.
    from ps_cli.replay.replay import replay as run_replay

    reported(lambda output: run_replay(options, output))


@app.command()
@options_of(BenchOptions)
def bench(options: BenchOptions) -> None:
    """Measure pushpull on this machine, beside memcpy, TCP, raw gRPC and torch RPC.

    See docs/reference/BENCHMARKS.md for the meaning of each figure.
    """
    # Imported here, because other commands start without numpy.
    from ps_cli.bench.catalogue import bench as run_bench

    def measure(_: Output) -> int:
        settings = BenchSettings(
            quick=options.quick,
            size_mb=options.size_mb,
            lanes=chosen_lanes(options.lane),
            device=options.device,
            replica_count=options.replicas,
            server_count=options.servers,
            has_update_log=options.update_log,
            rate_mbit=options.rate_mbit,
        )
        run_bench(options.name, settings, options.json_path)
        return 0

    reported(measure)


@app.command()
def version() -> None:
    """Print the versions that a bug report needs."""
    print(_versions())


def _show_versions(is_wanted: bool) -> None:
    if is_wanted:
        print(_versions())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_show_versions, is_eager=True, help="Print the versions."
        ),
    ] = False,
) -> None:
    """Options of `pushpull` itself."""


def _versions() -> str:
    names = ("pushpull", "torch", "grpcio", "protobuf")
    packages = (f"{name} {_installed(name)}" for name in names)
    return ", ".join((*packages, f"Python {platform.python_version()}", os.uname().machine))


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed as a package)"


def main() -> None:
    try:
        app(prog_name="pushpull")
    except ModuleNotFoundError as error:
        words = words_for_missing(error, "this command")
        if words is None:
            raise
        with Output() as output:
            output.complain(words)
        sys.exit(USAGE_EXIT_CODE)


if __name__ == "__main__":
    main()
