"""Worker processes that begin with torch imported, which costs each of its own seconds of CPU.

The standard library's fork server imports it once; each process is a fork of that one, before it
has any thread or client. It can be killed and paused as any other. Its environment is that of the
server: what a test sets in `os.environ` does not reach it.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

from ps_runtime.imported import spared

with spared():  # here as in the server, which imports this module
    import torch  # noqa: F401

    import ps_worker.distributed_optimizer  # noqa: F401


def warm_context() -> ForkServerContext:
    """In the place of `multiprocessing.get_context("spawn")`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context
