"""Bad streams, reads, sessions, registrations and tables over the real wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from ps_core import limits
from ps_runtime.grpc.errors import STATUS
from ps_server.values.kernel_fingerprint import kernel_fingerprint
from pushpull.v1 import parameters_pb2, scheduler_pb2
from pushpull.v1 import types_pb2 as types
from tests.integration.raw_wire import (
    DEADLINE_S,
    RawTable,
    RawWorker,
    Scene,
    Wire,
    check_error,
    payload,
    refused,
    spec,
    to_range,
)
from tests.joining import proven

PARAMETERS = "/pushpull.v1.ParameterService/"
SCHEDULER = "/pushpull.v1.SchedulerService/"
UNKNOWN_TABLE = 1_000_000


# --- streams


def _raw_push(wire: Wire, table: RawTable, method: str, *messages: bytes) -> None:
    call: Any = wire.server_channels[table.places[0][2]].stream_stream(PARAMETERS + method)
    list(call(iter(messages), timeout=DEADLINE_S))


STREAMS = ("Push", "PushPull")
"""The header, blocks and seals have the same bytes in both."""


@pytest.mark.parametrize("method", STREAMS)
def test_a_stream_without_a_header_in_its_place_ends(
    wire: Wire, bad: RawWorker, table: RawTable, method: str
) -> None:
    header = bad.header.SerializeToString()
    block = parameters_pb2.PushRequest(block=bad.block(table)).SerializeToString()

    def ends(code: str, word: str, *messages: bytes) -> None:
        refused(lambda: _raw_push(wire, table, method, *messages), code, word)

    ends("INVALID_CONFIG", "holds nothing; expected its header")
    ends("INVALID_CONFIG", "holds no entry; expected its header", b"")
    ends("INVALID_CONFIG", "holds block; expected its header", block)
    ends("INVALID_CONFIG", "holds header", header, header)
    ends("INVALID_CONFIG", "holds no entry", header, b"")
    empty = parameters_pb2.PushRequest(seal=parameters_pb2.Seal(table_id=table.table_id))
    ends("INVALID_CONFIG", "names 0 ranges", header, empty.SerializeToString())
    for _ in range(limits.SLOT_COUNT + 1):
        empty.seal.ranges.add()
    ends("INVALID_CONFIG", "names 65537 ranges", header, empty.SerializeToString())


@pytest.mark.parametrize("method", STREAMS)
def test_bytes_that_are_no_message_end_their_stream(
    wire: Wire, bad: RawWorker, table: RawTable, method: str
) -> None:
    header = bad.header.SerializeToString()
    block = parameters_pb2.PushRequest(block=bad.block(table)).SerializeToString()
    for malformed in (b"\xff\xff\xff", block[:-1], b"\x12\xff\xff\xff\x7f" + block[3:]):
        words = "does not parse"
        refused(lambda m=malformed: _raw_push(wire, table, method, m), "INVALID_TENSOR", words)  # type: ignore[misc]
        refused(
            lambda m=malformed: _raw_push(wire, table, method, header, m),  # type: ignore[misc]
            "INVALID_TENSOR",
            words,
        )


@pytest.mark.parametrize("method", STREAMS)
def test_a_message_over_the_limit_ends_its_stream(
    wire: Wire, bad: RawWorker, table: RawTable, method: str
) -> None:
    entry = bad.block(table)
    entry.payload = bytes(limits.MAX_MESSAGE_BYTES)
    large = parameters_pb2.PushRequest(block=entry).SerializeToString()
    for messages in ((large,), (bad.header.SerializeToString(), large)):
        with pytest.raises(grpc.RpcError) as failure:
            _raw_push(wire, table, method, *messages)
        ended: Any = failure.value
        assert ended.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"vs. {limits.MAX_MESSAGE_BYTES}" in ended.details()


UNARY = ("OpenSession", "GetRangeStats", "Pull")


def test_requests_that_are_no_message_are_invalid(wire: Wire, table: RawTable) -> None:
    server = wire.server_channels[table.places[0][2]]
    calls = [(server, PARAMETERS + name) for name in UNARY]
    calls += [
        (wire.channel, SCHEDULER + method.name)
        for method in scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].methods
    ]
    for channel, name in calls:
        is_stream = name.endswith(("Pull", "WatchCluster"))
        raw: Any = (channel.unary_stream if is_stream else channel.unary_unary)(name)

        def call(raw: Any = raw, is_stream: bool = is_stream) -> None:
            answer = raw(b"\xff\xff\xff", timeout=DEADLINE_S)
            if is_stream:
                list(answer)

        refused(call, "INVALID_TENSOR", "does not parse", name)


def test_a_reader_cannot_push(wire: Wire, table: RawTable) -> None:
    refused(
        lambda: wire.send(wire.reader, table.places[0][2]), "NOT_PERMITTED", "Push is for workers"
    )


def test_entries_that_never_end_hold_nobody_but_their_stream(
    wire: Wire, bad: RawWorker, table: RawTable
) -> None:
    entry = bad.block(table, value=2.0)  # what its step 2 will be: the resend is the same entry
    message = parameters_pb2.PushRequest(block=entry)
    with pytest.raises(grpc.RpcError) as failure:
        wire.send(bad, table.places[0][2], message, timeout_s=0.5)
    ended: Any = failure.value
    assert ended.code() is grpc.StatusCode.DEADLINE_EXCEEDED


# --- reads


def _first(reads: Any) -> Any:
    return reads.ranges[0]


Ask = Callable[[Any, RawTable], object]
BAD_READS: dict[str, tuple[Ask, str, tuple[str, ...]]] = {
    "unknown table": (
        lambda read, _: setattr(read, "table_id", UNKNOWN_TABLE),
        "TABLE_NOT_FOUND",
        ("there is no table 1000000",),
    ),
    "another server's range": (
        lambda read, table: to_range(_first(read), *table.elsewhere),
        "NOT_OWNER",
        ("does not serve range",),
    ),
    "another server's range, by its blocks": (  # as after a failover: a worker asks elsewhere
        lambda read, table: to_range(_first(read), *table.elsewhere, block=0),
        "NOT_OWNER",
        ("does not serve range",),
    ),
    "old epoch": (
        lambda read, _: setattr(_first(read), "assignment_epoch", 1),
        "STALE_ASSIGNMENT",
        ("epoch 2; got 1",),
    ),
    "block beyond the table": (
        lambda read, _: _first(read).blocks.append(4),
        "INVALID_KEYS",
        ("block 4",),
    ),
    "block twice": (
        lambda read, _: _first(read).blocks.extend([0, 0]),
        "INVALID_KEYS",
        ("names 2 blocks; expected each of its 1 at most once",),
    ),
    "block a hundred thousand times": (
        lambda read, _: _first(read).blocks.extend([0] * 100_000),
        "INVALID_KEYS",
        ("names 100000 blocks",),
    ),
    "unknown codec": (
        lambda read, _: setattr(read, "codec", 77),
        "INVALID_TENSOR",
        ("codec is 77, which is unknown",),
    ),
    "codec of a wider dtype": (
        lambda read, _: setattr(read, "codec", types.CODEC_FP64),
        "INVALID_TENSOR",
        ("codec fp64", "expected fp32, or a codec of fewer bits"),
    ),
    "codec of pushes alone": (
        lambda read, _: setattr(read, "codec", types.CODEC_SIGN),
        "INVALID_TENSOR",
        ("a pull cannot have codec sign; expected fp32, fp16, bf16 or int8",),
    ),
    "codec of a few elements": (
        lambda read, _: setattr(read, "codec", types.CODEC_SPARSE),
        "INVALID_TENSOR",
        ("a pull cannot have codec sparse",),
    ),
    "codec of factors": (
        lambda read, _: setattr(read, "codec", types.CODEC_LOW_RANK),
        "INVALID_TENSOR",
        ("a pull cannot have codec low_rank",),
    ),
    "consistent at a clock that has passed": (
        lambda read, _: setattr(read, "consistent", True),
        "ALREADY_PAST",
        ("is at clock 1; the pull asked for 0",),
    ),
}


@pytest.mark.parametrize("case", BAD_READS)
def test_a_bad_read_is_its_ranges_error(wire: Wire, table: RawTable, case: str) -> None:
    change, code, words = BAD_READS[case]
    request = wire.pull_request(table, [0])
    change(request, table)
    (part,) = wire.pull(table.places[0][2], request)
    check_error(part.error.error, code, *words)


@pytest.mark.parametrize("codec", ["fp64", "fp16", "bf16", "int8", "sign", "low_rank"])
@pytest.mark.parametrize("what", ["ids", "a listing"])
def test_rows_are_read_in_their_tables_own_codec(wire: Wire, what: str, codec: str) -> None:
    rows = types.RowsSpec(partition_count=1, seed=7)
    table = wire.create(f"rows {codec} {what}", blocks=1, element_count=4, rows=rows)
    request = wire.pull_request(table, [0])
    request.codec = getattr(types, f"CODEC_{codec.upper()}")
    request.ranges[0].blocks.append(0)
    if what == "ids":
        request.ranges[0].ids.append(bytes(16))
    else:
        request.ranges[0].skipped_row_counts.append(0)
    (part,) = wire.pull(table.places[0][2], request)
    check_error(part.error.error, "INVALID_TENSOR", f"codec {codec}", "expected fp32")
    request.codec = types.CODEC_FP32
    (part,) = wire.pull(table.places[0][2], request)
    assert part.block.codec == types.CODEC_FP32
    assert len(part.block.payload) == (32 if what == "ids" else 0)


def test_a_read_that_names_a_range_twice_or_none_is_refused(wire: Wire, table: RawTable) -> None:
    for consistent in (False, True):
        request = wire.pull_request(table, [0, 0], consistent=consistent, clock=1)
        (part,) = wire.pull(table.places[0][2], request)
        check_error(part.error.error, "INVALID_KEYS", "comes twice; expected each once")
        request = wire.pull_request(table, [0], consistent=consistent, clock=1)
        for _ in range(30_000):
            request.ranges.add(range_id=100)
        (part,) = wire.pull(table.places[0][2], request)
        check_error(part.error.error, "INVALID_KEYS", "names 30001 ranges")
        del request.ranges[2:]
        (part,) = wire.pull(table.places[0][2], request)
        check_error(part.error.error, "INVALID_KEYS", "there is no range 100")


def test_a_read_that_names_much_is_not_even_parsed(wire: Wire, table: RawTable) -> None:
    request = wire.pull_request(table, [0])
    for _ in range(150_000):
        request.ranges.add(range_id=100)
    refused(
        lambda: wire.pull(table.places[0][2], request), "INVALID_TENSOR", "expected at most 262144"
    )


def test_a_read_of_nothing_is_answered_with_nothing(wire: Wire, table: RawTable) -> None:
    assert wire.pull(table.places[0][2], wire.pull_request(table, [])) == []


def test_a_read_of_a_clock_to_come_expires_and_says_for_whom(wire: Wire, table: RawTable) -> None:
    request = wire.pull_request(table, [0], deadline_ms=50, clock=2**63, consistent=True)
    request.deadline_ms = 50
    (part,) = wire.pull(table.places[0][2], request)
    check_error(part.error.error, "WAIT_EXPIRED", "update 2 of table", "worker 0", "worker 1")


def test_a_bad_read_does_not_end_the_stream_that_it_came_by(
    wire: Wire, bad: RawWorker, table: RawTable
) -> None:
    request = parameters_pb2.PushPullRequest
    wrong = wire.pull_request(table, [0], codec=77)
    right = wire.pull_request(table, [0], clock=1)
    messages = [request(header=bad.header.header), request(pull=wrong), request(pull=right)]
    parts = list(wire.servers[table.places[0][2]].PushPull(iter(messages), timeout=DEADLINE_S))
    assert [part.WhichOneof("part") for part in parts] == ["pull", "end", "pull", "end"]
    check_error(parts[0].pull.error.error, "INVALID_TENSOR", "codec is 77")
    assert parts[2].pull.block.payload == payload(-0.75)


# --- sessions


def _forged(**fields: Any) -> Callable[[types.SessionIdentity], None]:
    def change(session: types.SessionIdentity) -> None:
        for name, value in fields.items():
            setattr(session, name, value)

    return change


SESSIONS: dict[str, tuple[Callable[[types.SessionIdentity], None], str, tuple[str, ...]]] = {
    "no token": (_forged(session_token=b""), "UNAUTHENTICATED", ("token", "missing")),
    "wrong token": (_forged(session_token=b"x" * 32), "UNAUTHENTICATED", ("token", "wrong")),
    "another's rank": (_forged(rank=1), "UNAUTHENTICATED", ("token", "wrong")),
    "another's incarnation": (_forged(incarnation=1), "UNAUTHENTICATED", ("token", "wrong")),
    "a role that it has not": (
        _forged(role=types.NODE_ROLE_SERVER),
        "UNAUTHENTICATED",
        ("token", "wrong"),
    ),
    "no role": (_forged(role=0), "INVALID_CONFIG", ("session.role is unset",)),
    "unknown role": (_forged(role=9), "INVALID_CONFIG", ("session.role is 9, which is unknown",)),
    "other cluster": (_forged(cluster_id="elsewhere"), "FENCED", ("another cluster",)),
    "other timeline": (_forged(timeline=b"\7" * 16), "FENCED", ("another timeline",)),
    "no timeline": (_forged(timeline=b""), "FENCED", ("another timeline",)),
}


@pytest.mark.parametrize("case", SESSIONS)
def test_a_session_that_was_not_issued_may_do_nothing(
    wire: Wire, bad: RawWorker, table: RawTable, case: str
) -> None:
    change, code, words = SESSIONS[case]
    session = types.SessionIdentity()
    session.CopyFrom(bad.session)
    change(session)
    server, forger = wire.servers[table.places[0][2]], RawWorker(session)
    header = parameters_pb2.PushPullRequest(header=forger.header.header)
    creation = scheduler_pb2.CreateTableRequest(session=session, spec=spec("forged"))
    scheduler, message = wire.scheduler, scheduler_pb2
    calls: list[Callable[[], object]] = [
        lambda: server.OpenSession(
            parameters_pb2.OpenSessionRequest(session=session), timeout=DEADLINE_S
        ),
        lambda: wire.send(forger, table.places[0][2]),
        lambda: list(server.PushPull(iter([header]), timeout=DEADLINE_S)),
        lambda: list(server.Pull(parameters_pb2.PullRequest(session=session), timeout=DEADLINE_S)),
        lambda: scheduler.Heartbeat(message.HeartbeatRequest(session=session), timeout=DEADLINE_S),
        lambda: scheduler.CreateTable(creation, timeout=DEADLINE_S),
        lambda: scheduler.DeregisterNode(
            message.DeregisterNodeRequest(session=session), timeout=DEADLINE_S
        ),
        lambda: next(
            scheduler.WatchCluster(message.WatchClusterRequest(session=session), timeout=DEADLINE_S)
        ),
    ]
    for call in calls:
        refused(call, code, *words)


def test_a_view_that_never_comes_is_not_waited_for(wire: Wire, bad: RawWorker) -> None:
    request = parameters_pb2.OpenSessionRequest(
        session=bad.session, view_number=2**40, deadline_ms=100
    )
    for server in wire.servers.values():
        refused(
            lambda s=server: s.OpenSession(request, timeout=DEADLINE_S),  # type: ignore[misc]
            "WAIT_EXPIRED",
            str(2**40),
        )


# --- registration


def test_registrations_that_cannot_be(wire: Wire) -> None:
    view = wire.view()
    worker, server, reader = (
        types.NODE_ROLE_WORKER,
        types.NODE_ROLE_SERVER,
        types.NODE_ROLE_READER,
    )
    address = next(node.address for node in view.nodes if node.address)
    print_of_ours = kernel_fingerprint()

    def cannot(code: str, words: tuple[str, ...], role: Any, **fields: Any) -> None:
        request = proven(wire.scheduler, wire.registration(role, **fields))
        refused(lambda: wire.scheduler.RegisterNode(request, timeout=DEADLINE_S), code, *words)

    config = "INVALID_CONFIG"
    cannot(config, ("rank 0 is taken by worker node",), worker, requested_rank=0)
    cannot(config, ("requested_rank is 2", "2 workers, ranks 0 to 1"), worker, requested_rank=2)
    cannot(config, ("a worker beyond the 2", "rank 0 by", "rank 1 by"), worker)
    cannot(config, ("a reader has no rank",), reader, requested_rank=0)
    cannot(config, ("role is unset",), 0)
    cannot(config, ("role is 9, which is unknown",), 9)
    cannot(config, ("protocol_version is 2", "speaks 1"), worker, protocol_version=2)
    cannot(config, ("registration_id has 3 bytes; expected 16",), worker, registration_id=b"abc")
    cannot("FENCED", ("cluster 'elsewhere'",), worker, cluster_id="elsewhere")
    taken = {"address": address, "kernel_fingerprint": print_of_ours}
    cannot(config, (f"'{address}', which server node",), server, **taken)
    other = {"address": "127.0.0.1:9", "kernel_fingerprint": "torch=0.1"}
    cannot(config, ("kernel_fingerprint is 'torch=0.1'",), server, **other)
    cannot(config, ("expected 'host:port'",), server, address="nowhere", kernel_fingerprint="t")
    cannot(config, ("features has 65 names",), reader, features=["f"] * 65)
    again = wire.registrations[wire.workers[0].session.node_id]
    repeated = scheduler_pb2.RegisterNodeRequest()
    repeated.CopyFrom(again)
    repeated.requested_rank = 1
    proven(wire.scheduler, repeated)
    refused(
        lambda: wire.scheduler.RegisterNode(repeated, timeout=DEADLINE_S),
        config,
        "requested_rank 0; it came again with 1",
    )
    first = wire.scheduler.RegisterNode(again, timeout=DEADLINE_S)
    assert first.session == wire.workers[0].session
    assert [n.node_id for n in wire.view().nodes] == [n.node_id for n in view.nodes]


# --- tables


def _changed(**changes: Any) -> Callable[[str], types.TableSpec]:
    return lambda name: spec(name, **changes)


def _sgd(**fields: Any) -> types.OptimizerSpec:
    return types.OptimizerSpec(kind=types.OPTIMIZER_KIND_SGD, **fields)


def _tensors(*sizes: int) -> list[types.TensorSpec]:
    ends = [sum(sizes[:number]) for number in range(len(sizes))]
    return [
        types.TensorSpec(name=f"t{number}", shape=[size], offset=end)
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


OTHER_MODELS: dict[str, tuple[Callable[[str], types.TableSpec], str]] = {
    "more elements": (_changed(blocks=5), "element_count"),
    "another dtype": (_changed(dtype=types.DTYPE_FLOAT64), "dtype"),
    "other tensors": (_changed(tensors=_tensors(100, 156)), "tensor"),
    "another block size": (_changed(block_elements=128), "block_elements"),
    "another optimizer": (
        _changed(optimizer=types.OptimizerSpec(kind=types.OPTIMIZER_KIND_ADAM)),
        "optimizer",
    ),
    "another learning rate": (_changed(), "lr"),
    "another consistency": (
        _changed(consistency=types.Consistency(asp=types.Asynchronous())),
        "bsp",
    ),
}


@pytest.mark.parametrize("case", OTHER_MODELS)
def test_a_worker_with_another_model_is_told_the_first_difference(
    wire: Wire, table: RawTable, case: str, request: pytest.FixtureRequest
) -> None:
    make, word = OTHER_MODELS[case]
    other = make(request.node.name[:150])
    if case == "another learning rate":
        other.optimizer.hyperparameters[0].value = 0.1
    creation = scheduler_pb2.CreateTableRequest(session=wire.workers[1].session, spec=other)
    refused(
        lambda: wire.scheduler.CreateTable(creation, timeout=DEADLINE_S),
        "TABLE_EXISTS",
        "exists and differs",
        word,
    )


BAD_TABLES: dict[str, tuple[Callable[[str], types.TableSpec], str]] = {
    "no name": (lambda _: spec(""), "table name has 0 bytes"),
    "endless name": (lambda _: spec("n" * 201), "table name has 201 bytes"),
    "no dtype": (_changed(dtype=9), "dtype is 9, which is unknown"),
    "tensors that do not fill it": (_changed(tensors=_tensors(100, 100)), "have 200 elements"),
    "tensors with a gap": (
        _changed(tensors=[types.TensorSpec(name="t", shape=[256], offset=1)]),
        "starts at 1; expected 0",
    ),
    "a shape of many dimensions": (
        _changed(tensors=[types.TensorSpec(name="t", shape=[2**63] * 300)]),
        "300 dimensions; expected at most 64",
    ),
    "unaligned blocks": (_changed(block_elements=65), "block_elements is 65"),
    "too many blocks": (_changed(blocks=2**40), "expected at most 262144"),
    "a constant beyond float32": (
        _changed(initializer=types.Initializer(constant={"value": 1e300})),
        "its initial value is 1e+300",
    ),
    "inline values of another length": (
        _changed(initializer=types.Initializer(inline={"values": b"abc"})),
        "3 bytes; expected 1024",
    ),
    "33 hyperparameters": (
        _changed(optimizer=_sgd(hyperparameters=[types.Hyperparameter(name="lr")] * 33)),
        "33 entries; expected at most 32",
    ),
    "a rate beyond float32": (
        _changed(optimizer=_sgd(hyperparameters=[types.Hyperparameter(name="lr", value=1e300)])),
        "'lr' is 1e+300",
    ),
    "nesterov without momentum": (_changed(optimizer=_sgd(nesterov=True)), "nesterov needs"),
    "nesterov in Adam": (
        _changed(optimizer=types.OptimizerSpec(kind=types.OPTIMIZER_KIND_ADAM, nesterov=True)),
        "adam has no nesterov",
    ),
    "an unknown optimizer": (
        _changed(optimizer=types.OptimizerSpec(kind=99)),  # type: ignore[arg-type]
        "optimizer.kind is 99",
    ),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_a_table_that_cannot_be_is_refused(wire: Wire, case: str) -> None:
    make, words = BAD_TABLES[case]
    before = wire.view().tables
    creation = scheduler_pb2.CreateTableRequest(
        session=wire.workers[0].session, spec=make("cannot be")
    )
    refused(
        lambda: wire.scheduler.CreateTable(creation, timeout=DEADLINE_S), "INVALID_CONFIG", words
    )
    assert wire.view().tables == before


def test_only_workers_create_tables(wire: Wire) -> None:
    creation = scheduler_pb2.CreateTableRequest(session=wire.reader.session, spec=spec("r"))
    refused(
        lambda: wire.scheduler.CreateTable(creation, timeout=DEADLINE_S),
        "NOT_PERMITTED",
        "CreateTable is for workers",
    )


# --- last, since it takes its time, most of which has passed by now


def test_a_stream_that_never_says_who_it_is_ends(scene: Scene) -> None:
    call = scene.silent.call
    with pytest.raises(grpc.RpcError):
        next(call)
    assert call.code() is STATUS["WAIT_EXPIRED"]
    assert "waited for its header for 10 s" in call.details()
