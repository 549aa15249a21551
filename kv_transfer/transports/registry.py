"""The transports that exist, in one table: a new one is a file beside this one, and a row here."""

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
"""Class by name; `auto` takes the first that works. None is imported before it is asked for."""


class TransportClass(Protocol):
    """What the table needs of a transport's class."""

    def __call__(self, agent: str, device: str) -> Transport:
        """Make this end, by a name of its own, for a pool on a device. Raises ConfigError."""

    def why_not(self, device: str) -> str:
        """Why it cannot serve a pool on a device on this machine; "" where it can."""


def create_transport(name: str, device: str) -> Transport:
    """A transport by name for a pool on a device; `auto` takes the best that works here.

    Raises ConfigError that says which there are and why one of them cannot be used.
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
    """A name that no other incarnation has or had."""
    return uuid.uuid4().hex


def _first_that_works(device: str) -> str:
    """Where none does, the first: its error says what is missing."""
    working = (name for name in TRANSPORTS if not _load(name).why_not(device))
    return next(working, next(iter(TRANSPORTS)))


def _load(name: str) -> TransportClass:
    module, _, class_name = TRANSPORTS[name].partition(":")
    found: TransportClass = getattr(importlib.import_module(module), class_name)
    return found
