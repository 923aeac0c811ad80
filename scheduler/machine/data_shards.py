"""Data sets whose samples workers train shard by shard (SEMANTICS S20).

    pending  --issued-->  leased to one worker  --reported-->  done
    leased   --its worker's membership ends-->  pending, and counted as issued again

Rules:
    - A pass issues the shards in an order that is a function of seed and pass alone, and those that
      are pending again before the rest of it. It is over when all are done, and the next begins.
    - A request names how many shards its caller shall have, and a worker's last report is known: so
      a request that is repeated, because its answer was lost, changes nothing.
    - A worker that wants shards waits only while it has none, others have all that are left, and
      the pass is not over: so no worker waits that could end what others wait for.

Invariants:
    DS-1  A shard of the present pass is pending, leased to one member, or done.
    DS-2  A pass is over when each of its shards was reported once by a worker that had leased it.
    DS-3  Shards that are done in a checkpoint were reported before its cut, and those that are not
          are issued again after a restore.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, NoReturn

from ps_core import limits
from ps_core.cluster_view import Node
from ps_core.errors import InvalidConfig, check_config, listed
from ps_core.keys import NodeId
from ps_core.manifest import DataSetSpec, SavedDataSet

_NAMED_COUNT = 4  # holders of shards in a message
_ROUND_COUNT = 4  # of the Feistel network: fewer do not mix


class ShardReport(NamedTuple):
    """Shards that a worker reported in one call."""

    pass_number: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set of a run, and its present pass.

    Attributes:
        issued_count: shards of the pass's order that were issued, ever.
        returned: those of them that are pending again; `leases` has the worker of each leased one.
        reports: the last report of each worker.
        reissued_count: leases that ended without a report, in all passes.
    """

    run: str
    spec: DataSetSpec
    pass_number: int = 0
    issued_count: int = 0
    returned: tuple[int, ...] = ()
    leases: Mapping[int, NodeId] = field(default_factory=dict)
    reports: Mapping[NodeId, ShardReport] = field(default_factory=dict)
    reissued_count: int = 0

    @property
    def done_count(self) -> int:
        return self.issued_count - len(self.returned) - len(self.leases)

    @property
    def progress(self) -> tuple[int, int]:
        """The present pass, and how many of its shards are done; it only grows."""
        return self.pass_number, self.done_count

    def saved(self) -> SavedDataSet:
        """The data set for a checkpoint: leases end with the timeline."""
        is_open = (*self.returned, *self.leases)
        reissued_count = self.reissued_count + len(self.leases)
        return SavedDataSet(self.spec, self.pass_number, self.issued_count, is_open, reissued_count)

    @classmethod
    def restored(cls, saved: SavedDataSet) -> DataSet:
        """The data set of a checkpoint, which is of the run without a name."""
        return cls(
            "", saved.spec, saved.pass_number, saved.issued_count, saved.open_shards,
            reissued_count=saved.reissued_count,
        )  # fmt: skip

    def held_by(self, worker: NodeId) -> tuple[int, ...]:
        return tuple(shard for shard, holder in self.leases.items() if holder == worker)

    def shard_at(self, position: int) -> int:
        """The shard at a position of the present pass's order: the position, encrypted by a Feistel
        network with seed and pass as its key, as often as the result is no shard's number.
        """
        key = f"{self.spec.seed}/{self.pass_number}".encode()
        half_bits = max(1, -(-(self.spec.shard_count - 1).bit_length() // 2))
        mask = (1 << half_bits) - 1
        while True:
            left, right = position >> half_bits, position & mask
            for number in range(_ROUND_COUNT):
                text = f"{number}/{right}".encode()
                drawn = hashlib.blake2b(text, key=key, digest_size=8).digest()
                left, right = right, left ^ (int.from_bytes(drawn, "big") & mask)
            position = left << half_bits | right
            if position < self.spec.shard_count:
                return position

    def reported(self, worker: NodeId, report: ShardReport) -> DataSet:
        """The data set after a worker's report; InvalidConfig if it does not have these shards."""
        if not report.shards or self.reports.get(worker) == report:
            return self
        if report.pass_number != self.pass_number:
            self._refuse(f"the present pass is {self.pass_number}", report)
        if len(set(report.shards)) < len(report.shards):
            self._refuse("one of them comes twice", report)
        for shard in report.shards:
            holder = self.leases.get(shard)
            if holder is None:
                self._refuse(f"shard {shard} is not leased", report)
            if holder != worker:
                self._refuse(f"shard {shard} is leased to node {holder}", report)
        leases = {shard: who for shard, who in self.leases.items() if shard not in report.shards}
        after = replace(self, leases=leases, reports={**self.reports, worker: report})
        if after.done_count < self.spec.shard_count:
            return after
        return replace(after, pass_number=self.pass_number + 1, issued_count=0)

    def _refuse(self, reason: str, report: ShardReport) -> NoReturn:
        shards = listed([str(shard) for shard in report.shards], _NAMED_COUNT)
        raise InvalidConfig(
            f"shards {shards} of pass {report.pass_number} of data set '{self.spec.name}' were "
            f"reported, and {reason}; expected shards that the caller has leased, each once. "
            "Nothing has changed"
        )

    def issued(self, worker: NodeId, want_count: int) -> DataSet:
        """The data set after a worker was leased shards, up to `want_count` together."""
        missing = max(0, want_count - len(self.held_by(worker)))
        again, left = self.returned[:missing], self.returned[missing:]
        end = min(self.issued_count + missing - len(again), self.spec.shard_count)
        new = map(self.shard_at, range(self.issued_count, end))
        leases = {**self.leases, **dict.fromkeys((*again, *new), worker)}
        return replace(self, issued_count=end, returned=left, leases=leases)

    def without(self, worker: NodeId) -> DataSet:
        """The data set after a worker's membership has ended."""
        lost = self.held_by(worker)
        return replace(
            self,
            returned=(*self.returned, *lost),
            leases={shard: who for shard, who in self.leases.items() if who != worker},
            reports={who: report for who, report in self.reports.items() if who != worker},
            reissued_count=self.reissued_count + len(lost),
        )


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """A worker's request; the fields are those of `pushpull.v1.LeaseDataShardsRequest`."""

    spec: DataSetSpec
    pass_number: int | None
    done: tuple[int, ...]
    want_count: int


@dataclass(frozen=True, slots=True)
class ShardLease:
    """The present pass, and all shards of its own pass that the caller has. `reported_count` and
    `issued_count` are those of this call; it `ends_pass` if no shard of the pass is left.
    `waits_for` says who has the shards that the caller waits for.
    """

    pass_number: int
    shards: tuple[int, ...]
    reported_count: int
    issued_count: int
    ends_pass: bool
    waits_for: str


@dataclass(frozen=True, slots=True)
class DataShardsReturned:
    """Shards of a worker whose membership ended without a report of them are pending again."""

    worker: Node
    name: str
    pass_number: int
    shard_count: int


class DataShards:
    """The data sets of a cluster, by run and name."""

    def __init__(
        self,
        data_sets: dict[tuple[str, str], DataSet],
        describe: Callable[[NodeId, float], str],
    ) -> None:
        self._data_sets = data_sets
        self._describe = describe

    def lease(self, node: Node, request: ShardRequest, now_s: float) -> ShardLease:
        """Take a worker's report, and lease it shards."""
        worker, spec = node.node_id, request.spec
        before = self._found(node.run, spec)
        most = limits.MAX_HELD_SHARD_COUNT
        check_config(
            request.want_count <= most, f"want_count is {request.want_count}; expected 0 to {most}"
        )
        check_config(
            request.pass_number is not None or not request.done,
            "done_shards come without pass_number; expected the pass that they are of",
        )
        present, own = before.pass_number, request.pass_number
        own = present if own is None else own
        after = before.reported(worker, ShardReport(own, request.done))
        check_config(
            own <= after.pass_number,
            f"pass {own} of data set '{spec.name}' was asked for; the present one, "
            f"{after.pass_number}, is not over",
        )
        is_present = own == after.pass_number
        leased = after.issued(worker, request.want_count) if is_present else after
        self._data_sets[node.run, spec.name] = leased
        shards = leased.held_by(worker) if is_present else ()
        waits = is_present and request.want_count > 0 and not shards
        return ShardLease(
            leased.pass_number,
            shards,
            reported_count=len(before.leases) - len(after.leases),
            issued_count=len(leased.leases) - len(after.leases),
            ends_pass=present < after.pass_number,
            waits_for=self._holders(leased, now_s) if waits else "",
        )

    def _found(self, run: str, spec: DataSetSpec) -> DataSet:
        """The data set of this spec; a new one is checked."""
        known = self._data_sets.get((run, spec.name))
        if known is None:
            _check(spec)
            most = limits.MAX_DATA_SET_COUNT
            check_config(
                len(self._data_sets) < most,
                f"data set '{spec.name}' would be one of more than {most}, the most of a cluster; "
                "lease several passes of one",
            )
            return DataSet(run, spec)
        for name in ("sample_count", "shard_size", "seed"):
            came, declared = getattr(spec, name), getattr(known.spec, name)
            check_config(
                came == declared,
                f"{name} of data set '{spec.name}' is {came}, and was declared as {declared} by "
                "another worker, or in the checkpoint; expected the same, or another name",
            )
        return known

    def _holders(self, data_set: DataSet, now_s: float) -> str:
        holders = sorted(set(data_set.leases.values()))
        named = listed([self._describe(each, now_s) for each in holders], _NAMED_COUNT)
        return (
            f"the last {len(data_set.leases)} shards of pass {data_set.pass_number} of data set "
            f"'{data_set.spec.name}' are leased to {named}"
        )

    def ended(self, node: Node) -> list[DataShardsReturned]:
        """A worker's membership has ended: what it has leased is pending again."""
        returned = []
        for key, data_set in self._data_sets.items():
            count = len(data_set.held_by(node.node_id))
            if count or node.node_id in data_set.reports:
                self._data_sets[key] = data_set.without(node.node_id)
            if count:
                name, number = data_set.spec.name, data_set.pass_number
                returned.append(DataShardsReturned(node, name, number, count))
        return returned

    def remove(self, run: str) -> None:
        """Remove the data sets of a run."""
        for key in [key for key in self._data_sets if key[0] == run]:
            del self._data_sets[key]


def _check(spec: DataSetSpec) -> None:
    """Refuse a data set that no worker can train."""
    name_bytes, most_bytes = len(spec.name.encode()), limits.MAX_DATA_SET_NAME_BYTES
    count, most, size = spec.sample_count, limits.MAX_SAMPLE_COUNT, spec.shard_size
    check_config(
        1 <= name_bytes <= most_bytes,
        f"the data set's name has {name_bytes} bytes; expected 1 to {most_bytes}",
    )
    check_config(
        1 <= count <= most,
        f"sample_count of data set '{spec.name}' is {count}; expected 1 to {most}",
    )
    check_config(
        1 <= size <= count,
        f"shard_size of data set '{spec.name}' is {size}; expected 1 to its samples, {count}",
    )
