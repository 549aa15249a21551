"""Limits how long idle OpenMP threads of a process spin.

GNU's OpenMP, which torch bundles on Linux, keeps a waiting thread spinning for milliseconds.
Between two steps of a worker this wastes a core that the router and the transfer thread could use.
Within a step threads wait for each other for microseconds only, which the shorter spin covers.
"""

from __future__ import annotations

import os

_SPIN_COUNT = "GOMP_SPINCOUNT"
_SAYS_OTHERWISE = ("OMP_WAIT_POLICY", _SPIN_COUNT)
SPINS = 2000
"""The number of spins, which take some tens of microseconds."""


def let_threads_sleep() -> None:
    """Make the OpenMP threads of this process and its children spin for a short time only, unless
    the environment sets how they wait. Call it before importing torch."""
    if not any(name in os.environ for name in _SAYS_OTHERWISE):
        os.environ[_SPIN_COUNT] = str(SPINS)
