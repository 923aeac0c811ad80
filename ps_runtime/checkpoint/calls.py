"""What nodes say to the scheduler about checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ps_core.keys import TableId
from ps_core.manifest import PartReport
from ps_runtime.cluster import wire
from ps_runtime.cluster.scheduler_link import SchedulerLink
from ps_runtime.system import clock
from pushpull.v1 import scheduler_pb2

MAX_PROBLEM_BYTES = 500


async def report_part(link: SchedulerLink, number: int, part: PartReport) -> None:
    """Say that this node's part of checkpoint `number` is written, or cannot be.

    Blocking: until a scheduler has answered.

    Raises:
        Fenced: this node has been replaced.
    """
    request = scheduler_pb2.ReportCheckpointPartRequest(
        session=wire.session_to_proto(link.session),
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
    )
    await link.call(
        lambda stub, left_s: stub.ReportCheckpointPart(request, timeout=min(left_s, link.lease_s)),
        "the scheduler to hear of a checkpoint's part",
        math.inf,
    )


@dataclass(frozen=True)
class HeardOf:
    """What the scheduler says to who joins a checkpoint.

    Attributes:
        must_step: the caller stays before a step that the checkpoint is of, and that another worker
            has taken.
        is_awaited: the script of another worker waits for it.
    """

    must_step: bool
    is_awaited: bool


async def join_checkpoint(
    link: SchedulerLink,
    number: int,
    clocks: Mapping[TableId, int],
    has_state: bool,
    *,
    stays: bool = False,
) -> HeardOf:
    """Workers: say at which clocks this worker can write its own state down next; it goes no
    further until the cut is settled. `stays`: its script waits there until the checkpoint ends.

    Blocking, Raises: as `report_part`.
    """
    request = scheduler_pb2.JoinCheckpointRequest(
        session=wire.session_to_proto(link.session),
        number=number,
        tables=[
            scheduler_pb2.TableProgress(table_id=table_id, clock=each)
            for table_id, each in clocks.items()
        ],
        has_state=has_state,
        stays=stays,
    )
    answer = await link.call(
        lambda stub, left_s: stub.JoinCheckpoint(request, timeout=min(left_s, link.lease_s)),
        "the scheduler to hear where this worker is",
        math.inf,
    )
    return HeardOf(answer.must_step, answer.is_awaited)


async def restore_checkpoint(link: SchedulerLink, url: str, deadline_s: float) -> str:
    """Take the whole cluster back to a checkpoint; its directory. This session ends with that.

    Blocking: up to `deadline_s`.

    Raises:
        InvalidCheckpoint: there is no good one.
        Fenced: this node has been replaced; so it has if somebody else has restored the cluster.
        WaitExpired: no scheduler answered.
    """
    request = scheduler_pb2.RestoreCheckpointRequest(
        session=wire.session_to_proto(link.session), url=url
    )
    answer = await link.call(
        lambda stub, left_s: stub.RestoreCheckpoint(request, timeout=left_s),
        "the cluster to be restored",
        clock.now_s() + deadline_s,
    )
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
    """Ask for a checkpoint, and wait until it is complete; the one numbered `covered_by` will do.

    Args:
        link: to whom.
        reason: for its manifest.
        deadline_s: from now.
        covered_by: 0 for none.
        view_number: of the view that `covered_by` was found in; 0: whichever.

    Blocking: up to `deadline_s`.

    Raises:
        StaleAssignment: a checkpoint was cut in a newer view.
        InvalidConfig: the cluster has nowhere to put it.
        InvalidCheckpoint: it could not be written.
        WaitExpired: it was not complete in time; the message says who is missing.
        Fenced: this node has been replaced.
    """
    request = scheduler_pb2.CreateCheckpointRequest(
        session=wire.session_to_proto(link.session),
        reason=reason,
        covered_by=covered_by,
        view_number=view_number,
    )
    answer = await link.call(
        lambda stub, left_s: stub.CreateCheckpoint(request, timeout=left_s),
        "a checkpoint",
        clock.now_s() + deadline_s,
    )
    return MadeCheckpoint(answer.number, answer.url, answer.byte_count)
