"""Stored API keys: salted hashes with their terms, in a file or made at start, never the keys.

A key is long and random, so one round of BLAKE2b is enough. A short key could be guessed from its
hash, so it is refused. Knows nothing of HTTP, nor of which paths a key opens.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from http_kit.tenant import KeyTerms
from protocol.errors import ConfigError

MIN_KEY_CHARS = 20
KEY_PATTERN = rf"[!-~]{{{MIN_KEY_CHARS},}}"
NAME_PATTERN = r"[A-Za-z0-9._@-]{1,64}"
"""Names of keys and of groups that share a cache."""
_SALT_BYTES = 16
_DIGEST_BYTES = 32
_PURPOSE = b"baton api key"
_HASH = re.compile(
    rf"b2:([0-9a-f]{{{2 * _SALT_BYTES}}}):([0-9a-f]{{{2 * _DIGEST_BYTES}}})", re.ASCII
)
_NAME = re.compile(NAME_PATTERN)
_NUMBER = re.compile(r"-?[0-9]{1,9}")
_MOST_REMEMBERED = 4096


def make_key() -> str:
    """A new key: `baton-` and 256 random bits."""
    return f"baton-{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    """The hash of a key for a key file, `b2:SALT:DIGEST`, with a new salt per call. Raises
    ConfigError for a key that is too short or not printable."""
    if re.fullmatch(KEY_PATTERN, key) is None:
        raise ConfigError(f"a key has at least {MIN_KEY_CHARS} printable characters and no space")
    salt = secrets.token_bytes(_SALT_BYTES)
    return f"b2:{salt.hex()}:{_digest(salt, key).hex()}"


def key_line(hashed: str, terms: KeyTerms) -> str:
    """The line of a key file for a hash and its terms; those that are the default are left out."""
    usual = KeyTerms(terms.name)
    fields = [("name", terms.name)] if terms.name else []
    for name in ("priority", "max_priority", "inflight", "cache"):
        value = getattr(terms, name)
        if value != getattr(usual, name):
            fields.append((name, value))
    return " ".join([hashed, *(f"{name}={value}" for name, value in fields)])


@dataclass(frozen=True, slots=True)
class StoredKey:
    """The hash of a key, and what the key allows."""

    salt: bytes
    digest: bytes
    terms: KeyTerms

    def is_of(self, key: str) -> bool:
        """Whether this is the hash of `key`; compares in constant time."""
        return hmac.compare_digest(_digest(self.salt, key), self.digest)


class KeyRing:
    """The keys that open one door; a ring without keys is false. Its keys may change at any time.

    A key that was found is remembered by a digest, so that a request does not pay for every key
    of the ring.
    """

    def __init__(self, lines: Iterable[str] = ()) -> None:
        """`lines` are those of a key file. Raises ValueError for anything else."""
        self._keys: tuple[StoredKey, ...] = ()
        self._known: dict[bytes, StoredKey] = {}
        self._secret = secrets.token_bytes(_DIGEST_BYTES)
        self.replace([parse_line(line) for line in lines])

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def names(self) -> list[str]:
        """The names of all keys."""
        return [each.terms.name for each in self._keys]

    def replace(self, keys: Sequence[StoredKey]) -> None:
        """Admit these keys from now on, and no other. A key without a name is called after its
        place."""
        self._known.clear()
        self._keys = tuple(
            each
            if each.terms.name
            else replace(each, terms=replace(each.terms, name=f"key {place}"))
            for place, each in enumerate(keys, 1)
        )

    def find(self, key: str) -> StoredKey | None:
        """The stored key that `key` belongs to; None if it is not in the ring."""
        remembered = hashlib.blake2b(key.encode(), key=self._secret).digest()
        found = self._known.get(remembered)
        if found is None:
            for each in self._keys:
                if each.is_of(key):
                    found = each
            if found is not None and len(self._known) < _MOST_REMEMBERED:
                self._known[remembered] = found
        return found

    def admits(self, key: str) -> bool:
        """Whether `key` is in the ring."""
        return self.find(key) is not None

    def name_of(self, key: str) -> str | None:
        """The name of a key for logs; None if it is not in the ring."""
        found = self.find(key)
        return None if found is None else found.terms.name


def stored_keys(keys: Iterable[str]) -> list[StoredKey]:
    """Plain keys as a ring holds them, with usual terms. Raises ConfigError."""
    return [parse_line(hash_key(key)) for key in keys]


def read_keys(path: str, has_terms: bool = True) -> list[StoredKey]:
    """The keys of a file: a hash per line, then `field=value`; `#` begins a comment.

    Without `has_terms`, `name` is the only field. Raises ConfigError, which gives the number of a
    bad line and what is wrong, but not its content.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"key file {path} cannot be read: {error}") from error
    found: list[StoredKey] = []
    for number, line in enumerate(lines, start=1):
        if not line.partition("#")[0].strip():
            continue
        try:
            found.append(parse_line(line, has_terms))
        except ValueError as error:
            raise ConfigError(f"key file {path}, line {number}: {error}") from None
    if not found:
        raise ConfigError(f"key file {path} holds no key; `baton keys` makes one")
    return found


def parse_line(line: str, has_terms: bool = True) -> StoredKey:
    """One line of a key file. A comment names a key that has no `name`. Raises ValueError, whose
    text does not repeat the line."""
    text, _, comment = line.partition("#")
    hashed, *fields = text.split() or [""]
    match = _HASH.fullmatch(hashed)
    if match is None:
        raise ValueError("not a hash; `baton keys` makes one")
    given: dict[str, Any] = {}
    for each in fields:
        name, _, value = each.partition("=")
        read = _FIELDS.get(name)
        if read is None:
            raise ValueError(f"a field is none of {', '.join(_FIELDS)}")
        if name in given:
            raise ValueError(f"{name} is given twice")
        if name != "name" and not has_terms:
            raise ValueError(f"{name} is for clients' keys only")
        given[name] = read(name, value)
    if "priority" not in given:
        given["priority"] = max(0, given.get("max_priority", 0))
    terms = KeyTerms(**({"name": comment.strip()} | given))
    if terms.max_priority is not None and terms.priority < terms.max_priority:
        raise ValueError("priority is more urgent than max_priority; lower is more urgent")
    return StoredKey(bytes.fromhex(match[1]), bytes.fromhex(match[2]), terms)


def _word(field: str, value: str) -> str:
    if _NAME.fullmatch(value) is None:
        raise ValueError(f"{field} has 1 to 64 letters, digits, or any of . _ @ -")
    return value


def _number(field: str, value: str) -> int:
    if _NUMBER.fullmatch(value) is None:
        raise ValueError(f"{field} must be a whole number")
    return int(value)


def _count(field: str, value: str) -> int:
    number = _number(field, value)
    if number < 1:
        raise ValueError(f"{field} must be at least 1")
    return number


_FIELDS = {
    "name": _word,
    "priority": _number,
    "max_priority": _number,
    "inflight": _count,
    "cache": _word,
}


def _digest(salt: bytes, key: str) -> bytes:
    return hashlib.blake2b(
        key.encode(), digest_size=_DIGEST_BYTES, salt=salt, person=_PURPOSE
    ).digest()
