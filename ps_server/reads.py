"""Reads of one range on their way, and how they are answered: with bytes, or with places in memory
that is lent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ps_core.cluster_view import Session
from ps_core.errors import InvalidKeys, InvariantViolation, PushpullError
from ps_core.tables import NATIVE_CODEC, Codec
from ps_runtime import wire
from ps_server.events import AnswerPull, Place
from ps_server.frames import block_answer, range_error
from ps_server.range_state import RangeState
from ps_server.read_gate import WaitCause
from ps_server.shards import Shards
from pushpull.v1 import parameters_pb2

AnswerPart = bytes | parameters_pb2.SharedValue
"""A serialized PullResponse, or a value that the reader takes from where it lies."""


@dataclass(slots=True, eq=False)
class Read:
    """A read of one range on its way; `on_answer` gets its parts, once.

    `codec` is None for the table's own; `shared`: the reader takes what is lent to it; `cut` is the
    session's number of the cut that it ends, or 0.
    """

    place: Place
    blocks: Sequence[int]
    codec: Codec | None
    session: Session
    shared: bool
    on_answer: Callable[[list[AnswerPart]], None]
    cut: int = 0
    parked_s: float = 0.0
    cause: WaitCause | None = None
    """What it waits for, since `parked_s`, if it does."""


def answered(
    effect: AnswerPull, read: Read, state: RangeState, shards: Shards
) -> tuple[list[AnswerPart], int]:
    """What a read is answered with, and how many bytes of values that is."""
    place = effect.table_id, effect.range_id
    store = shards.stores[place]
    codec = read.codec or NATIVE_CODEC[state.table.spec.dtype]
    codec_number = wire.codec_to_proto(codec)
    answer: list[AnswerPart] = []
    byte_count = 0
    lent = shards.homes.lent_to(read.session, place, codec) if read.shared else None
    try:
        for block in read.blocks or state.blocks:
            version = effect.versions.get(block)
            if version is None:
                raise InvalidKeys(
                    f"block {block} of table '{state.name}' is not in range {effect.range_id}"
                )
            if effect.keeps_for is not None:
                store.keep(effect.keeps_for, block)
            if lent is not None:
                lying = lent.shared_value(effect, block)
                byte_count += lying.byte_count
                answer.append(lying)
                continue
            payload, presence = store.read(block, codec, effect.clock)
            value = parameters_pb2.BlockValue(
                block=block,
                version=version,
                peer_version=version - effect.own_updates.get(block, 0),
                clock=effect.range_clock,
                codec=codec_number,
                presence=presence,
            )
            byte_count += len(payload)
            answer.append(block_answer(value, payload))
    except InvariantViolation:
        raise
    except PushpullError as error:
        return [range_error(effect.range_id, error)], byte_count
    return answer, byte_count
