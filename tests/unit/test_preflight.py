"""What `make gpu-check` says before it begins, on a machine that lacks something."""

from __future__ import annotations

import torch

from ps_cli.bench.preflight import MIB, SIZES_MB, missing_packages, problems, sizes_that_fit


def test_each_missing_package_is_named() -> None:
    assert missing_packages(lambda name: name) == []

    def is_there(name: str) -> bool:
        if name == "google.protobuf":
            raise ModuleNotFoundError("google")
        return name != "pytest_timeout"

    assert missing_packages(is_there) == ["google.protobuf", "pytest_timeout"]


def test_a_machine_without_a_gpu_is_told_so() -> None:
    found = problems()
    assert found or torch.cuda.is_available()
    assert all(each.startswith(("torch ", "a second process ")) for each in found)


def test_models_are_measured_that_fit() -> None:
    least, most = SIZES_MB
    assert sizes_that_fit(80 * 10**9, 120 * 10**9) == [least, most]
    assert sizes_that_fit(80 * 10**9, 20 * 10**9) == [least]
    assert sizes_that_fit(8 * 10**9, 120 * 10**9) == []
    assert sizes_that_fit(11 * most * MIB, 10 * most * MIB - 1) == [least]
