"""Limits how long idle OpenMP threads of a process spin, and keeps OpenMP from pinning threads.

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


_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Each of them pins the thread that loads the library, and with it all later threads and the
children of the process, to the first core, although the operator pins workers by `cores`."""


def prepare_openmp() -> None:
    """Make the OpenMP threads of this process and its children spin for a short time only, unless
    the environment sets how they wait, and leave it to Baton which cores they use. Removes
    variables that are empty, of which the library complains. Call it before importing torch."""
    if not any(os.environ.get(name) for name in _SAYS_OTHERWISE):
        os.environ[_SPIN_COUNT] = str(SPINS)
    empty = [name for name, text in os.environ.items() if name.startswith("OMP_") and not text]
    for name in (*_BINDING, *empty):
        os.environ.pop(name, None)
