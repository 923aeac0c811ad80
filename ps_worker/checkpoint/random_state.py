"""The random generators of a process, as a state for checkpoints.

Rules:
    - Loading is all or nothing: every generator's state is tried on a spare one first.
    - A state has a generator for each CUDA device of its process; it loads into a process with at
      least as many, whose further devices keep their own.
    - Generators without a name (numpy's `default_rng`, a loader's processes') are not saved.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ps_core.errors import InvalidCheckpoint, InvalidConfig

PARTS = ("cuda", "generators", "numpy", "python", "torch")


class RandomState:
    """The generators of torch (CPU and each CUDA device), numpy's global one and Python's own.

    Args:
        generators: Further generators of torch by name, as of a data loader:
            ``RandomState(loader=generator)``.

    Raises:
        InvalidConfig: one of them is not a `torch.Generator`.
    """

    def __init__(self, **generators: torch.Generator) -> None:
        for name, generator in generators.items():
            if not isinstance(generator, torch.Generator):
                raise InvalidConfig(
                    f"{name} is a {type(generator).__name__}; expected a torch.Generator"
                )
        self._generators = generators

    def state_dict(self) -> dict[str, Any]:
        """Copies of the states of all generators."""
        version, words, gauss_next = random.getstate()
        return {
            "torch": torch.get_rng_state(),
            "cuda": [torch.cuda.get_rng_state(device) for device in _devices()],
            "numpy": np.random.get_state(legacy=False),
            "python": {
                "version": version,
                "words": np.array(words, dtype=np.uint32),
                "gauss_next": gauss_next,
            },
            "generators": {name: one.get_state() for name, one in self._generators.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set every generator to its state.

        Raises:
            InvalidConfig: the state has other names of generators, or more CUDA devices; nothing
                has changed.
            InvalidCheckpoint: it is not such a state; nothing has changed.
        """
        if set(state) != set(PARTS):
            came = ", ".join(map(str, state))
            raise InvalidCheckpoint(f"a random state of {came}; expected {', '.join(PARTS)}")
        self._check_places(state)
        python = _python_state(state["python"])
        self._try(state, python)
        torch.set_rng_state(state["torch"])
        for device, one in enumerate(state["cuda"]):
            torch.cuda.set_rng_state(one, device)
        np.random.set_state(state["numpy"])
        random.setstate(python)
        for name, generator in self._generators.items():
            generator.set_state(state["generators"][name])

    def _check_places(self, state: Mapping[str, Any]) -> None:
        named, devices = state["generators"], state["cuda"]
        if not isinstance(named, Mapping) or not isinstance(devices, list):
            raise InvalidCheckpoint(
                f"generators are a {type(named).__name__} and cuda a {type(devices).__name__}; "
                "expected a dict and a list"
            )
        if set(named) != set(self._generators):
            raise InvalidConfig(
                f"the state has generators {sorted(map(str, named))}; RandomState was given "
                f"{sorted(self._generators)}"
            )
        if len(devices) > len(_devices()):
            raise InvalidConfig(
                f"the state is of {len(devices)} CUDA devices; this process sees {len(_devices())}"
            )

    def _try(self, state: Mapping[str, Any], python: tuple[Any, ...]) -> None:
        tried = "torch"
        try:
            torch.Generator().set_state(state["torch"])
            for device, one in enumerate(state["cuda"]):
                tried = f"cuda[{device}]"
                torch.Generator(f"cuda:{device}").set_state(one)
            for name, generator in self._generators.items():
                tried = f"generators.{name}"
                torch.Generator(generator.device).set_state(state["generators"][name])
            tried = "numpy"
            kind = type(np.random.get_bit_generator())  # type: ignore[attr-defined]
            np.random.RandomState(kind()).set_state(state["numpy"])
            _check_position(state["numpy"]["state"])
            tried = "python"
            random.Random().setstate(python)  # noqa: S311 - only tried
        except (TypeError, ValueError, RuntimeError, KeyError, IndexError, OverflowError) as error:
            raise InvalidCheckpoint(f"{tried} is no state of that generator: {error}") from error


def _devices() -> range:
    return range(torch.cuda.device_count() if torch.cuda.is_available() else 0)


def _check_position(words: Mapping[str, Any]) -> None:
    """Raises ValueError if a twister's `pos` is beyond its words, which numpy does not check."""
    if "pos" in words and not 0 <= words["pos"] <= len(words["key"]):
        raise ValueError(f"pos is {words['pos']} of {len(words['key'])}")


def _python_state(state: Any) -> tuple[Any, ...]:
    """Python's own form of its generator's state; InvalidCheckpoint if it is malformed."""
    words = state.get("words") if isinstance(state, Mapping) else None
    if not isinstance(words, np.ndarray) or words.dtype != np.uint32 or words.ndim != 1:
        raise InvalidCheckpoint("python has no words; expected a 1-D array of uint32")
    gauss_next = state.get("gauss_next")
    if gauss_next is not None and not isinstance(gauss_next, float):
        raise InvalidCheckpoint(f"python.gauss_next is {gauss_next!r}; expected a float or None")
    return (state.get("version"), tuple(words.tolist()), gauss_next)
