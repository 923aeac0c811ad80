"""Each worker's GPUs: `pushpull train` deals out those that this process may use.

    GPUs                           a worker's
    as many as workers, or more    its own, and as many as the others'
    fewer                          one, shared with others

A worker finds its GPUs in CUDA_VISIBLE_DEVICES: to its script the first is `cuda:0`, whatever the
machine calls it. A script that chooses `torch.device("cuda")` needs no other line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ps_core.errors import InvalidConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"
AUTO, NONE = "auto", "none"

_GPU = re.compile(r"[0-9]+|(GPU|MIG)-[\w/-]+", re.ASCII)
"""A GPU as CUDA knows it; by any other name it hides all of them."""

_DEVICE_FILES = Path("/dev")


def devices_of(choice: str, inherited: Mapping[str, str], files: Path = _DEVICE_FILES) -> list[str]:
    """The GPUs that a choice of `--devices` names, as CUDA_VISIBLE_DEVICES names them; empty:
    workers inherit that variable as it is.

    Raises:
        InvalidConfig: the choice is neither "auto" nor "none", nor a list of distinct GPUs.
    """
    if choice == NONE:
        return []
    if choice != AUTO:
        named = [name.strip() for name in choice.split(",")]
        if not all(map(_GPU.fullmatch, named)) or len(set(named)) < len(named):
            raise InvalidConfig(
                f"devices are '{choice}'; expected auto, none, or different GPUs with commas "
                "between them, such as 0,1,3: each by its number, or by its GPU-... or MIG-... "
                "name in `nvidia-smi -L`"
            )
        return named
    if VISIBLE in inherited:
        names = [name.strip() for name in inherited[VISIBLE].split(",")]
        return names if all(names) and "-1" not in names else []
    count = sum(each.name[len("nvidia") :].isdigit() for each in files.glob("nvidia[0-9]*"))
    return [str(number) for number in range(count)]


def share(devices: list[str], rank: int, worker_count: int) -> dict[str, str]:
    """The variable for one worker, or nothing if there are no GPUs to deal out."""
    if not devices:
        return {}
    count = max(1, len(devices) // worker_count)
    begin = rank * count % len(devices)
    return {VISIBLE: ",".join(devices[begin : begin + count])}


def remark(devices: list[str], worker_count: int) -> str:
    """A line about who gets what, or nothing."""
    if not devices:
        return ""
    each, rest = divmod(len(devices), worker_count)
    gpus = f"{len(devices)} GPU{'' if len(devices) == 1 else 's'}"
    if not each:
        return f"{gpus} for {worker_count} workers, which share them; --devices chooses others"
    unused = f", and {rest} unused" if rest else ""
    return f"{gpus}: {each} for each of {worker_count} workers{unused}; --devices chooses others"
