"""What `pushpull replay` says of logs that were made by hand."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ps_cli.console.output import Output
from ps_cli.replay.options import ReplayOptions
from ps_cli.replay.replay import replay
from ps_core.errors import InvalidCheckpoint, InvalidConfig, InvalidUpdateLog, TableNotFound
from ps_core.keys import TableId
from ps_runtime.checkpoint.directory import locate
from ps_runtime.checkpoint.part_writer import PartWriter, PlannedTable
from ps_runtime.checkpoint.store import CheckpointStore
from tests.unit.checkpoint_files import CLUSTER_ID, saved
from tests.unit.written_logs import ASP, LEFT, MODEL, RIGHT, Owner, WrittenLog

CLOCKS = 100


@pytest.fixture(scope="module")
def bsp_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bsp")
    owners = Owner(LEFT), Owner(RIGHT)
    log = WrittenLog(path)
    for owner in owners:
        log.begin(owner)
    for clock in range(1, CLOCKS + 1):
        for owner in owners:
            log.record(owner.update(clock, (0, 2), skipped=(1,)))
    return path


def said(path: Path, **options: Any) -> str:
    given: dict[str, Any] = {"table": "*", **options}
    stream = io.StringIO()
    with Output(stream) as output:
        assert replay(ReplayOptions(path, **given), output) == 0
    return stream.getvalue()


def shown(path: Path, tmp_path: Path, **options: Any) -> list[int]:
    said(path, json_path=tmp_path / "shown.json", **options)
    document = json.loads((tmp_path / "shown.json").read_text())
    return [version["version"] for version in document["versions"]]


def test_a_line_says_who_and_how_far(bsp_log: Path) -> None:
    text = said(bsp_log, last=2)
    assert f"{bsp_log}: model; the log has versions 0 to 100\n" in text
    lines = text.splitlines()
    assert lines[1].split() == ["version", "time", "(UTC)", "from", "workers", "gradient",
                                "parameters"]  # fmt: skip
    assert re.fullmatch(r" *100  00:20:00\.000  0, 2, \(1 skipped\) +[\d.]+ +[\d.]+", lines[3])


def test_many_versions_are_a_screen_with_both_ends(bsp_log: Path, tmp_path: Path) -> None:
    found = shown(bsp_log, tmp_path)
    assert found == [*range(0, 100, 3), 100]
    assert shown(bsp_log, tmp_path, first=90, to=94) == [90, 91, 92, 93, 94]
    assert shown(bsp_log, tmp_path, every=50) == [0, 50, 100]
    assert shown(bsp_log, tmp_path, last=3) == [98, 99, 100]


def test_under_asp_a_line_has_its_clock_and_what_it_missed(tmp_path: Path) -> None:
    owner = Owner(LEFT, ASP)
    log = WrittenLog(tmp_path, ASP)
    log.begin(owner)
    log.record(owner.update(1, (0,)))
    log.record(owner.update(1, (1,), staleness=7))
    lines = said(tmp_path).splitlines()
    assert re.fullmatch(r" +2 +1 +00:16:42\.000 +1 +7 +[\d.]+ +[\d.]+", lines[4]), lines
    picture = tmp_path / "replay.svg"
    said(tmp_path, plot=picture)
    assert "updates of others missed: 7 at 2 version" in picture.read_text()
    with pytest.raises(InvalidUpdateLog, match="range 0 is at clock 1 at the end"):
        said(tmp_path, export=tmp_path / "model", clock=2)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"export": Path("m"), "against": "c"}, "give one of them"),
        ({"export": Path("m"), "last": 3}, "--export and --against show no versions"),
        ({"at": 3}, "--at and --clock say which version --export writes"),
        ({"export": Path("m"), "at": 3, "clock": 3}, "--at and --clock: give one of them"),
        ({"export": Path("m"), "at": 300}, "there is no version 300; the log has versions 0 to 1"),
        (
            {"json_path": Path("m"), "plot": Path("x/../m")},
            "--json and --plot are both m; expected",
        ),
        ({"first": 70, "to": 60}, "no version is from 70 to 60"),
        ({"evaluate": "nothing"}, "expected MODULE:FUNCTION"),
        ({"evaluate": "ps_core:nothing"}, "'ps_core:nothing': module 'ps_core' has no attribute"),
        ({"evaluate": "nowhere.py:loss"}, "No such file"),
    ],
)
def test_what_cannot_be_is_refused(bsp_log: Path, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(problem)):
        said(bsp_log, **options)


def test_a_loss_that_is_no_number_is_refused(bsp_log: Path, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "def nothing(tensors):\n    tensors\n\n\n"
        "def several(tensors):\n    return tensors.popitem()[1]\n"
    )
    for name, came in (("nothing", "NoneType"), ("several", "Tensor")):
        with pytest.raises(InvalidConfig, match=f"judge.py:{name}' returned a {came}; expected a "):
            said(bsp_log, evaluate=f"{tmp_path}/judge.py:{name}", last=1)


def test_a_table_that_is_not_there_is_named_with_those_that_are(bsp_log: Path) -> None:
    with pytest.raises(TableNotFound, match="no table with parameters is 'x'; the log has 'model'"):
        said(bsp_log, table="x")


# --- against a checkpoint


def checkpoint_of(root: Path, owners: Sequence[Owner], clock: int, *, is_torn: bool = False) -> str:
    """A checkpoint of what they have."""
    name, file = MODEL.spec.name, "server-1.safetensors"
    directory = CheckpointStore(locate(str(root))).directory(1, CLUSTER_ID)
    directory.create()
    path = directory.begin(file)
    slots = ("values", "momentum_buffer")
    writer = PartWriter(path, [PlannedTable(name, MODEL.block_count, slots)])
    for owner in owners:
        for block in owner.values():
            found = owner.shards.stores[MODEL.table_id, owner.range_id].saved(block)
            for tensor, payload in found.tensors:
                writer.append(name, block, tensor, bytes(payload), "F32")
            writer.note_block(name, block, version=found.version, steps=found.steps)
    written = writer.finish(1, CLUSTER_ID)
    directory.commit(file, path)
    manifest = saved([MODEL.spec], file, written, {name: MODEL.block_count})
    tables = tuple(replace(each, clock=clock, is_torn=is_torn) for each in manifest.tables)
    directory.write_manifest(replace(manifest, tables=tables))
    return directory.url


def test_a_table_that_the_checkpoint_does_not_have_is_not_equal(tmp_path: Path) -> None:
    """It may be of later; nobody is told that it was compared."""
    owners = Owner(LEFT), Owner(RIGHT)
    log = WrittenLog(tmp_path / "log")
    for owner in owners:
        log.begin(owner)
        log.record(owner.update(1))
    url = checkpoint_of(tmp_path / "saved", owners, 1)
    stream = io.StringIO()
    with Output(stream) as output:
        assert replay(ReplayOptions(log.path, against=url), output) == 0
        later = replace(MODEL, table_id=TableId(9), spec=replace(MODEL.spec, name="later"))
        log.table(later)
        assert replay(ReplayOptions(log.path, against=url), output) == 1
        assert replay(ReplayOptions(log.path, table="model", against=url), output) == 0
    assert stream.getvalue().splitlines() == [
        "model: equal, bit for bit, at clock 1",
        "model: equal, bit for bit, at clock 1",
        f"later: it is not in {url}",
        "model: equal, bit for bit, at clock 1",
    ]


def test_a_range_of_its_own_moment_has_its_initial_values_and_its_edits(tmp_path: Path) -> None:
    """Neither is an update: one range had none, and another ends with an edit, or before it."""
    left, right = Owner(LEFT, ASP), Owner(RIGHT, ASP)
    log = WrittenLog(tmp_path / "log", ASP)
    for owner in (left, right):
        log.begin(owner)
        log.record(owner.assigned(3.0))
    log.record(left.update(1))
    urls = [checkpoint_of(tmp_path / "before", (left, right), 1, is_torn=True)]
    log.record(left.assigned(5.0, 2))
    urls.append(checkpoint_of(tmp_path / "after", (left, right), 2, is_torn=True))
    for owner in (left, right):
        log.record(owner.update(3))
    for url in urls:
        stream = io.StringIO()
        with Output(stream) as output:
            assert replay(ReplayOptions(log.path, against=url), output) == 0, stream.getvalue()
        text = stream.getvalue()
        assert text == "model: equal, bit for bit, each block at its version in the checkpoint\n"


def test_steps_before_the_initial_values_of_a_late_table_are_counted(tmp_path: Path) -> None:
    """They are no versions of tables of which one was not there."""
    spec = replace(ASP.spec, name="late")
    first, late = Owner(LEFT, ASP), Owner(LEFT, replace(ASP, table_id=TableId(9), spec=spec))
    log = WrittenLog(tmp_path, ASP)
    log.begin(first)
    log.record(first.assigned(1.0))
    for clock in (1, 2, 3):
        log.record(first.update(clock))
    log.table(late.of)
    late.number = first.number
    log.record(late.assigned(2.0))
    first.number = late.number
    log.record(first.update(4))
    words = (
        "3 steps came before table 'late' had its initial values, and are no versions: --table "
        "with the others shows them\n"
    )
    both = tmp_path / "both.json"
    text = said(tmp_path, json_path=both)
    assert "the log has versions 0 to 1\n" in text
    assert words in text
    assert json.loads(both.read_text())["earlier_count"] == 3
    alone = tmp_path / "alone.json"
    text = said(tmp_path, table="model", json_path=alone)
    assert "the log has versions 0 to 4\n" in text
    assert "came before" not in text
    assert json.loads(alone.read_text())["earlier_count"] == 0


# --- a run that diverged


def test_what_is_not_finite_is_null_and_in_no_chart(bsp_log: Path, tmp_path: Path) -> None:
    judge, file, picture = (tmp_path / name for name in ("diverged.py", "shown.json", "shown.svg"))
    judge.write_text(
        "found = iter([2.0, float('inf'), float('nan'), 1.0])\n"
        "def loss(tensors):\n"
        "    return next(found)\n"
    )
    options = {"first": 1, "to": 4, "evaluate": f"{judge}:loss"}
    said(bsp_log, json_path=file, plot=picture, **options)

    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    document = json.loads(file.read_text(), parse_constant=refused)
    assert [version["loss"] for version in document["versions"]] == [2.0, None, None, 1.0]
    drawn = picture.read_text()
    assert "loss; not finite, and left out: 2" in drawn
    assert not re.search(r"\b(nan|inf)\b", drawn)


def test_a_chart_of_nothing_finite_says_so(bsp_log: Path, tmp_path: Path) -> None:
    judge, picture = tmp_path / "never_finite.py", tmp_path / "shown.svg"
    judge.write_text("def loss(tensors):\n    return float('nan')\n")
    said(bsp_log, last=2, evaluate=f"{judge}:loss", plot=picture)
    assert "loss; not finite, and left out: 2" in picture.read_text()


def test_a_log_that_cannot_be_read_is_said_by_name(tmp_path: Path) -> None:
    """Here a segment is a directory, which nobody maps."""
    (tmp_path / "server-0" / "00000001.log").mkdir(parents=True)
    with pytest.raises(InvalidUpdateLog, match=rf"{tmp_path}.* cannot be read: "):
        said(tmp_path)


def test_a_checkpoint_has_nothing_of_a_run_that_has_a_name(tmp_path: Path) -> None:
    """It may have another table of that name, of the run that has none."""
    owner = Owner(LEFT, replace(MODEL, run="nightly"))
    log = WrittenLog(tmp_path / "log", owner.of)
    log.begin(owner)
    log.record(owner.update(1))
    url = checkpoint_of(tmp_path / "saved", (Owner(LEFT), Owner(RIGHT)), 0)
    with pytest.raises(InvalidConfig, match="'model' is of run 'nightly', and checkpoints have"):
        said(tmp_path / "log", against=url)


@pytest.mark.parametrize("option", ["json_path", "plot", "export"])
def test_a_file_that_cannot_be_written_is_said_before_the_log_is_read(
    tmp_path: Path, option: str
) -> None:
    with pytest.raises(InvalidConfig, match="cannot be written"):
        said(tmp_path / "no log", **{option: tmp_path / "nowhere" / "file"})


def test_a_checkpoint_that_is_not_there_is_said_before_the_log_is_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="nowhere"):
        said(tmp_path / "no log", against=str(tmp_path / "nowhere"))
