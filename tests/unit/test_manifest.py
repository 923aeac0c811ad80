"""The manifest of a checkpoint: it comes back as it was, and what is wrong is named."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ps_core.errors import InvalidCheckpoint
from ps_core.manifest import (
    DataSetSpec,
    Manifest,
    SavedDataSet,
    SavedPart,
    SavedTable,
    SavedWorker,
    directory_name,
    from_json,
    number_of,
    to_json,
)

SHA = "ab" * 32
MANIFEST = Manifest(
    number=12,
    created="2026-11-22T10:20:00Z",
    reason="every 100 steps, für uns",
    cluster_id="3fa9c1d27b60a5e4",
    timeline=bytes(range(16)),
    worker_count=4,
    tables=(
        SavedTable("model/0", {"elementCount": "100", "lr": 0.1}, "ssp:4", 41, False, 3),
        SavedTable("loose", {}, "asp", 7, True, 1),
    ),
    parts=(
        SavedPart("server-1-8812.safetensors", 1000, SHA, {"model/0": 2, "loose": 1}),
        SavedPart("server-2-8813.safetensors", 500, SHA, {"model/0": 1}, 1, 4096),
    ),
    workers=(
        SavedWorker(0, 41, "worker-0-8817.safetensors", 5300, SHA),
        SavedWorker(1, 41),
        SavedWorker(3, 40, problem="it was killed"),
    ),
    bases=("00000010-3fa9c1d2", "00000011-3fa9c1d2"),
    lineage=(b"before" * 2, b"first"),
    data_sets=(
        SavedDataSet(DataSetSpec("train", 10, 4, 17), 3, 2, (2,), 5),
        SavedDataSet(DataSetSpec("held", 10, 4, 0), 0, 3, (0, 1, 2), 3),
    ),
)


def sealed(document: dict[str, Any]) -> str:
    """The document with the checksum that it should have."""
    fields = {name: value for name, value in document.items() if name != "sha256"}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return json.dumps({**fields, "sha256": hashlib.sha256(text.encode()).hexdigest()})


def test_it_comes_back_as_it_was() -> None:
    assert from_json(to_json(MANIFEST), "here") == MANIFEST


def test_its_checksum_is_as_the_page_says() -> None:
    assert from_json(sealed(json.loads(to_json(MANIFEST))), "here") == MANIFEST


def test_one_of_the_first_version_has_no_lineage() -> None:
    document = json.loads(to_json(MANIFEST))
    del document["lineage"], document["data_sets"]
    document["version"] = 1
    assert from_json(sealed(document), "here") == replace(MANIFEST, lineage=(), data_sets=())


def test_one_of_the_second_version_has_no_data_sets() -> None:
    document = json.loads(to_json(MANIFEST))
    del document["data_sets"]
    document["version"] = 2
    assert from_json(sealed(document), "here") == replace(MANIFEST, data_sets=())


def test_a_part_may_refer_to_partitions_without_rows_alone() -> None:
    part = replace(MANIFEST.parts[1], referred_byte_count=0)
    manifest = replace(MANIFEST, parts=(MANIFEST.parts[0], part))
    assert from_json(to_json(manifest), "here") == manifest


def test_a_data_set_is_cut_into_shards_of_which_the_last_may_be_smaller() -> None:
    spec = DataSetSpec("data", 10, 4, 0)
    assert spec.shard_count == 3
    assert [spec.samples(n) for n in range(3)] == [range(4), range(4, 8), range(8, 10)]
    assert DataSetSpec("data", 8, 4, 0).shard_count == 2


def test_a_run_is_its_timeline_and_those_before() -> None:
    assert MANIFEST.run == {MANIFEST.timeline, b"before" * 2, b"first"}
    assert replace(MANIFEST, timeline=b"", lineage=()).run == frozenset()


def test_what_it_adds_up_to() -> None:
    assert MANIFEST.byte_count == 6800
    assert (MANIFEST.referred_byte_count, MANIFEST.referred_block_count) == (4096, 1)
    assert not MANIFEST.is_full
    assert list(MANIFEST.files) == [
        "server-1-8812.safetensors", "server-2-8813.safetensors", "worker-0-8817.safetensors",
    ]  # fmt: skip
    assert MANIFEST.table("loose").is_torn
    with pytest.raises(InvalidCheckpoint, match="no table 'tight'; expected one of: 'model/0'"):
        MANIFEST.table("tight")


def test_directories_are_named_by_number_and_cluster() -> None:
    assert directory_name(12, "3fa9c1d27b60a5e4") == MANIFEST.directory == "00000012-3fa9c1d2"
    assert directory_name(123_456_789, "a/b") == "123456789-a-b"
    assert number_of("00000012-3fa9c1d2") == 12
    assert number_of(directory_name(123_456_789, "a/b")) == 123_456_789
    for other in ("12-3fa9c1d2", "00000012", "00000012-", "00000012-3fa9c1d2x", "x0000012-a"):
        assert number_of(other) is None


Change = Callable[[dict[str, Any]], object]

WRONG: list[tuple[Change, str]] = [
    (lambda d: d.update(format="zip"), "here: format is 'zip'; expected 'pushpull-checkpoint'"),
    (lambda d: d.update(version=4), "version is 4; expected at most 3: a newer pushpull"),
    (lambda d: d.update(version=1), "there is a field 'lineage'; expected none of that name"),
    (lambda d: d.update(version=2), "there is a field 'data_sets'; expected none of that name"),
    (lambda d: d["data_sets"].append(d["data_sets"][0]), "two data sets are named 'train'"),
    (lambda d: d["data_sets"][0].update(sample_count=0), "sample_count is 0; expected at least 1"),
    (lambda d: d["data_sets"][0].update(shard_size=0), "shard_size is 0; expected at least 1"),
    (lambda d: d["data_sets"][0].update(issued_count=4), "issued_count is 4; expected at most its"),
    (lambda d: d["data_sets"][0].update(open_shards=[0, 3]), "open_shards is .*; expected some of"),
    (lambda d: d["data_sets"][0].update(open_shards=[1, 1]), "open_shards is .*each once"),
    (lambda d: d["data_sets"][0].update(open_shards=[0, 1, 2]), "expected some of 2 issued shards"),
    (lambda d: d["data_sets"][0].update(open_shards=[-1]), "open_shards is .-1.; expected some"),
    (lambda d: d["data_sets"][0].update(open_shards=[True]), "open_shards is .True.; expected"),
    (lambda d: d["data_sets"][0].pop("seed"), "seed is missing; expected an integer"),
    (lambda d: d.pop("lineage"), "lineage is missing; expected a list"),
    (lambda d: d.update(lineage=["xy"]), "lineage is .*; expected timelines in hexadecimal digits"),
    (lambda d: d.update(lineage=[""]), "lineage is .*; expected timelines in hexadecimal digits"),
    (lambda d: d.update(lineage=[7]), "lineage is .*; expected timelines in hexadecimal digits"),
    (lambda d: d.update(lineage=["ab"] * 257), "lineage is 257; expected at most 256 timelines"),
    (lambda d: d.update(version="1"), "version is '1'; expected an integer"),
    (lambda d: d.update(version=0), "version is 0; expected at least 1"),
    (lambda d: d.update(number=0), "number is 0; expected at least 1"),
    (lambda d: d.update(number=True), "number is True; expected an integer"),
    (lambda d: d.update(number=1.5), "number is 1.5; expected an integer"),
    (lambda d: d.update(created="yesterday"), "created is 'yesterday'; expected a time such as"),
    (lambda d: d.pop("reason"), "reason is missing; expected a string"),
    (lambda d: d.update(cluster_id=""), "cluster_id is ''; expected 1 to 200 characters"),
    (lambda d: d.update(timeline="xy"), "timeline is 'xy'; expected hexadecimal digits"),
    (lambda d: d.update(worker_count=-1), "worker_count is -1; expected at least 0"),
    (lambda d: d.update(tables={}), "tables is {}; expected a list"),
    (lambda d: d.update(extra=1), "there is a field 'extra'; expected none of that name"),
    (lambda d: d["tables"].append("t"), r"here: tables\[2\] is a string; expected a JSON object"),
    (lambda d: d["tables"][0].update(name=""), r"tables\[0\]: name is ''; expected a name"),
    (lambda d: d["tables"][0].update(spec=None), r"tables\[0\]: spec is None; expected an object"),
    (lambda d: d["tables"][0].update(clock=-1), r"tables\[0\]: clock is -1; expected at least 0"),
    (lambda d: d["tables"][0].update(is_torn=0), "is_torn is 0; expected true or false"),
    (lambda d: d["tables"][0].update(block_count=0), "block_count is 0; expected at least 1"),
    (lambda d: d["tables"][0].update(size=1), r"tables\[0\]: there is a field 'size'"),
    (lambda d: d["tables"][1].update(name="model/0"), "two tables are named 'model/0'; expected"),
    (lambda d: d["tables"][0].update(block_count=4), "3 blocks of table 'model/0'; expected its"),
    (lambda d: d["parts"][0]["tables"].update(x=1), "blocks of a table 'x'; there is none"),
    (lambda d: d["parts"][0]["tables"].update(loose=0), "tables: loose is 0; expected at least 1"),
    (lambda d: d["parts"][0].update(file="../x"), "file is '../x'; expected the plain name"),
    (lambda d: d["parts"][0].update(file="a/b"), "file is 'a/b'; expected the plain name"),
    (lambda d: d["parts"][0].update(file=".."), "file is '..'; expected the plain name"),
    (lambda d: d["parts"][0].update(file=""), "file is ''; expected the plain name"),
    (lambda d: d["parts"][0].update(file="manifest.json"), "expected another name than the man"),
    (lambda d: d["parts"][0].update(byte_count=9), "byte_count is 9; expected at least 10"),
    (lambda d: d["parts"][0].update(header_sha256="AB" * 32), "expected 64 hexadecimal digits"),
    (lambda d: d["parts"][1].update(file="server-1-8812.safetensors"), "two parts are in the fil"),
    (lambda d: d.pop("bases"), "bases is missing; expected a list"),
    (lambda d: d.update(bases=["../x"]), "bases is .*; expected the names of checkpoints' dir"),
    (lambda d: d.update(bases=[7]), r"bases is \[7\]; expected the names of checkpoints' direct"),
    (lambda d: d["bases"].reverse(), "bases is .*; expected each once, ascending"),
    (lambda d: d.update(bases=d["bases"][:1] * 2), "bases is .*; expected each once, ascending"),
    (lambda d: d.update(bases=["00000012-3fa9c1d2"]), "it is its own base; expected other check"),
    (lambda d: d.update(bases=[]), "it has 0 bases for 1 blocks that are referred to; expected"),
    (lambda d: d["parts"][1].update(referred_block_count=2), "count is 2; expected at most its b"),
    (lambda d: d["parts"][0].update(referred_byte_count=1), "count is 1; expected those of 0 b"),
    (lambda d: d["parts"][0].pop("referred_block_count"), "referred_block_count is missing"),
    (lambda d: d["workers"][0].update(problem="lost"), "expected none, as there is a file"),
    (lambda d: d["workers"][1].update(byte_count=1), "byte_count is 1; expected 0, as there is no"),
    (lambda d: d["workers"][1].update(rank=0), "two workers have rank 0; expected one"),
    (lambda d: d["workers"][0].update(rank="0"), r"workers\[0\]: rank is '0'; expected an integer"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), WRONG)
def test_what_is_wrong_is_named(change: Change, reason: str) -> None:
    document = json.loads(to_json(MANIFEST))
    change(document)
    with pytest.raises(InvalidCheckpoint, match=reason) as caught:
        from_json(sealed(document), "here")
    assert caught.value.message.startswith("here")


@pytest.mark.parametrize(
    ("length", "shown"), [(98, f"'{'x' * 98}'"), (99, f"'{'x' * 99}..."), (999, f"'{'x' * 99}...")]
)
def test_of_a_long_value_the_beginning_is_shown(length: int, shown: str) -> None:
    """A hundred characters, with the quotation marks."""
    document = {**json.loads(to_json(MANIFEST)), "created": "x" * length}
    with pytest.raises(InvalidCheckpoint, match=re.escape(f"created is {shown}; expected a time")):
        from_json(sealed(document), "here")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not a manifest: Expecting value"),
        ("[1]", "here is a list; expected a JSON object"),
        ("null", "here is null; expected a JSON object"),
        ("[" * 100_000, "is not a manifest"),
        ('{"number": 1, "number": 2}', "the field 'number' is there twice"),
        ('{"number": NaN}', "NaN is no number"),
        ('{"number": 1' + "0" * 5000 + "}", "Exceeds the limit"),
    ],
)
def test_what_is_no_manifest_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=reason):
        from_json(text, "here")


def test_a_change_that_means_something_is_found() -> None:
    text = to_json(MANIFEST).replace('"clock": 40', '"clock": 41')
    with pytest.raises(InvalidCheckpoint, match=r"here: sha256 is .*: the manifest is damaged"):
        from_json(text, "here")


def test_one_that_would_be_refused_is_not_written() -> None:
    table = SavedTable("t", {"lr": float("nan")}, "bsp", 1, False, 1)
    with pytest.raises(InvalidCheckpoint, match="cannot be written as JSON"):
        to_json(Manifest(1, "", "", "c", b"", 1, (table,), (), ()))
    with pytest.raises(InvalidCheckpoint, match="the manifest of checkpoint 1: created is ''"):
        to_json(Manifest(1, "", "", "c", b"", 1, (), (), ()))
