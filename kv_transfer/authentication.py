"""Proof that a transport's descriptor comes from a worker of this fleet, unchanged.

Native transports crash on forged descriptors, so descriptors are verified before any transport
sees them. The digest is keyed BLAKE2b over the agent's name, the size of its pool, the descriptor
and, for a pool that is sharded over ranks, its layout, which determines where heads go. With an
empty secret the digest detects corruption but not forgery.
"""

from __future__ import annotations

import hashlib
import hmac

from protocol.errors import ProtocolError
from protocol.layout import KvLayout

_PURPOSE = b"baton kv peer"
_DIGEST_BYTES = 32


def authenticate_descriptor(
    secret: bytes, agent: str, descriptor: bytes, num_blocks: int, layout: KvLayout | None = None
) -> bytes:
    """The 32-byte digest to send with a descriptor. `secret` may have any length."""
    key = hashlib.blake2b(secret, person=_PURPOSE).digest()
    digest = hashlib.blake2b(key=key, digest_size=_DIGEST_BYTES, person=_PURPOSE)
    fields = [agent.encode(), str(num_blocks).encode(), descriptor]
    if layout is not None:
        fields.append(layout.fingerprint.encode())
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.digest()


def verify_descriptor(
    secret: bytes,
    agent: str,
    descriptor: bytes,
    num_blocks: int,
    digest: bytes,
    layout: KvLayout | None = None,
) -> None:
    """Raises ProtocolError unless `digest` was made from these values with this secret."""
    expected = authenticate_descriptor(secret, agent, descriptor, num_blocks, layout)
    if not hmac.compare_digest(expected, digest):
        raise ProtocolError(f"the descriptor of agent {agent!r} is not authentic")
