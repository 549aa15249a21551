"""Text for people that may be lost: a full disk, or a reader that is gone, ends no process."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import TextIO


class LossyText(io.TextIOBase):
    """Passes text to `stream`; what the stream refuses is lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's encoding."""
        return self._stream.encoding

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The stream's file descriptor."""
        return self._stream.fileno()

    def writable(self) -> bool:
        """See TextIOBase."""
        return True

    def write(self, text: str) -> int:
        """Write the text, if the stream takes it."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """See TextIOBase."""
        with suppress(OSError, ValueError):  # ValueError: the stream was closed before us
            self._stream.flush()
