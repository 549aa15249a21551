"""The table of transports. To add one, add a file beside this one and a row here."""

from __future__ import annotations

import importlib
import uuid
from typing import Protocol

from kv_transfer.transports.interface import Transport
from protocol.errors import ConfigError

AUTO = "auto"
TRANSPORTS = {
    "nixl": "kv_transfer.transports.nixl:NixlTransport",
    "shm": "kv_transfer.transports.shm:ShmTransport",
}
"""Class by name; `auto` takes the first that works. Each is imported only when it is needed."""


class TransportClass(Protocol):
    """Interface of a transport's class, as the table uses it."""

    def __call__(self, agent: str, device: str) -> Transport:
        """Make a transport with this agent name for a pool on a device. Raises ConfigError."""

    def why_not(self, device: str) -> str:
        """Why the transport cannot serve a pool on a device on this machine; "" if it can."""


def create_transport(name: str, device: str) -> Transport:
    """A transport by name for a pool on a device; `auto` takes the best that works here.

    Raises ConfigError that lists the transports and says why one cannot be used.
    """
    if name == AUTO:
        name = _first_that_works(device)
    if name not in TRANSPORTS:
        known = ", ".join([AUTO, *sorted(TRANSPORTS)])
        reasons = "; ".join(filter(None, (_load(each).why_not(device) for each in TRANSPORTS)))
        note = f" ({reasons})" if reasons else ""
        raise ConfigError(f"transport {name!r} is unknown; available: {known}{note}")
    return _load(name)(new_agent_name(), device)


def new_agent_name() -> str:
    """A name that no other incarnation has or ever had."""
    return uuid.uuid4().hex


def _first_that_works(device: str) -> str:
    """The first transport that works, else the first: its error says what is missing."""
    working = (name for name in TRANSPORTS if not _load(name).why_not(device))
    return next(working, next(iter(TRANSPORTS)))


def _load(name: str) -> TransportClass:
    module, _, class_name = TRANSPORTS[name].partition(":")
    found: TransportClass = getattr(importlib.import_module(module), class_name)
    return found
