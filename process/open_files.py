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
_RESERVE = 64
"""Files that are kept for the process itself: other members of the fleet, the store, logs."""
_MOST_RESERVED = 1 / 4


def allow_open_files(wanted: int) -> None:
    """Raise the limit to `wanted` files, or as near as the hard limit allows. Never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError):  # macOS allows less than its hard limit says
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def is_reserved(descriptor: int) -> bool:
    """Whether an accepted connection has one of the descriptors that the process keeps for itself:
    close the connection at once. The kernel gives the lowest free descriptor, so nearly all below
    it are in use."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return False
    return descriptor >= limit - min(_RESERVE, int(limit * _MOST_RESERVED))


class FileRoom:
    """Says once in the log when this process has no descriptors left for more connections, and when
    it has some again. Python, libuv and ZeroMQ close or refuse connections without a word."""

    def __init__(self) -> None:
        self.is_full = False

    def check(self) -> None:
        """Look, and log what has changed."""
        reason = _why_full()
        if reason and not self.is_full:
            log.error(
                "new connections are closed: %s; raise the limit (ulimit -n), which is %d",
                reason, resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            )  # fmt: skip
        elif self.is_full and not reason:
            log.info("files and connections can be opened again")
        self.is_full = bool(reason)


def _why_full() -> str:
    try:
        descriptor = os.open("/", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return str(error.strerror) if error.errno in (errno.EMFILE, errno.ENFILE) else ""
    os.close(descriptor)
    return "few descriptors are left" if is_reserved(descriptor) else ""
