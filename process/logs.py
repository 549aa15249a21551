"""Logging of a process to stderr: lines for people, or one JSON object per line.

A line that cannot be written, as on a full disk, is lost and counted; the process continues.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from typing import Any, NamedTuple, TextIO

from process.trace_context import CURRENT_TRACE

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def setup_logs(
    level: str, format: str, who: str, stream: TextIO | io.TextIOBase | None = None
) -> None:
    """Send every logger of this process to `stream` (stderr). Each `main` calls it once.

    `level` is a key of LEVELS, `format` "text" or "json", `who` the role or worker that each line
    names. Another call replaces the earlier set-up.
    """
    handler = CountingHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter(who) if format == "json" else TextFormatter(who))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(LEVELS[level])
    logging.captureWarnings(True)


class LogCounts(NamedTuple):
    """The lines of this process's log since its start: those that were written, and lost ones."""

    written: int = 0
    lost: int = 0


def log_counts() -> LogCounts:
    """The counts of this process; zero before `setup_logs`."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, CountingHandler):
            return handler.counts
    return LogCounts()


class CountingHandler(logging.StreamHandler[TextIO | io.TextIOBase]):
    """Writes lines to a stream and counts them; a line that the stream refuses is lost."""

    def __init__(self, stream: TextIO | io.TextIOBase) -> None:
        super().__init__(stream)
        self.counts = LogCounts()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        lost = self.counts.lost
        super().emit(record)
        if self.counts.lost == lost:
            self.counts = self.counts._replace(written=self.counts.written + 1)

    def handleError(self, record: logging.LogRecord) -> None:
        """Count a line that could not be written; bugs in formatting are shown as usual."""
        if isinstance(sys.exception(), OSError):
            self.counts = self.counts._replace(lost=self.counts.lost + 1)
        else:
            super().handleError(record)


def about(request_id: str, trace_id: str = "") -> dict[str, Any]:
    """The `extra` of a log line about a request, for processes that have no current trace."""
    return {"request_id": request_id, "trace_id": trace_id}


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
        """The line, with the request's trace at its end if there is one."""
        line = super().formatMessage(record)
        trace_id = _trace_fields(record).get("trace_id")
        return line if trace_id is None else f"{line} (trace {trace_id})"


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (seconds of the epoch), level, who, logger, message.

    A line about a request has its `request_id`, and `trace_id` if the request is part of a trace;
    in a router also `span_id`.
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
        line.update(_trace_fields(record))
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _trace_fields(record: logging.LogRecord) -> dict[str, str]:
    """The ids of the line (`about`), and those of the current request."""
    trace = CURRENT_TRACE.get()
    fields = {} if trace is None else {"trace_id": trace.trace_id, "span_id": trace.span_id}
    own = {name: getattr(record, name, "") for name in ("request_id", "trace_id")}
    return fields | {name: value for name, value in own.items() if value}
