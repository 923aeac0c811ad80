"""Checks of a registration, and the message of every refusal.

Rules:
    - A refusal names the value that came, the expected one and, where a rank or address is taken,
      its holder. Checks of the request alone come before checks against the cluster.
    - A restarted process asks for the rank or address of its former node before the scheduler can
      know that this one is dead. A caller that says that it waits is told to ask again, until the
      other node is heard, or the wait is so long that a living node would have been heard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain

from ps_core import limits, runs
from ps_core.cluster_view import Node, NodeState, Role
from ps_core.errors import Fenced, InvalidConfig, Overloaded, Recovering
from ps_core.keys import NodeId
from ps_core.runs import Run
from ps_core.tables.optimizers import OptimizerKind
from ps_core.tables.table import Table
from scheduler.machine import update_offers
from scheduler.machine.state import ClusterSettings, ClusterState, Registration

PROTOCOL_VERSION = 1
REGISTRATION_ID_BYTES = 16
LAUNCH_ID_BYTES = 16
MAX_ADDRESS_BYTES = 300
MAX_FINGERPRINT_BYTES = 1024
MAX_FEATURE_COUNT = 64
MAX_FEATURE_BYTES = 64
_LISTED_COUNT = 8
_MISSED_INTERVALS = 1.5  # between two heartbeats of a node that lives, at most, as a rule
_SERVER_RESERVE = 200  # places for servers beside `server_count`: for left ones, and new ones
_WILDCARDS = frozenset({"", "0.0.0.0", "::", "[::]", "*"})  # noqa: S104 - they are refused


@dataclass(frozen=True, slots=True)
class Heard:
    """Heartbeats of the other nodes, at one moment; `interval_s` is between two of a node."""

    describe: update_offers.Describe
    quiet_s: Callable[[NodeId], float]
    interval_s: float

    def may_be_dead(self, node: Node, waited_s: float) -> bool:
        """True if a node may have died before the start of a caller that has waited `waited_s`: it
        was not heard since, except within one interval for heartbeats under way.
        """
        return node.state.is_member and self.quiet_s(node.node_id) + self.interval_s >= waited_s


def check_request(request: Registration, settings: ClusterSettings) -> None:
    """Check the request in itself."""
    if len(request.registration_id) != REGISTRATION_ID_BYTES:
        raise InvalidConfig(
            f"registration_id has {len(request.registration_id)} bytes; expected "
            f"{REGISTRATION_ID_BYTES}"
        )
    if len(request.launch_id) not in (0, LAUNCH_ID_BYTES):
        raise InvalidConfig(
            f"launch_id has {len(request.launch_id)} bytes; expected {LAUNCH_ID_BYTES}, or none"
        )
    if request.protocol_version != PROTOCOL_VERSION:
        raise InvalidConfig(
            f"protocol_version is {request.protocol_version}; this cluster speaks "
            f"{PROTOCOL_VERSION}"
        )
    if request.cluster_id not in ("", settings.cluster_id):
        raise Fenced(
            f"the request names cluster '{request.cluster_id[:100]}'; this is cluster "
            f"'{settings.cluster_id}'. A scheduler that is restarted without its journal has a new "
            f"cluster, and its nodes must be restarted too, with its cluster_id "
            f"(PUSHPULL_CLUSTER_ID), or none"
        )
    longest = max((len(name.encode()) for name in request.features), default=0)
    if len(request.features) > MAX_FEATURE_COUNT or longest > MAX_FEATURE_BYTES:
        raise InvalidConfig(
            f"features has {len(request.features)} names of up to {longest} bytes; expected at "
            f"most {MAX_FEATURE_COUNT} of up to {MAX_FEATURE_BYTES}"
        )
    update_offers.check_offers(request)
    _check_update_log(request, settings)
    if request.role is Role.SERVER:
        _check_address(request.address)
        size_bytes = len(request.kernel_fingerprint.encode())
        if not 1 <= size_bytes <= MAX_FINGERPRINT_BYTES:
            raise InvalidConfig(
                f"a server's kernel_fingerprint has {size_bytes} bytes; expected 1 to "
                f"{MAX_FINGERPRINT_BYTES}"
            )
    runs.check_name(request.run)
    if request.run and request.role is Role.SERVER:
        raise InvalidConfig(f"run is '{request.run}'; a server is of no run, and serves all")
    runs.check_identity(request.identity)
    if request.identity and request.role is not Role.WORKER:
        raise InvalidConfig(
            f"identity is '{request.identity}'; a {request.role.value} has none, only workers do"
        )
    if request.role is not Role.WORKER and request.requested_rank is not None:
        raise InvalidConfig(
            f"requested_rank is {request.requested_rank}; a {request.role.value} has no rank"
        )


def _check_update_log(request: Registration, settings: ClusterSettings) -> None:
    claim = request.update_log
    if claim is None:
        return
    if request.role is not Role.SERVER:
        raise InvalidConfig(f"a {request.role.value} keeps an update log; only servers do")
    for log_id in (claim.log_id, *claim.former_log_ids):
        if len(log_id) != limits.LOG_ID_BYTES:
            raise InvalidConfig(
                f"an update log's log_id has {len(log_id)} bytes; expected {limits.LOG_ID_BYTES}"
            )
    former_count, is_former = len(claim.former_log_ids), claim.log_id in claim.former_log_ids
    if former_count > limits.MAX_FORMER_LOGS or is_former:
        raise InvalidConfig(
            f"an update log had {former_count} others before it; expected at most "
            f"{limits.MAX_FORMER_LOGS}, and not itself"
        )
    is_ours = claim.timeline == settings.timeline  # another cluster may have had other ranges
    beyond = [each for each in claim.range_ids if is_ours and each >= settings.range_count]
    if beyond or len(set(claim.range_ids)) != len(claim.range_ids):
        raise InvalidConfig(
            f"an update log has {len(claim.range_ids)} ranges, {beyond[:3]} among them; expected "
            f"each once, and below {settings.range_count}"
        )
    if len(claim.assignment_epochs) not in (0, len(claim.range_ids)):
        raise InvalidConfig(
            f"an update log has {len(claim.range_ids)} ranges and {len(claim.assignment_epochs)} "
            "epochs of them; expected one for each"
        )


def _check_address(address: str) -> None:
    host, colon, port = address.rpartition(":")
    shown = address[:MAX_ADDRESS_BYTES]
    well_formed = (
        colon
        and not any(c.isspace() for c in address)
        and port.isascii()
        and port.isdigit()
        and 1 <= int(port[:6]) <= 65_535
        and len(address.encode()) <= MAX_ADDRESS_BYTES
    )
    if not well_formed:
        raise InvalidConfig(
            f"a server's address is '{shown}'; expected 'host:port' with a port from 1 to 65535, "
            f"at most {MAX_ADDRESS_BYTES} bytes"
        )
    if host in _WILDCARDS:
        raise InvalidConfig(
            f"a server's address is '{shown}': nobody can reach a server there; set --advertise to "
            f"the 'host:port' that others reach it at"
        )


def check_repeated(request: Registration, first: Registration, node: Node) -> None:
    """Refuse a registration_id that is repeated with other values, or after its node left."""
    for name in (
        "role", "run", "address", "requested_rank", "kernel_fingerprint", "custom_updates",
        "update_log", "identity",
    ):  # fmt: skip
        came, was = getattr(request, name), getattr(first, name)
        if came != was:
            raise InvalidConfig(
                f"this registration_id was node {node.node_id}'s with {name} {was!r}; it came "
                f"again with {came!r}. A process draws its own registration_id"
            )
    if node.state is NodeState.GONE:
        raise Fenced(node.fence_words)
    if node.state is NodeState.LEFT:
        raise Fenced(
            f"this registration_id was node {node.node_id}'s, which has left; register under "
            f"a new one"
        )


def check_place(
    request: Registration, cluster: ClusterSettings, state: ClusterState, heard: Heard
) -> None:
    """Check the request against the cluster and its servers."""
    if state.finished:
        raise InvalidConfig(
            f"the cluster is finished: all workers have left, and it ends with its work "
            f"(stop_when_done); no {request.role.value} may join. Start a new cluster"
        )
    _check_count(request, cluster, state)
    if request.role is not Role.SERVER:
        return
    for table in state.tables.values() if request.update_log is not None else ():
        # Custom updates may fail after they are logged.
        if table.spec.optimizer.kind is OptimizerKind.CUSTOM:
            raise InvalidConfig(
                f"the server keeps an update log, and table '{table.spec.name}' has the custom "
                f"update '{table.spec.optimizer.custom_update}', which is not logged; expected a "
                "server without --update-log"
            )
    _check_servers(request, state, heard)
    update_offers.check_agreement(request, state, heard.describe)


def _check_count(request: Registration, cluster: ClusterSettings, state: ClusterState) -> None:
    """Refuse a node beyond the most that a cluster can have. Places are kept for servers: workers
    that have ended must not keep one from coming in the place of another.
    """
    most = limits.MAX_NODE_COUNT
    if len(state.members) >= most:
        raise Overloaded(f"the cluster has {len(state.members)} nodes; it can have {most}")
    most -= min(cluster.server_count + _SERVER_RESERVE, most // 2)
    if request.role is Role.SERVER or len(state.members) < most:
        return
    count = sum(each.node.role is not Role.SERVER for each in state.members.values())
    if count >= most:
        raise Overloaded(
            f"the cluster has {count} workers and readers, with those that have ended; it can have "
            f"{most} beside its servers. Remove runs that are over (pushpull runs remove NAME), or "
            "restore a checkpoint (client.restore), which begins the cluster anew"
        )


def _check_servers(request: Registration, state: ClusterState, heard: Heard) -> None:
    describe = heard.describe
    for node in state.nodes_of(Role.SERVER):
        if node.state is NodeState.LEFT:
            continue
        theirs = state.members[node.node_id].registration.kernel_fingerprint
        if request.kernel_fingerprint != theirs:
            raise InvalidConfig(
                f"the server's kernel_fingerprint is '{request.kernel_fingerprint}'; "
                f"{describe(node)} has '{theirs}'. Servers of one cluster need the same "
                f"pushpull, torch, CPU capability and C library, or their results differ: for "
                f"another release stop the run and resume it from its checkpoint; on mixed "
                f"machines start all of them with ATEN_CPU_CAPABILITY set to what the least has "
                f"(default, avx2 or avx512), and, where selftest alone differs, from one image"
            )
        if request.shares_log(state.members[node.node_id].registration):
            _check_not_copied(request, node, heard)
            continue  # the caller has the log's lock, so that one is dead
        # A silent server's address may be taken, because a restart on the same port does that.
        if node.address == request.address and node.state is NodeState.ALIVE:
            taken = f"a server's address is '{request.address}', which {describe(node)} has already"
            if request.waited_s is not None and heard.may_be_dead(node, request.waited_s):
                raise _ask_again(f"{taken}; it is free when that one is silent", heard)
            raise InvalidConfig(
                f"{taken}: stop that one, or give the address that others reach this one at "
                "(--advertise)"
            )


def _check_not_copied(request: Registration, node: Node, heard: Heard) -> None:
    """Ask a server to come again, that waits, if another with its update log was heard just now at
    another address. One that is heard since lives: its directory was copied.
    """
    is_heard = heard.quiet_s(node.node_id) < _MISSED_INTERVALS * heard.interval_s
    may_live = node.state is NodeState.ALIVE and is_heard and node.address != request.address
    if request.waited_s is None or not may_live:
        return
    former = heard.describe(node)
    if heard.may_be_dead(node, request.waited_s):
        reason = f"the update log is that of {former}; it is free when that one is not heard"
        raise _ask_again(reason, heard)
    raise InvalidConfig(
        f"the update log is a copy of that of {former}, which lives, and has more: start this "
        "server with an empty directory (--update-log)"
    )


def _ask_again(reason: str, heard: Heard) -> Recovering:
    return Recovering(reason, retry_after_ms=max(1, round(heard.interval_s * 1000)))


def run_of(request: Registration, state: ClusterState, settings: ClusterSettings) -> Run:
    """The worker's run; a new one has the size of its job, if that is known."""
    size = request.world_size if request.run else 0
    return state.runs.get(request.run) or Run(request.run, size or settings.worker_count)


def check_run(request: Registration, state: ClusterState) -> None:
    """Raise InvalidConfig for a worker or reader of a run that was ended, or does not exist."""
    run = state.runs.get(request.run)
    if request.role is Role.WORKER and run is not None and run.has_ended:
        ended = "removed" if run.is_removed else "ended"
        raise InvalidConfig(over_words(run.name, f"an operator {ended} it"))
    if request.role is not Role.READER:
        return
    if run is not None and run.is_removed:
        raise InvalidConfig(
            f"run '{run.name}' was removed by an operator: it has no tables to read"
        )
    if request.run and run is None:
        known = ", ".join(f"'{name}'" for name in list(state.runs)[:_LISTED_COUNT]) or "none"
        raise InvalidConfig(
            f"there is no run '{request.run}' to read; the runs of the cluster: {known}"
        )


def over_words(run: str, why: str) -> str:
    return f"run '{run}' is over: {why}; give the new run another name (--run, PUSHPULL_RUN)"


def choose_rank(
    request: Registration, cluster: ClusterSettings, state: ClusterState, heard: Heard
) -> int:
    """The rank of a new worker in its run.

    It is the requested rank, or the rank of a worker of the same identity that has not left. Else,
    of the ranks below the run's worker count, it is the lowest never given, then the lowest of a
    gone worker; then the lowest free one of the late joiners'.
    """
    run = run_of(request, state, cluster)
    settings = cluster.of_run(run)
    if settings.rank_count > limits.MAX_NODE_COUNT // 2:
        raise InvalidConfig(
            f"run '{run.name}' would have {settings.rank_count} workers; expected at most "
            f"{limits.MAX_NODE_COUNT // 2}"
        )
    holders = state.workers_by_rank(run.name)
    describe = heard.describe
    _check_world_size(request, settings, holders.values())
    rank = request.requested_rank
    predecessor = state.predecessor_of(request)
    if predecessor is not None:
        rank = predecessor.rank
        holders[rank] = replace(predecessor, state=NodeState.GONE)
    if rank is None:
        first = range(settings.worker_count)
        fresh = (r for r in first if r not in holders)
        gone = (r for r in first if r in holders and holders[r].state is NodeState.GONE)
        beyond = (
            r
            for r in range(settings.worker_count, settings.rank_count)
            if r not in holders or not holders[r].state.is_member
        )
        rank = next(chain(fresh, gone, beyond), None)
        if rank is None:
            taken = _all_taken(run, settings, holders, describe)
            _check_all_live(request, settings, holders.values(), taken, heard)
            raise InvalidConfig(taken)
    if not 0 <= rank < settings.rank_count:
        raise InvalidConfig(
            f"requested_rank is {rank}; {_sizes(settings, run.name)}, ranks 0 to "
            f"{settings.rank_count - 1}: ask for one of these, or for none, or start "
            "the cluster with more (--workers, --max-workers)"
        )
    holder, is_further = holders.get(rank), rank >= settings.worker_count
    if is_further:
        _check_may_come_late(state.tables_of(run.name))
    if holder is None or holder.state is NodeState.GONE:
        return rank
    if not holder.state.is_member:
        if is_further:
            return rank
        raise InvalidConfig(
            f"rank {rank} was {describe(holder)}; the rank of a worker that has left is not given "
            "again, only that of a gone one. A new run needs a name of its own (--run, "
            "PUSHPULL_RUN)"
        )
    taken = f"rank {rank} is taken by {describe(holder)}"
    _check_all_live(request, settings, (holder,), taken, heard)
    raise InvalidConfig(f"{taken}; ask for another rank, or for none to be given a free one")


def _check_world_size(
    request: Registration, settings: ClusterSettings, holders: Iterable[Node]
) -> None:
    """Refuse a job with fewer workers than the run, which would wait for workers that nobody
    starts, or more. Once some have gone or left, another number may be right.
    """
    count = request.world_size
    if not count or settings.worker_count <= count <= settings.rank_count:
        return
    if all(holder.state.is_member for holder in holders):
        remedy = "give the run of this job another name"
        if not request.run:
            remedy = f"start its scheduler with --workers {count}"
        raise InvalidConfig(
            f"the job has {count} workers (world_size); {_sizes(settings, request.run)}: "
            f"{remedy}, or as many workers as it waits for"
        )


def _check_all_live(
    request: Registration,
    settings: ClusterSettings,
    holders: Iterable[Node],
    taken: str,
    heard: Heard,
) -> None:
    """Tell a worker that waits to ask again if a holder of its rank may be dead."""
    waited_s, timeout_s = request.waited_s, settings.worker_timeout_s
    if waited_s is None or not timeout_s:
        return
    if any(heard.may_be_dead(holder, waited_s) for holder in holders):
        given = f"it is given again after {timeout_s:g} s of silence (worker_timeout_s)"
        raise _ask_again(f"{taken}; {given}", heard)


def _check_may_come_late(tables: Iterable[Table]) -> None:
    """Refuse a late joiner where only the workers have the parameters that it would start from."""
    for table in tables:
        if table.spec.optimizer.kind is OptimizerKind.AGGREGATE:
            raise InvalidConfig(
                f"a worker beyond those that the cluster was started for; the parameters of table "
                f"'{table.spec.name}' (Aggregate) are in the workers and not in the servers, so it "
                "cannot get them"
            )


def _sizes(settings: ClusterSettings, run: str) -> str:
    most, count = settings.rank_count, settings.worker_count
    more = f" and takes up to {most}" if most > count else ""
    whole = f"run '{run}' was begun" if run else "the cluster was started"
    return f"{whole} for {count} workers{more}"


def _all_taken(
    run: Run, settings: ClusterSettings, holders: dict[int, Node], describe: update_offers.Describe
) -> str:
    listed = [f"rank {one} by {describe(holders[one])}" for one in sorted(holders)[:_LISTED_COUNT]]
    count = settings.rank_count
    if count > _LISTED_COUNT:
        listed.append(f"and {count - _LISTED_COUNT} more")
    limit = "was started for" if count == settings.worker_count else "takes (max_workers)"
    whole = f"run '{run.name}'" if run.name else "the cluster"
    return (
        f"a worker beyond the {count} that {whole} {limit}: every rank is "
        f"given, {', '.join(listed)}. To train beside or after these, begin a run of another name "
        "(--run, PUSHPULL_RUN)"
    )
