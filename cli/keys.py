"""`baton keys`: makes a key, or hashes one, and prints its line for the router's key files.

Prints the key once and stores it nowhere.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.admission.api_keys import NAME_PATTERN, hash_key, key_line, make_key
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

    def __post_init__(self) -> None:
        if self.terms.priority < self.max_priority:
            raise ConfigError("priority is more urgent than max_priority; lower is more urgent")

    @property
    def terms(self) -> KeyTerms:
        """What the key will allow."""
        priority = max(0, self.max_priority) if self.priority is None else self.priority
        return KeyTerms(self.name or "", priority, self.max_priority, self.inflight, self.cache)


def main(argv: Sequence[str]) -> int:
    """Print a key and its line, or only a line; returns 2 if the key is not acceptable."""
    settings = settings_or_exit(
        KeysSettings,
        argv,
        prog="baton keys",
        description="Make an API or admin key and its line for the router's key file.",
        section="keys",
    )
    if settings.hash:
        try:
            print(key_line(hash_key(sys.stdin.readline().strip()), settings.terms))
        except ConfigError as error:
            print(f"baton keys: {error}", file=sys.stderr)
            return 2
        return 0
    key = make_key()
    print(f"key, for the client:       {key}")
    print(f"line, for the key file:    {key_line(hash_key(key), settings.terms)}")
    return 0
