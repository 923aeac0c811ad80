"""Files that take their names when they are complete."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ps_cli.console.tensor_file import check_writable, replaced
from ps_core.errors import InvalidConfig


def test_the_file_behind_a_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    file, link = tmp_path / "shared" / "report", tmp_path / "report"
    file.write_text("earlier")
    link.symlink_to(file)
    check_writable(link)
    assert file.read_text() == "earlier"
    with replaced(link) as stream:
        stream.write(b"newer")
        assert file.read_text() == "earlier"
    assert link.is_symlink()
    assert file.read_text() == "newer"
    assert [path.name for path in file.parent.iterdir()] == ["report"]


def test_a_pipe_is_written_as_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_writable(pipe)  # without opening it: its reader would see an end
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with replaced(pipe) as stream:
            stream.write(b"newer")
        assert os.read(reader, 100) == b"newer"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_of_two_that_write_a_file_at_once_the_second_is_refused(tmp_path: Path) -> None:
    """Each would else write into what the other has given its name."""
    out = tmp_path / "report"
    out.write_text("earlier")
    with replaced(out) as stream:
        stream.write(b"whole")
        for second in (lambda: check_writable(out), replaced(out).__enter__):
            with pytest.raises(InvalidConfig, match=f"{out} is being written by another process"):
                second()
        stream.write(b" of the first")
        assert out.read_text() == "earlier"
    assert out.read_text() == "whole of the first"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_what_a_killed_one_has_left_is_written_over(tmp_path: Path) -> None:
    (tmp_path / ".report.tmp").write_text("left by one that was killed, and longer")
    with replaced(tmp_path / "report") as stream:
        stream.write(b"whole")
    assert (tmp_path / "report").read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_where_nothing_can_be_written_the_error_names_the_file(tmp_path: Path) -> None:
    for out in (tmp_path, tmp_path / "absent" / "file"):
        with pytest.raises(InvalidConfig, match=f"{out} cannot be written"):
            check_writable(out)
        with pytest.raises(InvalidConfig, match=f"{out} cannot be written"), replaced(out):
            pass
    assert list(tmp_path.iterdir()) == []
