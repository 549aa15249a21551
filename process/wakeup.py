"""Lets other threads and signal handlers wake a loop that waits in a poller."""

from __future__ import annotations

import os


class Wakeup:
    """A pipe whose read end becomes readable on `wake`. Owns both ends.

    Any thread and signal handlers may call `wake`, even after `close`. `fileno` is for `zmq.Poller`
    or `select`. Many wakes before a `clear` count as one.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._closed = False

    def fileno(self) -> int:
        """The file descriptor to poll for reading."""
        return self._read

    def wake(self) -> None:
        """Make the waiting loop turn."""
        if self._closed:
            return
        try:
            os.write(self._write, b"\0")
        except BlockingIOError:
            return  # the pipe is already full of wakes

    def clear(self) -> bool:
        """Consume all wakes; True if there was one."""
        was_woken = False
        try:
            while os.read(self._read, 4096):
                was_woken = True
        except BlockingIOError:
            return was_woken
        return was_woken

    def close(self) -> None:
        """Close both ends. Threads that may call `wake` must have stopped or be idle."""
        self._closed = True
        os.close(self._read)
        os.close(self._write)
