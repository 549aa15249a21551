"""Stored API keys: salted hashes, in a file or made at start, never the keys themselves.

A key is long and random, so one round of BLAKE2b is enough. A short key could be guessed from its
hash, so it is refused. Knows nothing of HTTP, nor of which paths a key opens.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ConfigError

MIN_KEY_CHARS = 20
KEY_PATTERN = rf"[!-~]{{{MIN_KEY_CHARS},}}"
_SALT_BYTES = 16
_DIGEST_BYTES = 32
_PURPOSE = b"baton api key"
_HASH = re.compile(
    rf"b2:([0-9a-f]{{{2 * _SALT_BYTES}}}):([0-9a-f]{{{2 * _DIGEST_BYTES}}})", re.ASCII
)


def make_key() -> str:
    """A new key: `baton-` and 256 random bits."""
    return f"baton-{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    """A key's line in a key file, `b2:SALT:DIGEST`, with a new salt per call. Raises ConfigError
    for a key that is too short or not printable."""
    if re.fullmatch(KEY_PATTERN, key) is None:
        raise ConfigError(f"a key has at least {MIN_KEY_CHARS} printable characters and no space")
    salt = secrets.token_bytes(_SALT_BYTES)
    return f"b2:{salt.hex()}:{_digest(salt, key).hex()}"


@dataclass(frozen=True, slots=True)
class _KeyHash:
    salt: bytes
    digest: bytes


class KeyRing:
    """The keys that open one door; a ring without keys is false."""

    def __init__(self, hashes: Iterable[str] = ()) -> None:
        """`hashes` are lines from `hash_key`. Raises ValueError for anything else."""
        self._hashes = [_parse(each) for each in hashes]

    def __len__(self) -> int:
        return len(self._hashes)

    def admits(self, key: str) -> bool:
        """Whether `key` is in the ring; compares with every hash, in constant time."""
        found = False
        for each in self._hashes:
            found |= hmac.compare_digest(_digest(each.salt, key), each.digest)
        return found


def load_key_ring(keys: Iterable[str], path: str | None) -> KeyRing:
    """A ring of plain `keys` and of the hashes in a file, one per line; `#` begins a comment.

    Raises ConfigError, which gives the number of a bad line but not its content.
    """
    hashes = [hash_key(key) for key in keys]
    if path is not None:
        hashes += _read_hashes(Path(path))
    return KeyRing(hashes)


def _read_hashes(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"key file {path} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if _HASH.fullmatch(text) is None:
            raise ConfigError(f"key file {path}, line {number}: not a hash; `baton keys` makes one")
        found.append(text)
    if not found:
        raise ConfigError(f"key file {path} holds no key; `baton keys` makes one")
    return found


def _parse(text: str) -> _KeyHash:
    match = _HASH.fullmatch(text)
    if match is None:
        raise ValueError("not a hash of a key")
    return _KeyHash(bytes.fromhex(match[1]), bytes.fromhex(match[2]))


def _digest(salt: bytes, key: str) -> bytes:
    return hashlib.blake2b(
        key.encode(), digest_size=_DIGEST_BYTES, salt=salt, person=_PURPOSE
    ).digest()
