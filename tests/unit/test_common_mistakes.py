"""What people get wrong most, each told in a line that says what to do instead."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import ps_worker as ps
from ps_cli.__main__ import app
from ps_core.errors import InvalidConfig
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_runtime.grpc.addresses import check_scheduler_address
from ps_worker.spec.flat_layout import named_groups, plain_name
from ps_worker.spec.optimizers import check_optimizer
from ps_worker.spec.settings import table_spec
from ps_worker.spec.training_options import TrainingOptions
from ps_worker.steps.steps import check_handle
from ps_worker.training.local_optimizer import inner_optimizer

WEIGHT = nn.Parameter(torch.zeros(1))


def refused(call: Any, *arguments: Any) -> str:
    """The message of what is refused, which is one line."""
    with pytest.raises(InvalidConfig) as found:
        call(*arguments)
    assert "\n" not in found.value.message
    return found.value.message


class Own(torch.optim.SGD):
    """An optimizer that a script defines."""


@pytest.mark.parametrize(
    ("given", "came", "expected"),
    [
        (torch.optim.SGD, "torch's SGD", "expected ps_worker.SGD(lr=0.1), which does the same on"),
        (torch.optim.SGD([WEIGHT], lr=0.1), "torch's SGD", "ps_worker.SGD(lr=0.1)"),
        (torch.optim.AdamW([WEIGHT]), "torch's AdamW", "ps_worker.AdamW(lr=0.001)"),
        (torch.optim.NAdam, "torch's NAdam", "Aggregate(functools.partial(NAdam, lr=0.001))"),
        (Own([WEIGHT], lr=0.1), "torch's Own", "Aggregate(functools.partial(Own, lr=0.001))"),
        ("sgd", "the text 'sgd'", "expected ps_worker.SGD(lr=0.1)"),
        ("AdamW", "the text 'AdamW'", "expected ps_worker.AdamW(lr=0.001)"),
        ("fast", "the text 'fast'", "expected ps_worker.SGD(lr=0.1)"),
        (ps.Adam, "the class Adam", "such as ps_worker.Adam(lr=0.001)"),
        (ps.Custom, "the class Custom", "such as ps_worker.Custom('lion', lr=0.0001)"),
        (functools.partial(torch.optim.SGD, lr=0.1), "optimizer is partial", "ps_worker.SGD("),
        (None, "optimizer is NoneType", "expected one of ps_worker's"),
    ],
)
def test_an_optimizer_that_is_none_of_ours(given: Any, came: str, expected: str) -> None:
    for call in (check_optimizer, lambda it: table_spec("t", 10, it, {})):
        message = refused(call, given)
        assert came in message
        assert expected in message


def test_an_optimizer_of_ours() -> None:
    for optimizer in (ps.SGD(lr=0.1), ps.Aggregate(), ps.Custom("lion")):
        check_optimizer(optimizer)
    spec = OptimizerSpec(OptimizerKind.SGD)
    assert table_spec("t", 10, spec, {}).optimizer.kind is OptimizerKind.SGD


def test_a_factory_that_is_an_optimizer() -> None:
    made = torch.optim.SGD([WEIGHT], lr=0.1)
    wrong: Any = ps.Aggregate(made)  # type: ignore[arg-type]
    message = refused(inner_optimizer, wrong, [{"params": [WEIGHT]}])
    assert "Aggregate's factory is SGD; expected a function that makes a torch" in message
    assert "functools.partial(torch.optim.SGD, lr=0.1)" in message


def test_a_tables_name_where_a_handle_is_due() -> None:
    assert refused(check_handle, "weights") == (
        "table is the name 'weights'; expected the handle that create_table returned, or "
        "client.table('weights')"
    )
    assert "table is int; expected the handle" in refused(check_handle, 3)


@pytest.mark.parametrize(
    ("option", "given", "expected"),
    [
        ("accumulate", "4", "'4'; expected a whole number"),
        ("accumulate", 2.5, "2.5; expected a whole number"),
        ("accumulate", None, "None; expected a whole number"),
        ("recompute", 1.5, "1.5; expected a whole number"),
        ("gate_bytes", 1e6, "1000000.0; expected a whole number"),
        ("gate_bytes", "8MB", "'8MB'; expected a whole number"),
        ("gate_bytes", -1, "-1; expected a whole number of 0 or more"),
        ("block_elements", 1024.0, "1024.0; expected a whole number"),
        ("clip_norm", "1", "'1'; expected a number or None"),
        ("overlap_pull", "no", "'no'; expected True or False"),
        ("allow_non_finite", "no", "'no'; expected True or False"),
        ("aggregate_within", True, "True; expected text or None"),
        ("name", 5, "5; expected text"),
    ],
)
def test_an_option_of_another_kind(option: str, given: Any, expected: str) -> None:
    options: Any = {option: given}
    assert f"{option} is {expected}" in refused(TrainingOptions.of, options, ps.BSP())


def test_a_layout_that_is_none() -> None:
    sgd = ps.SGD(lr=0.1)
    for layout in (10.0, None):
        message = refused(table_spec, "t", layout, sgd, {})
        assert f"the layout is {layout}; expected a number of elements, a shape, or" in message
    message = refused(table_spec, "t", 10, sgd, {"gate_bytes": 1e6})
    assert message == "gate_bytes is 1000000.0; expected a whole number of 0 or more"
    for counted in (np.int64(6), [np.int64(2), 3], torch.Size([2, 3]), [("a", (np.int64(6),))]):
        assert table_spec("t", cast(Any, counted), sgd, {}).element_count == 6
    assert "staleness is 1.5; expected a whole number" in refused(ps.SSP, 1.5)


@pytest.mark.parametrize("given", [None, 5, nn.Linear])
def test_parameters_that_are_none(given: Any) -> None:
    message = refused(named_groups, given)
    words = "the class Linear" if given is nn.Linear else str(given)
    assert message == f"expected a module, or its parameters or groups of them; got {words}"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("localhost", "expected host:port, such as localhost:7000"),
        ("", "expected host:port, such as HOST:7000"),
        ("[::1]", "such as [::1]:7000"),
        ("http://127.0.0.1:7000", "without http://, such as 127.0.0.1:7000"),
        ("https://head/", "without https://, such as head:7000"),
        ("grpc://head:7000/x", "without grpc://, such as head:7000"),
        ("head:", "expected host:port"),
        ("head:70000", "expected host:port with a port of 0 to 65535"),
        ("head:port", "expected host:port"),
        ("head:0", "0 is no scheduler's port"),
    ],
)
def test_a_schedulers_address_that_is_none(address: str, expected: str) -> None:
    message = refused(check_scheduler_address, address)
    assert message.startswith(f"the scheduler's address is '{address}'; ")
    assert expected in message


@pytest.mark.parametrize("address", ["h:7000", "[::1]:7000", "dns:///h:7000", "unix:/run/s"])
def test_a_schedulers_address(address: str) -> None:
    check_scheduler_address(address)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("_orig_mod.0.weight", "0.weight"),
        ("encoder._orig_mod.weight", "encoder.weight"),
        ("_orig_mod._orig_mod.weight", "weight"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("weight", "weight"),
    ],
)
def test_a_compiled_modules_names_are_the_plain_ones(name: str, plain: str) -> None:
    assert plain_name(name) == plain


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("train", "script.py", "--checkpoint-every", "5"),
            "a checkpoint every 5 has no place to go; give --checkpoint-url",
        ),
        (
            ("train", "script.py", "--checkpoint-url", "x", "--checkpoint-every", "often"),
            "a checkpoint every 'often'; expected a number of steps such as 100, or a time",
        ),
        (("up", "--checkpoint-every", "5m"), "has no place to go; give --checkpoint-url"),
        (("up", "--update-log-mb", "5"), "an update log without one; give --update-log"),
        (
            ("train", "script.py", "-w", "2", "--epochs", "5"),
            "options of the script come after --, as in: pushpull train script.py -- --epochs ...",
        ),
        (
            ("compare", "script.py", "--epochs", "5"),
            "pushpull compare has no option --epochs; options of the script come after --",
        ),
        (("train", "script.py", "-e", "5"), "no option -e; options of the script come after --"),
        (
            ("train", "script.py", "--checkpoint-url", "--checkpoint-every", "5"),
            "the value of --checkpoint-url is missing: '--checkpoint-every' is in its place",
        ),
        (
            ("train", "--resume", "--workers", "2", "script.py"),
            "the value of --resume is missing: '--workers' is in its place; expected one that",
        ),
        (("up", "--update-log", "--quiet"), "the value of --update-log is missing: '--quiet' is"),
        (
            ("compare", "script.py", "-o", "--verbose"),
            "the value of --report is missing: '--verbose' is in its place",
        ),
        (("status", "--scheduler", "localhost"), "expected host:port, such as localhost:7000"),
        (("status", "--scheduler", "http://h:7"), "expected host:port, without http://"),
        (("tables", "list", "--scheduler", "h"), "expected host:port, such as h:7000"),
        (("checkpoint", "create", "--scheduler", "h"), "expected host:port, such as h:7000"),
    ],
)
def test_a_command_line_that_cannot_be_is_refused_in_a_line(
    arguments: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    ran = CliRunner().invoke(app, arguments, prog_name="pushpull")
    assert isinstance(ran.exception, SystemExit), ran.exception
    assert ran.exit_code == 2
    (line,) = ran.stderr.splitlines()
    assert line.startswith("pushpull: ")
    assert expected in line


def test_an_option_that_is_misspelt_before_any_script_is_typers_to_tell() -> None:
    ran = CliRunner().invoke(app, ("up", "--wrokers", "2"), prog_name="pushpull")
    assert ran.exit_code == 2
    assert "--wrokers" in ran.stderr
    assert "--workers" in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("train", "script.py", "--resume"), "Option '--resume' requires an argument"),
        (("train", "script.py", "-w"), "Option '-w' requires an argument"),
        (("train", "script.py", "--verbose=1"), "Option '--verbose' does not take a value"),
        (("compare", "script.py", "--report"), "Option '--report' requires an argument"),
    ],
)
def test_an_option_of_ours_without_its_value_is_not_taken_for_the_scripts(
    arguments: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    ran = CliRunner().invoke(app, arguments, prog_name="pushpull")
    assert ran.exit_code == 2
    assert expected in ran.stderr


@pytest.fixture
def no_temporary_files(tmp_path: Path) -> Iterator[None]:
    """The system's folder for them is not there."""
    before, tempfile.tempdir = tempfile.gettempdir(), str(tmp_path / "read-only")
    yield
    tempfile.tempdir = before


@pytest.mark.parametrize("command", ["train", "up"])
@pytest.mark.usefixtures("no_temporary_files")
def test_a_container_without_a_place_for_temporary_files(command: str, tmp_path: Path) -> None:
    """Its root is read-only, and nothing is mounted at /tmp."""
    script = tmp_path / "train.py"
    script.write_text("print('trains')\n")
    ended = CliRunner().invoke(app, [command, str(script)][: 1 + (command == "train")])
    assert ended.exit_code == 2
    assert "no temporary directory can be made" in ended.output
    assert "TMPDIR" in ended.output
    assert "Traceback" not in ended.output
