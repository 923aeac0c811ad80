"""How far the workers of a table may run apart, as a value.

    BSP     every update has a step of every worker (or of all but the slowest few)
    SSP(s)  every step is applied by itself; no read misses a step that is older than s clocks
    ASP     every step is applied by itself; nobody waits; what is stale may be treated for it

Staleness, tau, of a push to a block: updates of the block by others since its worker pulled it.

Rules:
    - A field belongs to one mode; where it does not apply it has its default.

What it deliberately does not do: decide (the server's gates do), or know protobuf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from ps_core import limits
from ps_core.errors import InvalidConfig


class Mode(Enum):
    """How far workers may run apart."""

    BSP = "bsp"
    SSP = "ssp"
    ASP = "asp"


class StalePolicy(Enum):
    """ASP: what happens to a push that is stale."""

    ACCEPT = "accept"
    REJECT = "reject"
    DAMP = "damp"
    DIVIDE = "divide"
    COMPENSATE = "compensate"


@dataclass(frozen=True, slots=True)
class Consistency:
    """The setting of one table.

    Attributes:
        mode: which of the three.
        backup_workers: BSP: workers whose step may be missing from an update; 0 waits for all.
        grace_ms: BSP with backup workers: how long an update waits for the others once enough
            steps are there.
        staleness: SSP: s. 0 waits as BSP does, but applies each step by itself.
        policy: ASP: what happens to a stale push.
        bound: REJECT: the largest staleness that is accepted.
        alpha: DAMP: a push is multiplied by 1 / (1 + alpha * tau). DIVIDE multiplies it by
            1 / max(1, tau).
        strength: COMPENSATE: lambda. A gradient g that was computed at w' and comes to w is taken
            as g + lambda * g * g * (w - w'), element by element (Zheng et al., DC-ASGD, 2017).
        adaptive: COMPENSATE: lambda is divided by the root of the running mean of g * g.
    """

    mode: Mode = Mode.BSP
    backup_workers: int = 0
    grace_ms: int = 0
    staleness: int = 0
    policy: StalePolicy = StalePolicy.ACCEPT
    bound: int = 0
    alpha: float = 0.0
    strength: float = 0.0
    adaptive: bool = False

    def validated(self) -> Consistency:
        """The setting, checked.

        Raises:
            InvalidConfig: naming the field, what came and what was expected.
        """
        _check_count("backup_workers", self.backup_workers, limits.MAX_NODE_COUNT)
        _check_count("grace_ms", self.grace_ms, limits.MAX_GRACE_MS)
        _check_count("staleness", self.staleness, limits.MAX_STALENESS)
        _check_count("bound", self.bound, limits.MAX_STALENESS)
        for field, is_set, belongs in (
            ("backup_workers", self.backup_workers, self.mode is Mode.BSP),
            ("grace_ms", self.grace_ms, self.backup_workers > 0),
            ("staleness", self.staleness, self.mode is Mode.SSP),
            ("policy", self.policy is not StalePolicy.ACCEPT, self.mode is Mode.ASP),
            ("bound", self.bound, self.policy is StalePolicy.REJECT),
            ("alpha", self.alpha, self.policy is StalePolicy.DAMP),
            ("strength", self.strength, self.policy is StalePolicy.COMPENSATE),
            ("adaptive", self.adaptive, self.policy is StalePolicy.COMPENSATE),
        ):
            if is_set and not belongs:
                raise InvalidConfig(f"{self} has {field}; expected it with {_OWNER[field]} only")
        for field, value, policy in (
            ("alpha", self.alpha, StalePolicy.DAMP),
            ("strength", self.strength, StalePolicy.COMPENSATE),
        ):
            if self.policy is policy and not 0.0 < value <= limits.MAX_ALPHA:
                raise InvalidConfig(
                    f"{field} is {value}; expected above 0, at most {limits.MAX_ALPHA:g}"
                )
        return self

    def without_policy(self) -> Consistency:
        """The same for values that are not gradients: what is stale is taken as it is."""
        return Consistency(self.mode, self.backup_workers, self.grace_ms, staleness=self.staleness)

    def scale(self, tau: int) -> float:
        """What a push of staleness `tau` is multiplied by."""
        if self.policy is StalePolicy.DAMP:
            return 1.0 / (1.0 + self.alpha * tau)
        if self.policy is StalePolicy.DIVIDE:
            return 1.0 / max(1, tau)
        return 1.0

    def rejects(self, tau: int) -> bool:
        """Whether a push of staleness `tau` is turned away."""
        return self.policy is StalePolicy.REJECT and tau > self.bound

    def __str__(self) -> str:
        """As `pushpull` writes and reads it: bsp, bsp:backup=1, ssp:4, asp, asp:reject=8."""
        if self.mode is Mode.SSP:
            return f"ssp:{self.staleness}"
        if self.backup_workers:
            grace = f",grace={self.grace_ms}ms" if self.grace_ms else ""
            return f"bsp:backup={self.backup_workers}{grace}"
        if self.policy is StalePolicy.ACCEPT:
            return str(self.mode.value)
        number = {
            StalePolicy.REJECT: f"={self.bound}",
            StalePolicy.DAMP: f"={self.alpha:g}",
            StalePolicy.COMPENSATE: f"={self.strength:g}" + ",adaptive" * self.adaptive,
        }
        return f"{self.mode.value}:{self.policy.value}{number.get(self.policy, '')}"


_OWNER = {
    "backup_workers": "BSP",
    "grace_ms": "BSP and backup workers",
    "staleness": "SSP",
    "policy": "ASP",
    "bound": "ASP and reject",
    "alpha": "ASP and damp",
    "strength": "ASP and compensate",
    "adaptive": "ASP and compensate",
}

_ADAPTIVE = ",adaptive"

_FORMS = (
    "bsp, bsp:backup=B, bsp:backup=B,grace=Tms, ssp:S, asp, asp:reject=BOUND, asp:damp=ALPHA, "
    "asp:divide, asp:compensate=LAMBDA, asp:compensate=LAMBDA,adaptive"
)


def parsed(text: str) -> Consistency:
    """The setting that `str` wrote.

    Raises:
        InvalidConfig: it is none.
    """
    name, _, rest = text.strip().lower().partition(":")
    try:
        return _parsed(name, rest).validated()
    except (ValueError, KeyError):
        raise InvalidConfig(f"consistency is '{text}'; expected one of {_FORMS}") from None


def _parsed(name: str, rest: str) -> Consistency:
    if name == "ssp":
        return Consistency(Mode.SSP, staleness=int(rest))
    adaptive = rest.endswith(_ADAPTIVE)
    parts = rest.removesuffix(_ADAPTIVE).split(",")
    words = dict(part.partition("=")[::2] for part in parts if part)
    found = Consistency(Mode(name))
    if name == "bsp" and words:
        grace_ms = int(words.pop("grace", "0ms").removesuffix("ms"))
        found = Consistency(backup_workers=int(words.pop("backup")), grace_ms=grace_ms)
    elif name == "asp" and words:
        ((policy, number),) = words.items()
        words = {}
        kind = StalePolicy(policy)
        if kind is StalePolicy.ACCEPT or (kind is StalePolicy.DIVIDE and number):
            raise ValueError(rest)
        found = Consistency(
            Mode.ASP,
            policy=kind,
            bound=int(number) if kind is StalePolicy.REJECT else 0,
            alpha=float(number) if kind is StalePolicy.DAMP else 0.0,
            strength=float(number) if kind is StalePolicy.COMPENSATE else 0.0,
            adaptive=adaptive,
        )
    if words or (adaptive and name != "asp"):
        raise ValueError(rest)
    return found


def _check_count(field: str, value: int, most: int) -> None:
    if not 0 <= value <= most or not math.isfinite(value):
        raise InvalidConfig(f"{field} is {value}; expected 0 to {most}")
