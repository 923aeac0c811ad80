"""The module that does a codec's work: passes of numpy, or loops that numba compiles, where it is
installed (the extra `rows`). Both give the same bits.
"""

from __future__ import annotations

import contextlib
import importlib
from types import ModuleType


class Kernels:
    """The module of one codec.

    Args:
        passes: the module of numpy.
        loops: the name of the other one. Loading it reads files, so a server does it on a thread.
    """

    def __init__(self, passes: ModuleType, loops: str) -> None:
        self._module = passes
        self._loops = loops
        self._are_used = self._are_final = False

    def load(self) -> None:
        """Load the compiled loops, if numba is there; blocks for a second, or for some where they
        must be compiled. Any thread: until it has ended, others go on with passes of numpy.
        """
        self._are_final = True  # at once: who asks next need not call this, too
        with contextlib.suppress(ImportError):  # numba is missing, or of no use beside this numpy
            self._module = importlib.import_module(self._loops)

    def must_load(self) -> bool:
        """True once they have been used, until somebody calls `load`."""
        return self._are_used and not self._are_final

    def used(self) -> ModuleType:
        """The module that is there."""
        self._are_used = True
        return self._module
