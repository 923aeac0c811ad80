"""Rights of roles, and the proof of the join secret.

Rules of rights:
    - Readers read, and change nothing that another node sees. Operators look after the cluster and
      touch no values. Only servers speak for ranges.
    - A method outside the table is for nobody. REFERENCE.md has the table, and a test calls every
      method with a session of every role.

Rules of the proof, which shows that a process knows the join secret without sending it:
    - A proof is valid for one challenge, one registration_id, one role, rank and address, one run
      of that size and one identity: with a proof read on the wire nobody can join as another node,
      another cluster or another run.
    - Without an identity, and in the run without a name, the proof has no field for them.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from ps_core.cluster_view import Role
from ps_core.errors import NotPermitted, Unauthenticated

_EVERYBODY = frozenset(Role)
_SERVERS = frozenset({Role.SERVER})
_WORKERS = frozenset({Role.WORKER})
_READERS = frozenset({Role.READER})
_PULLING = _WORKERS | _READERS
_CHANGING = _WORKERS | {Role.OPERATOR}

NEEDS_NO_SESSION = frozenset({"GetJoinChallenge", "RegisterNode"})
"""Methods before a session: RegisterNode asks for a proof of the join secret instead."""

NO_SESSION = "the session token is missing; send the session as RegisterNode gave it"
"""Message for a call without a session."""

MAY_CALL: Mapping[str, frozenset[Role]] = {
    "Heartbeat": _EVERYBODY,
    "DeregisterNode": _EVERYBODY,
    "WatchCluster": _EVERYBODY,
    "GetClusterStatus": _EVERYBODY,
    "CreateTable": _WORKERS,
    "ReportKeptValues": frozenset({Role.OPERATOR}),
    "EndRun": frozenset({Role.OPERATOR}),
    "RemoveRun": frozenset({Role.OPERATOR}),
    "SetConsistency": _CHANGING,
    "PromiseChange": _SERVERS,
    "SetBackups": _SERVERS,
    "CreateCheckpoint": _CHANGING,
    "RestoreCheckpoint": _CHANGING,
    "JoinCheckpoint": _WORKERS,
    "ReportCheckpointPart": _SERVERS | _WORKERS,
    "LeaseDataShards": _WORKERS,
    "OpenSession": _PULLING,
    "Push": _WORKERS,
    "Pull": _PULLING,
    "PushPull": _WORKERS,
    "BeginCut": _READERS,
    "EndCut": _READERS,
    "GetRangeStats": _EVERYBODY,
    "EnterCollective": _WORKERS,
    "SettleChange": _SERVERS,
    "Replicate": _SERVERS,
}
"""Roles that may call a method, each with its own session."""


def check(method: str, role: Role) -> None:
    """Raise NotPermitted if the role has no right to call the method."""
    roles = MAY_CALL.get(method, frozenset())
    if role not in roles:
        raise NotPermitted(f"{method} is for {words(roles)}; the caller's role is {role.value}")


def words(roles: frozenset[Role]) -> str:
    """The roles in a sentence: "workers and operators"."""
    names = [f"{role.value}s" for role in Role if role in roles]
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:]))) or "nobody"


CHALLENGE_BYTES = 16

_REMEDY = (
    "start this process with PUSHPULL_JOIN_SECRET, or PUSHPULL_JOIN_SECRET_FILE, as the scheduler "
    "has it (~/.pushpull/join-secret of the user that started it, unless one of them was set)"
)


@dataclass(frozen=True, slots=True)
class Joiner:
    """The fields of a registration that the proof covers."""

    registration_id: bytes
    role: Role
    rank: int | None = None
    address: str = ""
    run: str = ""
    world_size: int = 0
    identity: str = ""

    def proof(self, secret: bytes, challenge: bytes) -> bytes:
        """HMAC-SHA256 over the challenge and these fields (docs/reference/PROTOCOL.md)."""
        rank = "" if self.rank is None else str(self.rank)
        ids = challenge.hex(), self.registration_id.hex()
        fields = (*ids, self.role.value, rank, self.address)
        of_run = (self.run, str(self.world_size))
        if self.identity:
            text = "|".join(("pushpull-join-identity", *fields, *of_run, self.identity))
        elif self.run:
            text = "|".join(("pushpull-join-run", *fields, *of_run))
        else:
            text = "|".join(("pushpull-join", *fields))
        return hmac.new(secret, text.encode(), hashlib.sha256).digest()

    def check(self, proof: bytes, secret: bytes, challenge: bytes) -> None:
        """Raise Unauthenticated, with the remedy, for a registration without a valid proof."""
        if not proof:
            raise Unauthenticated(
                f"no {self.role.value} joins without the cluster's join secret: {_REMEDY}"
            )
        if not hmac.compare_digest(proof, self.proof(secret, challenge)):
            raise Unauthenticated(
                f"the join secret of this {self.role.value} is not the cluster's: {_REMEDY}"
            )
