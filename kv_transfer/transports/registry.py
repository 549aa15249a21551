"""The table of transports. To add one, add a file beside this one and a row here."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Sequence
from typing import Protocol

from kv_transfer.transports.distant_end import DistantEnd
from kv_transfer.transports.healing import HealingTransport
from kv_transfer.transports.interface import Transport
from kv_transfer.transports.joined import JoinedTransport, NotifyingTransport
from protocol.errors import ConfigError

AUTO = "auto"
TRANSPORTS = {
    "nixl": "kv_transfer.transports.nixl:NixlTransport",
    "shm": "kv_transfer.transports.shm:ShmTransport",
}
"""Class by name. Each is imported only when it is needed."""


class TransportClass(Protocol):
    """Interface of a transport's class, as the table uses it. `heals_by_new_ends`: a transport that
    has lost a peer may reach that peer again only if it opens a new agent."""

    heals_by_new_ends: bool

    def __call__(self, agent: str, device: str) -> Transport:
        """Make a transport with this agent name for a pool on a device. Raises ConfigError."""

    def why_not(self, device: str) -> str:
        """Why the transport cannot serve a pool on a device on this machine; "" if it can."""


def create_transport(
    name: str, device: str, open_others: Callable[[], Sequence[DistantEnd]] = tuple
) -> Transport:
    """A transport by name for a pool on a device. `open_others`: see JoinedTransport.

    Raises ConfigError that lists the transports and says why one cannot be used.
    """
    if name not in TRANSPORTS:
        known = ", ".join([AUTO, *sorted(TRANSPORTS)])
        reasons = "; ".join(filter(None, (_load(each).why_not(device) for each in TRANSPORTS)))
        note = f" ({reasons})" if reasons else ""
        raise ConfigError(f"transport {name!r} is unknown; available: {known}{note}")
    found = _load(name)
    if found.heals_by_new_ends:
        return HealingTransport(lambda: JoinedTransport(_notifying(found, device), open_others))
    return found(new_agent_name(), device)


def chosen_transport(name: str, device: str, is_one_host: bool) -> str:
    """The name itself, or for `auto` the best transport that works for a pool on `device`.

    With `is_one_host`, all peers run on this host and in its network namespace. Shared memory,
    which opens no port, is then preferred. Otherwise NIXL is preferred, because it reaches other
    hosts. If nothing works, the error of the chosen one says what is missing.
    """
    if name != AUTO:
        return name
    order = ("shm", "nixl") if is_one_host else ("nixl", "shm")
    working = (each for each in order if not _load(each).why_not(device))
    return next(working, "nixl")


def new_agent_name() -> str:
    """A name that no other incarnation has or ever had."""
    return uuid.uuid4().hex


def _notifying(found: TransportClass, device: str) -> NotifyingTransport:
    transport = found(new_agent_name(), device)
    assert isinstance(transport, NotifyingTransport)
    return transport


def open_end(name: str, device: str) -> Transport:
    """One end of a transport by name, which does not heal: its owner opens another one."""
    return _load(name)(new_agent_name(), device)


def _load(name: str) -> TransportClass:
    module, _, class_name = TRANSPORTS[name].partition(":")
    found: TransportClass = getattr(importlib.import_module(module), class_name)
    return found
