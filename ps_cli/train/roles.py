"""`pushpull scheduler`, `pushpull server`, `pushpull worker`: one role, on this machine.

The process becomes the role, which reads its own command line. This module has only its options,
for `--help` and for the shell's completion.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import typing
from importlib import import_module
from inspect import Parameter, Signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ps_runtime.launch.role_entry import become
from ps_runtime.settings.config import fields_of, flag_name


@dataclasses.dataclass(frozen=True, slots=True)
class StartedRole:
    """A role: its module, and the classes of its settings."""

    module: str
    settings: tuple[str, ...]
    runs_script: bool = False
    """Options end at the script's name."""

    def parser(self, description: str) -> argparse.ArgumentParser:
        """The parser of the role's own command line."""
        made = import_module(self.settings[0].rpartition(".")[0]).parser()
        made.description = description
        return typing.cast(argparse.ArgumentParser, made)


ROLES = {
    "scheduler": StartedRole("scheduler", ("scheduler.config.SchedulerConfig",)),
    "server": StartedRole("ps_server", ("ps_server.config.ServerConfig",)),
    "worker": StartedRole(
        "ps_worker",
        ("ps_worker.transport.config.WorkerConfig", "ps_worker.transport.config.ProcessConfig"),
        runs_script=True,
    ),
}
"""By the name of the command."""


class BecomesRole(TyperCommand):
    """A command that becomes a role, except for --help and completion."""

    def get_params(self, ctx: Any) -> list[Any]:
        return [*_parameters(ROLES[str(self.name)]), *super().get_params(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer does for help and completion; otherwise this process becomes the role."""
        role = ROLES[str(self.name)]
        if ctx.resilient_parsing or asks_for_help(args, ends_at_script=role.runs_script):
            return super().parse_args(ctx, args)
        return become(role.module, args, os.environ)

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - as typer calls it
        role = ROLES[str(self.name)]
        print(role.parser(inspect.cleandoc(self.help or "")).format_help(), end="")


def asks_for_help(arguments: list[str], *, ends_at_script: bool) -> bool:
    """True if the command line has --help, and not among the script's arguments: where it
    `ends_at_script` all options have a value, and the first other argument is the script.
    """
    is_value = False
    for argument in arguments:
        if argument in ("-h", "--help"):
            return True
        if ends_at_script and not is_value and not argument.startswith("--"):
            return False
        is_value = not is_value and argument.startswith("--") and "=" not in argument
    return False


def _parameters(role: StartedRole) -> list[Any]:
    """The parameters that typer makes for a function with the role's options."""

    def shown(**given: object) -> None:
        pass

    options = [_setting(*each) for name in role.settings for each in _hints(name)]
    if role.runs_script:
        rest = Annotated[list[str] | None, typer.Argument(metavar="ARGS")]
        options += [
            Parameter("script", _NAMED, annotation=Annotated[Path, typer.Argument()]),
            Parameter("arguments", _NAMED, default=None, annotation=rest),
        ]
    else:
        options += [_option("config", Path, "--config")]
        options += [_option("print_config", bool, "--print-config")]
    vars(shown)["__signature__"] = Signature(options)
    shown.__annotations__ = {option.name: option.annotation for option in options}
    alone = typer.Typer(add_completion=False)
    alone.command()(shown)
    made: list[Any] = typer.main.get_command(alone).params
    return made


_NAMED = Parameter.KEYWORD_ONLY


def _hints(name: str) -> list[tuple[str, Any]]:
    settings = resolve_name(name)
    hints = typing.get_type_hints(settings)
    return [(field.name, hints[field.name]) for field in fields_of(settings)]


def _setting(name: str, hint: Any) -> Parameter:
    flag = flag_name(name)
    if hint is bool:
        return _option(name, bool, f"{flag}/--no{flag[1:]}")
    return _option(name, str, flag)


def _option(name: str, kind: Any, flags: str) -> Parameter:
    hint = Annotated[kind | None, typer.Option(flags)]
    return Parameter(name, _NAMED, default=None, annotation=hint)
