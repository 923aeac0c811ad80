"""Options that several commands share, and commands whose options are a dataclass.

typer reads a command's options from the parameters of its function. A command with many options
takes one value of a dataclass, whose fields are its options.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from ps_cli.console.reported import refuse
from ps_core import limits
from ps_core.errors import InvalidConfig
from ps_runtime.launch.cluster_shape import CheckpointPlan, ClusterShape, UpdateLogPlan

OptionsT = TypeVar("OptionsT")

LOGGED_RESTARTS = 5
"""Restarts of servers with an update log, by default."""

LAST_CHECKPOINT_S = 60.0
"""Seconds that the last checkpoint may take by default; a step may have to end first."""

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The error that typer raises for a command line that it cannot read."""


class ScriptCommand(TyperCommand):
    """A command that runs a script: its error for an unknown option says where the script's go."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            option = str(getattr(error, "option_name", ""))
            script = next((word for word in given if word.endswith(".py")), "")
            is_ours = any(option in each.opts for each in self.get_params(ctx))
            if not option or is_ours or not script:
                raise
            refuse(
                f"{ctx.command_path} has no option {option}; options of the script come after --, "
                f"as in: {ctx.command_path} {script} -- {option} ..."
            )


Script = Annotated[
    Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="The training script.")
]
SchedulerAddress = Annotated[
    str,
    typer.Option(
        envvar="PUSHPULL_SCHEDULER",
        help="host:port of the scheduler, or several, separated by commas.",
    ),
]
WorkerCount = Annotated[
    int, typer.Option("--workers", "-w", min=1, help="Workers that the first update waits for.")
]
ServerCount = Annotated[
    int, typer.Option("--servers", "-s", min=1, help="Servers that share the parameters.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The options of a command that starts a local cluster."""

    workers: WorkerCount = 1
    max_workers: Annotated[
        int,
        typer.Option(
            min=0,
            help="The most workers at a time. Those beyond --workers are started by hand and join "
            "while the others train. 0: as many as --workers.",
        ),
    ] = 0
    servers: ServerCount = 1
    replicas: Annotated[
        int,
        typer.Option(
            min=1,
            envvar="PUSHPULL_REPLICAS",
            help="Servers that hold each range, at most --servers. 1: when a server dies its "
            "values are lost and the run ends. 2: the run goes on.",
        ),
    ] = 1
    min_in_sync: Annotated[
        int,
        typer.Option(
            min=1,
            envvar="PUSHPULL_MIN_IN_SYNC",
            help="Replicas of a range that must hold a push before it counts; a range with fewer "
            "waits. 1: a range goes on with its last replica.",
        ),
    ] = 1
    lease_s: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Seconds of silence after which a server is replaced by its backups; it sends "
            "three heartbeats in that time. 0: the scheduler's own setting.",
        ),
    ] = 0.0
    checkpoint_url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            envvar="PUSHPULL_CHECKPOINT_URL",
            help="The root of the checkpoints: a path, or a URL such as s3://bucket/run. Without "
            "it there are none.",
        ),
    ] = ""
    checkpoint_every: Annotated[
        str,
        typer.Option(
            metavar="N|TIME",
            help="Make a checkpoint every N steps (ps.Outer: outer steps) or every TIME (60s, "
            "5m, 1h). Without it: at the end, and when `pushpull checkpoint create` or the "
            "script asks.",
        ),
    ] = ""
    checkpoint_keep: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            envvar="PUSHPULL_CHECKPOINT_KEEP",
            help="Keep the newest N checkpoints. 0: keep all.",
        ),
    ] = 0
    checkpoint_full_every: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            envvar="PUSHPULL_CHECKPOINT_FULL_EVERY",
            help="Make every N-th checkpoint a full one; the others have only the blocks that "
            "changed, and refer to earlier ones for the rest. 1: all are full.",
        ),
    ] = 1
    resume: Annotated[
        str,
        typer.Option(
            metavar="URL",
            envvar="PUSHPULL_RESUME",
            help="Start from a checkpoint, with any number of servers and workers. URL is its "
            "directory, or a root, whose newest good checkpoint is taken. auto: the newest one of "
            "--checkpoint-url; if it has none, training starts from the beginning.",
        ),
    ] = ""
    checkpoint_last_s: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=limits.MAX_DEADLINE_S,
            envvar="PUSHPULL_CHECKPOINT_LAST_S",
            help="Seconds that the last checkpoint may take, before the roles are stopped. A step "
            "may have to end first; a second signal cuts it short. 0: no last checkpoint.",
        ),
    ] = LAST_CHECKPOINT_S
    update_log: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            envvar="PUSHPULL_UPDATE_LOG",
            help="Each server logs every update in its own directory in DIR. A server that dies is "
            "started again and recovers from its log; `pushpull replay` shows the updates.",
        ),
    ] = ""
    update_log_mb: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="MB",
            help="The size of a server's log, in MB, above which its oldest updates are deleted. "
            "0: the server's own setting.",
        ),
    ] = 0
    update_log_sync: Annotated[
        bool,
        typer.Option(
            "--update-log-sync",
            help="An update counts only when it is on disk, so that the log survives a power cut.",
        ),
    ] = False
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default=f"servers with --update-log: {LOGGED_RESTARTS}; others: 0",
            help="Restarts of dead workers and servers, all together. A role that dies soon after "
            "its start is started again after a pause that doubles, up to 30 s.",
        ),
    ] = None

    @property
    def shape(self) -> ClusterShape:
        return ClusterShape(
            self.servers,
            self.workers,
            max_workers=self.max_workers,
            replica_count=self.replicas,
            min_in_sync=self.min_in_sync,
            lease_s=self.lease_s,
            checkpoints=CheckpointPlan(
                self.checkpoint_url,
                self.checkpoint_every,
                self.checkpoint_keep,
                self.resume,
                self.checkpoint_full_every,
            ),
            update_log=UpdateLogPlan(self.update_log, self.update_log_mb, self.update_log_sync),
            has_journal=True,
        )


def _refuse_options_as_values(hints: Iterable[Any]) -> None:
    for hint in hints:
        kind, *notes = get_args(hint)
        for option in notes:
            if isinstance(option, OptionInfo) and kind in (str, Path, str | None, Path | None):
                option.callback = _value


def _value(context: typer.Context, option: typer.CallbackParam, value: Any) -> Any:
    """The text or path that was given to an option: not the next option, whose value would then be
    taken for an argument.
    """
    if str(value).startswith("--") and not context.resilient_parsing:
        refuse(
            f"the value of {option.opts[0]} is missing: '{value}' is in its place; expected one "
            "that does not begin with --"
        )
    return value


def options_of(cls: type[OptionsT]) -> Callable[[Callable[[OptionsT], None]], Callable[..., None]]:
    """Decorates a command whose options are the fields of the dataclass `cls`, which are annotated
    as typer wants parameters to be.
    """
    hints = get_type_hints(cls, include_extras=True)
    _refuse_options_as_values(hints.values())
    options = inspect.signature(cls).parameters.values()
    signature = inspect.Signature([one.replace(annotation=hints[one.name]) for one in options])

    def decorate(command: Callable[[OptionsT], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(**given: object) -> None:
            try:
                command(cls(**given))
            except InvalidConfig as error:  # options that contradict each other
                refuse(error.message)

        vars(called).pop("__wrapped__")  # its parameters are not the command's
        vars(called)["__signature__"] = signature
        called.__annotations__ = {name: hints[name] for name in signature.parameters}
        return called

    return decorate
