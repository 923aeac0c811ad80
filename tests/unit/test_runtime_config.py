"""Settings: which source wins, and what is said of a wrong one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ps_core.errors import InvalidConfig
from ps_runtime.settings.config import argument_parser, from_command_line, resolve
from ps_runtime.settings.environment import VARIABLES


@dataclass(frozen=True, slots=True)
class Settings:
    workers: int = field(metadata={"help": "How many workers."})
    listen: str = field(default="127.0.0.1:0", metadata={"help": "Where to listen, 100 % local."})
    scheduler: tuple[str, ...] = field(default=(), metadata={"help": "Schedulers."})
    rank: int | None = field(default=None, metadata={"help": "The rank."})
    stop_when_done: bool = field(default=False, metadata={"help": "Stop at the end."})
    connect_deadline_s: float = field(default=60.0, metadata={"help": "How long to try."})
    ready_file: Path | None = field(default=None, metadata={"help": "Written when ready."})


PARSER = argument_parser(Settings, "A role.")


def settings_file(folder: Path, text: str) -> Path:
    file = folder / "settings.toml"
    file.write_text(text)
    return file


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = settings_file(tmp_path, 'workers = 1\nlisten = "file:1"\nconnect_deadline_s = 1\n')
    env = {"PUSHPULL_WORKERS": "2", "PUSHPULL_CONNECT_DEADLINE_S": "2.5", "HOME": "/"}
    settings = resolve(Settings, {"workers": "3", "rank": None}, env, file)
    assert settings == Settings(workers=3, listen="file:1", connect_deadline_s=2.5)


def test_every_type_is_read_from_text() -> None:
    env = {
        "PUSHPULL_WORKERS": "2",
        "PUSHPULL_SCHEDULER": "a:1, b:2",
        "PUSHPULL_RANK": "0",
        "PUSHPULL_STOP_WHEN_DONE": "Yes",
        "PUSHPULL_READY_FILE": "/tmp/ready",  # noqa: S108 - never written
    }
    settings = resolve(Settings, {}, env)
    assert settings == Settings(
        workers=2,
        scheduler=("a:1", "b:2"),
        rank=0,
        stop_when_done=True,
        ready_file=Path("/tmp/ready"),  # noqa: S108
    )


def test_an_empty_variable_counts_as_not_given() -> None:
    assert resolve(Settings, {"workers": 1}, {"PUSHPULL_RANK": ""}).rank is None


def test_a_missing_setting_says_how_to_give_it() -> None:
    with pytest.raises(
        InvalidConfig, match=r"give --workers or PUSHPULL_WORKERS: How many workers"
    ):
        resolve(Settings, {}, {})


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("PUSHPULL_WORKERS", "two", "PUSHPULL_WORKERS is 'two'; expected a whole number"),
        ("PUSHPULL_STOP_WHEN_DONE", "maybe", "PUSHPULL_STOP_WHEN_DONE is 'maybe'; expected one of"),
        ("PUSHPULL_CONNECT_DEADLINE_S", "nan", "is 'nan'; expected a finite number"),
        ("PUSHPULL_CONNECT_DEADLINE_S", "-3", "is '-3'; expected a finite number, 0 or more"),
        ("PUSHPULL_WORKERS", "-1", "is '-1'; expected a whole number, 0 or more"),
        ("PUSHPULL_SHEDULER", "a:1", "PUSHPULL_SHEDULER is unknown; did you mean PUSHPULL_SCHED"),
        ("PUSHPULL_QQQQQQQ", "1", "PUSHPULL_QQQQQQQ is unknown; expected one of PUSHPULL_ADA"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, value: str, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        resolve(Settings, {"workers": None}, {"PUSHPULL_WORKERS": "1", variable: value})


def test_another_roles_variables_are_tolerated() -> None:
    env = dict.fromkeys(VARIABLES, "")
    assert resolve(Settings, {"workers": 1}, env).workers == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("worker = 1", "'worker' in .*settings.toml is unknown; did you mean workers?"),
        ("workers = true", "'workers' in .*settings.toml is True; expected a whole number"),
        ("workers = 1\nlisten = 5", "'listen' in .*settings.toml is 5; expected text"),
        ("workers = 1\nscheduler = [1]", "expected texts separated by commas"),
        ("workers =", "settings.toml is not TOML"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        resolve(Settings, {}, {}, settings_file(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"absent\.toml cannot be read: No such file"):
        resolve(Settings, {}, {}, tmp_path / "absent.toml")


def test_the_printed_settings_can_be_given_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--workers", "2", "--stop-when-done", "--scheduler", "a:1,b:2", "--listen", 'q"\\:0']
    with pytest.raises(SystemExit) as ended:
        from_command_line(Settings, PARSER, [*flags, "--print-config"], {})
    printed = capsys.readouterr().out
    file = settings_file(tmp_path, printed)
    assert ended.value.code == 0
    assert from_command_line(Settings, PARSER, ["--config", str(file)], {}) == Settings(
        workers=2, stop_when_done=True, scheduler=("a:1", "b:2"), listen='q"\\:0'
    )
    assert "# rank is not set" in printed


def test_a_flag_turns_off_what_the_environment_turned_on() -> None:
    env = {"PUSHPULL_STOP_WHEN_DONE": "1"}
    settings = from_command_line(Settings, PARSER, ["--workers", "1", "--no-stop-when-done"], env)
    assert not settings.stop_when_done


def test_a_wrong_command_line_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        from_command_line(Settings, PARSER, ["--workers", "many"], {})
    assert ended.value.code == 2
    assert "--workers is 'many'; expected a whole number" in capsys.readouterr().err


def test_help_names_every_flag_with_its_variable_and_its_default() -> None:
    text = PARSER.format_help()
    assert "--connect-deadline-s" in text
    assert "[PUSHPULL_CONNECT_DEADLINE_S; default: 60.0]" in " ".join(text.split())
    assert "100 % local" in text
