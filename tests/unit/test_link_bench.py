"""`pushpull bench link`: what a link lets through at once, and rounds that are too fast for it."""

from __future__ import annotations

import pytest

from ps_cli.bench.instruments.shaped_link import burst_bytes
from ps_cli.bench.measurements.link import link_fault


@pytest.mark.parametrize(
    ("rate_mbit", "byte_count"), [(10, 4_096), (100, 25_000), (1000, 250_000), (10_000, 2_500_000)]
)
def test_an_end_sends_two_milliseconds_of_the_link_at_once(rate_mbit: int, byte_count: int) -> None:
    assert burst_bytes(rate_mbit) == byte_count


def test_a_round_that_is_faster_than_the_link_is_a_fault() -> None:
    rows = [{"codec": codec, "of_link": share} for codec, share in (("none", 0.97), ("int8", 1.53))]
    assert link_fault({"rows": rows[:1]}) == ""
    fault = link_fault({"rows": rows})
    assert fault == (
        "int8: the link takes 1.53 times as long for the bytes of a round as the round took"
    )
