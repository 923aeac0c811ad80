"""Values to messages and back: nothing is lost, and what is unset is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_core.cluster_view import (
    BackupRequest,
    ClusterView,
    Node,
    NodeState,
    RangeAssignment,
    Role,
    Session,
)
from ps_core.consistency import Consistency, Mode, StalePolicy
from ps_core.errors import InvalidConfig, InvalidTensor
from ps_core.keys import (
    AssignmentEpoch,
    Incarnation,
    KeyRange,
    NodeId,
    RangeId,
    Slot,
    TableId,
)
from ps_core.limits import MAX_HYPERPARAMETER_COUNT
from ps_core.tables.elements import Codec, DType, Initializer, InitializerKind
from ps_core.tables.optimizers import Kernels, OptimizerKind, OptimizerSpec
from ps_core.tables.table import Table
from ps_core.tables.table_spec import Reduction, TableSpec, TensorSpec
from ps_runtime.cluster import wire
from pushpull.v1 import scheduler_pb2, types_pb2

UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
NUMBERS = st.floats(allow_nan=False)

INITIALIZERS = st.one_of(
    st.just(Initializer()),
    st.builds(Initializer, kind=st.just(InitializerKind.CONSTANT), constant=NUMBERS),
    st.builds(Initializer, kind=st.just(InitializerKind.INLINE), inline=st.binary(max_size=64)),
    st.just(Initializer(InitializerKind.FROM_RANK_ZERO)),
)
OPTIMIZERS = st.builds(
    OptimizerSpec,
    kind=st.sampled_from(OptimizerKind),
    hyperparameters=st.dictionaries(st.text(max_size=8), NUMBERS, max_size=6).map(
        lambda values: tuple(sorted(values.items()))
    ),
    nesterov=st.booleans(),
    amsgrad=st.booleans(),
    centered=st.booleans(),
    maximize=st.booleans(),
    kernels=st.sampled_from(Kernels),
    inner_steps=UINT32,
)
TENSORS = st.builds(
    TensorSpec,
    name=st.text(max_size=8),
    shape=st.lists(UINT64, max_size=4).map(tuple),
    offset=UINT64,
)
CONSISTENCIES = st.one_of(
    st.builds(Consistency, backup_workers=UINT32, grace_ms=UINT32),
    st.builds(Consistency, st.just(Mode.SSP), staleness=UINT32),
    st.builds(Consistency, st.just(Mode.SSP), staleness=UINT32, least=UINT32, most=UINT32),
    st.builds(Consistency, st.just(Mode.ASP), policy=st.just(StalePolicy.REJECT), bound=UINT32),
    st.builds(
        Consistency, st.just(Mode.ASP), policy=st.just(StalePolicy.DAMP), alpha=st.floats(1e-3, 9)
    ),
    st.builds(
        Consistency,
        st.just(Mode.ASP),
        policy=st.just(StalePolicy.COMPENSATE),
        strength=st.floats(1e-3, 9),
        adaptive=st.booleans(),
    ),
    st.builds(
        Consistency,
        st.just(Mode.ASP),
        policy=st.sampled_from((StalePolicy.ACCEPT, StalePolicy.DIVIDE)),
    ),
)
SPECS = st.builds(
    TableSpec,
    name=st.text(max_size=16),
    dtype=st.sampled_from(DType),
    element_count=UINT64,
    optimizer=OPTIMIZERS,
    block_elements=UINT32,
    tensors=st.lists(TENSORS, max_size=3).map(tuple),
    consistency=CONSISTENCIES,
    initializer=INITIALIZERS,
    reduction=st.sampled_from(Reduction),
    allow_non_finite=st.booleans(),
    gate_bytes=UINT64,
)
TABLES = st.builds(Table, table_id=UINT32.map(TableId), first_ordinal=UINT64, spec=SPECS)
NODES = st.builds(
    Node,
    node_id=UINT32.map(NodeId),
    incarnation=UINT64.map(Incarnation),
    role=st.sampled_from(Role),
    rank=UINT32,
    address=st.text(max_size=16),
    state=st.sampled_from(NodeState),
    silence_ms=UINT64,
)
NODE_IDS = st.integers(1, 2**32 - 1).map(NodeId)
RANGES = st.builds(
    RangeAssignment,
    range_id=UINT32.map(RangeId),
    slots=st.builds(KeyRange, begin=UINT32.map(Slot), end=UINT32.map(Slot)),
    assignment_epoch=UINT64.map(AssignmentEpoch),
    primary=st.one_of(st.none(), NODE_IDS),
    backups=st.lists(NODE_IDS, max_size=3).map(tuple),
    catching_up=st.lists(NODE_IDS, max_size=3).map(tuple),
)
WISHES = st.builds(
    BackupRequest,
    range_id=UINT32.map(RangeId),
    assignment_epoch=UINT64.map(AssignmentEpoch),
    backups=st.frozensets(NODE_IDS, max_size=3),
)
VIEWS = st.builds(
    ClusterView,
    view_number=UINT64,
    cluster_id=st.text(max_size=8),
    worker_count=UINT32,
    server_count=UINT32,
    nodes=st.lists(NODES, max_size=3).map(tuple),
    ranges=st.lists(RANGES, max_size=3).map(tuple),
    tables=st.lists(TABLES, max_size=2).map(tuple),
    finished=st.booleans(),
)
SESSIONS = st.builds(
    Session,
    cluster_id=st.text(max_size=8),
    timeline=st.binary(max_size=16),
    node_id=UINT32.map(NodeId),
    incarnation=UINT64.map(Incarnation),
    role=st.sampled_from(Role),
    rank=UINT32,
    token=st.binary(max_size=32),
)


@given(VIEWS)
def test_a_view_comes_back_as_it_was(view: ClusterView) -> None:
    sent = wire.view_to_proto(view).SerializeToString()
    assert wire.view_from_proto(types_pb2.ClusterView.FromString(sent)) == view


@given(SESSIONS)
def test_a_session_comes_back_as_it_was(session: Session) -> None:
    sent = wire.session_to_proto(session).SerializeToString()
    assert wire.session_from_proto(types_pb2.SessionIdentity.FromString(sent)) == session


@given(WISHES)
def test_a_wish_for_backups_comes_back_as_it_was(backup_request: BackupRequest) -> None:
    sent = wire.backup_request_to_proto(backup_request).SerializeToString()
    assert (
        wire.backup_request_from_proto(scheduler_pb2.BackupRequest.FromString(sent))
        == backup_request
    )


def test_a_backup_that_is_wished_for_twice_is_named() -> None:
    twice = scheduler_pb2.BackupRequest(range_id=7, backup_node_ids=[3, 2, 3])
    with pytest.raises(InvalidConfig, match=r"of range 7 is \[3, 2, 3\]; expected each node once"):
        wire.backup_request_from_proto(twice)


@pytest.mark.parametrize("codec", Codec)
def test_a_codec_comes_back_as_it_was(codec: Codec) -> None:
    assert wire.codec_from_proto(wire.codec_to_proto(codec)) is codec


def test_unset_enums_with_a_meaning_take_it() -> None:
    message = wire.spec_to_proto(a_spec())
    message.optimizer.kernels = types_pb2.KERNEL_KIND_UNSPECIFIED
    message.reduction = types_pb2.REDUCTION_UNSPECIFIED
    spec = wire.spec_from_proto(message)
    assert (spec.optimizer.kernels, spec.reduction) == (Kernels.FAST, Reduction.MEAN)


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("dtype", "dtype is unset; expected one of float32"),
        ("optimizer", "optimizer.kind is unset; expected one of sgd"),
        ("consistency", "consistency.mode is unset; expected one of bsp, ssp, asp"),
        ("initializer", "initializer.kind is unset; expected one of zeros"),
    ],
)
def test_an_unset_field_is_named(field: str, named: str) -> None:
    message = wire.spec_to_proto(a_spec())
    message.ClearField(field)
    with pytest.raises(InvalidConfig, match=named):
        wire.spec_from_proto(message)


def test_an_unknown_number_is_named() -> None:
    with pytest.raises(InvalidConfig, match=r"session\.role is 99, which is unknown"):
        wire.role_from_proto(99, "session.role")
    with pytest.raises(InvalidTensor, match="codec is 99, which is unknown; expected one of fp32"):
        wire.codec_from_proto(99)


def test_hyperparameters_come_sorted_and_each_name_once() -> None:
    pairs = (("momentum", 0.9), ("lr", 0.1))
    assert wire.hyperparameters_from_proto(wire.hyperparameters_to_proto(pairs)) == (
        ("lr", 0.1),
        ("momentum", 0.9),
    )
    twice = wire.hyperparameters_to_proto((("lr", 0.1), ("lr", 0.2)))
    with pytest.raises(InvalidConfig, match="'lr' comes twice"):
        wire.hyperparameters_from_proto(twice)


def test_too_many_hyperparameters_are_refused() -> None:
    pairs = tuple((f"h{index}", 0.0) for index in range(MAX_HYPERPARAMETER_COUNT + 1))
    with pytest.raises(InvalidConfig, match=f"expected at most {MAX_HYPERPARAMETER_COUNT}"):
        wire.hyperparameters_from_proto(wire.hyperparameters_to_proto(pairs))


def a_spec() -> TableSpec:
    return TableSpec("t", DType.FLOAT32, 64, OptimizerSpec(OptimizerKind.SGD)).validated()


def test_a_long_layout_is_made_a_message_once_and_is_always_its_own() -> None:
    """More of them than are kept, each after it has been forgotten too."""
    layouts = [
        tuple(TensorSpec(f"{number}.{each}", (64,), each * 64) for each in range(500))
        for number in range(70)
    ]
    for number, tensors in [*enumerate(layouts), *enumerate(layouts)]:
        spec = TableSpec(
            f"t{number}", DType.FLOAT32, 500 * 64, OptimizerSpec(OptimizerKind.SGD), tensors=tensors
        )
        message = wire.spec_to_proto(spec)
        assert wire.spec_from_proto(message) == spec
        message.tensors[0].name = "changed"
        assert wire.spec_from_proto(wire.spec_to_proto(spec)) == spec
