"""Reaps processes that nobody else waits for: PID 1 of a container inherits every orphan."""

from __future__ import annotations

import os
from collections.abc import Collection


def reap_orphans(own: Collection[int]) -> int:
    """Take the exit status of every ended child that is not in `own`; returns their number.

    Children of `own` are left to their owners. Until an owner takes such a child, the child may
    hide other ended children, so call this function again.
    """
    num_reaped = 0
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return num_reaped
        if ended is None or ended.si_pid in own:
            return num_reaped
        os.waitpid(ended.si_pid, 0)
        num_reaped += 1
