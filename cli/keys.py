"""`baton keys`: makes an API key, or hashes one, for the router's key files.

Prints the key once and stores it nowhere.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from process.settings import setting, settings_or_exit
from protocol.errors import ConfigError
from router.http.api_keys import hash_key, make_key


@dataclass(frozen=True, kw_only=True)
class KeysSettings:
    """Settings of `baton keys`."""

    hash: bool = setting(
        False, help="read a key from standard input and print its hash alone, for a key file"
    )


def main(argv: Sequence[str]) -> int:
    """Print a key and its hash, or only a hash; returns 2 if the key is not acceptable."""
    settings = settings_or_exit(
        KeysSettings,
        argv,
        prog="baton keys",
        description="Make an API or admin key; its hash is a line of the router's key file.",
        section="keys",
    )
    if settings.hash:
        try:
            print(hash_key(sys.stdin.readline().strip()))
        except ConfigError as error:
            print(f"baton keys: {error}", file=sys.stderr)
            return 2
        return 0
    key = make_key()
    print(f"key, for the client:       {key}")
    print(f"hash, for the key file:    {hash_key(key)}")
    return 0
