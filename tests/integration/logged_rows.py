"""A run of two workers that train tables of rows, whose servers keep update logs: one of these dies
in the middle, and a backup goes on; another one gives its ranges away and leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import ps_worker as ps
from ps_runtime.launch.cluster_shape import CheckpointPlan, UpdateLogPlan
from tests.integration.replicated_cluster import DEADLINE_S, ReplicatedCluster, replicated_cluster
from tests.integration.rows_alone import Rows, RowsAlone

WORKERS = 2
DIM = 6
IDS = 400
PUSHED = 60
LEASE_S = 3.0
"""So long that a busy machine loses none."""

BOUND_MB = 3
"""So small that segments are begun in the middle of the run; the first of them stay."""

BEFORE, KILLED, DRAINED, AFTER = 5, 9, 11, 14
"""The step of the first checkpoint, of the kill, of a planned hand-over, and the last."""

BSP_TERMS: dict[str, dict[str, Any]] = {
    "plain": {"optimizer": ps.Adagrad(lr=0.1), "partitions": 5},
    "pruned": {
        "optimizer": ps.FTRL(lr=0.2, l1=0.01), "init": ps.Uniform(1.0), "partitions": 3,
        "max_rows": 60, "evict_after": 9, "admit_after": 2, "eviction": "lfu",
    },
    "rounded": {"optimizer": ps.Adam(lr=0.1), "partitions": 3, "storage": "int8"},
    "late": {"optimizer": ps.Adam(lr=0.05), "partitions": 2, "seed": 7},
}  # fmt: skip
"""Tables that a twin trains, too; `late` is made after the kill."""

OTHER_TERMS: dict[str, dict[str, Any]] = {
    "loose": {
        "optimizer": ps.RowwiseAdagrad(lr=0.1), "consistency": "asp", "max_rows": 80,
        "partitions": 4, "init": ps.Normal(0.1),
    },
    "turned": {"optimizer": ps.SGD(lr=0.1), "consistency": "asp", "evict_after": 8},
    "wide": {"optimizer": ps.Adam(lr=0.1), "consistency": "ssp:1", "dtype": "float64"},
}  # fmt: skip
"""Tables of other settings; `turned` becomes BSP."""

DENSE, DENSE_SHAPE = "weights", (256, 128)
"""So large that its updates fill a segment."""


@dataclass
class LoggedRows:
    """What was left of the run, while its cluster still runs.

    Attributes:
        checkpoints: of step BEFORE, and of the end.
        pulled: the rows of ids 0 to IDS of each table at the end, as a client has them.
        twins: of the tables of BSP_TERMS, at the end.
        pushes: of each worker to the table `plain`, step by step.
        handle: of this table.
    """

    logs: Path
    checkpoints: tuple[str, str]
    pulled: dict[str, Rows] = field(default_factory=dict)
    twins: dict[str, RowsAlone] = field(default_factory=dict)
    pushes: list[list[tuple[Rows, Rows]]] = field(default_factory=list)

    handle: ps.TableHandle | None = None

    def plain_at(self, step: int) -> dict[int, bytes]:
        """The rows of the table `plain` after a step, by id, of a twin of its own."""
        assert self.handle is not None
        twin = RowsAlone(self.handle)
        for pushes in self.pushes[:step]:
            twin.step(pushes)
        return rows_of(twin)


def rows_of(twin: RowsAlone) -> dict[int, bytes]:
    """The rows that a twin of float32 has, by id."""
    found: dict[int, bytes] = {}
    for block in twin.store.blocks:
        tensors = dict(twin.store.saved(block).tensors)
        ids = np.frombuffer(tensors["ids"], np.uint64).tolist()
        rows = np.frombuffer(tensors["values"], np.float32).reshape(-1, DIM)
        found |= {row_id: row.tobytes() for row_id, row in zip(ids, rows, strict=True)}
    return found


@contextmanager
def logged_rows(root: Path) -> Iterator[LoggedRows]:
    """Train; each server that ends comes back."""
    logs = root / "logs"
    shape: dict[str, Any] = {
        "lease_s": LEASE_S,
        "update_log": UpdateLogPlan(str(logs), BOUND_MB),
        "checkpoints": CheckpointPlan(str(root / "checkpoints")),
    }
    with replicated_cluster(3, WORKERS, **shape) as cluster, ExitStack() as stack:
        clients = [
            stack.enter_context(
                ps.connect(cluster.address, rank=rank, request_deadline_s=DEADLINE_S)
            )
            for rank in range(WORKERS)
        ]
        training = _Training(cluster, clients)
        for step in range(1, AFTER + 1):
            training.step(step)
        made = training.checkpoint, training.save()
        found = LoggedRows(logs, made, twins=training.twins, pushes=training.pushes)
        found.handle = training.tables["plain"][0]
        for name in training.tables:
            table = training.tables[name][0]
            if name != DENSE:
                found.pulled[name] = np.array(clients[0].pull_rows(table, np.arange(IDS)))
        yield found


class _Training:
    """Two workers of this process, in turns."""

    def __init__(self, cluster: ReplicatedCluster, clients: list[ps.Client]) -> None:
        self._cluster = cluster
        self._clients = clients
        self._draws = np.random.default_rng(5)
        self.checkpoint = ""
        self.tables: dict[str, list[ps.TableHandle]] = {}
        self.twins: dict[str, RowsAlone] = {}
        self.pushes: list[list[tuple[Rows, Rows]]] = []
        self.tables[DENSE] = [
            each.create_table(
                DENSE,
                [("weights.weight", DENSE_SHAPE)],
                optimizer=ps.Adam(lr=0.01),
                block_elements=512,
            )
            for each in clients
        ]
        for name, terms in {**BSP_TERMS, **OTHER_TERMS}.items():
            if name != "late":
                self._create(name, terms)

    def _create(self, name: str, terms: dict[str, Any]) -> None:
        made = [each.create_embedding(name, DIM, **terms) for each in self._clients]
        self.tables[name] = made
        if name in BSP_TERMS:
            self.twins[name] = RowsAlone(made[0])

    def step(self, step: int) -> None:
        """A step of each worker on each table."""
        tickets = []
        for name, handles in self.tables.items():
            pushes = [self._push(name) for _ in handles]
            for client, table, push in zip(self._clients, handles, pushes, strict=True):
                if name == DENSE:
                    client.pull(table)
                    tickets.append((client, client.push(table, push[1])))
                else:
                    client.pull_rows(table, push[0][:3])  # so that the server knows of staleness
                    tickets.append((client, client.push_rows(table, *push)))
            if name in self.twins:
                self.twins[name].step(pushes)
            if name == "plain":
                self.pushes.append(pushes)
            if step == KILLED and name == "plain":
                self._kill()  # with pushes on their way
        for client, ticket in tickets:
            client.wait(ticket)
        if step == BEFORE:
            self._push_alone(0)  # which the checkpoint has, and the other's step of this clock not
            self.checkpoint = self.save()
            self._push_alone(1)
            self._clients[0].set_consistency("turned", "bsp")
        if step == DRAINED:
            server = self._cluster.living[0]
            assert self._cluster.primary_of(server)
            self._cluster.stop(server)
            self._cluster.start_again(server)
            self._cluster.healed()
        if step == KILLED:
            self._create("late", BSP_TERMS["late"])

    def _push_alone(self, rank: int) -> None:
        """One worker's step of the table `loose`."""
        client = self._clients[rank]
        client.wait(client.push_rows(self.tables["loose"][rank], *self._push("loose")))

    def _push(self, name: str) -> tuple[Rows, Rows]:
        if name == DENSE:
            return np.empty(0), self._draws.standard_normal(DENSE_SHAPE).astype("f4")
        dtype = "f8" if name == "wide" else "f4"
        ids = (self._draws.zipf(1.3, PUSHED) - 1) % IDS
        return ids, self._draws.standard_normal((PUSHED, DIM)).astype(dtype)

    def _kill(self) -> None:
        server = self._cluster.living[0]
        assert self._cluster.primary_of(server)
        self._cluster.kill(server)
        self._cluster.taken_over_from(server)
        self._cluster.start_again(server)
        self._cluster.healed()

    def save(self) -> str:
        """A checkpoint's directory; every worker is between two steps."""
        tickets = [client.checkpoint("asked for", timeout_s=DEADLINE_S) for client in self._clients]
        *_, url = [ticket.wait().url for ticket in tickets]  # a fast one is not that of the others
        return url
