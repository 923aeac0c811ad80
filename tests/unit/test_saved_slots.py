"""State of custom updates in checkpoints, whatever it is called."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ps_runtime.checkpoint.part_file import read_header, read_tensor, tensor_name
from ps_runtime.checkpoint.part_writer import PartWriter, PlannedTable
from ps_server.values.shard_store import ShardStore
from ps_server.values.store_copy import VALUES, slot_of, tensor_of
from tests.unit.test_custom_updates import Shard, gradients

NAMES = ("a/b", "1/values", "values", "%2F", "%76alues", "/", "", "plain", "\u00e4 \u20ac")


class Peculiar:
    """Each state is moved by the gradient, in its own way."""

    hyperparameters: ClassVar[Mapping[str, float]] = {}
    slots: ClassVar = {name: float(place) for place, name in enumerate(NAMES)}

    def update(
        self, values: Tensor, state: Mapping[str, Tensor], gradient: Tensor, *_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        moved = {name: each + gradient * (len(name) + 1) for name, each in state.items()}
        return values - gradient, moved


def test_it_comes_back_whatever_it_is_called(tmp_path: Path) -> None:
    shard = Shard(Peculiar())
    for gradient in gradients(2):
        shard.step(gradient)
    table, store = shard.table, shard.store
    names = (VALUES, *map(tensor_of, NAMES))
    path = tmp_path / "part"
    writer = PartWriter(path, [PlannedTable("model", table.block_count, names)])
    for block in range(table.block_count):
        saved = store.saved(block)
        assert {name for name, _ in saved.tensors} == set(names)
        for name, payload in saved.tensors:
            writer.append("model", block, name, payload)
        writer.note_block("model", block, saved.version, saved.steps)
    writer.finish(1, "cluster")

    again = ShardStore(table, range(table.block_count), update=shard.update)
    with path.open("rb") as file:
        header = read_header(file, str(path))
        for (_, block), stored in header.blocks.items():
            room = again.load(block, stored.version, stored.steps)
            for name in stored.tensors:
                taken = read_tensor(file, header, tensor_name("model", block, name))
                room(name, len(taken))[:] = taken
    for block in range(table.block_count):
        ours, theirs = store._state(block), again._state(block)
        assert torch.equal(ours.values, theirs.values)
        assert ours.slots.keys() == theirs.slots.keys() == set(NAMES)
        for name in NAMES:
            length = ours.length
            assert torch.equal(ours.slots[name][:length], theirs.slots[name][:length]), name


@given(st.lists(st.text(st.sampled_from("%/valuesF256 7"), max_size=8), max_size=6))
def test_no_two_names_become_one(names: list[str]) -> None:
    written = [tensor_of(name) for name in names]
    assert [slot_of(each) for each in written] == names
    assert all("/" not in each and each != VALUES for each in written)


def test_the_names_of_torchs_own_state_are_themselves() -> None:
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg"):
        assert tensor_of(name) == slot_of(name) == name
