"""Many sessions on one server, a few of them active at a time, compared with two workers."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, NamedTuple

from rich.table import Table as TextTable

from ps_cli.bench.contenders import contenders
from ps_cli.bench.contenders.child import together
from ps_cli.bench.instruments.process_memory import PeakWatch, thread_count
from ps_cli.bench.instruments.sampling import (
    MB,
    Operation,
    figures_table,
    measured_in_turns,
    rounded,
)
from ps_cli.bench.settings import BenchSettings

DEFAULT_SIZE_MB = 32
QUICK_SIZE_MB = 1
MOVES = ("push", "pull", "round")


class _Crowd(NamedTuple):
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

    def commands(self, byte_count: int) -> list[tuple[str, ...]]:
        ranks = [str(rank) for rank in range(self.session_count)]
        given = ("worker:crowd", str(byte_count), str(self.operation_count))
        return [(*given, *ranks[at :: self.process_count]) for at in range(self.process_count)]


PAIR, CROWD = _Crowd(2, 1, 32), _Crowd(8, 8, 8)
"""Both move the same bytes in a sample; each session of the crowd has one turn in it."""

QUICK_PAIR, QUICK_CROWD = _Crowd(2, 1, 4), _Crowd(2, 4, 4)


def sessions(settings: BenchSettings) -> dict[str, Any]:
    """The document of `--json`; takes a few minutes."""
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
        clusters = contenders.enter_all(
            stack,
            [
                contenders.cluster(lane, each.commands(byte_count), worker_count=each.session_count)
                for each in crowds
            ],
        )
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
            measured = measured_in_turns(operations, settings.round_count, settings.on_progress)
            threads = [thread_count(cluster.server_pid) for cluster in clusters]
    return [
        {
            "lane": lane,
            "workers": crowd.session_count,
            "processes": crowd.process_count,
            "active": crowd.process_count,
            "servers": 1,
            **{f"{move}_gb_s": rounded(measured[crowd.name_of(move)].gb_s) for move in MOVES},
            "server_thread_count": threads[at],
            "server_peak_bytes": watches[at].peak_bytes,
            "server_borrowed_bytes": watches[at].borrowed_bytes,
        }
        for at, crowd in enumerate(crowds)
    ]


def _compared(pair: dict[str, Any], crowd: dict[str, Any]) -> dict[str, float]:
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
        rates = [f"{row[f'{move}_gb_s']:.2f}" for move in MOVES]
        if row["workers"] > PAIR.session_count:
            over = (ratios[row["lane"]][f"{move}_over_two_workers"] for move in MOVES)
            rates = [f"{rate} ({each:.2f})" for rate, each in zip(rates, over, strict=True)]
        borrowed = f"(+ {row['server_borrowed_bytes'] / MB:.0f})"
        table.add_row(
            f"{row['lane']}, {row['workers']}",
            *rates,
            str(row["server_thread_count"]),
            f"{row['server_peak_bytes'] / MB:.0f} {borrowed}",
        )
    return table
