"""The quota for a checkpoint's copies: what may change has space, and all may in the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ps_core.keys import RangeId, TableId
from ps_server.values.copy_on_write import CopyQuota

BLOCK_BYTES = 10
RANGES = st.lists(st.integers(0, 6), min_size=1, max_size=6)  # blocks of each range


@given(RANGES, st.integers(0, 120), st.data())
def test_copies_of_open_ranges_fit_and_every_range_opens(
    sizes: list[int], bound_bytes: int, data: st.DataObject
) -> None:
    quota = CopyQuota(bound_bytes)
    keys = [(TableId(1), RangeId(number)) for number in range(len(sizes))]
    left = dict(zip(keys, sizes, strict=True))
    for key, count in left.items():
        is_open = quota.plan(key, (count + 1) * BLOCK_BYTES)  # a bound: one block did not change
        assert is_open == (key not in quota.held)
    for key, count in left.items():
        quota.captured(key, count * BLOCK_BYTES)
    while any(left.values()) or quota.waiting_bytes:
        quota.opened()
        unwritten = sum(left[key] for key in keys if key not in quota.held) * BLOCK_BYTES
        assert quota.waiting_bytes + unwritten <= bound_bytes + BLOCK_BYTES
        may_copy = [key for key in keys if left[key] and key not in quota.held]  # they change
        may_copy += [key for key in quota.turns if left[key]]
        if may_copy and (not quota.waiting_bytes or data.draw(st.booleans())):
            key = data.draw(st.sampled_from(may_copy))
            left[key] -= 1
            quota.copied(key, BLOCK_BYTES, is_last=not left[key])
        else:
            quota.written(BLOCK_BYTES)
    quota.opened()
    assert quota.held == []
