"""The keys of a file of KV blocks: from the cluster's secret, for one model, layout and file.

KV is a prompt in another form, and anyone who can write KV can choose the answers. So blocks on
disk are encrypted and authenticated by AES-256-GCM. A file's random salt makes its key unlike that
of any other file; without the secret, nothing in the file can be read or forged.
"""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES, ID_BYTES, SALT_BYTES, NONCE_BYTES, TAG_BYTES = 32, 16, 32, 12, 16
_PURPOSE = b"baton KV blocks on disk"


class ForgedBlock(Exception):
    """Bytes on disk that no worker with this key wrote."""


@dataclass(frozen=True)
class DiskScope:
    """The workers that may read a file: those with this secret and this layout, which names the
    model."""

    secret: str
    layout_fingerprint: str

    def key(self, salt: bytes) -> DiskKey:
        """The key of a file with this salt."""
        info = _PURPOSE + self.layout_fingerprint.encode()
        derived = HKDF(SHA256(), KEY_BYTES + ID_BYTES, salt, info).derive(self.secret.encode())
        return DiskKey(derived[:KEY_BYTES], derived[KEY_BYTES:])


class DiskKey:
    """Seals and opens blocks. `key_id` tells, without revealing the key, which one it is.

    Nonces are random, so that one key is good for 2^32 blocks (NIST SP 800-38D).
    """

    def __init__(self, key: bytes, key_id: bytes) -> None:
        self.key_id = key_id
        self._cipher = AESGCM(key)

    def has_id(self, key_id: bytes) -> bool:
        """Whether this key has the given id."""
        return hmac.compare_digest(self.key_id, key_id)

    def seal(self, block: memoryview, about: bytes, into: memoryview) -> bytes:
        """Encrypt a block, and authenticate `about`, which stays in clear. `into` has room for the
        tag behind it. Returns the nonce."""
        nonce = os.urandom(NONCE_BYTES)
        self._cipher.encrypt_into(nonce, block, about, into)
        return nonce

    def open(self, nonce: bytes, sealed: memoryview, about: bytes, into: memoryview) -> None:
        """Decrypt a block. Raises ForgedBlock, and leaves `into` undefined, if a bit is wrong."""
        try:
            self._cipher.decrypt_into(nonce, sealed, about, into)
        except InvalidTag as error:
            raise ForgedBlock("the block was not written by a worker with this secret") from error
