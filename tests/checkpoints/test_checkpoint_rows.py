"""Incremental checkpoints of a cluster: what sleeps is referred to; a run goes on from a row."""

from __future__ import annotations

import functools
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ps_worker as ps
from ps_cli.checkpoint.commands import (
    compact_checkpoint,
    diff_checkpoints,
    list_checkpoints,
    prune_checkpoints,
    show_checkpoint,
)
from ps_cli.checkpoint.export import export
from ps_cli.console.output import Output
from ps_runtime.checkpoint.reader import CheckpointReader, problems_of
from ps_runtime.checkpoint.store import CheckpointStore
from tests.integration.command_line import run

COUNT, BLOCK = 5_000, 64
BLOCKS = -(-COUNT // BLOCK)
TABLES = ("trained", "woken", "sleeping")
ONES = np.ones(COUNT, np.float32)


def _tables(client: ps.Client) -> dict[str, ps.TableHandle]:
    return {
        name: client.create_table(
            name, COUNT, optimizer=ps.Adam(lr=0.1), reduction="sum", block_elements=BLOCK
        )
        for name in TABLES
    }


def _values(client: ps.Client) -> dict[str, Any]:
    return {name: np.array(client.pull(client.table(name))) for name in TABLES}


def test_a_run_goes_on_from_a_row_of_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, kept = tmp_path / "root", tmp_path / "kept"
    monkeypatch.setenv("PUSHPULL_CHECKPOINT_FULL_EVERY", "3")
    monkeypatch.setenv("PUSHPULL_CHECKPOINT_KEEP", "1")
    moved = (TABLES, ("trained", "woken"), ("trained",), ("trained",))
    with (
        ps.local_cluster(2, 1, checkpoint_url=str(root)) as cluster,
        ps.connect(cluster.address) as client,
    ):
        tables, names = _tables(client), list[str]()
        expected = values = _values(client)
        for step, changed in enumerate(moved):
            for name in changed:
                client.push_pull(tables[name], ONES)
            if step == 3:  # before the next full one takes the others away
                shutil.copytree(root, kept)
                expected = values
            names.append(Path(client.checkpoint().wait().url).name)
            values = _values(client)
    full = CheckpointStore(str(root))
    assert full.names() == names[3:], "the fourth is full, and one is kept"
    assert full.named(names[3]).read_manifest().is_full
    store = CheckpointStore(str(kept))
    assert store.names() == names[:3], "what the third needs was kept"
    first, second, third = (store.named(name).read_manifest() for name in names[:3])
    assert (first.bases, second.bases, third.bases) == ((), (names[0],), (names[0], names[1]))
    assert [m.referred_block_count for m in (first, second, third)] == [0, BLOCKS, 2 * BLOCKS]
    assert third.referred_byte_count == 2 * 3 * COUNT * 4
    assert third.byte_count < first.byte_count - 2 * 3 * COUNT * 4 * 0.9
    for name in names[:3]:
        assert problems_of(store.named(name)) == []

    with (
        ps.local_cluster(1, 1, checkpoint_url=str(root), resume=str(kept)) as cluster,
        ps.connect(cluster.address) as client,
    ):
        tables = _tables(client)
        assert [tables[name].clock for name in TABLES] == [3, 2, 1]
        for name, found in _values(client).items():
            np.testing.assert_array_equal(found, expected[name])
        client.push_pull(tables["trained"], ONES)
        again = client.checkpoint().wait()
        np.testing.assert_array_equal(_values(client)["trained"], values["trained"])
    assert CheckpointStore(str(root)).named(Path(again.url).name).read_manifest().is_full
    _commands(kept, names)


def test_a_table_that_has_no_rows_yet_is_referred_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PUSHPULL_CHECKPOINT_FULL_EVERY", "3")
    with (
        ps.local_cluster(1, 1, checkpoint_url=str(tmp_path)) as cluster,
        ps.connect(cluster.address) as client,
    ):
        ps.Embedding(client, "rows", 4, optimizer=ps.Adagrad(lr=0.1), partitions=3)
        trained = client.create_table("trained", COUNT, optimizer=ps.SGD(lr=0.1))
        for _ in range(2):
            client.push_pull(trained, ONES)
            name = Path(client.checkpoint().wait().url).name
    manifest = CheckpointStore(str(tmp_path)).named(name).read_manifest()
    assert (manifest.referred_block_count, manifest.referred_byte_count) == (3, 0)
    assert problems_of(CheckpointStore(str(tmp_path)).named(name)) == []


def _said(command: Callable[..., int], *arguments: Any, **options: Any) -> str:
    stream = io.StringIO()
    assert command(*arguments, Output(stream), **options) == 0
    return stream.getvalue()


def _commands(kept: Path, names: list[str]) -> None:
    """What the command line says and does with the row."""
    root = str(kept)
    listed = _said(list_checkpoints, root).splitlines()
    assert listed[-1].startswith(names[2])
    assert listed[-1].endswith("good, needs 117.2 KiB of 1, 2")
    shown = _said(show_checkpoint, root, as_json=False)
    assert f"refers to {2 * BLOCKS} blocks of 117.2 KiB in {names[0]}, {names[1]}\n" in shown
    assert "of them elsewhere (" in shown
    compacted = run("checkpoint", "compact", root, cwd=kept)
    assert compacted.returncode == 0, compacted.stderr
    number, cluster = names[2].split("-")
    made = f"{number}-z-{cluster[:6]}"
    assert compacted.stdout.startswith(f"{kept}/{made} (")
    assert "nothing is written" in _said(compact_checkpoint, root)
    assert _said(diff_checkpoints, f"{root}/{names[2]}", root).endswith("the same tables\n")
    outs = [kept.with_name(f"{name}.safetensors") for name in (names[2], made)]
    for out in outs:
        _said(functools.partial(export, f"{root}/{out.stem}", out, "", None))
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert _said(prune_checkpoints, root, 1).endswith(f"1 left under {kept}\n")
    with CheckpointReader(CheckpointStore(root).named(made)) as reader:
        assert reader.manifest.is_full
