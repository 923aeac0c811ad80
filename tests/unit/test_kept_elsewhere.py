"""Servers that keep another cluster's values, as the scheduler knows them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from ps_core.errors import InvalidConfig, Overloaded
from ps_runtime.cluster import kept_values
from scheduler.machine.kept_values import KEPT_LEASES, MAX_COUNT, KeptElsewhere, KeptValues

LEASE_S = 3.0


def kept(address: str = "h:7", cluster_id: str = "c0", file: str = "/x.json") -> KeptValues:
    return KeptValues(address, cluster_id, file)


def addresses(known: KeptElsewhere, now_s: float) -> list[str]:
    return [address for address, _ in known.at(now_s)]


def test_what_is_said_again_is_news_once_and_is_shown_while_it_is_said() -> None:
    known = KeptElsewhere(LEASE_S)
    assert known.said(kept(), 10.0)
    assert not known.said(kept(), 12.0)
    assert known.said(kept(file=""), 13.0), "another file is news"
    assert known.said(kept("a:1"), 13.0)
    assert addresses(known, 13.0 + KEPT_LEASES * LEASE_S) == ["a:1", "h:7"]
    known.said(kept("a:1"), 20.0)
    assert addresses(known, 23.0) == ["a:1"], "the other has not said so again"
    assert known.said(kept(file=""), 23.0), "one that comes back is news"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        (kept(""), "address"),
        (kept(cluster_id=""), "cluster_id"),
        (kept("h" * 301), "address"),
        (kept(cluster_id="c\n"), "cluster_id"),
        (kept(file="x" * 1001), "file"),
        (kept(file="\x1b[31m"), "file"),
    ],
)
def test_what_cannot_be_is_refused_and_not_shown(values: KeptValues, field: str) -> None:
    known = KeptElsewhere(LEASE_S)
    with pytest.raises(InvalidConfig, match=field):
        known.said(values, 1.0)
    assert addresses(known, 1.0) == []


def test_there_are_only_so_many() -> None:
    known = KeptElsewhere(LEASE_S)
    for number in range(MAX_COUNT):
        known.said(kept(f"h:{number}"), 1.0)
    with pytest.raises(Overloaded, match="100 servers have reported kept values"):
        known.said(kept("h:one-more"), 1.0)
    assert not known.said(kept("h:3"), 2.0), "who is known may say so again"
    assert known.said(kept("h:one-more"), 1.5 + KEPT_LEASES * LEASE_S), "when others have gone"


@pytest.mark.parametrize("field", ["session", "view"])
def test_a_damaged_file_of_kept_values_is_named(tmp_path: Path, field: str) -> None:
    """As by a disk: it is JSON and base64, and no message."""
    file = tmp_path / "pushpull-server-1-x.json"
    fields = {"format": kept_values.FORMAT, "session": "", "view": ""}
    file.write_text(json.dumps({**fields, field: base64.b64encode(b"\xff" * 9).decode()}))
    with pytest.raises(InvalidConfig, match=f"{file} is no file of kept values"):
        kept_values.read(file)
