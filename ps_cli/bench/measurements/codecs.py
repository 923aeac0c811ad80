"""Codecs on one core, and a table whose gradients and values travel in them, in GB/s of float32."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import Any

from rich.console import Group, RenderableType

from ps_cli.bench.contenders import contenders
from ps_cli.bench.contenders.ceilings import memcpy
from ps_cli.bench.contenders.child import started
from ps_cli.bench.contenders.codecs import CODECS
from ps_cli.bench.contenders.worker import CODEC, pull_codec_of
from ps_cli.bench.instruments.sampling import Operation, figures_table, measured_in_turns, rounded
from ps_cli.bench.measurements.dense import MOVES, operations_by_move
from ps_cli.bench.settings import BenchSettings
from ps_core.codecs.choices import PushCodec
from ps_core.tables.elements import Codec

DEFAULT_SIZE_MB = 64
QUICK_SIZE_MB = 2
WHOLE = Codec.FP32.value


def codecs(settings: BenchSettings) -> dict[str, Any]:
    """The document of `--json`; takes about a minute."""
    byte_count = settings.table_bytes(DEFAULT_SIZE_MB, QUICK_SIZE_MB)
    names = {WHOLE: "sgd", **{codec: f"sgd{CODEC}{codec}" for codec in CODECS}}
    with ExitStack() as stack:
        (child,) = stack.enter_context(started(("codecs:codecs", str(byte_count))))
        clusters = contenders.enter_all(
            stack,
            [
                contenders.cluster(lane, contenders.members(1, byte_count, [*names.values()]))
                for lane in settings.lanes
            ],
        )
        coded = [f"{codec} {way}" for codec in CODECS for way in ("encode", "decode")]
        moved = {
            (cluster.lane, codec): operations_by_move(
                cluster, name, f"{cluster.lane} {codec} {{}}", byte_count
            )
            for cluster in clusters
            for codec, name in names.items()
        }
        operations = [
            Operation("memcpy", memcpy(byte_count), byte_count),
            *(Operation(name, child.timed(name), byte_count) for name in coded),
            *itertools.chain.from_iterable(found.values() for found in moved.values()),
        ]
        measured = measured_in_turns(operations, settings.round_count, settings.on_progress)
    rates = {name: rounded(each.gb_s) for name, each in measured.items()}
    return {
        "environment": {"table_bytes": byte_count, "round_count": settings.round_count},
        "ceilings": {
            "memcpy_gb_s": rates["memcpy"],
            **{f"{name.replace(' ', '_')}_gb_s": rates[name] for name in coded},
        },
        "rows": [
            {
                "lane": lane,
                "codec": codec,
                "pull_codec": pull_codec_of(codec),
                "bytes_over_fp32": rounded(_share(codec)),
                **{f"{move}_gb_s": rates[f"{lane} {codec} {move}"] for move in MOVES},
                **{
                    f"{move}_over_fp32": rounded(
                        rates[f"{lane} {codec} {move}"] / rates[f"{lane} {WHOLE} {move}"]
                    )
                    for move in MOVES
                },
            }
            for lane, codec in moved
        ],
    }


def _share(codec: str) -> float:
    """Bytes of a payload over those of float32."""
    count = 2**18
    found = PushCodec.parsed(codec).payload_bytes(count, 1)
    return found / Codec.FP32.payload_bytes(count)


def codecs_view(document: dict[str, Any]) -> RenderableType:
    ceilings = document["ceilings"]
    alone = figures_table(
        "codecs: GB/s of float32 on one core",
        *("encode", "decode"),
        caption=f"memcpy: {ceilings['memcpy_gb_s']:.2f} GB/s; the last four keep what is left",
    )
    for codec in CODECS:
        ways = (ceilings[f"{codec}_{way}_gb_s"] for way in ("encode", "decode"))
        alone.add_row(codec, *(f"{rate:.2f}" for rate in ways))
    moved = figures_table(
        "codecs: GB/s of parameters (in brackets: over fp32 in this run)", "bytes", *MOVES
    )
    for row in document["rows"]:
        moved.add_row(
            f"{row['lane']} {row['codec']}",
            f"{row['bytes_over_fp32']:.3f}",
            *(f"{row[f'{move}_gb_s']:.2f} ({row[f'{move}_over_fp32']:.2f})" for move in MOVES),
        )
    return Group(alone, moved)
