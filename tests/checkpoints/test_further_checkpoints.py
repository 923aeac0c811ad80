"""What `tests/integration/test_checkpoints.py` shows of one setting, of the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ps_worker as ps
from tests.integration.resumed_training import Recipe
from tests.integration.test_checkpoints import (
    BLOCK,
    check_bsp_goes_on,
    check_cut,
    check_other_workers,
    counting_table,
    made_checkpoints,
)


def _sgd() -> Any:
    return ps.SGD(lr=1e-2, momentum=0.9, nesterov=True)


def _rmsprop() -> Any:
    return ps.RMSprop(lr=1e-2, momentum=0.9, centered=True)


def _aggregate() -> Any:
    return ps.Aggregate(lambda groups: torch.optim.Adam(groups, lr=1e-2))


@pytest.mark.parametrize("optimizer", [_sgd, _rmsprop, _aggregate])
def test_bsp_goes_on_bit_for_bit(tmp_path: Path, optimizer: Any) -> None:
    check_bsp_goes_on(tmp_path, Recipe(optimizer, lane="grpc"))


@pytest.mark.parametrize("consistency", ["bsp:backup=1", "asp"])
def test_the_cut_of_a_table_that_is_trained(tmp_path: Path, consistency: str) -> None:
    check_cut(tmp_path, consistency)


@pytest.mark.parametrize(("consistency", "workers"), [("asp", 1), ("bsp", 1)])
def test_it_goes_on_with_fewer_workers(tmp_path: Path, consistency: str, workers: int) -> None:
    check_other_workers(tmp_path, consistency, workers)


def test_another_table_is_refused(tmp_path: Path) -> None:
    (url,) = made_checkpoints(tmp_path / "checkpoints", 1)
    with ps.local_cluster(1, 1, resume=url) as cluster, ps.connect(cluster.address) as client:
        with pytest.raises(ps.InvalidCheckpoint, match="element_count is 5000; got 4000"):
            client.create_table("counted", 4000, optimizer=ps.SGD(lr=1.0), block_elements=BLOCK)
        counting_table(client, "ssp:2")  # how far workers may run apart is not the table's for good


def test_the_manifest_says_what_is_in_it(tmp_path: Path) -> None:
    (url,) = made_checkpoints(tmp_path / "checkpoints", 1)
    manifest = json.loads((Path(url) / "manifest.json").read_text())
    (table,) = manifest["tables"]
    assert table["name"] == "counted"
    assert table["consistency"] == "bsp"
    assert table["spec"]["optimizer"]["kind"] == "OPTIMIZER_KIND_SGD"
    (worker,) = manifest["workers"]
    assert (worker["rank"], worker["clock"], worker["file"]) == (0, 1, "")


def test_without_a_place_for_them_there_are_none() -> None:
    with ps.local_cluster(1, 1) as cluster, ps.connect(cluster.address) as client:
        counting_table(client, "bsp")
        with pytest.raises(ps.InvalidConfig, match="checkpoint_url"):
            client.checkpoint().wait()
