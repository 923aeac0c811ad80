"""Every limit of the system, with its relations asserted (LIM-*).

Sizes are in bytes (`_bytes`), times in seconds (`_s`), numbers of things in `_count`.
"""

from __future__ import annotations

from ps_core.errors import check

SLOT_COUNT = 65_536
"""Slots of the key space; fixed by the contract."""

MAX_RANGE_COUNT = 4096
"""Key ranges of any cluster, and so what a seal or a read may name."""

RANGE_COUNT = 64
"""Key ranges of a cluster of up to four servers, fixed when the cluster is formed: each is sealed
by itself, which costs as much as a block of it."""

LARGE_CLUSTER_RANGE_COUNT = 256
"""Key ranges of a cluster of more than eight servers, which share them evenly enough."""

BLOCK_ALIGNMENT_ELEMENTS = 64
"""Blocks are multiples of it: torch's fused CPU kernels are bit-equal only at such cuts (DESIGN
8)."""

DEFAULT_BLOCK_ELEMENTS = 262_144
"""1 MiB of float32: the best message size measured, and below gRPC's default limit."""

MAX_BLOCK_ELEMENTS = 524_288
"""A block of the widest codec (8 bytes) still fits a message."""

MAX_ELEMENT_BYTES = 8

MESSAGE_OVERHEAD_BYTES = 65_536
"""The most that a message holds beside its payload: presence bits, ranges of a seal."""

MAX_ENTRY_BYTES = 256 * 1024
"""Of a request without payloads, and of a message's part beside them: the ranges and blocks that it
names. A larger one is not even parsed, since millions of empty entries fit a message."""

MAX_EDIT_BYTES = 64
"""Of what names an edit in a seal."""

MAX_SCALE = {4: 3.4028234663852886e38, 8: 1.7976931348623157e308}
"""By how much a gradient may be multiplied, by the bytes of an element of its sum: the largest
number that there is of that width."""

MAX_MESSAGE_BYTES = 4 * 1024 * 1024 + MESSAGE_OVERHEAD_BYTES
"""The largest message that servers and clients of ours accept."""

FOREIGN_MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""gRPC's default limit; a block of the default size stays below it, so foreign clients need no
option."""

REPLICATION_MESSAGE_BYTES = 1024 * 1024 + MESSAGE_OVERHEAD_BYTES
"""What servers send each other is cut into messages of about so much: a block of the default size
and what was decided with it."""

MAX_INLINE_INITIALIZER_BYTES = 1024 * 1024
MAX_TABLE_NAME_BYTES = 200
MAX_TABLE_COUNT = 10_000

MAX_TABLE_BLOCK_COUNT = 262_144
"""Blocks of one table: 256 GiB of float32 at the default size. A server takes about 30 microseconds
of its processor to make one, 8 s for all of these, and `BLOCK_OVERHEAD_BYTES` of memory."""

BLOCK_OVERHEAD_BYTES = 4096
"""What a block takes of a server beside its elements, at most: 1.9 KB measured for what is known of
it, and 0.6 KB for each tensor of optimizer state."""

TABLE_MEMORY_SHARE = 0.9
"""Of a machine's memory, or a container's, what a server says that tables may take."""

VIEW_RESERVED_BYTES = 256 * 1024
"""Of a cluster's view, what tables leave to nodes that come, or come back: some 2,000 of them."""

MAX_TENSOR_COUNT = 100_000
MAX_NODE_COUNT = 10_000
MAX_TENSOR_DIMENSION_COUNT = 64
"""torch's own limit."""

MAX_HYPERPARAMETER_COUNT = 32
MAX_HYPERPARAMETER_NAME_BYTES = 64
MAX_HYPERPARAMETER_MAGNITUDE = 1e18
"""Beyond it the scalars that optimizers derive (a rate over 1 - beta) may leave float32's range,
where torch's kernels raise; by then an update is in its record and cannot be refused any more."""

MAX_CUSTOM_UPDATE_COUNT = 64
"""Custom updates that one server may register."""

MAX_CUSTOM_UPDATE_NAME_BYTES = 64
MAX_CUSTOM_UPDATE_FINGERPRINT_BYTES = 300
MAX_CUSTOM_UPDATE_PROBLEM_BYTES = 500

MAX_FLOAT32 = 3.4028234663852886e38
MAX_WAITER_COUNT = 65_536
"""Parked reads on one server."""

JOIN_RETRY_S = 0.2
"""After which a worker that pushes before it has joined should try again."""

DEFAULT_CUT_S = 5.0
MAX_CUT_S = 10.0
"""How long a cut may hold up training, if its reader does not end it."""

MAX_CUT_COUNT = 64
"""Cuts that are held at once in one range of a table."""

MAX_LEDGER_GAP_COUNT = 65_536
"""Sequences that a ledger holds above its low-water mark, and outcomes that it keeps below it for
a sender that never confirms."""

MAX_RANGE_BLOCK_COUNT = 4608
"""Blocks of one table in one range: what a seal does to all of them is decided in one turn of the
server's loop, some 2 microseconds a block. A table of `MAX_TABLE_BLOCK_COUNT` has up to 4,300 in
one of `RANGE_COUNT` ranges."""

MAX_NAMED_BLOCK_COUNT = 32_768
"""Single blocks that a read of ours names; of ranges beyond it, it asks for all. With them and all
ranges a request stays below `MAX_ENTRY_BYTES`."""

MAX_QUEUED_REPLY_COUNT = 65_536
"""Replies that wait for the reader of a push stream; beyond it the stream is not read on."""

STREAM_READ_BYTES = 256 * 1024
"""A read of at most so much is answered on the push stream; a larger one gets a stream of its own,
with its own flow control."""

MAX_STREAM_READ_COUNT = 256
"""Reads that wait on one PushPull stream; beyond it those with a number are refused."""

MAX_UNREAD_BYTES = 512 * 1024 * 1024
"""Of answers to reads that a server has made and nobody has read yet, of all calls together."""

UNREAD_S = 2.0
"""Where they are too many, a call of which nothing was read for so long is cut."""

MAX_RECOMPUTE_COUNT = 64
"""How often a step may compute anew what was too stale: each time is a step of its own."""

MAX_CLOCK_LEAD_COUNT = 64
"""How far beyond its newest seal in effect a worker may send."""

DEFAULT_WINDOW_BYTES = 32 * 1024 * 1024
"""Payload bytes that a worker has in flight to one server: sent and not yet RECEIVED."""

DEFAULT_GATE_EXTRA_BYTES = 256 * 1024 * 1024
"""Room for staged steps and sums on one server and table beyond one step, if that is more than a
step."""

MAX_TURN_S = 0.02
"""The longest that an event loop is at one thing, whatever comes: a fraction of what is left of a
lease when a heartbeat was lost."""

SLICE_S = 0.005
"""After so much of a turn long work waits for another one: what is under way then ends in time."""

SLICE_BLOCK_COUNT = 64
"""Blocks that long work takes before it looks at the time."""

SLICE_BYTES = 4 * 1024 * 1024
"""The same in bytes that it copies."""

HEARTBEAT_INTERVAL_S = 1.0
LEASE_S = 3.0
SCHEDULER_RECONNECT_S = 0.25
"""At most so long between two attempts of a node to reach a scheduler that is away. It is judged a
lease after that comes back."""
WORKER_TIMEOUT_S = 30.0
"""A worker that is silent for longer is declared gone: what the others' reads wait by default, so
that one which waited for a dead worker in vain is answered when it is asked again."""

ADAPTATION_INTERVAL_S = 5.0
"""A bound that moves is looked at so often: several heartbeats of every node are in it, and a
change of some milliseconds costs less than a hundredth of it."""

MAX_READ_WAIT_COUNT = 4096
"""Waits of workers on tables that a server says in one heartbeat; what is beyond is not said."""

DEFAULT_PULL_DEADLINE_S = 30.0
DEFAULT_SESSION_DEADLINE_S = 10.0
STREAM_HEADER_DEADLINE_S = 10.0
"""From the opening of a push stream to its header."""

MAX_CHECKPOINT_URL_BYTES = 1024
"""Of the directory that checkpoints go to, which is in the view."""

CHECKPOINT_DIRECTORY_BYTES = 32
"""Of a checkpoint's own directory under that one."""

CHECKPOINT_CUT_S = 60.0
"""So long servers hold what is beyond a cut for those that are not there yet."""

CHECKPOINT_WRITTEN_S = 3600.0
"""So long a checkpoint may take to be written."""

CHECKPOINT_BUFFER_BYTES = 256 * 1024 * 1024
"""Of blocks that a server has copied for a checkpoint and not yet written. A step changes every
block of a dense table: ranges whose copies do not fit are held at their cut until they do."""

CHECKPOINT_STALL_S = 15.0
"""A store that takes nothing for so long, while training waits for room for copies, gets no part of
that checkpoint."""

CHECKPOINT_RATE_BYTES_S = 200 * 1024 * 1024
"""What a server writes of a checkpoint in a second while it also trains."""

UPDATE_LOG_BYTES = 4_000_000_000
"""What an update log takes of a disk; more, if that is less than what a server needs to begin."""

MAX_COLLECTIVE_BYTES = 512 * 1024
"""What one worker may give in a collective call: metrics, a confusion matrix, a vocabulary's
counts. What is larger belongs into a table."""

MAX_COLLECTIVE_ROUND_BYTES = 2 * 1024 * 1024
"""The same of all workers together: each of them is sent all of it."""

MAX_COLLECTIVE_CALL_BYTES = 1024
"""Of what says which call it is."""

LANES = ("auto", "shm", "grpc")
"""The settings of PUSHPULL_LANE."""

LANE_RING_BYTES = 16 * 1024 * 1024
"""Shared memory that a worker makes for its pushes to one server. The last-level cache of a server
machine holds it, so that what the worker wrote is still there when the server reads it."""

LANE_BATCH_BYTES = 4 * 1024 * 1024
"""Payload in shared memory that one message describes: enough to make the message's own cost small,
and a fraction of the ring, so that both ends work at once."""

LANE_MIN_PAYLOAD_BYTES = 16 * 1024
"""A smaller payload travels in its message: it costs less there than a place in the ring."""

LANE_BUFFER_BATCH_BYTES = 16 * 1024 * 1024
"""The same where payloads are not copied into a ring: nobody waits for a piece to come back."""

MAX_BATCH_COUNT = 64
"""Blocks in one message."""

MAX_LANE_SEGMENT_COUNT = 16
"""Segments that one session shares with a server."""

MAX_LANE_SEGMENT_BYTES = 64 * 1024**3
"""Virtual: the memory is the client's."""

LANE_ALIGNMENT_BYTES = 16
"""Of payloads in shared memory: no element is wider."""

MAX_LANE_STRANGER_COUNT = 256
"""Connections on a server's Unix socket that have not said who they are."""

MAX_STREAM_CONNECTION_COUNT = 4096
"""Connections to a server's stream port."""

MAX_STALENESS = 1_000_000
MAX_ALPHA = 1e6
MAX_GRACE_MS = 60_000
"""How long an update with backup workers may wait for those that it can do without."""

MAX_DEADLINE_S = 3600.0
ROOM_RETRY_S = 0.5
"""RetryInfo of a refusal for room: the fallback if the CREDIT reply is lost."""

MAX_STATE_DEPTH = 64
"""How deep a worker's own state may be nested: a state that contains itself ends here."""

MAX_STATE_VALUE_COUNT = 10_000_000
"""Values in a worker's own state, a tensor being one: the order of a large data set as a list fits,
one inner state that a hundred lists share, and those again, does not."""

MAX_ERROR_MESSAGE_BYTES = 1024
"""An error travels in trailing metadata, twice and escaped; gRPC's default limit there is 8 KiB."""

MAX_HTTP_REQUEST_BYTES = 8192
"""Request line and headers of a GET on a node's HTTP port."""

MAX_HTTP_CONNECTION_COUNT = 64
"""Beyond it the oldest is closed."""

HTTP_REQUEST_DEADLINE_S = 5.0
"""From the accept of an HTTP connection to its close."""

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
    "no cluster of few servers would have room for the largest table",
)
check(
    MAX_COLLECTIVE_BYTES + MAX_COLLECTIVE_ROUND_BYTES + MESSAGE_OVERHEAD_BYTES <= MAX_MESSAGE_BYTES,
    "LIM-14",
    "what a worker gives and the round before it do not fit a message",
)
check(4 * SLICE_S <= MAX_TURN_S, "LIM-9", "what is under way would not end in its turn")
check(20 * MAX_TURN_S <= HEARTBEAT_INTERVAL_S, "LIM-10", "a turn would delay a heartbeat")
check(
    8 * MAX_NAMED_BLOCK_COUNT <= MAX_ENTRY_BYTES,
    "LIM-13",
    "the blocks that a read names leave too little of a request to ranges",
)
