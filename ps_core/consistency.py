"""Consistency settings of a table, as values.

    BSP     every update has a step of every worker (or of all but the slowest few)
    SSP(s)  every step is applied by itself; no read misses a step that is older than s clocks;
            the scheduler may move s between two limits
    ASP     every step is applied by itself; nobody waits; a policy may treat stale pushes

Staleness, tau, of a push to a block: updates of the block by others since its worker pulled it.

Rules:
    - A field belongs to one mode; elsewhere it has its default.
    - The bound in effect is one number: `staleness`, of an adaptive bound too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from numbers import Integral
from typing import Any

from ps_core import limits
from ps_core.errors import InvalidConfig


class Mode(Enum):
    """Bound on the clocks between workers."""

    BSP = "bsp"
    SSP = "ssp"
    ASP = "asp"


class StalePolicy(Enum):
    """Treatment of stale pushes in ASP."""

    ACCEPT = "accept"
    REJECT = "reject"
    DAMP = "damp"
    DIVIDE = "divide"
    COMPENSATE = "compensate"


@dataclass(frozen=True, slots=True)
class Consistency:
    """The setting of one table.

    Attributes:
        mode: one of the three.
        backup_workers: BSP: workers whose step an update may lack; 0 waits for all.
        grace_ms: BSP with backup workers: wait of an update for the others, once enough steps are
            there.
        staleness: SSP: s. 0 waits as BSP does, but applies each step by itself.
        least: SSP with an adaptive bound: the lowest s, and the first.
        most: SSP with an adaptive bound: the highest s. 0: the bound is fixed.
        policy: ASP: treatment of stale pushes.
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
    least: int = 0
    most: int = 0

    @property
    def moves(self) -> bool:
        """True for an adaptive bound."""
        return self.most > 0

    @property
    def as_requested(self) -> Consistency:
        """The setting as requested, with an adaptive bound at its lowest."""
        return replace(self, staleness=self.least) if self.moves else self

    def validated(self) -> Consistency:
        """The setting itself, if it is valid.

        Raises:
            InvalidConfig: a field is wrong, or belongs to another mode.
        """
        _check_count("backup_workers", self.backup_workers, limits.MAX_NODE_COUNT)
        _check_count("grace_ms", self.grace_ms, limits.MAX_GRACE_MS)
        for field in ("staleness", "bound", "least", "most"):
            _check_count(field, getattr(self, field), limits.MAX_STALENESS)
        is_ssp = self.mode is Mode.SSP
        compensates = self.policy is StalePolicy.COMPENSATE
        for field, is_set, belongs, owner in (
            ("backup_workers", self.backup_workers, self.mode is Mode.BSP, "BSP"),
            ("grace_ms", self.grace_ms, self.backup_workers > 0, "BSP and backup workers"),
            ("staleness", self.staleness, is_ssp, "SSP"),
            ("least", self.least, is_ssp, "SSP"),
            ("most", self.most, is_ssp, "SSP"),
            ("policy", self.policy is not StalePolicy.ACCEPT, self.mode is Mode.ASP, "ASP"),
            ("bound", self.bound, self.policy is StalePolicy.REJECT, "ASP and reject"),
            ("alpha", self.alpha, self.policy is StalePolicy.DAMP, "ASP and damp"),
            ("strength", self.strength, compensates, "ASP and compensate"),
            ("adaptive", self.adaptive, compensates, "ASP and compensate"),
        ):
            if is_set and not belongs:
                raise InvalidConfig(f"{self} has {field}; expected it with {owner} only")
        self._check_bounds()
        for field, value, policy in (
            ("alpha", self.alpha, StalePolicy.DAMP),
            ("strength", self.strength, StalePolicy.COMPENSATE),
        ):
            if self.policy is policy and not 0.0 < value <= limits.MAX_ALPHA:
                raise InvalidConfig(
                    f"{field} is {value}; expected above 0, at most {limits.MAX_ALPHA:g}"
                )
        return self

    def _check_bounds(self) -> None:
        if not self.moves and not self.least:
            return
        if self.most <= self.least:
            raise InvalidConfig(
                f"most is {self.most}; expected above {self.least}, the lowest that s may be"
            )
        if not self.least <= self.staleness <= self.most:
            raise InvalidConfig(
                f"staleness is {self.staleness}; expected {self.least} to {self.most}, the bounds"
            )

    def without_policy(self) -> Consistency:
        """The setting for values that are no gradients: stale ones are accepted."""
        accepting = replace(self, policy=StalePolicy.ACCEPT, bound=0, alpha=0.0)
        return replace(accepting, strength=0.0, adaptive=False)

    def scale(self, tau: int) -> float:
        """Factor of a push of staleness `tau`."""
        if self.policy is StalePolicy.DAMP:
            return 1.0 / (1.0 + self.alpha * tau)
        if self.policy is StalePolicy.DIVIDE:
            return 1.0 / max(1, tau)
        return 1.0

    def rejects(self, tau: int) -> bool:
        """True if a push of staleness `tau` is rejected."""
        return self.policy is StalePolicy.REJECT and tau > self.bound

    def __str__(self) -> str:
        """The syntax of `parsed`: bsp, bsp:backup=1, ssp:4, ssp:2..8, asp, asp:reject=8. An
        adaptive bound above its lowest is shown: ssp:2..8@5.
        """
        if self.mode is Mode.SSP:
            if not self.moves:
                return f"ssp:{self.staleness}"
            place = "" if self.staleness == self.least else f"@{self.staleness}"
            return f"ssp:{self.least}..{self.most}{place}"
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


_ADAPTIVE = ",adaptive"

_FORMS = (
    "bsp, bsp:backup=B, bsp:backup=B,grace=Tms, ssp:S, ssp:LEAST..MOST, asp, asp:reject=BOUND, "
    "asp:damp=ALPHA, asp:divide, asp:compensate=LAMBDA, asp:compensate=LAMBDA,adaptive"
)


def moving(least: int, most: int) -> Consistency:
    """SSP with an adaptive bound from `least` to `most`; InvalidConfig if these are no bounds."""
    if most == 0:  # which stands for a fixed bound
        raise InvalidConfig(f"most is 0; expected above {least}, the lowest that s may be")
    return Consistency(Mode.SSP, staleness=least, least=least, most=most).validated()


def parsed(text: str) -> Consistency:
    """The inverse of `str`; InvalidConfig if `text` is no setting."""
    name, _, rest = text.strip().lower().partition(":")
    try:
        return _parsed(name, rest).validated()
    except (ValueError, KeyError):
        raise InvalidConfig(f"consistency is '{text}'; expected one of {_FORMS}") from None


def _parsed(name: str, rest: str) -> Consistency:
    if name == "ssp":
        least, dots, rest = rest.partition("..")
        if not dots:
            return Consistency(Mode.SSP, staleness=int(least))
        most, at, place = rest.partition("@")
        found = moving(int(least), int(most))
        return replace(found, staleness=int(place)) if at else found
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


def _check_count(field: str, value: Any, most: int) -> None:
    if not isinstance(value, Integral):
        raise InvalidConfig(f"{field} is {value!r}; expected a whole number, 0 to {most}")
    if not 0 <= int(value) <= most:
        raise InvalidConfig(f"{field} is {value}; expected 0 to {most}")
