"""Takes the primaries of views into the push window (SEMANTICS S8).

Views may be left out: in those that did not come a range may have left its primary and come back,
and the server has forgotten the entries that it had received. Nobody else would send them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ps_core.cluster_view import RangeAssignment
from ps_core.keys import NodeId, RangeId
from ps_worker.window.push_window import PushWindow

EPOCHS_TO_RETURN = 3
"""A range that its primary gave up, and that comes back to it, passes at least three epochs: a
failover and what follows take as many, and each hand-over takes two."""

_NOBODY = NodeId(0)


def take_primaries(
    window: PushWindow, known_epochs: Mapping[RangeId, int], ranges: Iterable[RangeAssignment]
) -> frozenset[RangeId]:
    """Have `window` send to the primaries of a newer view; the one before had `known_epochs`. What
    was sent to a primary that a range has left goes again, and so does what was sent to one that
    may have given the range up in between: returns the ranges of which that is so.
    """
    owners: dict[RangeId, NodeId] = {}
    may_be_back: dict[RangeId, NodeId] = {}
    for each in ranges:
        if each.primary is None:
            continue
        owners[each.range_id] = each.primary
        known = known_epochs.get(each.range_id, each.assignment_epoch)
        if each.assignment_epoch >= known + EPOCHS_TO_RETURN:
            may_be_back[each.range_id] = _NOBODY
    if may_be_back:
        window.assign(owners | may_be_back)
    window.assign(owners)
    return frozenset(may_be_back)
