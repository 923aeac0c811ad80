"""A thing has one name: what the core calls it is what the contract, metrics and pages call it."""

from __future__ import annotations

from enum import Enum

import pytest
from google.protobuf.descriptor import EnumDescriptor

from ps_core.cluster_view import NodeState, Role
from ps_core.consistency import Mode, StalePolicy
from ps_core.ledger import Outcome, ReplyKind
from ps_core.tables.elements import Codec, DType, InitializerKind
from ps_core.tables.optimizers import Kernels, OptimizerKind
from ps_core.tables.table_spec import Reduction
from pushpull.v1 import parameters_pb2, types_pb2

ENUMS: list[tuple[type[Enum], EnumDescriptor, str]] = [
    (Role, types_pb2.NodeRole.DESCRIPTOR, "NODE_ROLE_"),
    (NodeState, types_pb2.NodeState.DESCRIPTOR, "NODE_STATE_"),
    (Codec, types_pb2.Codec.DESCRIPTOR, "CODEC_"),
    (DType, types_pb2.Dtype.DESCRIPTOR, "DTYPE_"),
    (OptimizerKind, types_pb2.OptimizerKind.DESCRIPTOR, "OPTIMIZER_KIND_"),
    (Kernels, types_pb2.KernelKind.DESCRIPTOR, "KERNEL_KIND_"),
    (Reduction, types_pb2.Reduction.DESCRIPTOR, "REDUCTION_"),
    (Outcome, parameters_pb2.Outcome.DESCRIPTOR, "OUTCOME_"),
    (ReplyKind, parameters_pb2.ReplyKind.DESCRIPTOR, "REPLY_KIND_"),
]


@pytest.mark.parametrize(("ours", "theirs", "prefix"), ENUMS)
def test_the_members_are_those_of_the_contract(
    ours: type[Enum], theirs: EnumDescriptor, prefix: str
) -> None:
    names = {value.name.removeprefix(prefix).lower() for value in theirs.values}
    assert {member.value for member in ours} == names - {"unspecified"}
    assert all(member.value == member.name.lower() for member in ours)


def test_the_initializers_are_those_of_the_contract() -> None:
    (choice,) = types_pb2.Initializer.DESCRIPTOR.oneofs
    names = {field.name for field in choice.fields}
    assert {kind.value for kind in InitializerKind} == names


def test_modes_and_policies_are_called_as_people_write_them() -> None:
    assert [mode.value for mode in Mode] == ["bsp", "ssp", "asp"]
    assert {policy.name.lower() for policy in StalePolicy} == {p.value for p in StalePolicy}
