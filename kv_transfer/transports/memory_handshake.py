"""How two workers of a host prove to each other that they may share a pool's memory.

The pool's owner makes a random key. The key travels in the owner's descriptor: only over encrypted
control connections, and only to members of the fleet. Over the Unix socket each side proves that it
has the key, with a keyed BLAKE2b digest over both sides' random numbers; the peer comes first. Both
must also run as the same user, according to the kernel.

    owner -> peer   challenge
    peer -> owner   nonce, proof, the peer's agent
    owner -> peer   proof, and with it the open file
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from dataclasses import dataclass

NONCE_BYTES = 32
PROOF_BYTES = 32
KEY_BYTES = 32
_PURPOSE = b"baton kv memory"
_OWNER, _PEER = b"owner", b"peer"


@dataclass(frozen=True)
class Handshake:
    """The data that both sides have once the peer has answered the challenge."""

    key: bytes
    challenge: bytes
    nonce: bytes
    agent: bytes  # of the peer

    @property
    def peer_proof(self) -> bytes:
        """The proof that the peer has the key."""
        return self._proof(_PEER)

    @property
    def owner_proof(self) -> bytes:
        """The proof that the owner has the key."""
        return self._proof(_OWNER)

    def _proof(self, side: bytes) -> bytes:
        digest = hashlib.blake2b(key=self.key, digest_size=PROOF_BYTES, person=_PURPOSE)
        for field in (side, self.challenge, self.nonce, self.agent):
            digest.update(len(field).to_bytes(8, "little"))
            digest.update(field)
        return digest.digest()


def stranger(connection: socket.socket) -> str:
    """The other end's user, in words, if it is not ours; "" if it is. If the kernel does not report
    the user, other users are kept out by the socket's folder, which only our user may enter."""
    if not hasattr(socket, "SO_PEERCRED"):
        return ""
    layout = struct.Struct("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
    pid, uid, _ = layout.unpack(credentials)
    return "" if uid == os.geteuid() else f"process {pid} of user {uid}"
