"""Options of `pushpull bench` that a benchmark has no use for."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from ps_cli.__main__ import app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("optimizers", "--lane", "grpc"), "lane is 'grpc'; optimizers has none to choose"),
        (("link", "--lane", "shm"), "lane is 'shm'; link has none to choose"),
        (("optimizers", "--rate-mbit", "5"), "rate-mbit is 5; only link has a link of a rate"),
        (("dense", "--rate-mbit", "5"), "rate-mbit is 5; only link has a link of a rate"),
        (("shards", "--size-mb", "1"), "size-mb is 1; shards has a size of its own"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    arguments: tuple[str, ...], message: str
) -> None:
    found = CliRunner().invoke(app, ["bench", *arguments, "--quick"])
    assert (found.exit_code, found.output) == (2, f"pushpull: {message}\n")


def test_a_link_that_is_too_slow_for_the_table_is_refused() -> None:
    """Else the rounds would be measured for a quarter of an hour, and the steps then given up."""
    found = CliRunner().invoke(app, ["bench", "link", "--rate-mbit", "20"])
    assert found.exit_code == 2
    assert found.output == (
        "pushpull: 4 steps of 64 MiB would take 429 s at 20 Mbit/s; expected at most 240 s: choose "
        "a smaller --size-mb, or a larger --rate-mbit\n"
    )
