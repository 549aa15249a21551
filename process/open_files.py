"""This process's limit on open files, of which each connection takes at least one.

The usual limit is 1,024 for the sake of programs that call select(2); ours do not. The system's
hard limit is much higher: https://0pointer.net/blog/file-descriptor-limits.html.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource

log = logging.getLogger(__name__)

MOST_FILES = 65_536
"""The limit that routers and workers ask for."""


def allow_open_files(wanted: int) -> None:
    """Raise the limit to `wanted` files, or as near as the hard limit allows. Never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError):  # macOS allows less than its hard limit says
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class FileRoom:
    """Says once in the log when this process can open no more files, and when it can again. Python,
    libuv and ZeroMQ then close or refuse connections without a word."""

    def __init__(self) -> None:
        self.is_full = False

    def check(self) -> None:
        """Look, and log what has changed."""
        reason = _why_full()
        if reason and not self.is_full:
            log.error(
                "no more files and connections can be opened: %s; raise the limit (ulimit -n), "
                "which is %d",
                reason, resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            )  # fmt: skip
        elif self.is_full and not reason:
            log.info("files and connections can be opened again")
        self.is_full = bool(reason)


def _why_full() -> str:
    try:
        os.close(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return str(error.strerror) if error.errno in (errno.EMFILE, errno.ENFILE) else ""
    return ""
