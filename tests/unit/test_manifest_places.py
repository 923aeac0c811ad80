"""Names of directories and places in a manifest, and what a manifest says of itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_core.change import Checkpoint, TableChange
from ps_core.consistency import Consistency
from ps_core.errors import InvalidCheckpoint
from ps_core.manifest import (
    MAX_PLACE_CHARACTERS,
    PartReport,
    ReportedTable,
    directory_name,
    left_directory_name,
    place_in,
    split_place,
)
from tests.unit.test_manifest import MANIFEST

DIRECTORY = "00000012-3fa9c1d2"


def test_what_workers_left_has_a_directory_of_the_cluster() -> None:
    assert directory_name(12, "3fa9c1d2-more") == DIRECTORY
    assert left_directory_name("3fa9c1d2-more") == "left-3fa9c1d2"
    assert left_directory_name("a-b") == "left-a-b"


def test_a_place_is_a_directory_and_a_file() -> None:
    place = place_in(DIRECTORY, "server-1.safetensors")
    assert place == f"{DIRECTORY}/server-1.safetensors"
    assert split_place(place) == (DIRECTORY, "server-1.safetensors")


@pytest.mark.parametrize(
    "place",
    [
        "",
        DIRECTORY,
        f"{DIRECTORY}/",
        f"{DIRECTORY}/manifest.json",
        f"{DIRECTORY}/../x",
        f"{DIRECTORY}/a/b",
        f"{DIRECTORY}/.x",
        "/server-1",
        "elsewhere/server-1",
        "../server-1",
    ],
)
def test_what_is_no_place_is_none(place: str) -> None:
    assert split_place(place) is None


def test_a_place_has_so_many_characters_at_most() -> None:
    longest = "9" * (MAX_PLACE_CHARACTERS - len("-3fa9c1d2/server-1"))
    assert split_place(f"{longest}-3fa9c1d2/server-1") is not None
    assert split_place(f"9{longest}-3fa9c1d2/server-1") is None
    assert MAX_PLACE_CHARACTERS == 240


def test_a_manifest_says_whether_it_is_full_and_whether_it_was_imported() -> None:
    assert MANIFEST.is_full is False
    assert replace(MANIFEST, bases=()).is_full is True
    assert MANIFEST.is_imported is False
    assert replace(MANIFEST, timeline=b"").is_imported is True


def test_a_table_that_is_not_there_is_named_with_those_that_are() -> None:
    there = ", ".join(f"'{table.name}'" for table in MANIFEST.tables)
    with pytest.raises(InvalidCheckpoint) as caught:
        MANIFEST.table("u")
    assert caught.value.message.endswith(f"has no table 'u'; expected one of: {there}")
    with pytest.raises(InvalidCheckpoint) as caught:
        replace(MANIFEST, tables=()).table("u")
    assert caught.value.message.endswith("expected one of: none")


def test_who_has_nothing_to_write_reports_nothing() -> None:
    assert PartReport() == PartReport("", 0, "", {}, "", 0, 0, ())
    assert ReportedTable(3, 7) == ReportedTable(3, 7, is_torn=False)


def test_a_checkpoint_begins_uncut_and_full_and_a_change_is_of_none() -> None:
    begun = Checkpoint(1, "file:///x")
    assert (begun.is_cut, begun.base) == (False, 0)
    assert TableChange(1, 0, Consistency()).checkpoint == 0
