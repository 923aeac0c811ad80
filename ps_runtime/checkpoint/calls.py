"""Calls of nodes to the scheduler about checkpoints; they raise as `SchedulerLink.call`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ps_core.keys import TableId
from ps_core.manifest import PartReport
from ps_runtime.cluster.scheduler_link import SchedulerLink
from ps_runtime.system import clock
from pushpull.v1 import scheduler_pb2

MAX_PROBLEM_BYTES = 500


async def report_part(link: SchedulerLink, number: int, part: PartReport) -> None:
    """Report that this node's part of checkpoint `number` is written, or cannot be. Blocking: until
    a scheduler has answered.
    """
    request = scheduler_pb2.ReportCheckpointPartRequest(
        session=link.identity,
        number=number,
        file=part.file,
        byte_count=part.byte_count,
        header_sha256=bytes.fromhex(part.header_sha256),
        tables=[
            scheduler_pb2.WrittenTable(
                table_id=table_id,
                block_count=table.block_count,
                clock=table.clock,
                is_torn=table.is_torn,
            )
            for table_id, table in part.tables.items()
        ],
        problem=part.problem.encode()[:MAX_PROBLEM_BYTES].decode(errors="ignore"),
        referred_block_count=part.referred_block_count,
        referred_byte_count=part.referred_byte_count,
        bases=part.bases,
        has_parameters=part.has_parameters,
    )
    await link.call("ReportCheckpointPart", request, "the scheduler to hear of a checkpoint's part")


async def join_checkpoint(
    link: SchedulerLink,
    number: int,
    clocks: Mapping[TableId, int],
    has_state: bool,
    *,
    has_begun: bool,
    stays: bool = False,
) -> scheduler_pb2.JoinCheckpointResponse:
    """Workers: report the clocks at which this worker can save its own state next; it goes no
    further until the cut is decided. `stays`: its script waits there until the checkpoint ends.
    `has_begun`: its script has come to a save point.

    In the answer, `must_step`: the caller waits before a step that the checkpoint includes, because
    another worker has taken that step; `is_awaited`: the script of another worker waits for it.
    Blocking: as `report_part`.
    """
    request = scheduler_pb2.JoinCheckpointRequest(
        session=link.identity,
        number=number,
        tables=[
            scheduler_pb2.TableProgress(table_id=table_id, clock=each)
            for table_id, each in clocks.items()
        ],
        has_state=has_state,
        has_begun=has_begun,
        stays=stays,
    )
    answer: scheduler_pb2.JoinCheckpointResponse = await link.call(
        "JoinCheckpoint", request, "the scheduler to hear where this worker is"
    )
    return answer


async def restore_checkpoint(link: SchedulerLink, url: str, deadline_s: float) -> str:
    """Take the whole cluster back to a checkpoint, which ends this session; returns its directory.
    Blocking: up to `deadline_s`.

    Raises:
        InvalidCheckpoint: there is no good one.
        Fenced: also if another caller has restored the cluster.
    """
    request = scheduler_pb2.RestoreCheckpointRequest(session=link.identity, url=url)
    end_s = clock.now_s() + deadline_s
    answer = await link.call("RestoreCheckpoint", request, "the cluster to be restored", end_s)
    found: str = answer.url
    return found


@dataclass(frozen=True, slots=True)
class MadeCheckpoint:
    """A complete checkpoint: its number, its directory and the bytes of its files."""

    number: int
    url: str
    byte_count: int


async def create_checkpoint(
    link: SchedulerLink, reason: str, deadline_s: float, covered_by: int, view_number: int
) -> MadeCheckpoint:
    """Request a checkpoint, and wait until it is complete.

    The checkpoint numbered `covered_by` (0: none) will do, which was found in the view
    `view_number` (0: any). `reason` is for its manifest. Blocking: up to `deadline_s`.

    Raises:
        StaleAssignment: a checkpoint was cut in a newer view.
        InvalidConfig: the cluster has no place for it.
        InvalidCheckpoint: it could not be written.
        WaitExpired: it was not complete in time, and still may be; the message names the missing
            nodes.
    """
    request = scheduler_pb2.CreateCheckpointRequest(
        session=link.identity, reason=reason, covered_by=covered_by, view_number=view_number
    )
    end_s = clock.now_s() + deadline_s
    answer = await link.call("CreateCheckpoint", request, "a checkpoint", end_s)
    return MadeCheckpoint(answer.number, answer.url, answer.byte_count)
