"""Makes REFERENCE.md from the code: settings, variables, commands, errors, metrics, limits.

`make reference`, or `python -m docs.reference` in the repository root, writes it; a tidy test fails
when it is not what this script would write.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from prometheus_client import CollectorRegistry

from ps_cli.__main__ import app
from ps_core import limits, rights
from ps_core.cluster_view import Role
from ps_core.errors import CATALOGUE
from ps_runtime.grpc.errors import STATUS
from ps_runtime.observe import metrics
from ps_runtime.settings.config import fields_of, flag_name, variable_name
from ps_runtime.settings.environment import VARIABLES
from ps_server.config import ServerConfig
from ps_worker.transport.config import ProcessConfig, WorkerConfig
from pushpull.v1 import parameters_pb2, replication_pb2, scheduler_pb2
from scheduler.config import SchedulerConfig

PAGE = Path(__file__).resolve().parent / "reference/REFERENCE.md"

ROLES = {
    "`pushpull scheduler`": SchedulerConfig,
    "`pushpull server`": ServerConfig,
    "`pushpull worker` and of `pushpull.connect`": WorkerConfig,
    "`pushpull worker` alone": ProcessConfig,
}

SERVICES = [
    scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"],
    parameters_pb2.DESCRIPTOR.services_by_name["ParameterService"],
    replication_pb2.DESCRIPTOR.services_by_name["ReplicationService"],
]

_CALLERS = """Each with its own session, which RegisterNode gave it. Without one, or with one that
was not issued, the answer is UNAUTHENTICATED; with another role's it is PERMISSION_DENIED.
RegisterNode asks for the proof of the join secret instead. The standard health service and
reflection are open to everybody."""

HEAD = """# Reference

Made from the code by `make reference`; do not edit it.

A setting is taken from its flag, else from its environment variable, else from the TOML file of
`--config`, else it has its default. An unknown key, flag or `PUSHPULL_*` variable is an error.
`--print-config` prints what was resolved. `pushpull.connect` takes arguments, which go before
flags. `pushpull worker` has neither `--config` nor `--print-config`.
"""


def page() -> str:
    """The whole page."""
    sections = [HEAD, *settings(), variables(), *commands(), callers()]
    return "\n".join((*sections, errors(), measurements(), bounds()))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; bars and line ends inside a cell are made harmless."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def settings() -> Iterator[str]:
    """The settings of each role, from the dataclass that resolves them."""
    for command, config in ROLES.items():
        rows = [
            (
                f"`{flag_name(field.name)}`",
                f"`{variable_name(field.name)}`",
                _default(field),
                field.metadata["help"],
            )
            for field in fields_of(config)
        ]
        heading = f"## Settings of {command}\n\n"
        yield heading + table(("flag", "variable", "default", "meaning"), rows)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return "not set" if field.default in (None, "") else f"`{field.default}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()}`"
    return "required"


def variables() -> str:
    """Every environment variable, whoever reads it."""
    rows = [(f"`{name}`", meaning) for name, meaning in VARIABLES.items()]
    return "## Environment variables\n\n" + table(("variable", "meaning"), rows)


def commands() -> Iterator[str]:
    """Every command of `pushpull` with its options."""
    for name, command in _commands(typer.main.get_command(app)):
        rows = [
            (
                f"`{max(parameter.opts, key=len)}`",
                "" if parameter.default is None else f"`{parameter.default}`",
                getattr(parameter, "help", "") or "",
            )
            for parameter in command.params
        ]
        text = inspect.cleandoc(command.help or "")
        options = "\n" + table(("option", "default", "meaning"), rows) if rows else ""
        yield f"## `pushpull {name}`\n\n{text}\n{options}"


def _commands(group: Any) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        yield name, command
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", c) for inner, c in _commands(command))


def callers() -> str:
    """Who may call each method of the contract."""
    roles = list(Role)
    rows = []
    for service in SERVICES:
        for name in service.methods_by_name:
            allowed = rights.MAY_CALL.get(name)
            cells = ["yes" if allowed and role in allowed else "" for role in roles]
            cells = ["no session needed", *cells[1:]] if allowed is None else cells
            rows.append((f"`{service.name}.{name}`", *cells))
    head = ("method", *(f"{role.value}s" for role in roles))
    return f"## Who may call what\n\n{_CALLERS}\n\n{table(head, rows)}"


def errors() -> str:
    """The catalogue: what a call can be answered with."""
    rows = [
        (
            f"`{code}`",
            f"`{kind.__name__}`",
            STATUS[code].name,
            inspect.cleandoc(kind.__doc__ or ""),
        )
        for code, kind in CATALOGUE.items()
    ]
    return "## Errors\n\n" + table(("code", "exception", "gRPC status", "meaning"), rows)


def measurements() -> str:
    """Every metric of every role."""
    registry = CollectorRegistry(auto_describe=True)
    for kind in metric_classes():
        kind(registry)
    rows = []
    for metric in sorted(registry.collect(), key=lambda metric: metric.name):
        shown = metric.name + ("_total" if metric.type == "counter" else "")
        labels = ", ".join(labels_of(registry, metric.name))
        rows.append((f"`{shown}`", metric.type, labels, metric.documentation))
    head = "## Metrics\n\nServed at `/metrics` of every role, beside the process's own.\n\n"
    return head + table(("metric", "type", "labels", "meaning"), rows)


def metric_classes() -> list[Any]:
    """The classes that hold a role's metrics."""
    return [
        kind
        for name, kind in inspect.getmembers(metrics, inspect.isclass)
        if name.endswith("Metrics") and kind.__module__ == metrics.__name__
    ]


def labels_of(registry: CollectorRegistry, name: str) -> tuple[str, ...]:
    """The label names of a metric."""
    collector = registry._names_to_collectors[name]
    return tuple(getattr(collector, "_labelnames", ()))


def bounds() -> str:
    """Every limit, with the text below its definition."""
    tree = ast.parse(inspect.getsource(limits))
    rows = []
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            rows.append((f"`{name}`", f"`{getattr(limits, name)}`", _text(after)))
    return "## Limits\n\n" + table(("limit", "value", "meaning"), rows)


def _text(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return str(node.value.value)
    return ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
