"""Threads follow the container's limit of CPU time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ps_runtime.system.capacity import follow_limit, usable_core_count

CORES = len(os.sched_getaffinity(0))


def a_system(root: Path, groups: str, files: dict[str, str]) -> Path:
    """What the kernel would show under `root`."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "100000 100000\n"}),
        ("0::/pod/worker\n", {"sys/fs/cgroup/pod/cpu.max": "50000 100000\n"}),
        (
            "4:cpu,cpuacct:/worker\n2:memory:/worker\n",
            {
                "sys/fs/cgroup/cpu/worker/cpu.cfs_quota_us": "60000\n",
                "sys/fs/cgroup/cpu/worker/cpu.cfs_period_us": "100000\n",
            },
        ),
    ],
)
def test_a_limit_is_as_many_cores_as_it_is_worth(
    tmp_path: Path, groups: str, files: dict[str, str]
) -> None:
    assert usable_core_count(a_system(tmp_path, groups, files)) == 1


@pytest.mark.parametrize("text", ["max 100000\n", "99900000 100000\n", "", "nonsense\n"])
def test_without_a_limit_all_cores_are_usable(tmp_path: Path, text: str) -> None:
    root = a_system(tmp_path, "0::/\n", {"sys/fs/cgroup/cpu.max": text})
    assert usable_core_count(root) == CORES
    environment: dict[str, str] = {}
    follow_limit(environment, root)
    assert environment == {}, "torch's own choice"


def test_torch_is_told_of_a_limit_unless_the_user_has_said_a_number(tmp_path: Path) -> None:
    root = a_system(tmp_path, "0::/\n", {"sys/fs/cgroup/cpu.max": "100000 100000\n"})
    limited: dict[str, str] = {}
    chosen = {"OMP_NUM_THREADS": "3"}
    follow_limit(limited, root, core_count=4)
    follow_limit(chosen, root, core_count=4)
    assert limited == {"OMP_NUM_THREADS": "1"}
    assert chosen == {"OMP_NUM_THREADS": "3"}
