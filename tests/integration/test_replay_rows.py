"""`pushpull replay` of tables of rows, beside the cluster that has them and their twins."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

from ps_server.update_log.format import HEAD_BYTES, MAGIC, FrameKind, frame_bytes, head_at, packed
from tests.file_limits import NO_BYTECODE, limiting
from tests.integration.command_line import environment, run, run_here
from tests.integration.logged_rows import (
    AFTER,
    BEFORE,
    BSP_TERMS,
    DIM,
    IDS,
    KILLED,
    OTHER_TERMS,
    WORKERS,
    LoggedRows,
    logged_rows,
    rows_of,
)
from tests.integration.rows_alone import Rows

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow, pytest.mark.thorough]

TABLES = {**BSP_TERMS, **OTHER_TERMS}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoggedRows]:
    with logged_rows(tmp_path_factory.mktemp("run")) as found:
        yield found


def replay(logs: Path, *arguments: str, cwd: Path, code: int = 0) -> str:
    """What the command prints."""
    ended = run_here("replay", str(logs), *arguments, cwd=cwd)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stderr if code == 2 else ended.stdout


def complaints(said: str) -> str:
    """Without what may be of a killed server whose last record a backup had before its log."""
    notes = "records were decided by servers", "records are in no log; the values after them come"
    kept = [line for line in said.splitlines() if not any(note in line for note in notes)]
    return "".join(f"{line}\n" for line in kept)


def by_id(path: Path, name: str) -> dict[int, bytes]:
    """A table's rows in a safetensors file."""
    found = safetensors.torch.load_file(path)
    ids, rows = found[f"{name}/ids"].tolist(), found[f"{name}/rows"].numpy()
    assert len(set(ids)) == len(ids)
    return {row_id: row.tobytes() for row_id, row in zip(ids, rows, strict=True)}


# --- bit by bit


@pytest.mark.parametrize("name", TABLES)
def test_the_newest_version_is_what_a_client_pulls(
    logged: LoggedRows, name: str, tmp_path: Path
) -> None:
    """Row by row; those of a twin of one process, and no other, are there."""
    out = tmp_path / "model.safetensors"
    said = replay(logged.logs, "--table", name, "--export", str(out), cwd=tmp_path)
    found = by_id(out, name)
    assert f"2 tensors and {len(found):,} rows at version " in said
    if name in BSP_TERMS:
        assert found == rows_of(logged.twins[name])
    assert found == {row_id: logged.pulled[name][row_id].tobytes() for row_id in found}
    assert 0 < len(found) < IDS
    if TABLES[name].get("max_rows"):
        assert len(found) <= TABLES[name]["max_rows"]


@pytest.mark.parametrize("which", [0, 1])
def test_it_is_what_a_checkpoint_has(logged: LoggedRows, which: int, tmp_path: Path) -> None:
    """Rows, optimizer state, ages, counts and candidates, before the kill and at the end."""
    ended = run_here(
        "replay", str(logged.logs), "--against", logged.checkpoints[which], cwd=tmp_path
    )
    clock = (BEFORE, AFTER)[which]
    torn = "each partition at its version in the checkpoint"
    clocks = {
        **dict.fromkeys(("weights", "plain", "pruned", "rounded", "wide"), f"at clock {clock}"),
        "loose": torn,
        "turned": (torn, f"at clock {clock}")[which],
        "late": f"at clock {AFTER - KILLED}",
    }
    lines = [f"{name}: equal, bit for bit, {where}" for name, where in clocks.items()]
    if not which:
        lines[-1] = f"late: it is not in {logged.checkpoints[0]}"
    assert sorted(ended.stdout.splitlines()) == sorted(lines), ended.stderr
    assert ended.returncode == 1 - which


def test_a_clock_is_what_the_checkpoint_of_that_clock_has(
    logged: LoggedRows, tmp_path: Path
) -> None:
    saved, made = tmp_path / "saved.safetensors", tmp_path / "made.safetensors"
    for name in ("plain", "pruned", "wide"):
        first = run_here(
            "checkpoint", "export", logged.checkpoints[0], str(saved), "--prefix", name,
            cwd=tmp_path,
        )  # fmt: skip
        assert first.returncode == 0, first.stderr
        at = "--clock", str(BEFORE)
        replay(logged.logs, "--table", name, *at, "--export", str(made), cwd=tmp_path)
        assert by_id(made, name) == by_id(saved, name)
        (one, its_notes), (other, notes) = _header(made), _header(saved)
        assert (one, its_notes) == (other, notes)


def _header(path: Path) -> tuple[dict[str, object], object]:
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header, header.pop("__metadata__")


def test_snapshots_of_rows_are_compared(logged: LoggedRows, tmp_path: Path) -> None:
    """The end of a segment has one: of rows that have come and gone until then."""
    assert len(list((logged.logs / "server-1").glob("*.log"))) > 1
    said = replay(logged.logs, "--table", "[plw]*", cwd=tmp_path)
    (line,) = [line for line in said.splitlines() if "snapshots in the log" in line]
    assert int(line.split()[-5]) >= 3, line


# --- what is shown


def test_each_version_has_its_rows_norms_and_loss(logged: LoggedRows, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "def loss(tensors):\n"
        "    assert list(tensors) == ['plain/ids', 'plain/rows']\n"
        "    ids, rows = tensors.values()\n"
        f"    assert len(set(ids.tolist())) == len(ids) and rows.shape == (len(ids), {DIM})\n"
        "    return rows.square().sum().sqrt()\n"
    )
    ended = run(
        "replay", str(logged.logs), "--table", "plain", "--every", "1", "--evaluate",
        "judge.py:loss", "--json", "shown.json", "--plot", "shown.svg", cwd=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    versions = json.loads((tmp_path / "shown.json").read_text())["versions"]
    numbers = [each["version"] for each in versions]
    assert {0, *range(1, KILLED), *range(KILLED + 2, AFTER + 1)}.issubset(numbers)
    seen: set[int] = set()
    for number, pushes in enumerate(logged.pushes, 1):
        seen.update(*(ids.tolist() for ids, _ in pushes))
        if number not in numbers:
            continue
        version = versions[numbers.index(number)]
        assert version["row_count"] == len(seen)
        assert version["gradient_norm"] == pytest.approx(_norm(pushes), rel=1e-5)
        assert version["loss"] == pytest.approx(version["parameter_norm"], rel=1e-5)
        assert version["ranks"] == [0, 1]
    assert "rows" in ended.stdout.splitlines()[1].split()
    (last,) = re.findall(rf"^ +{AFTER} .*$", ended.stdout, re.MULTILINE)
    assert last.split()[-2] == str(len(seen))
    drawn = (tmp_path / "shown.svg").read_text()
    titles = [line for line in drawn.splitlines() if '<text class="title"' in line]
    assert any(">rows<" in line for line in titles)


def _norm(pushes: list[tuple[Rows, Rows]]) -> float:
    """That of the mean of the workers' gradients."""
    total = np.zeros((IDS, DIM))
    for ids, rows in pushes:
        np.add.at(total, ids, rows)
    return float(np.linalg.norm(total / WORKERS))


def test_parameters_and_rows_are_of_one_version(logged: LoggedRows, tmp_path: Path) -> None:
    """Tables of one model, dense and of rows, under BSP: a version is a clock of both."""
    command = "--table", "[wp][el][ia]*", "--json", "shown.json"
    said = replay(logged.logs, *command, cwd=tmp_path)
    assert f"weights, plain; the log has versions 0 to {AFTER}\n" in said
    shown = json.loads((tmp_path / "shown.json").read_text())
    assert shown["versions_are_clocks"]
    out = tmp_path / "model.safetensors"
    options = "--table", "[wp][el][ia]*", "--at", str(BEFORE), "--export", str(out)
    said = replay(logged.logs, *options, cwd=tmp_path)
    assert "3 tensors and " in said
    saved = tmp_path / "saved.safetensors"
    ended = run_here("checkpoint", "export", logged.checkpoints[0], str(saved), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    made, kept = safetensors.torch.load_file(out), safetensors.torch.load_file(saved)
    assert made["weights.weight"].equal(kept["weights.weight"])
    assert by_id(out, "plain") == by_id(saved, "plain")


def test_tables_without_rows_have_no_column_of_them(logged: LoggedRows, tmp_path: Path) -> None:
    said = replay(logged.logs, "--table", "weights", "--json", "shown.json", cwd=tmp_path)
    assert said.splitlines()[1].split()[-1] == "parameters"
    shown = json.loads((tmp_path / "shown.json").read_text())
    assert {version["row_count"] for version in shown["versions"]} == {None}


# --- logs that are not whole


@pytest.fixture
def copied(logged: LoggedRows, tmp_path: Path) -> Path:
    """The logs, to be damaged."""
    return Path(shutil.copytree(logged.logs, tmp_path / "logs"))


def test_a_torn_log_ends_where_it_is_torn(logged: LoggedRows, copied: Path, tmp_path: Path) -> None:
    for directory in copied.iterdir():
        segment = max(directory.glob("*.log"))
        content = segment.read_bytes()
        segment.write_bytes(content[: 3 * len(content) // 4 + 1])
    ended = run_here("replay", str(copied), "--against", logged.checkpoints[1], cwd=tmp_path)
    assert ended.returncode == 1, ended.stdout
    assert not complaints(ended.stderr)
    assert "loose: partition " in ended.stdout
    assert "plain: cannot be compared at clock 14: range " in ended.stdout
    said = replay(copied, "--table", "plain", "--export", "model", cwd=tmp_path)
    newest = int(said.split(" at version ")[1].split(",")[0])
    assert BEFORE <= newest < AFTER
    assert by_id(tmp_path / "model", "plain") == logged.plain_at(newest)


def test_a_damaged_log_is_an_error_that_says_where(copied: Path, tmp_path: Path) -> None:
    segment = min((copied / "server-1").glob("*.log"))
    content = bytearray(segment.read_bytes())
    begin = records_of(content)[0]
    content[begin + HEAD_BYTES + 20] ^= 1
    segment.write_bytes(content)
    ended = run_here("replay", str(copied), "--export", "model", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (
        1, f"pushpull: {segment}: at byte {begin}: a frame is damaged: its checksum is another\n",
    )  # fmt: skip
    assert [each.name for each in tmp_path.iterdir()] == ["logs"]


def records_of(content: bytes | bytearray) -> list[int]:
    """Where the records of a segment with some KB begin."""
    offset, found = len(MAGIC), []
    while (head := head_at(memoryview(content), offset)) is not None:
        if head.kind is FrameKind.RECORD and head.length > 500:
            found.append(offset)
        offset += frame_bytes(head.length)
    return found


def alter(logs: Path, logged: LoggedRows, step: int) -> int:
    """Put zeros in the place of a gradient that one worker pushed to `plain`, in an intact frame;
    its id.
    """
    (ids, rows), _ = logged.pushes[step - 1]
    once = {row_id for row_id in ids.tolist() if np.count_nonzero(ids == row_id) == 1}
    row_id: int = min(once)
    row = rows[np.flatnonzero(ids == row_id)[0]].tobytes()
    for segment in logs.glob("*/*.log"):
        content = bytearray(segment.read_bytes())
        for begin in records_of(content):
            head = head_at(memoryview(content), begin)
            assert head is not None
            payload = slice(begin + HEAD_BYTES, begin + HEAD_BYTES + head.length)
            at = content.find(row, payload.start, payload.stop)
            if at >= 0:
                content[at : at + len(row)] = bytes(len(row))
                content[begin : begin + HEAD_BYTES] = packed(head, bytes(content[payload]))
                segment.write_bytes(content)
                return row_id
    raise AssertionError(f"the gradient of id {row_id} is in no log")


def test_another_update_is_seen(logged: LoggedRows, copied: Path, tmp_path: Path) -> None:
    row_id = alter(copied, logged, AFTER)
    ended = run_here("replay", str(copied), "--against", logged.checkpoints[1], cwd=tmp_path)
    assert (ended.returncode, complaints(ended.stderr)) == (1, "")
    lines = [line for line in ended.stdout.splitlines() if "equal, bit for bit" not in line]
    where = rf"in 1 of 5 partitions \(\d\); the lowest id is {row_id}"
    assert len(lines) == 2, ended.stdout
    for line, array in zip(lines, ("sum", "values"), strict=True):
        assert re.fullmatch(f"plain: 1 rows differ in {array}, {where}", line), line
    assert len(ended.stdout.splitlines()) == 2 + len(TABLES)


def test_a_snapshot_that_updates_do_not_make_is_an_error(
    logged: LoggedRows, copied: Path, tmp_path: Path
) -> None:
    alter(copied, logged, 1)
    ended = run_here("replay", str(copied), cwd=tmp_path)
    assert ended.returncode == 1, ended.stdout
    pattern = (
        r"pushpull: \S+/server-\d/\d+\.log: at byte \d+: range \d+ of table 'plain' is other than "
        "what its updates make of it here: other kernels made it, or the log is not whole\n"
    )
    assert re.fullmatch(pattern, complaints(ended.stderr)), ended.stderr


def test_one_servers_log_is_not_the_whole_table(logged: LoggedRows, tmp_path: Path) -> None:
    one = str(logged.logs / "server-1")
    for options in (("--export", "model"), ("--against", logged.checkpoints[1])):
        ended = run_here("replay", one, "--table", "plain", *options, cwd=tmp_path)
        assert ended.returncode == 1, ended.stdout
        assert "table 'plain': no log has all of ranges" in ended.stderr
        reason = r"which partition \d of table 'plain' is in: give the dir|at the end of its log\n"
        assert re.search(reason, ended.stderr + ended.stdout)
    assert not list(tmp_path.iterdir())


# --- as a user


def test_a_disk_that_is_full_is_said(logged: LoggedRows, tmp_path: Path) -> None:
    """Of the rows on their way, and of the file itself; neither is left."""
    for most in (4096, 16_384):
        ended = subprocess.run(
            [sys.executable, "-m", "ps_cli", "replay", logged.logs, "--export", "model"],
            cwd=tmp_path, env=environment() | NO_BYTECODE, capture_output=True, text=True,
            check=False, preexec_fn=limiting(most),
        )  # fmt: skip
        assert ended.returncode == 2, ended.stdout
        assert complaints(ended.stderr) == "pushpull: model cannot be written: File too large\n"
        assert not list(tmp_path.iterdir())


def test_mistakes_are_said_with_what_there_is(logged: LoggedRows, tmp_path: Path) -> None:
    ended = run_here("replay", str(logged.logs), "--table", "plane", cwd=tmp_path)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1), ended.stderr
    assert "no table with parameters is 'plane'; the log has " in ended.stderr
    assert "'plain'" in ended.stderr
    ended = run_here(
        "replay", str(logged.logs), "--table", "plain", "--at", "99", "--export", "model",
        cwd=tmp_path,
    )  # fmt: skip
    assert (ended.returncode, complaints(ended.stderr)) == (
        2, f"pushpull: there is no version 99; the log has versions 0 to {AFTER}\n",
    )  # fmt: skip
    assert not list(tmp_path.iterdir())
