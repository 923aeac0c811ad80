"""Worker processes that begin with torch imported, which costs each of its own seconds of CPU.

The standard library's fork server imports it once; each process is a fork of that one, before it
has any thread or client. It can be killed and paused as any other. Its environment is that of the
server: what a test sets in `os.environ` does not reach it.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOADED = "tests.integration.warm_imports"


def warm_context() -> ForkServerContext:
    """In the place of `multiprocessing.get_context("spawn")`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    return context
