"""`pushpull replay` beside a cluster that runs, one of whose servers was killed in the middle."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

from ps_server.update_log.format import (
    HEAD_BYTES,
    MAGIC,
    FrameKind,
    Head,
    frame_bytes,
    head_at,
    packed,
)
from tests.integration.command_line import run, run_here
from tests.integration.logged_run import (
    BLOCK,
    CLOCKS,
    SAVED_CLOCK,
    SHAPES,
    WORKERS,
    LoggedRun,
    logged_run,
)

pytestmark = [pytest.mark.timeout(300), pytest.mark.thorough]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoggedRun]:
    with logged_run(tmp_path_factory.mktemp("run")) as found:
        yield found


def exported(path: Path, name: str) -> np.ndarray:
    return safetensors.torch.load_file(path)[f"{name}.weight"].numpy()


@pytest.mark.parametrize("name", SHAPES)
def test_the_newest_version_is_what_a_client_pulls(
    logged: LoggedRun, name: str, tmp_path: Path
) -> None:
    out = tmp_path / "model.safetensors"
    ended = run_here(
        "replay", str(logged.logs), "--table", name, "--export", str(out), cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    newest = CLOCKS if name == "bsp" else WORKERS * CLOCKS
    assert f"1 tensors at version {newest}, clock {CLOCKS}, of 20" in ended.stdout
    made = exported(out, name)
    assert made.shape == SHAPES[name]
    assert made.tobytes() == logged.pulled[name].tobytes()


@pytest.mark.parametrize("which", [0, 1])
def test_it_is_what_a_checkpoint_has(logged: LoggedRun, which: int, tmp_path: Path) -> None:
    """Parameters and what the optimizer keeps, in the middle and at the end."""
    url = logged.checkpoints[which]
    ended = run_here("replay", str(logged.logs), "--against", url, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    clock = (SAVED_CLOCK, CLOCKS)[which]
    assert f"bsp: equal, bit for bit, at clock {clock}\n" in ended.stdout
    assert "asp: equal, bit for bit, " in ended.stdout


def test_a_clock_is_what_the_checkpoint_of_that_clock_has(
    logged: LoggedRun, tmp_path: Path
) -> None:
    saved, made = tmp_path / "saved.safetensors", tmp_path / "made.safetensors"
    first = run_here(
        "checkpoint", "export", logged.checkpoints[0], str(saved), "--prefix", "bsp", cwd=tmp_path
    )
    assert first.returncode == 0, first.stderr
    again = run_here(
        "replay", str(logged.logs), "--table", "bsp", "--clock", str(SAVED_CLOCK),
        "--export", str(made), cwd=tmp_path,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert again.stdout == f"{made}: 1 tensors at clock {SAVED_CLOCK}\n"
    assert made.read_bytes() == saved.read_bytes()


def test_every_step_has_a_version_with_its_loss(logged: LoggedRun, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "def loss(tensors):\n"
        "    (name, weight), = tensors.items()\n"
        "    assert name == 'asp.weight'\n"
        "    return weight.square().sum().sqrt()\n"
    )
    ended = run(
        "replay", str(logged.logs), "--table", "asp", "--every", "1", "--evaluate",
        "judge.py:loss", "--json", "shown.json", "--plot", "shown.svg", cwd=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    shown = json.loads((tmp_path / "shown.json").read_text())
    versions = shown["versions"]
    assert [each["version"] for each in versions] == list(range(WORKERS * CLOCKS + 1))
    steps = Counter((tuple(each["ranks"]), each["clock"]) for each in versions[1:])
    assert steps == Counter(
        ((rank,), clock) for rank in range(WORKERS) for clock in range(1, CLOCKS + 1)
    )
    for rank in range(WORKERS):
        clocks = [each["clock"] for each in versions if each["ranks"] == [rank]]
        assert clocks == sorted(clocks)
    for each in versions:
        assert each["loss"] == pytest.approx(each["parameter_norm"], rel=1e-5)
    count = SHAPES["asp"][0] * SHAPES["asp"][1]
    norms = [each["gradient_norm"] for each in versions[1:]]
    assert norms == pytest.approx([count**0.5] * len(norms), rel=0.1)
    assert len(re.findall(r"^ +\d+ +\d+ +\d\d:", ended.stdout, re.MULTILINE)) == len(versions)
    drawn = (tmp_path / "shown.svg").read_text()
    assert re.findall(r'<text class="title".*>(.*)</text>', drawn)[:3] == [
        "loss", "norm of the parameters", "norm of the gradient",
    ]  # fmt: skip


def test_of_many_versions_some_are_shown(logged: LoggedRun, tmp_path: Path) -> None:
    command = ("replay", str(logged.logs), "--table", "bsp", "--json", "shown.json")
    for options, expected in (
        (("--last", "3"), [8, 9, 10]),
        (("--from", "2", "--to", "6", "--every", "3"), [2, 5, 6]),
    ):
        ended = run_here(*command, *options, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        shown = json.loads((tmp_path / "shown.json").read_text())
        assert [each["version"] for each in shown["versions"]] == expected
        assert {tuple(each["ranks"]) for each in shown["versions"]} == {(0, 1, 2)}
    wrong = run_here(*command, "--from", "50", cwd=tmp_path)
    assert (wrong.returncode, wrong.stderr) == (
        2, "pushpull: no version is from 50 to 10; the log has versions 0 to 10\n",
    )  # fmt: skip


def test_a_torn_log_ends_where_it_is_torn(logged: LoggedRun, tmp_path: Path) -> None:
    """What is there is shown; a checkpoint of later is not what it has."""
    copied = Path(shutil.copytree(logged.logs, tmp_path / "logs"))
    segment = max((copied / "server-1").glob("*.log"))
    content = segment.read_bytes()
    segment.write_bytes(content[: 3 * len(content) // 4 + 1])
    ended = run_here("replay", str(copied), "--against", logged.checkpoints[1], cwd=tmp_path)
    assert ended.returncode == 1, ended.stdout
    assert not ended.stderr
    assert re.search(r"asp: block \d+ has had \d+ updates in range \d+; expected 30", ended.stdout)
    assert re.search(
        r"bsp: cannot be compared at clock 10: range \d+ is at clock \d+ at the end", ended.stdout
    )
    shown = run_here("replay", str(copied), "--table", "bsp", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    newest = re.search(r"the log has versions 0 to (\d+)", shown.stdout)
    assert newest is not None
    assert SAVED_CLOCK < int(newest[1]) < CLOCKS
    assert "are no versions" in shown.stdout, "the other server has later clocks"


def test_a_damaged_log_is_an_error_that_says_where(logged: LoggedRun, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(logged.logs, tmp_path / "logs"))
    segment = min((copied / "server-0").glob("*.log"))
    content = bytearray(segment.read_bytes())
    offset = len(MAGIC)
    while offset < len(content) // 2:
        head = head_at(memoryview(content), offset)
        assert head is not None
        begin, offset = offset, offset + frame_bytes(head.length)
    content[begin + HEAD_BYTES] ^= 1
    segment.write_bytes(content)
    ended = run_here("replay", str(copied), cwd=tmp_path)
    assert ended.returncode == 1
    where = f"{segment}: at byte {begin}"
    assert ended.stderr == f"pushpull: {where}: a frame is damaged: its checksum is another\n"


def test_another_update_is_seen(logged: LoggedRun, tmp_path: Path) -> None:
    """The last one of a server, of which one element is another; its frame is intact."""
    copied = Path(shutil.copytree(logged.logs, tmp_path / "logs"))
    segment = max((copied / "server-1").glob("*.log"))
    content = bytearray(segment.read_bytes())
    offset = len(MAGIC)
    found: tuple[int, Head] | None = None
    while (head := head_at(memoryview(content), offset)) is not None:
        if head.kind is FrameKind.RECORD and head.length > 4 * BLOCK:
            found = offset, head
        offset += frame_bytes(head.length)
    assert found is not None
    offset, head = found
    payload = slice(offset + HEAD_BYTES, offset + HEAD_BYTES + head.length)
    for byte in range(payload.stop - 104, payload.stop - 100):
        content[byte] ^= 1
    content[offset : offset + HEAD_BYTES] = packed(head, bytes(content[payload]))
    segment.write_bytes(content)
    ended = run_here("replay", str(copied), "--against", logged.checkpoints[1], cwd=tmp_path)
    assert ended.returncode == 1, ended.stdout
    assert not ended.stderr
    assert re.search(r"values differ in 1 of \d+ blocks \(\d+\)\n", ended.stdout), ended.stdout
    assert "exp_avg differ in 1 of" in ended.stdout
    assert "equal, bit for bit" in ended.stdout, "the other table"


def test_one_servers_log_is_not_the_whole_table(logged: LoggedRun, tmp_path: Path) -> None:
    one = str(logged.logs / "server-0")
    ended = run_here("replay", one, "--export", "model", "--table", "bsp", cwd=tmp_path)
    assert ended.returncode == 1
    assert "table 'bsp': no log has all of ranges" in ended.stderr
    assert ended.stderr.count("no log has all of") == 1, "the other table is not asked for"
    assert "give the directory that has the logs of all servers" in ended.stderr
    shown = run_here("replay", one, "--table", "bsp", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "the log has versions 0 to 10" in shown.stdout
