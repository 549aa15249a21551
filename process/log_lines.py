"""Turns any process's line of output into one JSON object, as `process.logs` writes them.

Lines of Baton's processes are such objects already. Lines of UCX, NIXL and Valkey are split into
their parts. Any other line, such as one of a traceback, is a message by itself.
"""

from __future__ import annotations

import json
import re

_UCX = re.compile(
    r"\[(?P<time>\d+\.\d+)\] \[[^\]]*\] +\S+ +UCX +(?P<level>[A-Z_]+) +(?P<message>.*)"
)
_VALKEY = re.compile(r"\d+:[A-Z] \d\d \w{3} \d{4} [\d:.]+ (?P<level>[.\-*#]) (?P<message>.*)")
_NIXL = re.compile(r"(?P<level>[IWEF])\d{4} [\d:.]+ +\d+ (?P<message>\S+\] .*)")
_FORMATS = {"ucx": _UCX, "valkey": _VALKEY, "nixl": _NIXL}
_LEVELS = {
    "FATAL": "error", "ERROR": "error", "WARN": "warning", "DIAG": "info", "INFO": "info",
    ".": "debug", "-": "debug", "*": "info", "#": "warning",
    "I": "info", "W": "warning", "E": "error", "F": "error",
}  # fmt: skip
"""Our levels, by the names and signs of other programs; any other is "debug"."""


def json_line(line: str, who: str, now: float) -> str:
    """The line as a JSON object on one line: time (seconds of the epoch), level, who, logger,
    message. `now` is the time for lines without one; `who` is the process that wrote the line."""
    line = line.rstrip("\r\n")
    if _is_ours(line):
        return line
    time_s, level, logger, message = now, "info", "output", line
    for name, format in _FORMATS.items():
        match = format.fullmatch(line)
        if match is not None:
            fields = match.groupdict()
            time_s = float(fields.get("time", now))
            level, logger = _LEVELS.get(fields["level"], "debug"), name
            message = fields["message"]
            break
    content = {
        "time": round(time_s, 6),
        "level": level,
        "who": who,
        "logger": logger,
        "message": message,
    }
    return json.dumps(content, ensure_ascii=False)


def _is_ours(line: str) -> bool:
    if not line.startswith("{"):
        return False
    try:
        content = json.loads(line)
    except ValueError:
        return False
    return isinstance(content, dict) and {"time", "level", "who", "message"} <= content.keys()
