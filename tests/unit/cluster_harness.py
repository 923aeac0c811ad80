"""A cluster machine with a hand on its clock, for the tests beside this file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ps_core import errors
from ps_core.cluster_view import Node, Role, Session
from ps_core.keys import Incarnation
from ps_core.tables.elements import DType
from ps_core.tables.optimizers import OptimizerKind, OptimizerSpec
from ps_core.tables.table_spec import TableSpec
from scheduler.journal import records
from scheduler.machine.cluster import Cluster, Created, Parked
from scheduler.machine.state import ClusterSettings, Registration

SETTINGS = ClusterSettings(
    cluster_id="c-1",
    timeline=bytes(range(16)),
    token_key=b"k" * 32,
    first_incarnation=Incarnation(70),
    worker_count=2,
    server_count=2,
)
SPEC = TableSpec(
    name="model",
    dtype=DType.FLOAT32,
    element_count=1_000,
    optimizer=OptimizerSpec(OptimizerKind.SGD),
    block_elements=64,
)


def asking(role: Role, number: int, **fields: Any) -> Registration:
    """A registration whose id is made from `number`."""
    if role is Role.SERVER:
        fields = {"address": f"h{number}:70", "kernel_fingerprint": "torch=2"} | fields
    return Registration(number.to_bytes(16, "big"), role, **fields)


class Harness:
    """A cluster and a hand on its clock."""

    def __init__(self, **settings: Any) -> None:
        self.now_s = 100.0
        self.cluster = Cluster(replace(SETTINGS, **settings), self.now_s)
        self.number = 0
        self.transitions: list[object] = []

    def start_again(self, now_s: float = 7.0) -> None:
        """The scheduler dies; another goes on from its journal, by another clock."""
        found = records.read(
            records.Differences().since(self.cluster.journaled(self.now_s)).encoded()
        )
        assert found is not None
        began = Cluster.resumed(found, now_s)
        self.cluster, self.now_s = began.reply, now_s
        self.transitions += began.transitions

    def join(self, role: Role, **fields: Any) -> Session:
        self.number += 1
        decision = self.cluster.register(asking(role, self.number, **fields), self.now_s)
        self.transitions += decision.transitions
        return decision.reply

    def leave(self, session: Session) -> None:
        self.transitions += self.cluster.deregister(session, "done", self.now_s).transitions

    def die(self, session: Session) -> None:
        """It is gone in the middle of its work."""
        ended = self.cluster.deregister(session, "SIGKILL", self.now_s, unfinished=True)
        self.transitions += ended.transitions

    def create(self, session: Session, spec: TableSpec = SPEC) -> Created | Parked:
        decision = self.cluster.create_table(session, spec, self.now_s)
        self.transitions += decision.transitions
        return decision.reply

    def beat(self, *sessions: Session) -> None:
        for session in sessions:
            number = self.cluster.view.view_number
            self.transitions += self.cluster.heartbeat(session, self.now_s, number).transitions

    def pass_time(self, seconds: float, *heard: Session) -> None:
        """Let time go by in half seconds; the sessions of `heard` beat at each."""
        for _ in range(int(seconds * 2)):
            self.now_s += 0.5
            self.beat(*heard)
            self.transitions += self.cluster.tick(self.now_s).transitions

    def is_finished(self) -> bool:
        return self.cluster.view.finished

    def servers_have_left(self) -> bool:
        return self.cluster.servers_have_left

    def node(self, session: Session) -> Node:
        return self.cluster.view.nodes_by_id[session.node_id]


def refused(
    kind: type[errors.PushpullError], *words: str, by: Callable[[], object], of: Harness
) -> None:
    """`by` must raise `kind` with `words` in its message, and leave the view as it was."""
    before = of.cluster.view
    with pytest.raises(kind) as failure:
        by()
    for word in words:
        assert word in failure.value.message
    assert of.cluster.view == before
