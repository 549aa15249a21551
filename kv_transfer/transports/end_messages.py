"""What an end of a transport in another process is told, and what it reports.

`distant_end` is the teller's side, `kv_transfer.end_server` that of the end. Both belong to one
worker, and the connection between them is trusted. An end has a number, which the teller chooses.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kv_transfer.head_slices import Share
from protocol.errors import ProtocolError


class _Base(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    end: int


class OpenEnd(_Base, frozen=True):
    """Open an end with this number, which registers the process's part of the pool."""


class CloseEnd(_Base, frozen=True):
    """Close the end. Peers have stopped writing."""


class AddPeer(_Base, frozen=True):
    """See Transport."""

    agent: str
    descriptor: bytes
    num_blocks: int
    shares: tuple[tuple[Share, ...], ...]


class RemovePeer(_Base, frozen=True):
    """See Transport."""

    agent: str


class Write(_Base, frozen=True):
    """Write blocks to a peer; `WriteOver` of this number follows. The write must be posted within
    `within_s` after the end's process sent the beat with this nonce, or not at all."""

    handle: int
    agent: str
    source_blocks: list[int]
    target_blocks: list[int]
    group: int
    nonce: int
    within_s: float


class Expect(_Base, frozen=True):
    """See Transport."""

    data: bool


class Disconnect(_Base, frozen=True):
    """See Transport; `Disconnected` follows."""

    kept: list[str]


class Opened(_Base, frozen=True):
    """The end is open. Peers reach its part of the pool, the ranks' parts in their order, with the
    descriptor."""

    agent: str
    descriptor: bytes
    num_ranks: int


class OpenFailed(_Base, frozen=True):
    """The end could not be opened."""

    reason: str


class PeerIsReady(_Base, frozen=True):
    """The end can write to the peer."""

    agent: str


class PeerIsLost(_Base, frozen=True):
    """The end cannot write to the peer, and has removed it."""

    agent: str
    reason: str


class WriteOver(_Base, frozen=True):
    """A write is over, as WriteDone has it."""

    handle: int
    error: str | None


class Disconnected(_Base, frozen=True):
    """The end has broken the connections that a `Disconnect` meant."""


EndOrder = OpenEnd | CloseEnd | AddPeer | RemovePeer | Write | Expect | Disconnect
EndReport = Opened | OpenFailed | PeerIsReady | PeerIsLost | WriteOver | Disconnected

_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(EndOrder)
_reports = msgspec.msgpack.Decoder(EndReport)


def encode(message: EndOrder | EndReport) -> bytes:
    """MessagePack of an order or a report."""
    return _encoder.encode(message)


def decode_order(data: bytes) -> EndOrder:
    """Raises ProtocolError."""
    order: EndOrder = _decoded(_orders, data)
    return order


def decode_report(data: bytes) -> EndReport:
    """Raises ProtocolError."""
    report: EndReport = _decoded(_reports, data)
    return report


def _decoded(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"a message about an end of KV transfers: {error}") from error
