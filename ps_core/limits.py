"""Limits of the system, with their relations asserted (LIM-*).

Sizes are in bytes (`_bytes`), times in seconds (`_s`), counts in `_count`.
"""

from __future__ import annotations

from ps_core.errors import check

SLOT_COUNT = 65_536
"""Slots of the key space; fixed by the contract."""

MAX_RANGE_COUNT = 4096
"""Key ranges of any cluster, and so in a seal or a read."""

RANGE_COUNT = 64
"""Key ranges of a cluster of up to four servers, fixed when the cluster is formed. Each is sealed
by itself, which costs as much as a block of it."""

LARGE_CLUSTER_RANGE_COUNT = 256
"""Key ranges of a cluster of more than eight servers, for an even share."""

BLOCK_ALIGNMENT_ELEMENTS = 64
"""Block sizes are multiples of it, because torch's fused CPU kernels are bit-equal only at such
cuts (DESIGN 8)."""

DEFAULT_BLOCK_ELEMENTS = 262_144
"""1 MiB of float32: the best message size measured, and below gRPC's default limit."""

MAX_BLOCK_ELEMENTS = 524_288
"""Size at which a block of the widest codec (8 bytes) still fits a message."""

MAX_ELEMENT_BYTES = 8

ROW_ID_BYTES = 8
"""Bytes of the id of a row."""

MAX_ROW_ELEMENTS = 65_536
"""Elements of a row of an embedding table."""

MAX_ROW_COUNT = 32_768
"""Rows of one partition in a push or a pull: they are hashed, and perhaps sorted, in one turn of
the loop."""

LEAST_FRAME_COUNT = 4096
"""Rows of one partition that a server has in memory, if it has so many, whatever they take."""

MAX_PULLED_ROW_BYTES = 2 * 1024 * 1024
"""Bytes of rows of one partition in an answer: those that no update has made are computed in one
turn of the loop."""


def most_pulled_rows(row_bytes: int) -> int:
    """The rows of so many bytes that an answer may have of one partition."""
    return min(MAX_ROW_COUNT, MAX_PULLED_ROW_BYTES // row_bytes)


LEAST_DEFAULT_PARTITION_COUNT, PARTITIONS_PER_SERVER = 8, 4
"""Partitions of a table of rows whose creator names no number. Each costs a push as much as a
block, and a server has whole ones: several, so that all have nearly as many.
"""

MAX_PARTITION_COUNT = 4096


def default_partition_count(server_count: int) -> int:
    """The partitions of a table of rows whose creator names no number, in a cluster of so many
    servers.
    """
    wanted = max(LEAST_DEFAULT_PARTITION_COUNT, PARTITIONS_PER_SERVER * server_count)
    return min(wanted, MAX_PARTITION_COUNT)


MAX_HOT_ROW_COUNT = 16
"""The hottest rows of a range that its server names."""

MAX_ROW_AGE_COUNT = 2**31
"""The most updates after which a row may be evicted, or made; ages are counted in 32 bits."""

MESSAGE_OVERHEAD_BYTES = 65_536
"""Bytes of a message beside its payload: presence bits, ranges of a seal."""

MAX_ENTRY_BYTES = 256 * 1024
"""Bytes of a request without payloads, and of the fields beside payloads: the ranges and blocks
that it names. A larger request is not parsed, since millions of empty entries fit a message."""

MAX_EDIT_BYTES = 64
"""Bytes of an edit's name in a seal."""

MAX_SCALE = {4: 3.4028234663852886e38, 8: 1.7976931348623157e308}
"""Largest factor of a gradient, by the bytes of an element of its accumulator: the largest number
of that width."""

MAX_MESSAGE_BYTES = 4 * 1024 * 1024 + MESSAGE_OVERHEAD_BYTES
"""Largest message that our servers and clients accept."""

FOREIGN_MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""gRPC's default limit. A block of the default size stays below it, so foreign clients need no
option."""

REPLICATION_MESSAGE_BYTES = 1024 * 1024 + MESSAGE_OVERHEAD_BYTES
"""Size at which replication messages are cut: a block of the default size, and what was decided
with it."""

MAX_INLINE_INITIALIZER_BYTES = 1024 * 1024
MAX_TABLE_NAME_BYTES = 200
MAX_TABLE_COUNT = 10_000

MAX_TABLE_BLOCK_COUNT = 262_144
"""Blocks of one table: 256 GiB of float32 at the default size. A server takes about 30 microseconds
of its processor to make one, 8 s for all of these, and `BLOCK_OVERHEAD_BYTES` of memory."""

BLOCK_OVERHEAD_BYTES = 4096
"""Most memory of a block beside its elements: 1.9 KB measured for its bookkeeping, and 0.6 KB for
each tensor of optimizer state."""

TABLE_MEMORY_SHARE = 0.9
"""Share of the memory of a machine, or container, that a server offers to tables, without what its
process takes by itself."""

SERVER_PROCESS_BYTES = 256 * 2**20
"""Memory of a server's process without any table: the interpreter, torch, and buffers."""

VIEW_RESERVED_BYTES = 256 * 1024
"""Bytes of a view that tables leave to later nodes: some 2,000 of them."""

MAX_TENSOR_COUNT = 100_000
LOG_ID_BYTES = 16
MAX_FORMER_LOGS = 64
"""Logs that an update log's directory had before; a server names them when it registers."""

MAX_NODE_COUNT = 10_000
MAX_TENSOR_DIMENSION_COUNT = 64
"""torch's own limit."""

MAX_HYPERPARAMETER_COUNT = 32
MAX_HYPERPARAMETER_NAME_BYTES = 64
MAX_HYPERPARAMETER_MAGNITUDE = 1e18
"""Beyond it the scalars that optimizers derive (a rate over 1 - beta) may leave float32's range,
where torch's kernels raise; by then an update is in its record and cannot be refused any more."""

MAX_INNER_STEP_COUNT = 1_000_000
"""Steps that a worker takes by itself between two pushes."""

MAX_FRAGMENT_COUNT = 1_000
"""Parts of a table whose blocks are pushed at clocks of their own."""

MAX_CUSTOM_UPDATE_COUNT = 64
"""Custom updates of one server."""

MAX_CUSTOM_UPDATE_NAME_BYTES = 64
MAX_CUSTOM_UPDATE_FINGERPRINT_BYTES = 300
MAX_CUSTOM_UPDATE_PROBLEM_BYTES = 500

MAX_DATA_SET_COUNT = 100
"""Data sets of a cluster, whose samples are leased in shards."""

MAX_DATA_SET_NAME_BYTES = 200

MAX_SAMPLE_COUNT = 2**53
"""Samples of a data set: counts that every JSON reader keeps exactly."""

MAX_HELD_SHARD_COUNT = 64
"""Shards of a data set that one worker has leased. The scheduler knows a pass by how far its order
has been issued, and by what is open of that: some 100 bytes of memory for each leased shard and
each worker, and nothing for those that are done."""

MAX_FLOAT32 = 3.4028234663852886e38
MAX_WAITER_COUNT = 65_536
"""Parked reads on one server."""

JOIN_RETRY_S = 0.2
"""Wait of a worker that pushes before it has joined."""

DEFAULT_CUT_S = 5.0
MAX_CUT_S = 10.0
"""Longest time for which a reader's cut may hold up training."""

MAX_CUT_COUNT = 64
"""Cuts that are open at once in one range of a table."""

MAX_LEDGER_GAP_COUNT = 65_536
"""Sequences that a ledger stores above its low-water mark, and outcomes below it for a sender that
never confirms."""

MAX_RANGE_BLOCK_COUNT = 4608
"""Blocks of one table in one range. A seal's effect on all of them is decided in one turn of the
server's loop, at some 2 microseconds a block. A table of `MAX_TABLE_BLOCK_COUNT` has up to 4,300 in
one of `RANGE_COUNT` ranges."""

MAX_NAMED_BLOCK_COUNT = 32_768
"""Single blocks that our reads name, and versions that they hold; beyond it, a read asks for all
blocks of its ranges, and for their values. With these and all ranges, a request stays below
`MAX_ENTRY_BYTES`."""

MAX_QUEUED_REPLY_COUNT = 65_536
"""Replies that wait for the reader of a push stream; beyond it the stream is not read further."""

STREAM_READ_BYTES = 256 * 1024
"""Largest answer to a read on the push stream; a larger one gets a stream of its own, with its own
flow control."""

MAX_STREAM_READ_COUNT = 256
"""Reads that wait on one PushPull stream; further ones with a number are refused."""

MAX_UNREAD_BYTES = 512 * 1024 * 1024
"""Bytes of answers that a server has made and no client has read yet, of all calls together."""

UNREAD_S = 2.0
"""Time after which a call is ended if nothing of it was read, while unread answers are too many."""

MAX_RECOMPUTE_COUNT = 64
"""Times that one step may be computed again because its gradient was too stale; each is a step."""

MAX_CLOCK_LEAD_COUNT = 64
"""Clocks that a worker may send beyond its newest seal in effect."""

DEFAULT_WINDOW_BYTES = 32 * 1024 * 1024
"""Payload bytes that a worker has in flight to one server: sent and not yet RECEIVED."""

DEFAULT_GATE_EXTRA_BYTES = 256 * 1024 * 1024
"""Staging memory of one table on one server beyond one step, if that is more than a step."""

MAX_TURN_S = 0.02
"""Longest turn of an event loop: a fraction of the rest of a lease after a lost heartbeat."""

SLICE_S = 0.005
"""Time after which long work in a turn waits for other work, so that running calls end in time."""

SLICE_BLOCK_COUNT = 64
"""Blocks that long work takes between two looks at the time."""

SLICE_BYTES = 4 * 1024 * 1024
"""Bytes that it copies between them."""

HEARTBEAT_INTERVAL_S = 1.0
LEASE_S = 3.0
SCHEDULER_RECONNECT_S = 0.25
"""Longest wait between two attempts of a node to reach an absent scheduler, which judges the node a
lease after it is back."""
LOG_STALL_S = 20.0
"""Time for which a disk may be busy with one operation of an update log, which an overloaded one
takes seconds for. After it the log has failed: its server ends, and others take over before reads
have waited for their whole deadline."""
WORKER_TIMEOUT_S = 30.0
"""Silence after which a worker is declared gone: the default wait of other workers' reads, so that
a read which waited for a dead worker in vain succeeds when it is repeated."""

ADAPTATION_INTERVAL_S = 5.0
"""Interval of an adaptive bound: it contains several heartbeats of every node, and a change of some
milliseconds costs less than a hundredth of it."""

MAX_READ_WAIT_COUNT = 4096
"""Waits of workers on tables in one heartbeat of a server; further ones are left out."""

DEFAULT_PULL_DEADLINE_S = 30.0
DEFAULT_SESSION_DEADLINE_S = 10.0
STREAM_HEADER_DEADLINE_S = 10.0
"""Time from the opening of a push stream to its header."""

MAX_CHECKPOINT_URL_BYTES = 1024
"""Bytes of the checkpoint URL, which is in the view."""

CHECKPOINT_DIRECTORY_BYTES = 32
"""Bytes of a checkpoint's own directory name."""

CHECKPOINT_CUT_S = 60.0
"""Time for which servers hold back later clocks for a checkpoint's cut."""

CHECKPOINT_WRITTEN_S = 3600.0
"""Time for all parts of a checkpoint."""

CHECKPOINT_BUFFER_BYTES = 256 * 1024 * 1024
"""Bytes that a server has copied for a checkpoint and not yet written. A step changes every block
of a dense table: ranges whose copies do not fit are held at their cut until they do."""

CHECKPOINT_STALL_S = 15.0
"""Time after which a server gives up its part of a checkpoint, if the store takes nothing while
training waits for copies."""

CHECKPOINT_RATE_BYTES_S = 200 * 1024 * 1024
"""Bytes of a checkpoint that a server writes in a second while it also trains."""

UPDATE_LOG_BYTES = 4_000_000_000
"""Disk space of an update log; more, if a server needs more to begin."""

MAX_COLLECTIVE_BYTES = 512 * 1024
"""Bytes of one worker's share of a collective call: metrics, a confusion matrix, a vocabulary's
counts. Larger values belong into a table."""

MAX_COLLECTIVE_ROUND_BYTES = 2 * 1024 * 1024
"""Bytes of all shares together: each worker is sent all of them."""

MAX_COLLECTIVE_CALL_BYTES = 1024
"""Bytes of a collective call's name."""

LANES = ("auto", "shm", "grpc")
"""Values of PUSHPULL_LANE."""

LANE_RING_BYTES = 16 * 1024 * 1024
"""Shared memory of a worker for its pushes to one server. The last-level cache of a server machine
holds it, so the server reads what is still in the cache."""

LANE_ANSWER_BYTES = 16 * 1024 * 1024
"""Shared memory of a server for the rows that one session pulls: what its caches hold."""

LANE_ANSWER_COUNT = 1024
"""Answers of rows that lie there at once, at most."""

LANE_BATCH_BYTES = 4 * 1024 * 1024
"""Payload in shared memory that one message describes: enough to make the message's own cost small,
and a fraction of the ring, so that both ends work at once."""

LANE_MIN_PAYLOAD_BYTES = 16 * 1024
"""Smallest payload for shared memory; a smaller one costs less in its message."""

LANE_BUFFER_BATCH_BYTES = 16 * 1024 * 1024
"""The same where payloads are not copied into a ring, so that no worker waits for space in it."""

MAX_BATCH_COUNT = 64
"""Blocks in one message."""

MAX_LANE_SEGMENT_COUNT = 16
"""Segments that one session shares with a server."""

MAX_LANE_SEGMENT_BYTES = 64 * 1024**3
"""Virtual memory: the pages are the client's."""

LANE_ALIGNMENT_BYTES = 16
"""Alignment of payloads in shared memory; no element is wider."""

MAX_LANE_STRANGER_COUNT = 256
"""Connections to a server's Unix socket without a session yet."""

MAX_STREAM_CONNECTION_COUNT = 4096
"""Connections to a server's stream port."""

MAX_STALENESS = 1_000_000
MAX_ALPHA = 1e6
MAX_GRACE_MS = 60_000
"""Longest wait of an update for the steps of backup workers."""

MAX_DEADLINE_S = 3600.0
OVER_QUOTA_RETRY_S = 0.5
"""`retry_after_ms` of a refusal over quota, in seconds, if the CREDIT reply is lost."""

MAX_STATE_DEPTH = 64
"""Nesting of a worker's own state, where a state that contains itself ends."""

MAX_STATE_VALUE_COUNT = 10_000_000
"""Values in a worker's own state, a tensor being one. The order of a large data set as a list fits;
one inner state that a hundred lists share, and those again, does not."""

MAX_ERROR_MESSAGE_BYTES = 1024
"""Bytes of an error's message: it travels in trailing metadata, twice and escaped, where gRPC's
default limit is 8 KiB."""

MAX_HTTP_REQUEST_BYTES = 8192
"""Bytes of the request line and headers of a GET on a node's HTTP port."""

MAX_HTTP_CONNECTION_COUNT = 64
"""HTTP connections of a node; beyond it the oldest is closed."""

HTTP_REQUEST_DEADLINE_S = 5.0
"""Time from the accept of an HTTP connection to its close."""

check(
    DEFAULT_BLOCK_ELEMENTS % BLOCK_ALIGNMENT_ELEMENTS == 0, "LIM-1", "default block is not aligned"
)
check(
    MAX_BLOCK_ELEMENTS * MAX_ELEMENT_BYTES + MESSAGE_OVERHEAD_BYTES <= MAX_MESSAGE_BYTES,
    "LIM-2",
    "the largest block does not fit a message",
)
check(
    DEFAULT_BLOCK_ELEMENTS * MAX_ELEMENT_BYTES + MESSAGE_OVERHEAD_BYTES
    <= FOREIGN_MAX_MESSAGE_BYTES,
    "LIM-3",
    "a default block does not fit gRPC's default message",
)
check(2 * LANE_BATCH_BYTES <= LANE_RING_BYTES, "LIM-6", "a batch fills the ring")
check(2 * MAX_PULLED_ROW_BYTES <= LANE_ANSWER_BYTES, "LIM-15", "a piece is too large")
check(LANE_RING_BYTES <= MAX_LANE_SEGMENT_BYTES, "LIM-7", "no server would map the ring")
check(LEASE_S >= 2 * HEARTBEAT_INTERVAL_S, "LIM-4", "a lease must outlast a lost heartbeat")
check(WORKER_TIMEOUT_S > LEASE_S, "LIM-8", "a worker would be gone before it is silent")
check(
    SLOT_COUNT >= MAX_RANGE_COUNT >= LARGE_CLUSTER_RANGE_COUNT >= RANGE_COUNT,
    "LIM-5",
    "more ranges than slots",
)
check(
    2 * MAX_RANGE_BLOCK_COUNT + 1 <= MAX_LEDGER_GAP_COUNT,
    "LIM-11",
    "a step may push each block, and again when it has changed, and the seal comes after them",
)
check(
    MAX_RANGE_BLOCK_COUNT * RANGE_COUNT >= MAX_TABLE_BLOCK_COUNT,
    "LIM-12",
    "a cluster of few servers could not hold the largest table",
)
check(
    MAX_COLLECTIVE_BYTES + MAX_COLLECTIVE_ROUND_BYTES + MESSAGE_OVERHEAD_BYTES <= MAX_MESSAGE_BYTES,
    "LIM-14",
    "a share and the round before it do not fit a message",
)
check(4 * SLICE_S <= MAX_TURN_S, "LIM-9", "running calls would not end in their turn")
check(20 * MAX_TURN_S <= HEARTBEAT_INTERVAL_S, "LIM-10", "a turn would delay a heartbeat")
check(
    8 * MAX_NAMED_BLOCK_COUNT <= MAX_ENTRY_BYTES,
    "LIM-13",
    "the blocks that a read names leave too little of a request to ranges",
)
