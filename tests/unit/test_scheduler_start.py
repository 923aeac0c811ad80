"""A scheduler that is started again: its journal has a cluster, and its store may be ill."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ps_core.errors import InvalidCheckpoint, InvalidJournal
from scheduler.config import SchedulerConfig
from scheduler.edge.publication import Publication
from scheduler.edge.restoring import checkpoints_again_under
from scheduler.start import SchedulerStart, started
from tests.unit.reluctant_store import URL, Gate, reluctant_store


def config_of(tmp_path: Path, place: str = "runs") -> SchedulerConfig:
    return SchedulerConfig(
        workers=1,
        servers=1,
        journal=tmp_path / "journal",
        checkpoint_url=str(tmp_path / place),
    )


def kept(start: SchedulerStart) -> str:
    """The cluster, once the journal has it and is closed."""
    cluster = start.begun.reply

    async def written() -> None:
        publication = Publication(lambda: cluster, lambda *_: None, start.journal)
        publication.decided(())
        await publication.flushed()
        await publication.close(has_ended=False)

    asyncio.run(written())
    return cluster.settings.cluster_id


def refuse_writes(place: Path) -> None:
    """Also those of root, whom no right is taken from."""
    place.rmdir()
    place.touch()


def test_a_cluster_goes_on_where_no_checkpoint_can_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster_id = kept(started(config_of(tmp_path)))
    refuse_writes(tmp_path / "runs")
    with caplog.at_level("ERROR", logger="pushpull"):
        assert kept(started(config_of(tmp_path))) == cluster_id
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.startswith("event=checkpoints_not_writable")
    assert "cannot be written to: File exists" in line


def test_it_goes_on_where_the_place_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    with reluctant_store() as store, caplog.at_level("ERROR", logger="pushpull"):
        gate = Gate("pipe_file", "")
        assert checkpoints_again_under(URL, answers_within_s=0.05) == store.url
        gate.let_go()
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.startswith("event=checkpoints_not_writable")
    assert line.endswith('reason="it has not answered for 0.05 s"')


def test_a_new_cluster_does_not_begin_there(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(InvalidCheckpoint, match="no checkpoint can be written"):
        started(config_of(tmp_path))


def test_another_place_is_refused_as_ever(tmp_path: Path) -> None:
    kept(started(config_of(tmp_path)))
    with pytest.raises(InvalidJournal, match="with checkpoint_url"):
        started(config_of(tmp_path, "elsewhere"))
