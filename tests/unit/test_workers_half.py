"""The half of a hybrid model that workers keep: which checkpoints it can be loaded from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from ps_core.errors import InvalidCheckpoint
from ps_worker.training.hybrid.workers_half import WorkersHalf, check_shards


@dataclass
class Worker:
    """What the half asks of its client."""

    rank: int = 0
    world_size: int = 2
    restored_from: str = "runs/3"


def half(*, clock: int = 4, width: int = 3) -> WorkersHalf:
    module = nn.Sequential(nn.Linear(width, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(module.parameters())
    client: Any = Worker()
    return WorkersHalf(client, module, optimizer, (), lambda: clock, lambda: None)


def test_what_was_saved_is_loaded() -> None:
    saved, other = half(), half()
    other.load_state_dict(saved.state_dict())
    for name, tensor in saved.whole().items():
        assert torch.equal(tensor, other.whole()[name])


def test_a_half_of_another_step_is_refused() -> None:
    saved = half(clock=5).state_dict()
    expected = r"runs/3 has the servers' half as of step 4, and the workers' as of step 5: it was"
    with pytest.raises(InvalidCheckpoint, match=expected):
        half(clock=4).load_state_dict(saved)


def test_another_model_is_refused() -> None:
    with pytest.raises(InvalidCheckpoint, match=r"other parameters: 0.weight; expected the same"):
        half(width=4).load_state_dict(half().state_dict())


SHARDS = {"rank": 0, "worker_count": 2, "shapes": {"0.weight": [4, 3]}, "is_by_rows": True}


def test_shards_are_not_taken_for_the_whole() -> None:
    expected = r"in the shards of 2 workers \(FSDP2\), and here they are whole; expected the same"
    with pytest.raises(InvalidCheckpoint, match=expected):
        half().load_state_dict({**half().state_dict(), "shards": SHARDS})


def test_the_shards_of_another_worker_or_number_are_refused() -> None:
    check_shards("runs/3", SHARDS, SHARDS)
    with pytest.raises(InvalidCheckpoint, match=r"no shards of worker 0, which were lost; expect"):
        check_shards("runs/3", {**SHARDS, "rank": 1}, SHARDS)
    with pytest.raises(InvalidCheckpoint, match=r"the shards of 3 workers .* shards of 2 workers"):
        check_shards("runs/3", {**SHARDS, "worker_count": 3}, SHARDS)
