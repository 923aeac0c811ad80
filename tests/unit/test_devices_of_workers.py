"""Which worker gets which GPUs, and what is said about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ps_cli.train.devices import VISIBLE, devices_of, remark, share
from ps_core.errors import InvalidConfig

GPU = "GPU-8f1d0c1e-4c0f-11ee-be56-0242ac120002"
MIG = "MIG-3c2e0c1e-4c0f-11ee-be56-0242ac120002"


@pytest.mark.parametrize(
    ("choice", "inherited", "expected"),
    [
        ("auto", None, ["0", "1", "2"]),  # those of the machine
        ("auto", "2, GPU-8f1d", ["2", "GPU-8f1d"]),
        ("auto", "", []),
        ("auto", "-1", []),
        ("none", "0,1", []),
        ("1,0", "5", ["1", "0"]),
        (f"{GPU}, {MIG}", None, [GPU, MIG]),
        ("GPU-8f1d", None, ["GPU-8f1d"]),
        (f"MIG-{GPU}/1/0", None, [f"MIG-{GPU}/1/0"]),
    ],
)
def test_the_gpus_of_a_choice(
    tmp_path: Path, choice: str, inherited: str | None, expected: list[str]
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "nvidia0x"):
        (tmp_path / name).touch()
    env = {} if inherited is None else {VISIBLE: inherited}
    assert devices_of(choice, env, tmp_path) == expected


@pytest.mark.parametrize("choice", ["", "0,,1", "0,0", "0, 0", ","])
def test_a_choice_that_names_none_or_one_twice_is_refused(choice: str) -> None:
    with pytest.raises(InvalidConfig, match="different GPUs with commas"):
        devices_of(choice, {})


@pytest.mark.parametrize("choice", ["cuda:0", "0,cuda:1", "gpu", "all", "-1", "0.1", "0-3", "GPU-"])
def test_a_name_that_would_hide_all_gpus_is_refused(choice: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        devices_of(choice, {})
    assert refused.value.message == (
        f"devices are '{choice}'; expected auto, none, or different GPUs with commas between them, "
        "such as 0,1,3: each by its number, or by its GPU-... or MIG-... name in `nvidia-smi -L`"
    )


@pytest.mark.parametrize(
    ("gpu_count", "worker_count", "expected"),
    [
        (8, 8, ["0", "1", "2", "3", "4", "5", "6", "7"]),
        (8, 3, ["0,1", "2,3", "4,5"]),
        (2, 5, ["0", "1", "0", "1", "0"]),
        (1, 1, ["0"]),
    ],
)
def test_each_worker_has_its_own_while_there_are_enough(
    gpu_count: int, worker_count: int, expected: list[str]
) -> None:
    devices = [str(number) for number in range(gpu_count)]
    dealt = [share(devices, rank, worker_count) for rank in range(worker_count)]
    assert dealt == [{VISIBLE: names} for names in expected]


def test_without_gpus_nothing_is_set_or_said() -> None:
    assert share([], 0, 2) == {}
    assert remark([], 2) == ""


def test_what_is_said() -> None:
    assert remark(["0", "1"], 2) == "2 GPUs: 1 for each of 2 workers; --devices chooses others"
    assert remark(["0", "1", "2"], 2).startswith("3 GPUs: 1 for each of 2 workers, and 1 unused;")
    assert remark(["0"], 2).startswith("1 GPU for 2 workers, which share them;")
