"""RangeSnapshots against a dumb twin that copies every block at once (CW-1)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from ps_core.keys import RangeId, TableId
from ps_core.sliced_work import at_once
from ps_server.values.copy_on_write import Key, RangeSnapshots

RANGES = [(TableId(t), RangeId(r)) for t in (1, 2) for r in (0, 1)]
BLOCKS = range(4)


class Saved(NamedTuple):
    """A block as it is at the moment: what a store gives."""

    block: int
    value: int


class Store:
    """Blocks that are counted up."""

    def __init__(self) -> None:
        self.values = dict.fromkeys(BLOCKS, 0)

    def saved(self, block: int) -> Saved:
        return Saved(block, self.values[block])


ACTIONS = st.one_of(
    st.tuples(
        st.just("change"),
        st.sampled_from(RANGES),
        st.lists(st.sampled_from(BLOCKS), max_size=4),  # one may be named twice
    ),
    st.tuples(st.just("capture"), st.sampled_from(RANGES), st.sets(st.sampled_from(BLOCKS))),
    st.tuples(st.just("next"), st.none(), st.none()),
)


@given(st.lists(ACTIONS, max_size=40))
def test_each_block_is_handed_over_once_as_it_was(actions: list[tuple[str, Any, Any]]) -> None:
    stores = {key: Store() for key in RANGES}
    taken: list[tuple[TableId, Saved]] = []
    snapshots: Any = RangeSnapshots(lambda key, block: taken.append((key[0], block)))  # type: ignore[arg-type]
    expected: dict[Key, dict[int, int]] = {}

    def changed(key: Key, blocks: list[int]) -> None:
        snapshots.before_change(key, blocks)
        for block in blocks:
            stores[key].values[block] += 1

    for action, key, blocks in actions:
        if action == "change":
            changed(key, blocks)
        elif action == "capture" and key not in expected:
            expected[key] = {block: stores[key].values[block] for block in blocks}
            snapshots.add(key, stores[key], blocks)
        elif action == "next":
            left = snapshots.has_more
            found = at_once(snapshots.taking(RANGES))
            assert (found is not None) == left
            taken += [(found[0][0], found[1])] if found is not None else []
    taken += list(_rest(snapshots))
    assert not snapshots.has_more
    for table_id in (TableId(1), TableId(2)):
        wanted = sorted(
            block for key, of in expected.items() if key[0] == table_id for block in of.items()
        )
        assert sorted(tuple(block) for owner, block in taken if owner == table_id) == wanted


def _rest(snapshots: Any) -> Iterator[tuple[TableId, Saved]]:
    while (found := at_once(snapshots.taking(RANGES))) is not None:
        yield found[0][0], found[1]
