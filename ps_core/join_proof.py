"""The proof with which a process joins a cluster: it knows the join secret, and does not show it.

Rules:
    - A proof is good for one challenge, one registration_id, one role, rank and address, one run
      of that size and one identity: whoever reads it on the wire can neither join as anything else
      or anybody else, nor join another cluster or run with it.
    - Without an identity, and in the run without a name, it is what it was before there were any.

What it deliberately does not do: draw challenges, or find secrets
(`ps_runtime.cluster.join_secret`).
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from ps_core.cluster_view import Role
from ps_core.errors import Unauthenticated

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
        """HMAC-SHA256 over the challenge and these fields (docs/PROTOCOL.md)."""
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
