"""Many sessions on one server, a few of them active at a time, compared with two workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.table import Table as TextTable

import ps_worker as ps
from ps_cli.bench.contenders.child import Child, together
from ps_cli.bench.contenders.contenders import Cluster, enter_all
from ps_cli.bench.instruments.environment import environment
from ps_cli.bench.instruments.process_memory import PeakWatch, thread_count
from ps_cli.bench.instruments.sampling import (
    Measured,
    Operation,
    figures_table,
    rounded,
    take_turns,
)
from ps_cli.bench.settings import BenchSettings

DEFAULT_SIZE_MB = 32
QUICK_SIZE_MB = 1
MOVES = ("push", "pull", "round")
MB = 1e6


@dataclass(frozen=True, slots=True)
class _Crowd:
    """Processes with several sessions each; one session of a process is active at a time.

    A sample has `operation_count` operations of each process, each by its next session.
    """

    process_count: int
    sessions_each: int
    operation_count: int

    @property
    def session_count(self) -> int:
        return self.process_count * self.sessions_each

    @property
    def operations_per_sample(self) -> int:
        return self.process_count * self.operation_count

    def name_of(self, move: str) -> str:
        return f"{self.session_count} sessions, {move}"


PAIR, CROWD = _Crowd(2, 1, 32), _Crowd(8, 8, 8)
"""Both move the same bytes in a sample; each session of the crowd has one turn in it."""

QUICK_PAIR, QUICK_CROWD = _Crowd(2, 1, 4), _Crowd(2, 4, 4)


def sessions(settings: BenchSettings) -> dict[str, object]:
    """Measure everything; the document of `--json`.

    Blocking: a few minutes.
    """
    found = environment()
    byte_count = settings.table_bytes(DEFAULT_SIZE_MB, QUICK_SIZE_MB)
    crowds = (QUICK_PAIR, QUICK_CROWD) if settings.quick else (PAIR, CROWD)
    rows: list[dict[str, Any]] = []
    compared = []
    for lane in settings.lanes:
        pair, crowd = _measure(lane, crowds, byte_count, settings.within(lane))
        rows += (pair, crowd)
        compared.append({"lane": lane, **_compared(pair, crowd)})
    return {
        "environment": {
            **found,
            "table_bytes": byte_count,
            "operations_per_sample": crowds[1].operations_per_sample,
            "round_count": settings.round_count,
        },
        "ceilings": {},
        "rows": rows,
        "compared": compared,
    }


def _measure(
    lane: str, crowds: tuple[_Crowd, ...], byte_count: int, settings: BenchSettings
) -> list[dict[str, Any]]:
    """The rows of one lane; its crowds, each with its own server, take turns."""
    with contextlib.ExitStack() as stack:
        clusters = enter_all(stack, [_gather(lane, crowd, byte_count) for crowd in crowds])
        operations = [
            Operation(
                crowd.name_of(move),
                partial(together, cluster.workers, move),
                byte_count * crowd.operations_per_sample,
            )
            for crowd, cluster in zip(crowds, clusters, strict=True)
            for move in MOVES
        ]
        with contextlib.ExitStack() as watching:
            watches = [
                watching.enter_context(PeakWatch(cluster.server_pid, since_its_start=True))
                for cluster in clusters
            ]
            measured = take_turns(operations, settings.round_count, settings.on_round)
            threads = [thread_count(cluster.server_pid) for cluster in clusters]
    return [
        {
            "lane": lane,
            "workers": crowd.session_count,
            "processes": crowd.process_count,
            "active": crowd.process_count,
            "servers": 1,
            **_rates(crowd, measured),
            "server_thread_count": threads[at],
            "server_peak_bytes": watches[at].peak_bytes,
            "server_borrowed_bytes": watches[at].borrowed_bytes,
        }
        for at, crowd in enumerate(crowds)
    ]


@contextlib.contextmanager
def _gather(lane: str, crowd: _Crowd, byte_count: int) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        roles = stack.enter_context(ps.local_cluster(servers=1, workers=crowd.session_count))
        given = (roles.address, lane, str(byte_count), str(crowd.operation_count))
        ranks = [str(rank) for rank in range(crowd.session_count)]
        workers = Child.start_all(
            *(
                ("ps_cli.bench.contenders.crowd", *given, *ranks[number :: crowd.process_count])
                for number in range(crowd.process_count)
            )
        )
        for worker in workers:
            stack.enter_context(worker)
        yield Cluster(lane, workers, (roles.process_ids["server 0"],))


def _rates(crowd: _Crowd, measured: dict[str, Measured]) -> dict[str, float]:
    return {f"{move}_gb_s": rounded(measured[crowd.name_of(move)].gb_s) for move in MOVES}


def _compared(pair: dict[str, Any], crowd: dict[str, Any]) -> dict[str, float]:
    """The crowd compared with two workers."""
    more_sessions = crowd["workers"] - pair["workers"]
    grown_bytes = crowd["server_peak_bytes"] - pair["server_peak_bytes"]
    return {
        **{
            f"{move}_over_two_workers": rounded(crowd[f"{move}_gb_s"] / pair[f"{move}_gb_s"])
            for move in MOVES
        },
        "threads_more": crowd["server_thread_count"] - pair["server_thread_count"],
        "bytes_more_per_session": round(grown_bytes / more_sessions),
    }


def sessions_view(document: dict[str, Any]) -> TextTable:
    table = figures_table(
        "sessions: GB/s, sum over those active (in brackets: of 2 workers')",
        *(*MOVES, "threads", "MB"),
        caption="threads, MB: the server's (+ its workers' memory that it maps)",
    )
    ratios = {lane["lane"]: lane for lane in document["compared"]}
    for row in document["rows"]:
        ratio = ratios[row["lane"]] if row["workers"] > PAIR.session_count else None
        borrowed = f"(+ {row['server_borrowed_bytes'] / MB:.0f})"
        table.add_row(
            f"{row['lane']}, {row['workers']}",
            *(_rate(row, ratio, move) for move in MOVES),
            str(row["server_thread_count"]),
            f"{row['server_peak_bytes'] / MB:.0f} {borrowed}",
        )
    return table


def _rate(row: dict[str, Any], ratio: dict[str, Any] | None, move: str) -> str:
    rate = f"{row[f'{move}_gb_s']:.2f}"
    return rate if ratio is None else f"{rate} ({ratio[f'{move}_over_two_workers']:.2f})"
