"""The needs of `make gpu-check`: packages, a GPU, and memory.

`python -m ps_cli.bench.preflight` names the GPU, or all that is missing and how to get it. With
`--sizes` it prints the sizes of models, in MiB of parameters, whose benchmark fits into memory.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator

from ps_runtime.system.capacity import available_bytes

PACKAGES = (
    "fsspec", "google.protobuf", "grpc", "grpc_health", "grpc_reflection", "hpack", "hypothesis",
    "numpy", "prometheus_client", "pytest", "pytest_timeout", "rich", "safetensors", "torch",
    "typer", "uvloop",
)  # fmt: skip
"""By the names that they are imported by; whatever these need comes with them. This file imports
none of them before it has looked.
"""

MIB = 2**20

SIZES_MB = (1200, 6000)
"""Parameters of about 300 million and 1.5 billion."""

DEVICE_FACTOR, HOST_FACTOR = 11, 10
"""Memory that the benchmark of a model takes, in sizes of its parameters: on the device two of it
with gradients, moments and activations; on the host the servers' table with Adam's moments, and
what gradients and parameters are copied through.
"""

_TRY_S = 120.0


def missing_packages(is_there: Callable[[str], object] = importlib.util.find_spec) -> list[str]:
    """The names of the packages that are not there."""
    missing = []
    for name in PACKAGES:
        try:
            found = is_there(name)
        except ModuleNotFoundError:  # of a part of its name
            found = None
        if not found:
            missing.append(name)
    return missing


def device_problems() -> Iterator[str]:
    """A sentence for what keeps torch from the GPU, or a second process from it."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        yield (
            f"torch {torch.__version__} is a build for CPUs: install one for your driver "
            "(https://pytorch.org/get-started/locally)"
        )
        return
    try:
        torch.cuda.init()
    except RuntimeError as error:  # such as a driver that is older than the build
        yield (
            f"torch {torch.__version__} of CUDA {torch.version.cuda} finds no GPU: {error}. "
            "Look at nvidia-smi, at CUDA_VISIBLE_DEVICES, and whether the driver is as new as that"
        )
        return
    code = "import torch; torch.zeros(1, device='cuda')"
    command = [sys.executable, "-c", code]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=_TRY_S)
    if tried.returncode:
        last = tried.stderr.strip().rpartition("\n")[2]
        yield (
            f"a second process cannot use the GPU: {last}. Tests and benchmarks have several "
            "processes: leave exclusive-process mode (nvidia-smi -c DEFAULT)"
        )


def problems() -> list[str]:
    """All that is missing; torch is asked if it is there."""
    missing, found = missing_packages(), []
    if missing:
        names = ", ".join(missing)
        found.append(
            f"{sys.executable} has no {names}: pip install -e '.[dev]', or name another Python "
            "(make gpu-check PYTHON=...)"
        )
    if importlib.util.find_spec("torch") is not None:
        found += device_problems()
    return found


def sizes_that_fit(device_bytes: int, host_bytes: int) -> list[int]:
    """The sizes of `SIZES_MB` whose benchmark has room in so much free memory."""
    return [
        size
        for size in SIZES_MB
        if size * MIB * DEVICE_FACTOR <= device_bytes and size * MIB * HOST_FACTOR <= host_bytes
    ]


def _print_sizes() -> None:
    import torch

    device_bytes, _ = torch.cuda.mem_get_info()
    print(*sizes_that_fit(device_bytes, available_bytes()))


def main() -> None:
    found = problems()
    if found:
        sys.exit("\n".join(f"error: {each}" for each in found))
    if "--sizes" in sys.argv[1:]:
        _print_sizes()
    else:
        from ps_cli.bench.devices import CUDA, name_of

        print(name_of(CUDA))


if __name__ == "__main__":
    main()
