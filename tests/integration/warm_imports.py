"""What a warm process has imported: the fork server imports this module, once."""

from __future__ import annotations

import sys

from ps_runtime.imported import spared

with spared():  # here as in the server, which imports this module
    import torch  # noqa: F401

    import ps_cli.__main__
    import ps_server.process
    import ps_worker.__main__
    import ps_worker.distributed_optimizer
    import scheduler.__main__

MAINS = {
    "ps_cli": ps_cli.__main__.main,
    "ps_worker": lambda: sys.exit(ps_worker.__main__.main()),
    "ps_server": ps_server.process.main,
    "scheduler": scheduler.__main__.main,
}
"""What `python -m` runs, by module."""
