"""What requests to the scheduler say, as values; long ones are read beside the loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

from google.protobuf.message import DecodeError

from ps_core import limits, rights
from ps_core.cluster_view import Session
from ps_core.envelope import has_few
from ps_core.errors import InvalidConfig, InvalidTensor, Unauthenticated
from ps_core.keys import RangeId
from ps_core.tables import Table, TableSpec
from ps_core.update_offer import UpdateOffer
from ps_runtime.cluster import wire
from pushpull.v1 import scheduler_pb2, types_pb2
from scheduler.machine import view_size
from scheduler.machine.state import Registration, ServerMemory, UpdateLogClaim


def session_of(message: types_pb2.SessionIdentity) -> Session:
    """The session in a request, whoever's it is.

    Raises:
        Unauthenticated: there is none.
    """
    if not message.session_token:
        raise Unauthenticated(rights.NO_SESSION)
    return wire.session_from_proto(message)


_MAX_POOL_CHARACTERS = 128


def registration_of(request: scheduler_pb2.RegisterNodeRequest) -> Registration:
    """What a node says of itself; nothing of it is checked."""
    has_rank = request.HasField("requested_rank")
    return Registration(
        registration_id=request.registration_id,
        role=wire.role_from_proto(request.role),
        address=request.address,
        requested_rank=request.requested_rank if has_rank else None,
        protocol_version=request.protocol_version,
        features=tuple(request.features),
        kernel_fingerprint=request.kernel_fingerprint,
        cluster_id=request.cluster_id,
        custom_updates=tuple(map(_offer, request.custom_updates)),
        waited_s=request.waiting_ms / 1000 if request.HasField("waiting_ms") else None,
        update_log=_claim(request.update_log) if request.HasField("update_log") else None,
        memory=ServerMemory(request.memory.byte_count, request.memory.pool[:_MAX_POOL_CHARACTERS]),
        launch_id=request.launch_id,
        world_size=request.world_size,
        run=request.run,
        identity=request.identity,
    )


def _claim(message: scheduler_pb2.UpdateLogClaim) -> UpdateLogClaim:
    range_ids = tuple(map(RangeId, message.range_ids))
    return UpdateLogClaim(message.log_id, message.timeline, range_ids)


def _offer(message: scheduler_pb2.CustomUpdate) -> UpdateOffer:
    numbers = wire.hyperparameters_from_proto(message.hyperparameters)
    return UpdateOffer(message.name, numbers, message.fingerprint, message.problem)


async def table_request_of(
    request: scheduler_pb2.CreateTableRequest | bytes,
) -> scheduler_pb2.CreateTableRequest:
    """The request; a long one is parsed beside the loop.

    Raises:
        InvalidConfig: it is none, or has too many tensors.
    """
    if not isinstance(request, bytes):
        return request
    raw = request

    def read() -> scheduler_pb2.CreateTableRequest:
        fields = types_pb2.TableSpec
        try:
            if has_few(
                raw,
                scheduler_pb2.CreateTableRequest.SPEC_FIELD_NUMBER,
                fields.TENSORS_FIELD_NUMBER,
                limits.MAX_TENSOR_COUNT,
                fields.INITIALIZER_FIELD_NUMBER,
            ):
                return scheduler_pb2.CreateTableRequest.FromString(raw)
        except (InvalidTensor, DecodeError):
            pass
        raise InvalidConfig(
            f"a request of {len(raw)} bytes is no table's, or has over {limits.MAX_TENSOR_COUNT} "
            f"tensors, or over {limits.MAX_ENTRY_BYTES} bytes beside them"
        )

    return await asyncio.to_thread(read)


async def spec_of(message: types_pb2.TableSpec, known: Sequence[Table]) -> TableSpec:
    """The description that a message has. A long one is read beside the loop, and made the message
    that views will have; what the loop is going to ask of its layout is found there, too.
    """
    if message.ByteSize() <= limits.MESSAGE_OVERHEAD_BYTES:
        return wire.spec_from_proto(message)

    def read() -> TableSpec:
        spec = wire.spec_from_proto(message)
        found = next((table for table in known if table.spec.name == spec.name), None)
        if found is not None and found.spec.tensors == spec.tensors:
            spec = replace(spec, tensors=found.spec.tensors)
        wire.spec_to_proto(spec)
        view_size.table_bytes(spec)
        with contextlib.suppress(InvalidConfig):  # which the cluster says to who asks
            spec.validated()
        return spec

    return await asyncio.to_thread(read)


_PARSED_BYTES = limits.MESSAGE_OVERHEAD_BYTES
"""Tables of up to so many are parsed where they come in."""


def table_request_reader(raw: bytes) -> scheduler_pb2.CreateTableRequest | bytes:
    """The request; a long one as it came, for `table_request_of`."""
    return raw if len(raw) > _PARSED_BYTES else scheduler_pb2.CreateTableRequest.FromString(raw)
