"""Standard output as one JSON object a line, shared by all processes of a fleet."""

from __future__ import annotations

import io
import threading
import time
from typing import TextIO

from process.log_lines import json_line


class JsonOutput:
    """Writes whole lines from any thread. Once the reader has gone, lines are dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def write_line(self, who: str, line: str) -> None:
        """Write a line of process `who`; an empty line is left out."""
        if not line.strip():
            return
        text = json_line(line, who, time.time())
        with self._lock:
            try:
                self._stream.write(text + "\n")
                self._stream.flush()
            except (OSError, ValueError):  # the reader is gone, or the stream is closed
                return

    def stream_of(self, who: str) -> LineStream:
        """A stream that writes its lines as lines of process `who`."""
        return LineStream(self, who)


class LineStream(io.TextIOBase):
    """A text stream whose lines are written as lines of one process."""

    def __init__(self, output: JsonOutput, who: str) -> None:
        self._output = output
        self._who = who
        self._rest = ""

    def writable(self) -> bool:
        """See TextIOBase."""
        return True

    def write(self, text: str) -> int:
        """Write the lines that are complete now."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._output.write_line(self._who, line)
        return len(text)
