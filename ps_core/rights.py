"""Who may join a cluster, and who may call what: every method of the contract, and the roles whose
sessions it takes.

Rules of rights:
    - A reader reads, and changes nothing that anybody else sees. Operators look after the cluster
      and touch no values. Only servers speak for ranges.
    - A method that is not in the table may be called by nobody.

Rules of the proof with which a process joins: it knows the join secret, and does not show it.
    - A proof is good for one challenge, one registration_id, one role, rank and address, one run
      of that size and one identity: whoever reads it on the wire can neither join as anything else
      or anybody else, nor join another cluster or run with it.
    - Without an identity, and in the run without a name, it is what it was before there were any.

What it deliberately does not do: draw challenges, or find secrets
(`ps_runtime.cluster.join_secret`).

REFERENCE.md has the table, and a test calls every method with a session of every role.
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
"""Whoever registers has none yet: RegisterNode asks for the proof of the join secret instead."""

NO_SESSION = "the session token is missing; send the session as RegisterNode gave it"
"""What a call without a session is told."""

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
"""The roles that may call a method, each with its own session."""


def check(method: str, role: Role) -> None:
    """Refuse a caller whose role has no right to the method.

    Raises:
        NotPermitted: it has none; the message says who has.
    """
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
    """Who asks to join, as far as the proof binds it."""

    registration_id: bytes
    role: Role
    rank: int | None = None
    address: str = ""
    run: str = ""
    world_size: int = 0
    identity: str = ""

    def proof(self, secret: bytes, challenge: bytes) -> bytes:
        """HMAC-SHA256 over the challenge and these fields (docs/reference/PROTOCOL.md)."""
        fields = (
            challenge.hex(),
            self.registration_id.hex(),
            self.role.value,
            "" if self.rank is None else str(self.rank),
            self.address,
        )
        if self.identity:
            of_run = (self.run, str(self.world_size), self.identity)
            text = "|".join(("pushpull-join-identity", *fields, *of_run))
        elif self.run:
            text = "|".join(("pushpull-join-run", *fields, self.run, str(self.world_size)))
        else:
            text = "|".join(("pushpull-join", *fields))
        return hmac.new(secret, text.encode(), hashlib.sha256).digest()

    def check(self, proof: bytes, secret: bytes, challenge: bytes) -> None:
        """Refuse who has not proved that it knows the secret.

        Raises:
            Unauthenticated: the proof is missing or wrong; the message says what to do.
        """
        if not proof:
            raise Unauthenticated(
                f"no {self.role.value} joins without the cluster's join secret: {_REMEDY}"
            )
        if not hmac.compare_digest(proof, self.proof(secret, challenge)):
            raise Unauthenticated(
                f"the join secret of this {self.role.value} is not the cluster's: {_REMEDY}"
            )
