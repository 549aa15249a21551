"""Stored API keys: the salted hash of each key, and its terms. Keys themselves are never stored.

A key is long and random, so one round of BLAKE2b is enough. A short key could be guessed from its
hash, so it is refused. Keys from `make_key` contain an id, and so do their hashes: such a key is
compared only with hashes that have its id, however many keys are stored. A key without an id is
compared with every hash that has none. Does not know HTTP, nor to which paths a key gives access.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from http_kit.tenant import KeyTerms
from protocol.errors import ConfigError

MIN_KEY_CHARS = 20
KEY_PATTERN = rf"[!-~]{{{MIN_KEY_CHARS},}}"
NAME_PATTERN = r"[A-Za-z0-9._@-]{1,64}"
"""Names of keys and of groups that share a cache."""
NO_ID = ""
_ID_BYTES = 8
_SALT_BYTES = 16
_DIGEST_BYTES = 32
_PURPOSE = b"baton api key"
_HASH = re.compile(
    rf"b2:(?:([0-9a-f]{{{2 * _ID_BYTES}}}):)?([0-9a-f]{{{2 * _SALT_BYTES}}})"
    rf":([0-9a-f]{{{2 * _DIGEST_BYTES}}})",
    re.ASCII,
)
_KEY_WITH_ID = re.compile(rf"baton-([0-9a-f]{{{2 * _ID_BYTES}}})-[A-Za-z0-9_-]{{43}}", re.ASCII)
_NAME = re.compile(NAME_PATTERN)
_NUMBER = re.compile(r"-?[0-9]{1,9}")
_MOST_REMEMBERED = 4096
_MISS_S = 1.0


def make_key() -> str:
    """A new key, `baton-ID-SECRET`: an id that may be known, and 256 random bits."""
    return f"baton-{secrets.token_hex(_ID_BYTES)}-{secrets.token_urlsafe(32)}"


def id_of(key: str) -> str:
    """The id in a key; `NO_ID` if the key contains none."""
    match = _KEY_WITH_ID.fullmatch(key)
    return NO_ID if match is None else match[1]


def hash_key(key: str) -> str:
    """The hash of a key for a key file, `b2:ID:SALT:DIGEST`, with a new salt per call. The hash of
    a key without an id is `b2:SALT:DIGEST`. Raises ConfigError for a key that is too short or not
    printable."""
    if re.fullmatch(KEY_PATTERN, key) is None:
        raise ConfigError(f"a key has at least {MIN_KEY_CHARS} printable characters and no space")
    salt = secrets.token_bytes(_SALT_BYTES)
    parts = ["b2", id_of(key), salt.hex(), _digest(salt, key).hex()]
    return ":".join(filter(None, parts))


def key_line(hashed: str, terms: KeyTerms) -> str:
    """The line of a key file for a hash and its terms. Default terms are left out."""
    usual = KeyTerms(terms.name)
    fields = [("name", terms.name)] if terms.name else []
    for name in ("priority", "max_priority", "inflight", "cache", "tiers", "ttft_ms", "tpot_ms"):
        value = getattr(terms, name)
        if value != getattr(usual, name):
            fields.append((name, "off" if value is False else value))
    return " ".join([hashed, *(f"{name}={value}" for name, value in fields)])


@dataclass(frozen=True, slots=True)
class StoredKey:
    """The hash of a key, and what the key allows. `id` is `NO_ID` for keys without one."""

    id: str
    salt: bytes
    digest: bytes
    terms: KeyTerms

    def matches(self, key: str) -> bool:
        """Whether this is the hash of `key`; compares in constant time."""
        return hmac.compare_digest(_digest(self.salt, key), self.digest)


class KeyRing:
    """The keys that give access to one group of paths. Falsy when empty. The keys may be replaced
    at any time.

    Looking up a key with an id computes one hash, or none if the id is unknown. A key without an id
    is compared with every hash that has none. The result is cached under a digest of the key: until
    the keys are replaced if the key is in the ring, else for a second.
    """

    def __init__(
        self, lines: Iterable[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`lines` are lines of a key file. Raises ValueError for any other line."""
        self._keys: tuple[StoredKey, ...] = ()
        self._by_id: dict[str, list[StoredKey]] = {}
        self._found: dict[bytes, StoredKey] = {}
        self._missed: dict[bytes, float] = {}  # when each miss expires; the oldest first
        self._clock = clock
        self._secret = secrets.token_bytes(_DIGEST_BYTES)
        self.replace([parse_line(line) for line in lines])

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def names(self) -> list[str]:
        """The names of all keys."""
        return [each.terms.name for each in self._keys]

    @property
    def num_without_id(self) -> int:
        """How many hashes have no id. A key without an id is compared with all of these."""
        return len(self._by_id.get(NO_ID, ()))

    def replace(self, keys: Sequence[StoredKey]) -> None:
        """Admit these keys from now on, and no others. A key without a name is named for its
        position: `key 1`, `key 2`, ..."""
        self._found.clear()
        self._missed.clear()
        self._keys = tuple(
            each
            if each.terms.name
            else replace(each, terms=replace(each.terms, name=f"key {place}"))
            for place, each in enumerate(keys, 1)
        )
        by_id: dict[str, list[StoredKey]] = defaultdict(list)
        for each in self._keys:
            by_id[each.id].append(each)
        self._by_id = dict(by_id)

    def find(self, key: str) -> StoredKey | None:
        """The stored key whose hash matches `key`; None if the ring has no such key."""
        key_id = id_of(key)
        candidates = self._by_id.get(key_id, ())
        if key_id == NO_ID and candidates:
            return self._search(key, candidates)
        return _match(key, candidates)

    def _search(self, key: str, candidates: Sequence[StoredKey]) -> StoredKey | None:
        """`_match` with a cache of results."""
        cache_key = hashlib.blake2b(key.encode(), key=self._secret).digest()
        found = self._found.get(cache_key)
        if found is not None:
            return found
        now = self._clock()
        if self._missed.get(cache_key, now) > now:
            return None
        found = _match(key, candidates)
        if found is None:
            self._missed.pop(cache_key, None)
            if len(self._missed) >= _MOST_REMEMBERED:
                del self._missed[next(iter(self._missed))]
            self._missed[cache_key] = now + _MISS_S
        elif len(self._found) < _MOST_REMEMBERED:
            self._found[cache_key] = found
        return found

    def admits(self, key: str) -> bool:
        """Whether `key` is in the ring."""
        return self.find(key) is not None


def stored_keys(keys: Iterable[str]) -> list[StoredKey]:
    """The hashes of the given keys, with default terms. Raises ConfigError for a key that cannot be
    hashed."""
    return [parse_line(hash_key(key)) for key in keys]


def read_keys(path: str, has_terms: bool = True) -> list[StoredKey]:
    """The keys of a file: a hash per line, then `field=value`; `#` begins a comment.

    Without `has_terms`, `name` is the only field. Raises ConfigError, which gives the number of a
    bad line and what is wrong, but not its content.
    """
    return [each for _, each in numbered_keys(path, has_terms)]


def numbered_keys(path: str, has_terms: bool = True) -> list[tuple[int, StoredKey]]:
    """`read_keys`, each key with the number of its line, from 1."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"key file {path} cannot be read: {error}") from error
    found: list[tuple[int, StoredKey]] = []
    for number, line in enumerate(lines, start=1):
        if not line.partition("#")[0].strip():
            continue
        try:
            found.append((number, parse_line(line, has_terms)))
        except ValueError as error:
            raise ConfigError(f"key file {path}, line {number}: {error}") from None
    if not found:
        raise ConfigError(f"key file {path} holds no key; `baton keys` makes one")
    return found


def parse_line(line: str, has_terms: bool = True) -> StoredKey:
    """Parse one line of a key file. If the line has no `name`, its comment is the name. Raises
    ValueError, whose text does not repeat the line."""
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
            raise ValueError(f"a field must be one of {', '.join(_FIELDS)}")
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
    return StoredKey(match[1] or NO_ID, bytes.fromhex(match[2]), bytes.fromhex(match[3]), terms)


def _match(key: str, candidates: Iterable[StoredKey]) -> StoredKey | None:
    """The last candidate that is the hash of `key`. Compares all of them, so that the time does
    not reveal which one matched."""
    found = None
    for each in candidates:
        if each.matches(key):
            found = each
    return found


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


def _switch(field: str, value: str) -> bool:
    if value not in ("on", "off"):
        raise ValueError(f"{field} is on or off")
    return value == "on"


_FIELDS = {
    "name": _word,
    "priority": _number,
    "max_priority": _number,
    "inflight": _count,
    "cache": _word,
    "tiers": _switch,
    "ttft_ms": _count,
    "tpot_ms": _count,
}


def _digest(salt: bytes, key: str) -> bytes:
    return hashlib.blake2b(
        key.encode(), digest_size=_DIGEST_BYTES, salt=salt, person=_PURPOSE
    ).digest()
