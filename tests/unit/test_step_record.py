"""What a worker writes down of its steps, and what the comparison reads of it."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path

import pytest

from ps_cli.compare.modes import ComparedMode
from ps_cli.compare.records import LossEntry, TableEntry, read_records
from ps_core.codecs.choices import PushCodec
from ps_core.consistency import parsed
from ps_core.errors import InvalidConfig
from ps_core.tables.elements import Codec
from ps_core.tables.table_spec import TableSpec
from ps_worker.client.step_record import StepLine, StepRecord
from ps_worker.compression.table_codecs import TableCodecs
from ps_worker.spec.optimizers import SGD
from ps_worker.spec.settings import table_spec


def line(clock: int, staleness: int = 0) -> StepLine:
    return StepLine(
        clock=clock,
        compute_s=0.03,
        send_s=0.001,
        commit_s=0.01,
        read_s=0.002,
        staleness=staleness,
        rejected=0,
        discarded=False,
        applied=True,
    )


def spec(consistency: str) -> TableSpec:
    return table_spec("w", 64, SGD(lr=0.1), {"consistency": parsed(consistency)})


def kinds(folder: Path, rank: int = 0) -> list[str]:
    text = (folder / f"worker-{rank}.jsonl").read_text(encoding="utf-8")
    return [json.loads(one)["kind"] for one in text.splitlines()]


def test_a_loss_belongs_to_the_step_before_it(tmp_path: Path) -> None:
    record = StepRecord(str(tmp_path), 1, 2)
    record.table(spec("ssp:2"), TableCodecs(PushCodec.parsed("topk"), Codec.BF16))
    record.step(line(1))
    record.loss(0.5, 1)
    record.step(line(2, staleness=3))
    record.loss(float("nan"), 2)
    record.quality({"accuracy": 0.75})
    record.close(70, 30)
    record.close(80, 40)
    assert kinds(tmp_path, 1) == ["start", "table", "step", "step", "quality", "end"]
    (read,) = read_records(tmp_path)
    assert read.rank == 1
    assert read.tables == (
        TableEntry("w", "sgd", ComparedMode(parsed("ssp:2"), "topk:0.01", "bf16")),
    )
    assert [step.staleness for step in read.steps] == [0, 3]
    assert [(entry.step, entry.loss) for entry in read.losses] == [(1, 0.5), (2, None)]
    assert read.quality == {"accuracy": 0.75}
    assert (read.pushed_bytes, read.pulled_bytes) == (70, 30)
    assert read.steps[0].duration_s == pytest.approx(0.043)
    assert read.steps[0].ended_s <= read.steps[1].ended_s


def test_a_record_goes_on_after_a_restore(tmp_path: Path) -> None:
    """Of another client of the process."""
    for clock in (1, 2):
        record = StepRecord(str(tmp_path), 1, 2)
        record.table(spec("bsp"), TableCodecs())
        record.step(line(clock))
        record.loss(float(clock), clock)
        record.close(70, 30)
    assert kinds(tmp_path, 1) == ["start", "table", "step", "end"] * 2
    (read,) = read_records(tmp_path)
    assert len(read.tables) == 1
    assert [(entry.step, entry.loss) for entry in read.losses] == [(1, 1.0), (2, 2.0)]
    assert read.steps[0].ended_s <= read.steps[1].ended_s
    assert (read.pushed_bytes, read.pulled_bytes) == (140, 60)


def test_losses_without_a_step_of_ours_are_kept_with_their_clock(tmp_path: Path) -> None:
    record = StepRecord(str(tmp_path), 0, 1)
    record.loss(0.5, 7)
    record.close(0, 0)
    (read,) = read_records(tmp_path)
    assert read.steps == ()
    assert read.losses == (LossEntry(7, read.losses[0].at_s, 0.5),)


class FullFile(io.StringIO):
    """Takes no more, and says so again when it is closed."""

    name = "worker-0.jsonl"

    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        super().close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_training_goes_on_when_the_disk_takes_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = StepRecord(str(tmp_path), 0, 1)
    record.step(line(1))
    record.step(line(2))
    assert record._file is not None
    record._file.close()
    record._file = FullFile()
    with caplog.at_level("WARNING", "pushpull"):
        record.step(line(3))
        record.step(line(4))
        record.loss(0.5, 4)
        record.quality({"accuracy": 0.75})
        record.close(70, 30)
    assert record.is_on, "others wait for its first step"
    assert [one.getMessage().split()[0] for one in caplog.records] == ["event=steps_not_recorded"]
    assert "No space left on device" in caplog.text
    (read,) = read_records(tmp_path)
    assert len(read.steps) == 1
    assert not read.is_whole


def test_a_record_that_was_cut_counts_up_to_there(tmp_path: Path) -> None:
    record = StepRecord(str(tmp_path), 0, 1)
    for clock in (1, 2, 3):
        record.step(line(clock))
    path = tmp_path / "worker-0.jsonl"
    whole = path.read_text(encoding="utf-8")
    assert len(whole.splitlines()) == 3, "the line of the last step waits for its loss"
    path.write_text(whole[:-9], encoding="utf-8")
    (read,) = read_records(tmp_path)
    assert len(read.steps) == 1
    record.close(0, 0)


def test_an_empty_file_is_no_worker(tmp_path: Path) -> None:
    (tmp_path / "worker-0.jsonl").touch()
    assert read_records(tmp_path) == ()


def test_without_a_directory_nothing_is_written(tmp_path: Path) -> None:
    record = StepRecord("", 0, 1)
    record.step(line(1))
    record.loss(0.5, 1)
    record.close(0, 0)
    assert not record.is_on
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfig, match=r"record is '.*file', where nothing can be written"):
        StepRecord(str(tmp_path / "file"), 0, 1)
