"""Rows of checkpoints, of which most refer to others, against a twin that keeps full copies.

Two servers train one table; what is real is what decides about a block: the stores, what a server
remembers, the files. Checkpoints fail, ranges move, values are replaced without an update, servers
begin anew, others prune and compact: whatever is listed as good has exactly what it had.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_core.manifest import Manifest, SavedPart, SavedTable, place_in
from ps_core.sliced_work import at_once
from ps_core.tables.elements import Codec
from ps_runtime.checkpoint.compaction import compact
from ps_runtime.checkpoint.part_writer import PartWriter, PlannedTable
from ps_runtime.checkpoint.pruning import prune
from ps_runtime.checkpoint.reader import CheckpointReader, problems_of
from ps_runtime.checkpoint.store import CheckpointStore
from ps_server.checkpoint.unchanged_blocks import BlockKey, WrittenBlock, WrittenBlocks, unchanged
from ps_server.values.shard_store import ShardStore
from tests.examples import examples
from tests.property.shard_twin import table
from tests.unit.checkpoint_files import CLUSTER_ID, manifest_of, spec_json

MODEL = table([384])
NAME = MODEL.spec.name
BLOCKS = range(MODEL.block_count)
Copy = dict[int, tuple[int, bytes]]
"""Of each block its version and its values."""


@dataclass(frozen=True)
class Do:
    """One thing that happens; `blocks` are those that it is about, where it is."""

    kind: str
    blocks: tuple[int, ...] = ()
    number: int = 0


_SOME = st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=3, unique=True).map(tuple)
DOINGS = st.one_of(
    st.builds(Do, st.sampled_from(["update", "assign"]), _SOME),
    st.builds(Do, st.sampled_from(["update", "move", "load"]), _SOME),
    st.builds(Do, st.sampled_from(["checkpoint", "checkpoint", "full", "failed", "half"])),
    st.builds(Do, st.just("checkpoint")),
    st.builds(Do, st.sampled_from(["restart", "compact", "prune"]), number=st.integers(1, 3)),
)


class Row:
    """A cluster's servers, its checkpoints, and the copies that they should have."""

    def __init__(self, root: str) -> None:
        self.files = CheckpointStore(root)
        self.stores = [ShardStore(MODEL, BLOCKS[:3]), ShardStore(MODEL, BLOCKS[3:])]
        self.memories = [WrittenBlocks(), WrittenBlocks()]
        self.owners = [0, 1]  # which server has which half
        self.files_made = 0
        self.number, self.base, self.clock = 0, 0, 0
        self.copies: dict[str, Copy] = {}

    def store_of(self, block: int) -> ShardStore:
        return self.stores[block // 3]

    def do(self, doing: Do) -> None:
        self.clock += 1
        for block in doing.blocks:
            store, values = self.store_of(block), np.full(64, self.clock, np.float32).tobytes()
            part = (block, store.decode(block, Codec.FP32, values, b""))
            match doing.kind:
                case "update":
                    store.accumulate(self.clock, [part], 1.0)
                    store.apply(self.clock, (), 1)
                case "assign":
                    store.assign([part])
                case "load":  # of the same version, with other values
                    room = store.load(block, store.version(block), [1])
                    room("values", len(values))[:] = values
                case "move":
                    half = block // 3
                    copied = ShardStore(MODEL, BLOCKS[3 * half : 3 * half + 3])
                    at_once(copied.restoring(store.snapshot()))
                    self.stores[half] = copied
                    self.owners[half] = 1 - self.owners[half]
        match doing.kind:
            case "restart":
                self.memories[doing.number % 2] = WrittenBlocks()
            case "checkpoint" | "full" | "failed" | "half":
                self.checkpoint(doing.kind)
            case "compact":
                self.compact()
            case "prune":
                self.prune(doing.number)

    def checkpoint(self, kind: str) -> None:
        self.number += 1
        directory = self.files.directory(self.number, CLUSTER_ID)
        directory.create()
        base = 0 if kind == "full" else self.base
        parts, bases = [], set[str]()
        for server in range(1 if kind == "half" else 2):
            blocks = [b for b in BLOCKS if self.owners[b // 3] == server]
            if blocks:
                part, named = self._part(server, base, blocks)
                parts.append(part)
                bases |= named
        if kind in ("failed", "half"):
            if self.number % 2:
                directory.remove()
            return
        saved = SavedTable(NAME, spec_json(MODEL.spec), "bsp", self.clock, False, len(BLOCKS))
        manifest = replace(
            manifest_of(self.number, tuple(parts)), tables=(saved,), bases=tuple(sorted(bases))
        )
        directory.write_manifest(manifest)
        self.base = self.number
        self.copies[directory.name] = {
            block: (store.version(block), bytes(store.saved(block).tensors[0][1]))
            for block in BLOCKS
            for store in (self.store_of(block),)
        }

    def _part(self, server: int, base: int, blocks: Sequence[int]) -> tuple[SavedPart, set[str]]:
        """As `ps_server.checkpoint.checkpoint_parts` does it."""
        directory = self.files.directory(self.number, CLUSTER_ID)
        memory, file = self.memories[server], f"server-{server}.safetensors"
        known = memory.base(base)
        same = dict[BlockKey, WrittenBlock]()
        for half in {block // 3 for block in blocks}:
            owned = [block for block in blocks if block // 3 == half]
            same |= unchanged(known, MODEL.table_id, self.stores[half], owned)
        path = directory.begin(file)
        writer = PartWriter(path, [PlannedTable(NAME, len(blocks), ("values",))])
        for block in blocks:
            if (MODEL.table_id, block) in same:
                writer.refer(NAME, block, same[MODEL.table_id, block].stored)
                continue
            saved = self.store_of(block).saved(block)
            writer.append(NAME, block, "values", saved.tensors[0][1])
            writer.note_block(NAME, block, saved.version, saved.steps)
        written = writer.finish(self.number, CLUSTER_ID)
        directory.commit(file, path)
        now = dict(same)
        for (_, block), stored in written.blocks.items():
            if not stored.place:
                placed = replace(stored, place=place_in(directory.name, file))
                now[MODEL.table_id, block] = WrittenBlock(self.store_of(block).lineage, placed, 256)
        memory.wrote(self.number, now)
        named = {each.directory for each in same.values()}
        digest = written.header_sha256
        counts = {NAME: len(blocks)}
        part = SavedPart(file, written.byte_count, digest, counts, len(same), 256 * len(same))
        return part, named

    def compact(self) -> None:
        newest = self.files.newest_good()
        if newest is None or newest.read_manifest().is_full:
            return
        with CheckpointReader(newest) as reader:
            made = compact(self.files, reader)
        self.copies[made.directory] = self.copies[newest.name]

    def prune(self, keep: int) -> None:
        before = [name for name, found in self.files.entries() if isinstance(found, Manifest)]
        removed = prune(self.files, keep)
        assert not {*before[-keep:]} & {*removed}
        for name in removed:
            self.copies.pop(name, None)
        own = self.files.directory(self.base, CLUSTER_ID)
        if self.base and not own.has_manifest():
            self.base = 0  # as the scheduler finds when it would write the next manifest

    def judge(self) -> None:
        found = dict(self.files.entries())
        good = {name for name, each in found.items() if isinstance(each, Manifest)}
        assert good == self.copies.keys(), "what was complete is good, and nothing else"
        for name in good:
            assert problems_of(self.files.named(name)) == []
            with self.files.open(name) as reader:
                for block, (version, values) in self.copies[name].items():
                    assert reader.block(NAME, block).version == version
                    assert bytes(reader.read(NAME, block)) == values, f"block {block} of {name}"


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(DOINGS, min_size=4, max_size=14))
def test_what_is_listed_as_good_has_what_it_had(doings: list[Do]) -> None:
    with tempfile.TemporaryDirectory() as root:
        row = Row(root)
        for doing in [*doings, Do("checkpoint")]:
            row.do(doing)
            if doing.kind in ("prune", "compact"):
                row.judge()
        row.judge()


def test_a_store_that_became_a_copy_is_another() -> None:
    """As after a backup was brought up to date: versions may repeat."""
    store = ShardStore(MODEL, BLOCKS)
    before = store.lineage
    at_once(store.restoring(store.snapshot()))
    assert store.lineage is not before


def test_a_row_writes_what_changed_and_no_more(tmp_path: Path) -> None:
    row = Row(str(tmp_path))
    for kind in ("checkpoint", "update", "checkpoint", "checkpoint", "prune"):
        row.do(Do(kind, (0,) if kind == "update" else (), number=1))
    row.judge()
    (first, second, third) = row.files.names()
    with row.files.open(second) as reader:
        assert reader.manifest.referred_block_count == len(BLOCKS) - 1
    with row.files.open(third) as reader:
        assert reader.manifest.referred_block_count == len(BLOCKS)
        assert reader.manifest.bases == (first, second)
