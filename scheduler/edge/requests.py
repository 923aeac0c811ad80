"""Requests to the scheduler as values; long ones are parsed on a thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import asdict, replace

from google.protobuf.message import DecodeError

from ps_core import limits, rights
from ps_core.cluster_view import Session
from ps_core.envelope import has_few
from ps_core.errors import InvalidConfig, InvalidTensor, Unauthenticated
from ps_core.keys import AssignmentEpoch, RangeId
from ps_core.manifest import DataSetSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import TableSpec
from ps_core.update_offer import UpdateOffer
from ps_runtime.cluster import wire
from pushpull.v1 import scheduler_pb2, types_pb2
from scheduler.machine import view_size
from scheduler.machine.data_shards import DataSet, ShardRequest
from scheduler.machine.state import Registration, ServerMemory, UpdateLogClaim


def session_of(message: types_pb2.SessionIdentity) -> Session:
    """The session in a request, unchecked; Unauthenticated if it has none."""
    if not message.session_token:
        raise Unauthenticated(rights.NO_SESSION)
    return wire.session_from_proto(message)


_MAX_POOL_CHARACTERS = 128


def registration_of(request: scheduler_pb2.RegisterNodeRequest, timeline: bytes) -> Registration:
    """A node's registration with a cluster of this timeline, unchecked."""
    claim = _claim(request.update_log, timeline) if request.HasField("update_log") else None
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
        update_log=claim,
        memory=ServerMemory(request.memory.byte_count, request.memory.pool[:_MAX_POOL_CHARACTERS]),
        launch_id=request.launch_id,
        world_size=request.world_size,
        run=request.run,
        identity=request.identity,
    )


def _claim(message: scheduler_pb2.UpdateLogClaim, timeline: bytes) -> UpdateLogClaim:
    """An unused log is of the present timeline: it has all that anybody has seen, nothing."""
    range_ids = tuple(map(RangeId, message.range_ids))
    former_log_ids = tuple(message.former_log_ids)
    epochs = tuple(map(AssignmentEpoch, message.assignment_epochs))
    of = timeline if message.is_unused else message.timeline
    return UpdateLogClaim(message.log_id, of, range_ids, former_log_ids, epochs)


def _offer(message: scheduler_pb2.CustomUpdate) -> UpdateOffer:
    hyperparameters = wire.hyperparameters_from_proto(message.hyperparameters)
    return UpdateOffer(message.name, hyperparameters, message.fingerprint, message.problem)


def shard_request_of(request: scheduler_pb2.LeaseDataShardsRequest) -> ShardRequest:
    """A worker's request for shards, unchecked."""
    said = request.data_set
    spec = DataSetSpec(said.name, said.sample_count, said.shard_size, said.seed)
    pass_number = request.pass_number if request.HasField("pass_number") else None
    return ShardRequest(spec, pass_number, tuple(request.done_shards), request.want_count)


def data_set_to_proto(data_set: DataSet) -> scheduler_pb2.DataSetStatus:
    """The present pass of a data set, for the status answer."""
    spec = data_set.spec
    return scheduler_pb2.DataSetStatus(
        data_set=scheduler_pb2.DataSet(**asdict(spec)),
        run=data_set.run,
        pass_number=data_set.pass_number,
        shard_count=spec.shard_count,
        done_count=data_set.done_count,
        leased_count=len(data_set.leases),
        reissued_count=data_set.reissued_count,
    )


async def table_request_of(
    request: scheduler_pb2.CreateTableRequest | bytes,
) -> scheduler_pb2.CreateTableRequest:
    """The request; a long one is parsed on a thread. InvalidConfig if that fails."""
    if not isinstance(request, bytes):
        return request
    raw = request  # bytes for mypy, in the function below too

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
            f"a CreateTable request of {len(raw)} bytes cannot be parsed, or has over "
            f"{limits.MAX_TENSOR_COUNT} tensors, or over {limits.MAX_ENTRY_BYTES} bytes beside them"
        )

    return await asyncio.to_thread(read)


async def spec_of(message: types_pb2.TableSpec, known: Sequence[Table]) -> TableSpec:
    """The spec in a message. A thread parses a long one, and computes what the loop asks of it
    later: the message for views, its size, its validation.
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
        with contextlib.suppress(InvalidConfig):  # the cluster raises it again
            spec.validated()
        return spec

    return await asyncio.to_thread(read)


def table_request_reader(raw: bytes) -> scheduler_pb2.CreateTableRequest | bytes:
    """The parsed request; the bytes of a long one, for `table_request_of`."""
    is_long = len(raw) > limits.MESSAGE_OVERHEAD_BYTES
    return raw if is_long else scheduler_pb2.CreateTableRequest.FromString(raw)
