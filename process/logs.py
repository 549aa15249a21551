"""Logging of a process to stderr: lines for people, or one JSON object per line."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

from process.trace_context import CURRENT_TRACE

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def setup_logs(level: str, format: str, who: str, stream: TextIO | None = None) -> None:
    """Send every logger of this process to `stream` (stderr). Called once, by a `main`.

    `level` is a key of LEVELS, `format` "text" or "json", `who` the role or worker that each
    line names. Calling again replaces the former set-up.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter(who) if format == "json" else TextFormatter(who))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(LEVELS[level])
    logging.captureWarnings(True)


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.123 info decode-1f2e3d message`, in UTC."""

    converter = staticmethod(time.gmtime)
    default_msec_format = "%s.%03d"

    def __init__(self, who: str) -> None:
        super().__init__(f"%(asctime)s %(level)-7s {who.replace('%', '%%')} %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback below it if there is one."""
        record.level = record.levelname.lower()
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, with the client's trace at its end if there is one."""
        line = super().formatMessage(record)
        trace = CURRENT_TRACE.get()
        return line if trace is None else f"{line} (trace {trace.trace_id})"


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (seconds of the epoch), level, who, logger, message.

    `trace_id` and `span_id` are present if the line is about a request whose client traces.
    """

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON; `error` holds a traceback if there is one."""
        line: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "who": self._who,
            "logger": record.name,
            "message": record.getMessage(),
        }
        trace = CURRENT_TRACE.get()
        if trace is not None:
            line["trace_id"] = trace.trace_id
            line["span_id"] = trace.span_id
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
