"""How long the OpenMP threads of a process spin when they have nothing to do.

GNU's OpenMP, which torch brings along on Linux, keeps a waiting thread spinning for milliseconds:
between two steps of a worker, on a core that the router and the transfer thread could use just
then. Within a step threads wait for each other for microseconds, which these spins outlast.
"""

from __future__ import annotations

import os

_SPIN_COUNT = "GOMP_SPINCOUNT"
_SAYS_OTHERWISE = ("OMP_WAIT_POLICY", _SPIN_COUNT)
SPINS = 2000
"""Some tens of microseconds."""


def let_threads_sleep() -> None:
    """Before torch is imported: this process's OpenMP threads, and its children's, spin for a short
    time only, unless the environment says how they are to wait."""
    if not any(name in os.environ for name in _SAYS_OTHERWISE):
        os.environ[_SPIN_COUNT] = str(SPINS)
