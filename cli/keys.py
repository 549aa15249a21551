"""`baton keys`: makes a key, or hashes one, and prints its line for the router's key files; or
lists the keys of such a file that should be renewed.

Prints the key once and stores it nowhere.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.admission.api_keys import (
    NAME_PATTERN,
    NO_ID,
    hash_key,
    id_of,
    key_line,
    make_key,
    numbered_keys,
)
from http_kit.tenant import KeyTerms
from process.settings import setting, settings_or_exit
from protocol.errors import ConfigError

_PRIORITIES = {"minimum": -(10**9) + 1, "maximum": 10**9 - 1}


@dataclass(frozen=True, kw_only=True)
class KeysSettings:
    """Settings of `baton keys`."""

    hash: bool = setting(
        False, help="read a key from standard input and print its line alone, for a key file"
    )
    check: str | None = setting(
        None,
        help="a key file: list its keys that carry no id, which the router finds more slowly; "
        "the status is 1 if there are any",
    )
    name: str | None = setting(
        None, help="name of the key in logs and on the dashboard", pattern=NAME_PATTERN
    )
    priority: int | None = setting(
        None,
        help="priority of requests that name none; lower is earlier. None: 0, or max_priority if "
        "that is later",
        **_PRIORITIES,
    )
    max_priority: int = setting(
        0, help="most urgent priority that a request of this key may name", **_PRIORITIES
    )
    inflight: int | None = setting(
        None,
        help="sequences of this key at once; none: the router's default",
        unit="sequences",
        minimum=1,
    )
    cache: str | None = setting(
        None,
        help="group of keys that share cached prefixes; none: the key shares them with no other",
        pattern=NAME_PATTERN,
    )

    tiers: bool = setting(
        True, help="let workers keep the KV of this key's requests in host memory and on disk, too"
    )

    ttft_ms: int | None = setting(
        None,
        help="target of the time to the first token of requests that name none; none: the router's",
        unit="ms",
        minimum=1,
    )
    tpot_ms: int | None = setting(
        None,
        help="target of the time per output token of requests that name none; none: the router's",
        unit="ms",
        minimum=1,
    )

    def __post_init__(self) -> None:
        if self.terms.priority < self.max_priority:
            raise ConfigError("priority is more urgent than max_priority; lower is more urgent")

    @property
    def terms(self) -> KeyTerms:
        """What the key will allow."""
        priority = max(0, self.max_priority) if self.priority is None else self.priority
        limits = (priority, self.max_priority, self.inflight)
        targets = (self.ttft_ms, self.tpot_ms)
        return KeyTerms(self.name or "", *limits, self.cache, self.tiers, *targets)


def main(argv: Sequence[str]) -> int:
    """Print a key and its line, only a line, or the keys to renew. Returns 1 if there are keys to
    renew. Raises ConfigError if the key or the file is not acceptable."""
    settings = settings_or_exit(
        KeysSettings,
        argv,
        prog="baton keys",
        description="Make an API or admin key and its line for the router's key file.",
    )
    if settings.check is not None:
        return _check(settings.check)
    if settings.hash:
        _hash(sys.stdin.readline().strip(), settings.terms)
        return 0
    key = make_key()
    print(f"key, for the client:       {key}")
    print(f"line, for the key file:    {key_line(hash_key(key), settings.terms)}")
    return 0


def _hash(key: str, terms: KeyTerms) -> None:
    print(key_line(hash_key(key), terms))
    if id_of(key) == NO_ID:
        print(
            "baton keys: this key carries no id, so the router compares it with every key that "
            "has none; it finds keys that `baton keys` makes at once",
            file=sys.stderr,
        )


def _check(path: str) -> int:
    keys = numbered_keys(path)
    to_renew = [(number, each) for number, each in keys if each.id == NO_ID]
    for number, each in to_renew:
        name = f", {each.terms.name}" if each.terms.name else ""
        print(f"line {number}{name}: carries no id; replace it by a key that `baton keys` makes")
    print(f"{len(to_renew)} of {len(keys)} keys to renew")
    return 1 if to_renew else 0
