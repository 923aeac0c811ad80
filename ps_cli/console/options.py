"""Options of commands that are alike for several of them, and commands with many options.

typer reads a command's options from the parameters of its function. A command with many takes one
value of a dataclass, whose fields are its options.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from ps_cli.console.exit_rules import LOGGED_RESTARTS
from ps_cli.console.reported import refuse
from ps_core.errors import InvalidConfig
from ps_runtime.launch.cluster_shape import CheckpointPlan, UpdateLogPlan

OptionsT = TypeVar("OptionsT")

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What typer raises for a command line that it cannot read."""


class ScriptCommand(TyperCommand):
    """A command that runs a script: it says where options go that are the script's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer does; an option that the command does not have may be meant for the script."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            option = str(getattr(error, "option_name", ""))
            script = next((word for word in given if word.endswith(".py")), "")
            if not option or not script:
                raise
            refuse(
                f"{ctx.command_path} has no option {option}; options of the script come after --, "
                f"as in: {ctx.command_path} {script} -- {option} ..."
            )


Script = Annotated[
    Path,
    typer.Argument(exists=True, dir_okay=False, readable=True, help="The training script."),
]
WorkerCount = Annotated[
    int,
    typer.Option("--workers", "-w", min=1, help="Workers that the first update waits for."),
]
MaxWorkerCount = Annotated[
    int,
    typer.Option(
        "--max-workers",
        min=0,
        help="Workers that there may be at a time: those beyond --workers, started by hand, join "
        "while the others train. 0: none beyond these.",
    ),
]
ServerCount = Annotated[
    int,
    typer.Option("--servers", "-s", min=1, help="Servers that share the parameters."),
]
ReplicaCount = Annotated[
    int,
    typer.Option(
        "--replicas",
        min=1,
        envvar="PUSHPULL_REPLICAS",
        help="Servers that hold each range, at most --servers. 1: a server that dies ends the run, "
        "its values are lost; 2: the run goes on.",
    ),
]
MinInSync = Annotated[
    int,
    typer.Option(
        "--min-in-sync",
        min=1,
        envvar="PUSHPULL_MIN_IN_SYNC",
        help="Of the replicas of a range, how many must hold a push before it counts; a range with "
        "fewer waits. 1: it goes on with the last one.",
    ),
]
LeaseS = Annotated[
    float,
    typer.Option(
        "--lease-s",
        min=0.0,
        help="A server that is not heard for so many seconds is replaced by its backups; its "
        "heartbeats come three times as often. 0: the scheduler's own setting.",
    ),
]

MaxRestarts = Annotated[
    int | None,
    typer.Option(
        "--max-restarts",
        min=0,
        show_default=f"servers with --update-log: {LOGGED_RESTARTS}; others: 0",
        help="How many roles that died may be started again, all in all; one that dies soon after "
        "its start later each time, after up to 30 s.",
    ),
]


def options_of(
    cls: Callable[..., OptionsT],
) -> Callable[[Callable[[OptionsT], None]], Callable[..., None]]:
    """A command whose options are the fields of a dataclass.

    Args:
        cls: the dataclass; its fields are annotated as typer wants parameters to be.
    """
    signature = inspect.signature(cls, eval_str=True)

    def decorate(command: Callable[[OptionsT], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(**given: object) -> None:
            try:
                command(cls(**given))
            except InvalidConfig as error:  # options that contradict each other
                refuse(error.message)

        hints = {name: option.annotation for name, option in signature.parameters.items()}
        vars(called).pop("__wrapped__")  # its parameters are not the command's
        vars(called)["__signature__"] = signature
        called.__annotations__ = hints
        return called

    return decorate


CheckpointUrl = Annotated[
    str,
    typer.Option(
        metavar="URL",
        help="Where checkpoints go: a path, or a URL such as s3://bucket/run. Without it there are "
        "none.",
    ),
]
CheckpointEvery = Annotated[
    str,
    typer.Option(
        metavar="N|TIME",
        help="A checkpoint after each N steps, or in each TIME (60s, 5m, 1h). Without it: when "
        "`pushpull checkpoint create` or the script asks.",
    ),
]
CheckpointKeep = Annotated[
    int, typer.Option(min=0, help="How many checkpoints are kept; 0: all of them.")
]
CheckpointFullEvery = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="Of N checkpoints in a row one is full; the others have what changed, and refer to "
        "earlier ones for the rest. 1: all are full.",
    ),
]
Resume = Annotated[
    str,
    typer.Option(
        metavar="URL",
        help="Start from a checkpoint: its directory, or where there are some: the newest "
        "good one. auto: the newest of --checkpoint-url, or anew if there is none. Onto any "
        "number of servers and workers.",
    ),
]


UpdateLogPath = Annotated[
    str,
    typer.Option(
        metavar="DIR",
        help="Each server keeps every update in a directory of its own in DIR. One that dies is "
        "started again and goes on from there; `pushpull replay` shows what was done.",
    ),
]
UpdateLogMb = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="MB",
        help="Above so many MB the oldest updates of a server's log go; 0: the server's own "
        "setting.",
    ),
]
UpdateLogSync = Annotated[
    bool,
    typer.Option(
        "--update-log-sync",
        help="An update counts when the disk has it: the log survives a power cut, too.",
    ),
]


class PlansStorage:
    """Options of a command that starts a cluster: those about what it keeps, taken together."""

    __slots__ = ()

    checkpoint_url: CheckpointUrl
    checkpoint_every: CheckpointEvery
    checkpoint_keep: CheckpointKeep
    checkpoint_full_every: int
    resume: Resume
    update_log: UpdateLogPath
    update_log_mb: UpdateLogMb
    update_log_sync: UpdateLogSync

    @property
    def update_logs(self) -> UpdateLogPlan:
        """Where the servers keep their updates.

        Raises:
            InvalidConfig: they contradict each other.
        """
        return UpdateLogPlan(self.update_log, self.update_log_mb, self.update_log_sync)

    @property
    def checkpoints(self) -> CheckpointPlan:
        """Where checkpoints go, and which one it starts from.

        Raises:
            InvalidConfig: they contradict each other.
        """
        return CheckpointPlan(
            self.checkpoint_url,
            self.checkpoint_every,
            self.checkpoint_keep,
            self.resume,
            self.checkpoint_full_every,
        )
