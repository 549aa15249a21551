"""Processes that end when the process that started them ends.

`bind_to` binds the calling process. `python bound_command.py PARENT_PID COMMAND [ARGUMENT...]`
binds a third-party command, which takes its place. This works on Linux only; elsewhere processes
outlive their parents. The kernel sends the signal when the parent's thread ends, so that thread
must live on. Imports no Baton module, so that it starts fast.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    """Replaces this process with the command; returns only if the parent is already gone."""
    parent, command = int(argv[0]), list(argv[1:])
    if bind_to(parent, signal.SIGTERM):
        os.execv(command[0], command)
    return 1


def bind_to(parent: int, end_signal: signal.Signals) -> bool:
    """Let the kernel send this process a signal when its parent ends, however it ends. Returns
    whether `parent` still is the parent. Raises OSError."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(end_signal), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
