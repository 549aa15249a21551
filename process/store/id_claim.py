"""Decides whether a worker may take its id while another registration holds it.

A restarted worker meets the registration of its former process, and so does a second worker that
was given the same id. The restarted worker takes the id over, the second one is refused: a holder
that keeps renewing its lease is alive. The id is free when the holder's lease has ended, or at once
when the holder's process ran on our machine and has ended. Pure except for looking at processes.
"""

from __future__ import annotations

import os
from hashlib import sha1

import msgspec

from process.process_watch import WatchedProcess
from process.store.ignored_entries import DECODE_ERRORS
from protocol import wire
from protocol.errors import ProtocolError
from protocol.registration import WorkerInfo

GRACE_S = 1.0
"""A holder that was stopped just before its successor started may renew its lease once more."""
_CLOCK_SLACK_S = 0.01


class IdClaim:
    """One worker's attempts to register under its id, until one succeeds or `refusal` is set.

    `replaces` is the incarnation that the next attempt may replace, or the SHA-1 of an entry that
    is not a registration and so holds no id; "" if there is none. `refusal` is one line that says
    who holds the id. A claim that restores a registration takes the id back from any holder: the
    store forgot our registration, so the holder could not know about us.
    """

    def __init__(
        self, info: WorkerInfo, grace_s: float = GRACE_S, *, is_to_restore: bool = False
    ) -> None:
        self.replaces = ""
        self.refusal: str | None = None
        self._worker_id = info.worker_id
        self._machine = info.machine
        self._grace_s = grace_s
        self._is_to_restore = is_to_restore
        self._holder: str | bytes | None = None
        self._process: WatchedProcess | None = None
        self._met_at = 0.0
        self._ends_by: float | None = None

    @property
    def may_succeed_now(self) -> bool:
        """Whether the next attempt need not wait, because no holder is known or the holder may be
        replaced."""
        return self._holder is None or self.replaces != ""

    def note_holder(
        self, registration: bytes, left_s: float, asked_at: float, answered_at: float
    ) -> bool:
        """Note that an attempt found this holder. Returns True if the holder is a new one.

        The holder's lease ends in `left_s` unless it is renewed; a negative value (no end) counts
        as renewed. The store looked between `asked_at` and `answered_at`, in monotonic seconds.
        """
        info = _decode(registration)
        holder = registration if info is None else info.incarnation
        is_new = holder != self._holder
        if is_new:
            self._holder, self._process = holder, self._process_of(info)
            self._met_at, self._ends_by, self.replaces = asked_at, None, ""
        has_no_lease = info is None and left_s < 0
        if has_no_lease or not names_holder(self._worker_id, registration):
            self.replaces = sha1(registration, usedforsecurity=False).hexdigest()
        elif info is not None and (self._is_to_restore or self._has_ended(info)):
            self.replaces = info.incarnation
        elif asked_at >= self._met_at + self._grace_s:
            self._refuse_if_renewed(registration, left_s, asked_at, answered_at)
        return is_new

    def _refuse_if_renewed(
        self, registration: bytes, left_s: float, asked_at: float, answered_at: float
    ) -> None:
        if self._ends_by is None:
            self._ends_by = answered_at + left_s
        elif asked_at + left_s > self._ends_by + _CLOCK_SLACK_S:
            self.refusal = refusal(self._worker_id, registration)

    def _process_of(self, info: WorkerInfo | None) -> WatchedProcess | None:
        is_near = info is not None and info.machine and info.machine == self._machine
        return WatchedProcess(info.pid) if info is not None and is_near else None

    def _has_ended(self, info: WorkerInfo) -> bool:
        """Whether the holder's process is known to have ended. A holder with our own pid has
        ended."""
        if self._process is None:
            return False
        return info.pid == os.getpid() or self._process.has_ended()


class _Holder(msgspec.Struct):
    """The fields of a registration that all versions have."""

    worker_id: str
    incarnation: str


def names_holder(worker_id: str, registration: bytes) -> bool:
    """Whether these bytes are a registration of this id, perhaps by a worker of a later version."""
    try:
        return msgspec.json.decode(registration, type=_Holder).worker_id == worker_id
    except DECODE_ERRORS:
        return False


def is_registration(worker_id: str, registration: bytes) -> bool:
    """Whether these bytes are a registration of this id that we can read."""
    info = _decode(registration)
    return info is not None and info.worker_id == worker_id


def refusal(worker_id: str, registration: bytes) -> str:
    """The line for a worker whose id is held by this registration."""
    return (
        f"worker_id {worker_id} is held by {holder_name(registration)}, which is alive; "
        "stop that worker, or give this one another worker_id"
    )


def holder_name(registration: bytes) -> str:
    """Which process a registration belongs to, in words."""
    info = _decode(registration)
    if info is None:
        return "a worker whose registration cannot be read"
    return f"the {info.role.value} worker at {info.control} (pid {info.pid} on {info.host})"


def _decode(registration: bytes) -> WorkerInfo | None:
    try:
        return wire.decode_worker_info(registration)
    except ProtocolError:
        return None
