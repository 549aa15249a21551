"""W3C trace context of the current request, if its client sent one.

`traceparent` is read strictly by https://www.w3.org/TR/trace-context/ (level 1): a malformed header
counts as absent. Tasks inherit the current context, so log lines and traces of a request can name
the trace without passing it as an argument.
"""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar
from dataclasses import dataclass

_FORMAT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_VERSION, _UNKNOWN_VERSION = "00", "ff"
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A trace with one of our spans; all fields are lower-case hexadecimal. `parent_id` is the
    client's span, "" if the trace begins here."""

    trace_id: str
    parent_id: str
    span_id: str
    flags: str

    @property
    def is_sampled(self) -> bool:
        """Whether the process that began the trace records it."""
        return bool(int(self.flags, 16) & _SAMPLED)

    @property
    def traceparent(self) -> str:
        """The header that names our span."""
        return f"{_VERSION}-{self.trace_id}-{self.span_id}-{self.flags}"


CURRENT_TRACE: ContextVar[TraceContext | None] = ContextVar("current_trace", default=None)


def new_context(is_sampled: bool) -> TraceContext:
    """The context of a new trace that begins with one of our spans."""
    return TraceContext(secrets.token_hex(16), "", secrets.token_hex(8), f"{is_sampled:02x}")


def read_traceparent(header: str) -> TraceContext | None:
    """The context that a header names, with a new span; None for an invalid header.

    If the header has a later version than ours, only the fields of our version are read.
    """
    match = _FORMAT.fullmatch(header.strip(" \t"))
    if match is None:
        return None
    version, trace_id, parent_id, flags, more = match.groups()
    if version == _UNKNOWN_VERSION or (version == _VERSION and more):
        return None
    if not int(trace_id, 16) or not int(parent_id, 16):
        return None
    return TraceContext(trace_id, parent_id, secrets.token_hex(8), flags)
