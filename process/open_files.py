"""Raises this process's limit on open files, of which each connection takes at least one.

The usual limit is 1,024 for the sake of programs that call select(2); ours do not. The system's
hard limit is much higher: https://0pointer.net/blog/file-descriptor-limits.html.
"""

from __future__ import annotations

import contextlib
import resource


def allow_open_files(wanted: int) -> None:
    """Raise the limit to `wanted` files, or as near as the hard limit allows. Never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError):  # macOS allows less than its hard limit says
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
