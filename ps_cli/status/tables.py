"""`pushpull tables`: a cluster's tables, and how far their workers may run apart."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from ps_cli.console.output import Output
from ps_cli.console.scheduler_query import first_status
from ps_core.consistency import parsed
from ps_core.errors import TableNotFound
from ps_core.runs import words
from ps_runtime.cluster import wire

SchedulerAddress = Annotated[
    str,
    typer.Option(
        envvar="PUSHPULL_SCHEDULER",
        help="host:port of the scheduler, or several with commas.",
    ),
]

_NAMED_COUNT = 8
"""Tables that an error names."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A setting that tables of a run shall have, not before the clock after `after_clock`."""

    setting: str
    after_clock: int
    timeout_s: float
    run: str


async def matching_tables(addresses: Sequence[str], pattern: str, run: str) -> list[str]:
    """The names of a run's tables that fit a shell pattern; a name fits itself.

    Raises:
        TableNotFound: none does; the message names some that there are.
    """
    response = (await first_status(addresses)).response
    names = [table.spec.name for table in response.view.tables if table.run == run]
    found = [name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)]
    if not found:
        there = ", ".join(f"'{name}'" for name in names[:_NAMED_COUNT]) or "no table"
        more = f" and {len(names) - _NAMED_COUNT} more" * (len(names) > _NAMED_COUNT)
        whose = words(run) if run or response.view.runs else "the cluster"
        raise TableNotFound(f"no table is '{pattern}'; {whose} has {there}{more}")
    return found


async def list_tables(addresses: Sequence[str], output: Output) -> int:
    """Print a line for each table."""
    response = (await first_status(addresses)).response
    for message in response.view.tables:
        table = wire.table_from_proto(message)
        since = f" from clock {table.change.after_clock + 1} on" if table.change else ""
        proposed = f"; to become {table.proposed.consistency}" if table.proposed else ""
        output.say(
            f"{table.title}: {table.spec.element_count:,} elements of "
            f"{table.spec.dtype.value}, {table.spec.optimizer.label}, "
            f"{table.consistency}{since}{proposed}"
        )
    return 0


def set_consistency(address: str, names: Sequence[str], wanted: Wanted, output: Output) -> int:
    """Change each table, one after the other, and print from which clock on it is so."""
    setting = parsed(wanted.setting).begun
    # Here, so that the other commands start without torch.
    import ps_worker

    with ps_worker.connect(
        address, role="operator", run=wanted.run, request_deadline_s=wanted.timeout_s
    ) as client:
        for name in names:
            last = client.set_consistency(name, setting, after_clock=wanted.after_clock)
            output.say(f"{name}: {setting} from clock {last + 1} on")
    return 0
