"""Names and seals of remembered answers, with keys that derive from the cluster's secret.

A name is a keyed digest of the model, the cache's salt and all text up to the answer's end: nobody
without the secret can tell which text it stands for. In the store, ids are encrypted and
authenticated together with their name (AES-GCM with a key for each owner), so a
stranger who can write to the store can neither read nor choose an answer, nor put one in another's
place.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_NAME_BYTES = 20
_KEY_BYTES = 32
_NONCE_BYTES = 12


class Seal:
    """The keys of one cluster and model."""

    def __init__(self, cluster_secret: str, model: str) -> None:
        """`model`: fingerprint of the tokenizer and the template to which texts and ids belong."""
        secret = hashlib.blake2b(cluster_secret.encode(), digest_size=_KEY_BYTES).digest()
        model_key = model.encode()
        self._names_key = _derived(secret, b"answer names", model_key)
        self._owners_key = _derived(secret, b"answer owners", model_key)
        self._seals_key = _derived(secret, b"answer seals", model_key)

    def names(self, salt: str, text: str, ends: Iterable[int]) -> Iterator[bytes]:
        """The names of answers that end at these places of a text, which ascend."""
        digest = hashlib.blake2b(key=self._names_key, digest_size=_NAME_BYTES)
        digest.update(len(salt).to_bytes(4, "big") + salt.encode())
        start = 0
        for end in ends:
            digest.update(text[start:end].encode())
            start = end
            yield digest.copy().digest()

    def owner(self, salt: str) -> str:
        """The owner's name in the store."""
        return _derived(self._owners_key, b"owner", salt.encode())[:16].hex()

    def close(self, salt: str, name: bytes, ids: bytes) -> bytes:
        """The sealed ids."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._cipher(salt).encrypt(nonce, ids, name)

    def open(self, salt: str, name: bytes, sealed: bytes) -> bytes:
        """The ids. Raises ValueError for anything that was not sealed for this name and owner."""
        if len(sealed) < _NONCE_BYTES:
            raise ValueError("it is too short to be sealed ids")
        try:
            return self._cipher(salt).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], name)
        except InvalidTag:
            raise ValueError("it was not sealed by this cluster for this answer") from None

    def _cipher(self, salt: str) -> AESGCM:
        return AESGCM(_derived(self._seals_key, b"seal", salt.encode()))


def _derived(key: bytes, purpose: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_KEY_BYTES, key=key, person=purpose).digest()
