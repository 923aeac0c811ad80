"""What a warm process has imported: the fork server imports this module, once."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import runpy
import sys
from pathlib import Path

from ps_runtime.system.collector import spared

with spared():  # here as in the server, which imports this module
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    import ps_cli.__main__
    import ps_server.process
    import ps_worker.__main__
    import ps_worker.training.distributed_optimizer
    import scheduler.__main__


def torchrun() -> None:
    """`torchrun --standalone`: torch's own agent; its processes are forks of this one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--standalone", action="store_true", required=True)
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("script")
    given = parser.parse_args()
    multiprocessing.current_process().daemon = False  # those have no children
    config = LaunchConfig(
        1, 1, given.nproc_per_node, run_id=str(os.getpid()), rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, start_method="fork",
    )  # fmt: skip
    elastic_launch(config, _run_script)(given.script)


def _run_script(path: str) -> None:
    sys.argv = [path]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


MAINS = {
    "torchrun": torchrun,
    "ps_cli": ps_cli.__main__.main,
    "ps_worker": lambda: sys.exit(ps_worker.__main__.main()),
    "ps_server": ps_server.process.main,
    "scheduler": scheduler.__main__.main,
}
"""What `python -m` runs, by module; and torchrun."""
