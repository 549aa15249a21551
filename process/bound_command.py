"""Runs a command that ends when the process that started it does; for programs not our own.

`python tether.py PARENT_PID COMMAND [ARGUMENT...]` becomes the command. Linux only: elsewhere the
command runs untethered. The kernel's signal follows the parent's thread, so that must live on.
Imports nothing of ours, to start fast.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    """Becomes the command; returns only if the parent is gone already."""
    parent, command = int(argv[0]), list(argv[1:])
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() == parent:
        os.execv(command[0], command)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
