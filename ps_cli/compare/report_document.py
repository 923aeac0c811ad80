"""A comparison as a value, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ps_cli.compare.figures import ModeRow, RunFigures
from ps_cli.console.json_text import finite

FORMAT = 2
"""Raised when a field of the JSON changes its meaning."""

FINISHED, FAILED, STOPPED = "finished", "failed", "stopped"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The script, the settings and the machine of a comparison; `{seed}` in the script's arguments
    is the run's seed, `compute` the emulated computation, `began` in ISO 8601.
    """

    script: str
    arguments: tuple[str, ...]
    worker_count: int
    server_count: int
    compute: str
    modes: tuple[str, ...]
    began: str
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One run, its end and its figures until then."""

    mode: str
    seed: int
    state: str
    message: str
    figures: RunFigures


def missing_reports(runs: Sequence[ComparedRun]) -> list[str]:
    """Remarks on figures that no worker of a finished run reported, with the call that does."""
    figures = [run.figures for run in runs if run.state == FINISHED]
    remarks = []
    if figures and not any(each.quality for each in figures):
        remarks.append(
            "No run says how good its model is: have the script call "
            'client.report(quality={"accuracy": ...}) at its end, in every worker.'
        )
    if figures and not any(each.loss_by_step for each in figures):
        remarks.append(
            "No run has a curve of the loss: have the script call client.report(loss=...) after "
            "each step."
        )
    return remarks


def document_of(
    comparison: Comparison, runs: Sequence[ComparedRun], rows: Sequence[ModeRow]
) -> dict[str, Any]:
    """The JSON document; numbers that are not finite are null."""
    document = {
        "format": FORMAT,
        **asdict(comparison),
        "modes": [asdict(row) for row in rows],
        "runs": [_run(run) for run in runs],
    }
    cleaned: dict[str, Any] = finite(document)
    return cleaned


def _run(run: ComparedRun) -> dict[str, Any]:
    derived = ("steps_per_s", "mean_staleness", "max_staleness", "wait_share")
    figures = asdict(run.figures) | {name: getattr(run.figures, name) for name in derived}
    return {**asdict(run), "figures": figures}
