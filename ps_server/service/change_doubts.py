"""Questions to other servers while the scheduler is silent: the outcomes of changes for which steps
are held here (SEMANTICS S6).

    scheduler silent for a lease --> cuts, and undecided changes of deciding ranges, are given up
                                 --> the primary of each table's first range is asked, until it says
"""

from __future__ import annotations

import asyncio
import contextlib

import grpc

from ps_core.change import ChangeResult
from ps_core.cluster_view import ClusterView
from ps_core.errors import NotOwner
from ps_core.keys import NodeId
from ps_runtime.cluster import wire
from ps_runtime.grpc.channels import aio_channel
from ps_runtime.grpc.errors import from_rpc_error
from ps_runtime.observe import logs
from ps_server.ranges.server_machine import Doubt
from ps_server.service.node import ParameterNode
from pushpull.v1 import parameters_pb2, parameters_pb2_grpc

_ANSWER_S = 2.0


class ChangeDoubts:
    """Asks for the outcomes that one server doubts. Belongs to its event loop."""

    def __init__(self, node: ParameterNode) -> None:
        self._node = node
        self._addresses: dict[NodeId, str] = {}
        self._asking: dict[Doubt, asyncio.Task[None]] = {}

    def observe(self, view: ClusterView) -> None:
        """Take the other servers' addresses from a new view."""
        self._addresses = {node.node_id: node.address for node in view.nodes}

    def look(self, *, is_alone: bool) -> None:
        """Ask, or stop asking. Called now and then; `is_alone`: the scheduler is silent."""
        if is_alone is not self._node.is_alone:
            self._node.is_alone = is_alone
            if is_alone and self._node.prepared_changes:
                logs.warning("scheduler_silent", prepared_changes=len(self._node.prepared_changes))
        if is_alone:
            self._node.go_on_alone()
        doubts = set(self._node.machine.doubts) if is_alone else set()
        for old in self._asking.keys() - doubts:
            self._asking.pop(old).cancel()
        for doubt in doubts:
            if doubt.decided_by == self._node.session.node_id:
                with contextlib.suppress(NotOwner):  # it does not serve the range yet
                    self._learn(doubt, self._node.change_outcome(doubt.table_id, doubt.number))
            elif doubt not in self._asking or self._asking[doubt].done():
                self._asking[doubt] = asyncio.get_running_loop().create_task(self._ask(doubt))

    async def _ask(self, doubt: Doubt) -> None:
        request = parameters_pb2.SettleChangeRequest(
            session=wire.session_to_proto(self._node.session),
            table_id=doubt.table_id,
            number=doubt.number,
        )
        try:
            async with aio_channel(self._addresses[doubt.decided_by]) as channel:
                stub = parameters_pb2_grpc.ParameterServiceStub(channel)
                answer = await stub.SettleChange(request, timeout=_ANSWER_S)
        except grpc.RpcError as failure:
            reason = from_rpc_error(failure).message
            logs.debug("change_in_doubt", table_id=doubt.table_id, reason=reason)
            return
        outcome = wire.change_outcome_from_proto(answer.outcome)
        self._learn(doubt, None if outcome is None else ChangeResult(outcome, answer.after_clock))

    def _learn(self, doubt: Doubt, settled: ChangeResult | None) -> None:
        if settled is not None:
            self._node.learn(doubt, settled)

    async def close(self) -> None:
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
