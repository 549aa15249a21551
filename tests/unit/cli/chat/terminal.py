"""A command in a pseudo-terminal: keys go in, and what the screen was sent can be awaited."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from types import TracebackType

CTRL_C, CTRL_D, ENTER = b"\x03", b"\x04", b"\r"
_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|[()][A-Z0-9]|[=>])")
_CURSOR_REQUEST, _CURSOR = b"\x1b[6n", b"\x1b[1;1R"
WAIT_S = 60.0
_IN_TERMINAL = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Makes the terminal the one whose keys send signals, and becomes the command. A process that a
shell started in the background ignores Ctrl-C, and so would the command."""


class Terminal:
    """`python -m MODULE ARGUMENTS` in a terminal of 24 by 80."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._handle, inner = pty.openpty()
        self.resize(24, 80)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _IN_TERMINAL, sys.executable, "-m", module, *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={**os.environ, "TERM": "xterm"},
            start_new_session=True,
        )
        os.close(inner)
        self._text = ""
        self._seen = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._process.kill()
        self._process.wait()
        os.close(self._handle)

    def resize(self, rows: int, columns: int) -> None:
        """Change the terminal's size; the system notifies the command."""
        fcntl.ioctl(self._handle, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str | bytes) -> None:
        os.write(self._handle, keys.encode() if isinstance(keys, str) else keys)

    def say(self, line: str) -> None:
        """Type a line and press Enter."""
        self.type(line)
        self.type(ENTER)

    def wait_for(self, text: str) -> str:
        """Wait until `text` appears after the last awaited text. Returns what came up to its
        end."""
        deadline = time.monotonic() + WAIT_S
        while (place := self._text.find(text, self._seen)) < 0:
            if time.monotonic() > deadline or not self._read():
                raise AssertionError(f"{text!r} did not appear in {self._text[self._seen :]!r}")
        begin, self._seen = self._seen, place + len(text)
        return self._text[begin : self._seen]

    def modes(self) -> list[int]:
        """How the terminal treats what is typed and shown: see termios(3)."""
        flags: list[int] = termios.tcgetattr(self._handle)[:4]
        return flags

    def end_by(self, number: signal.Signals) -> int:
        """Send a signal and wait for the end; the exit status."""
        self._process.send_signal(number)
        return self._process.wait(WAIT_S)

    def status(self, keys: bytes) -> int:
        """Type `keys` and wait for the end; the exit status. They are typed again whenever nothing
        happens: a prompt that is drawn again, with a line in it, looks like one that is empty."""
        deadline = time.monotonic() + WAIT_S
        self.type(keys)
        before = len(self._text)
        while self._read():
            if time.monotonic() > deadline:
                raise AssertionError(f"it has not ended: {self._text[self._seen :]!r}")
            if len(self._text) == before:
                with contextlib.suppress(OSError):  # it has just ended
                    self.type(keys)
            before = len(self._text)
        return self._process.wait()

    def _read(self) -> bool:
        """Read what has come, waiting a moment; False at the end."""
        if not select.select([self._handle], [], [], 1.0)[0]:
            return True
        try:
            content = os.read(self._handle, 1 << 16)
        except OSError:  # Linux's end of a terminal
            return False
        for _ in range(content.count(_CURSOR_REQUEST)):
            self.type(_CURSOR)
        self._text += _ESCAPES.sub("", content.decode(errors="replace"))
        return bool(content)
