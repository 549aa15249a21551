"""The terms of one request: its tenant, its ticket from the gate, its deadline and its session."""

from __future__ import annotations

import hashlib
import re

import msgspec

from gateway.admission.gate import Ticket
from http_kit.tenant import EVERYBODY, Tenant
from protocol.errors import InvalidRequest
from protocol.retention import MAX_PRIORITY, MAX_SECONDS, USUAL_PRIORITY, RetentionHint

TIMEOUT_HEADER = "x-request-timeout-ms"
TTFT_HEADER, TPOT_HEADER = "x-baton-ttft-ms", "x-baton-tpot-ms"
"""A request's targets: the time to its first token, and the time of each later token."""
RETENTION_HEADER = "x-cache-retention"
"""How long the request's KV should stay cached: `300` seconds, or `300; priority=80`."""
SESSION_HEADERS = (
    "x-session-id",
    "x-dynamo-session-id",
    "x-smg-routing-key",
    "x-session-affinity",
    "x-claude-code-session-id",
    "thread-id",
)
"""The first of these headers in a request names its session. Codex names its conversation a
thread."""
AGENT_HEADER = "x-claude-code-agent-id"
"""Names an agent of the session that another header names. Each agent of Claude Code has a
conversation of its own, and agents of two sessions may have the same id."""
_SESSION_BYTES = 16
_RETENTION = re.compile(r"([0-9]{1,12})(?:\s*;\s*priority=([0-9]{1,12}))?", re.ASCII)
_MILLISECONDS = re.compile(r"[0-9]{1,12}")


class RequestTerms(msgspec.Struct, frozen=True):
    """`ends_at` is when the client stops waiting, by the clock that noted the request's arrival;
    None if the client set no limit. Without a gate there is no `ticket`. `session` identifies the
    client's session; empty if the client named none. `ttft_ms` and `tpot_ms` are its targets, by
    its headers or its key; None if neither has any. `retention` is the hint of its header."""

    tenant: Tenant = EVERYBODY
    ticket: Ticket | None = None
    ends_at: float | None = None
    session: str = ""
    ttft_ms: int | None = None
    tpot_ms: int | None = None
    retention: RetentionHint | None = None

    def session_or(self, name: str | None) -> str:
        """The session that a header names, otherwise the one that the body's `name` names."""
        return self.session or (session_of(self.tenant, name) if name else "")

    def count_sequences(self, num: int) -> None:
        """Count the request for the `num` sequences that it starts. Raises as `Ticket.widen`."""
        if self.ticket is not None and num > self.ticket.width:
            self.ticket.widen(num)


OPEN_TERMS = RequestTerms()
"""The terms of a request without a caller or a deadline."""


def session_of(tenant: Tenant, name: str) -> str:
    """The session with a tenant's name for it; no other tenant has the same one."""
    digest = hashlib.blake2b(name.encode(), digest_size=_SESSION_BYTES, key=tenant.share.encode())
    return digest.hexdigest()


def read_retention(value: str) -> RetentionHint:
    """The hint in the header. Raises InvalidRequest."""
    match = _RETENTION.fullmatch(value.strip())
    if match is not None:
        seconds, priority = int(match[1]), int(match[2] or USUAL_PRIORITY)
        if 1 <= seconds <= MAX_SECONDS and 1 <= priority <= MAX_PRIORITY:
            return RetentionHint(seconds, priority)
    raise InvalidRequest(
        f"'{RETENTION_HEADER}' must be seconds, from 1 to {MAX_SECONDS}, and perhaps a priority "
        f"from 1 to {MAX_PRIORITY}, as in '300; priority=80'",
        RETENTION_HEADER,
    )


def read_timeout_s(header: str) -> float:
    """The time that a client gives its request, in seconds. Raises InvalidRequest."""
    return read_ms(TIMEOUT_HEADER, header) / 1000


def read_ms(name: str, value: str) -> int:
    """The milliseconds in the header of this name. Raises InvalidRequest."""
    if _MILLISECONDS.fullmatch(value) is None or int(value) == 0:
        raise InvalidRequest(f"'{name}' must be a whole number of milliseconds, at least 1", name)
    return int(value)
