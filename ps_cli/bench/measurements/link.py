"""Rounds of one table over a link of a given rate, in each codec, and steps of a model over it."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import RenderableType

from ps_cli.bench.contenders.child import ANSWER_DEADLINE_S, Child, started
from ps_cli.bench.contenders.link import OVERLAPS, TRAINED_STEPS, WAITS
from ps_cli.bench.contenders.worker import pull_codec_of
from ps_cli.bench.instruments.sampling import MIB, figures_table, rounded, take_turns
from ps_cli.bench.instruments.shaped_link import shaped_link
from ps_cli.bench.settings import BenchSettings
from ps_core.codecs.choices import NONE
from ps_core.errors import InvalidConfig
from ps_runtime.cluster import join_secret

DEFAULT_SIZE_MB = 64
QUICK_SIZE_MB = 2
CODECS = (NONE, "bf16", "fp16", "int8", "sign", "topk", "lowrank")

_MOST_OF_DEADLINE = 0.8
"""The share of a contender's deadline; the rest is for what the processors do."""

_Round = tuple[float, int, int, int]
"""Seconds, bytes sent and received, and those of both without headers."""


def link(settings: BenchSettings) -> dict[str, Any]:
    """The document of `--json`; takes half a minute at 1 Gbit/s."""
    byte_count = settings.table_bytes(DEFAULT_SIZE_MB, QUICK_SIZE_MB)
    link_s = link_round_s(byte_count, settings)
    _check_time(link_s, byte_count, settings)
    join_secret.ensure(os.environ)  # the same for both ends
    with (
        shaped_link(settings.rate_mbit) as (servers, workers),
        started(("link:cluster", servers.address), namespace=servers.namespace) as (cluster,),
    ):
        address = cluster.do("address").result
        given = (address, workers.device, str(byte_count), str(link_s), *CODECS)
        with started(("link:worker", *given), namespace=workers.namespace) as (worker,):
            samples = take_turns(
                {codec: partial(_moved, worker, codec) for codec in CODECS},
                settings.round_count,
                settings.on_progress,
            )
            trained = take_turns(
                {name: partial(_trained_s, worker, name) for name in (WAITS, OVERLAPS)},
                settings.round_count,
                settings.on_progress,
            )
    medians = {
        codec: [statistics.median(column) for column in zip(*found, strict=True)]
        for codec, found in samples.items()
    }
    steps_s = {name: statistics.median(found) for name, found in trained.items()}
    return {
        "environment": {
            "table_bytes": byte_count,
            "rate_mbit": settings.rate_mbit,
            "round_count": settings.round_count,
        },
        "ceilings": {"link_round_s": rounded(link_s)},
        "rows": [
            {
                "codec": codec,
                "pull_codec": pull_codec_of(codec),
                "round_s": rounded(taken_s),
                "round_over_none": rounded(medians[NONE][0] / taken_s),
                "pushed_bytes": round(sent),
                "pulled_bytes": round(received),
                "of_link": rounded(_most_of_link(samples[codec], settings)),
                "bytes_over_none": rounded((sent + received) / sum(medians[NONE][1:3])),
            }
            for codec, (taken_s, sent, received, _) in medians.items()
        ],
        "compared": [
            {
                "overlap_pull": name == OVERLAPS,
                "compute_s": rounded(link_s),
                "step_s": rounded(step_s),
                "step_over_waiting": rounded(steps_s[WAITS] / step_s),
            }
            for name, step_s in steps_s.items()
        ],
    }


def link_round_s(byte_count: int, settings: BenchSettings) -> float:
    """The time of so many bytes on the link, both ways, one after the other."""
    return 2 * byte_count * 8 / 1e6 / settings.rate_mbit


def _check_time(link_s: float, byte_count: int, settings: BenchSettings) -> None:
    """Refuse steps that would take longer than a contender may: each computes and then moves all,
    for `link_s` each.
    """
    taken_s, most_s = 2 * TRAINED_STEPS * link_s, _MOST_OF_DEADLINE * ANSWER_DEADLINE_S
    if taken_s > most_s:
        raise InvalidConfig(
            f"{TRAINED_STEPS} steps of {byte_count // MIB} MiB would take {taken_s:.0f} s at "
            f"{settings.rate_mbit} Mbit/s; expected at most {most_s:.0f} s: choose a smaller "
            "--size-mb, or a larger --rate-mbit"
        )


def _most_of_link(rounds: Sequence[_Round], settings: BenchSettings) -> float:
    """The highest share of a round's time that the link takes for its bytes without headers, among
    which are acknowledgements, that travel against the others. What is pulled leaves when all that
    is pushed has arrived, so the two directions follow each other.
    """
    byte_s = 8 / 1e6 / settings.rate_mbit
    return max(carried * byte_s / taken_s for taken_s, _, _, carried in rounds)


def link_fault(document: dict[str, Any]) -> str:
    """The reason why the benchmark failed; empty: no round was faster than the link."""
    return "; ".join(
        f"{row['codec']}: the link takes {row['of_link']:g} times as long for the bytes of a round "
        "as the round took"
        for row in document["rows"]
        if row["of_link"] > 1
    )


def _trained_s(worker: Child, name: str) -> float:
    return float(worker.do(name).result)


def _moved(worker: Child, codec: str) -> _Round:
    seconds, sent, received, carried = worker.do(codec).result
    return seconds, sent, received, carried


def link_view(document: dict[str, Any]) -> RenderableType:
    environment = document["environment"]
    table = figures_table(
        f"link: a round over {environment['rate_mbit']} Mbit/s",
        *("seconds", "of the link", "over none", "bytes", "bytes over none"),
        caption=f"the link alone, float32 both ways, one after the other: "
        f"{document['ceilings']['link_round_s']:.3f} s. A step whose computation takes as long: "
        + " and ".join(
            f"{each['step_s']:.3f} s{' with overlap_pull' * each['overlap_pull']}"
            for each in document["compared"]
        ),
    )
    for row in document["rows"]:
        byte_count = row["pushed_bytes"] + row["pulled_bytes"]
        table.add_row(
            row["codec"],
            f"{row['round_s']:.3f}",
            f"{row['of_link']:.0%}",
            f"{row['round_over_none']:.2f}",
            f"{byte_count / 1e6:.1f} MB",
            f"{row['bytes_over_none']:.3f}",
        )
    return table
