"""Reads another process's output, line by line in a thread, so that the process never waits for
us."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from typing import IO

_KEPT_LINES = 200
_LONGEST_LINE = 1 << 16  # bytes; a longer line is passed in parts


class LinePump:
    """Passes each line to `take`, and keeps the last ones. Owns `stream` and the thread; both end
    when every holder of the stream's other end has closed it."""

    def __init__(self, stream: IO[bytes], take: Callable[[str], None]) -> None:
        """The thread calls `take`, which must not raise."""
        self._stream = stream
        self._take = take
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._thread = threading.Thread(target=self._run, name="baton-output", daemon=True)
        self._thread.start()

    def tail(self, num_lines: int) -> list[str]:
        """The last lines."""
        return list(self._lines)[-num_lines:]

    def join(self, timeout_s: float) -> None:
        """Wait until the last line has been taken. The process must have ended."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with self._stream:
            while raw := self._stream.readline(_LONGEST_LINE):
                line = raw.decode(errors="replace").rstrip("\r\n")
                self._lines.append(line)
                self._take(line)


def pump_output(process: subprocess.Popen[bytes], take: Callable[[str], None]) -> LinePump:
    """A pump of the standard output of a process that was just started. If the system has no room
    for another thread, ends the process and raises OSError."""
    assert process.stdout is not None
    try:
        return LinePump(process.stdout, take)
    except RuntimeError as error:
        process.kill()
        process.wait()
        for stream in filter(None, (process.stdin, process.stdout)):
            stream.close()
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
