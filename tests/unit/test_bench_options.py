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
