"""The offer of a custom update: all that the cluster outside its server knows of it.

The update itself, a function on tensors, is installed on the servers.

Rules:
    - Two servers that offer an update of one name offer the same fingerprint and hyperparameters.
    - A hyperparameter's name is a Python argument's, and none of `GROUP_KEYS`: every other key of a
      parameter group is meant for the update.
    - An offer with a `problem` comes from a server that has the package and cannot run it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from keyword import iskeyword

from ps_core import limits
from ps_core.errors import InvalidConfig
from ps_core.tables.optimizers import Hyperparameters

GROUP_KEYS = frozenset({
    "params", "param_names", "maximize", "foreach", "capturable", "differentiable", "fused",
    "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum",
})  # fmt: skip
"""Keys that torch's optimizers and schedulers use in a parameter group."""


@dataclass(frozen=True, slots=True)
class UpdateOffer:
    """One custom update of one server, by its name in table specs.

    Attributes:
        hyperparameters: all of them with their defaults, sorted by name.
        fingerprint: the package, its version, and the hash of a self-test.
        problem: the reason why the server cannot run it; empty if it can.
    """

    name: str
    hyperparameters: Hyperparameters = ()
    fingerprint: str = ""
    problem: str = ""

    def validated(self) -> UpdateOffer:
        """The offer itself; InvalidConfig if a field is wrong."""
        what = f"custom update '{self.name[: limits.MAX_CUSTOM_UPDATE_NAME_BYTES]}'"
        for field, text, most_bytes in (
            ("name", self.name, limits.MAX_CUSTOM_UPDATE_NAME_BYTES),
            ("fingerprint", self.fingerprint, limits.MAX_CUSTOM_UPDATE_FINGERPRINT_BYTES),
            ("problem", self.problem, limits.MAX_CUSTOM_UPDATE_PROBLEM_BYTES),
        ):
            least = int(field == "name" or (field == "fingerprint" and not self.problem))
            size_bytes = len(text.encode())
            if not least <= size_bytes <= most_bytes:
                raise InvalidConfig(
                    f"{what}: its {field} has {size_bytes} bytes; expected {least} to {most_bytes}"
                )
        if len(self.hyperparameters) > limits.MAX_HYPERPARAMETER_COUNT:
            raise InvalidConfig(
                f"{what} has {len(self.hyperparameters)} hyperparameters; expected at most "
                f"{limits.MAX_HYPERPARAMETER_COUNT}"
            )
        for name, value in self.hyperparameters:
            _check_number(what, name, value)
        return self


def _check_number(update: str, name: str, value: float) -> None:
    is_argument = name.isidentifier() and not iskeyword(name) and name not in GROUP_KEYS
    if not is_argument or len(name.encode()) > limits.MAX_HYPERPARAMETER_NAME_BYTES:
        raise InvalidConfig(
            f"{update} has a hyperparameter {name[:100]!r}; expected a name that an argument may "
            f"have, of at most {limits.MAX_HYPERPARAMETER_NAME_BYTES} bytes, and none of "
            f"{', '.join(sorted(GROUP_KEYS))}"
        )
    largest = limits.MAX_HYPERPARAMETER_MAGNITUDE
    if not math.isfinite(value) or abs(value) > largest:
        raise InvalidConfig(
            f"{update}: the default of '{name}' is {value}; expected a finite number of at most "
            f"{largest:g}"
        )
