"""Identity of KV blocks: a hash chain over full blocks of tokens.

`h_i = H(h_{i-1}, tokens of block i)`, `h_{-1} = H(seed, model fingerprint, salt)`. 128-bit BLAKE2b,
keyed by the fleet's seed through the root, so hashes mean the same on every worker. The seed comes
from the cluster's secret: nobody outside can predict a block's hash. A prompt may begin with blocks
that everybody shares. Their chain begins at a root of its own, and the salt's root is mixed in
after them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from struct import iter_unpack

import msgspec

HASH_BYTES = 16
_BLANK = blake2b(digest_size=HASH_BYTES)
"""Copied for each block: making a new state takes twice as long."""
_SEED_PURPOSE = b"baton blocks"
_FORK_PURPOSE = b"baton fork"
_COMMON_SALT = "shared prefixes"
"""No tenant has this salt: theirs are empty or contain a colon or a slash."""


def seed_of(cluster_secret: str) -> str:
    """The seed of all hashes in a fleet, hexadecimal; it does not reveal the secret."""
    digest = blake2b(cluster_secret.encode(), digest_size=HASH_BYTES, person=_SEED_PURPOSE)
    return digest.hexdigest()


@lru_cache(maxsize=1024)
def chain_root(model_fingerprint: str, salt: str = "", seed: str = "") -> bytes:
    """The parent of a sequence's first block; covers everything besides tokens that affects KV."""
    digest = blake2b(digest_size=HASH_BYTES)
    for part in (seed, model_fingerprint, salt):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def next_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full block that follows `parent`."""
    return blake2b(parent + array("I", tokens).tobytes(), digest_size=HASH_BYTES).digest()


def end_of(digest: bytes) -> bytes:
    """The name under which a worker whose layers keep windows reports that a cached prefix can end
    with this block: the tokens before it that all windows see are cached, too."""
    return digest[::-1]


class ChainStart(msgspec.Struct, frozen=True):
    """The start of a prompt's chain. The chain of its first `num_shared` blocks, all of them full,
    begins at `common` and is the same for every salt. All later blocks depend on `own`, the root of
    the salt."""

    own: bytes
    common: bytes = b""
    num_shared: int = 0

    def parent(self, hashes: Sequence[bytes]) -> bytes:
        """The parent of the block that follows the blocks with these hashes."""
        if len(hashes) != self.num_shared:
            return hashes[-1] if hashes else self.common
        if not hashes:
            return self.own
        return blake2b(hashes[-1] + self.own, digest_size=HASH_BYTES, person=_FORK_PURPOSE).digest()


@lru_cache(maxsize=1024)
def chain_start(
    model_fingerprint: str, salt: str, seed: str, shared_tokens: int, block_size: int
) -> ChainStart:
    """The start of a prompt whose first `shared_tokens` tokens are declared as shared. Only the
    full blocks among them are."""
    own = chain_root(model_fingerprint, salt, seed)
    num_shared = shared_tokens // block_size
    if not num_shared:
        return ChainStart(own)
    return ChainStart(own, chain_root(model_fingerprint, _COMMON_SALT, seed), num_shared)


def more_hashes(
    hashes: Sequence[bytes], start: ChainStart, tokens: Sequence[int], block_size: int
) -> list[bytes]:
    """The hashes of all full blocks of `tokens`; `hashes` has the first ones."""
    if not start.num_shared and not hashes:
        return block_hashes(start.own, tokens, block_size)
    made = list(hashes)
    for end in (start.num_shared * block_size, len(tokens)):
        begin = len(made) * block_size
        if begin < end:
            made += block_hashes(start.parent(made), tokens[begin:end], block_size)
    return made


def block_hashes(root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """One hash for each full block of `tokens`; a trailing partial block has none."""
    data = array("I", tokens)
    size = block_size * data.itemsize
    whole = data.tobytes()
    hashes: list[bytes] = []
    parent, blank = root, _BLANK.copy
    for (block,) in iter_unpack(f"{size}s", whole[: len(whole) // size * size]):
        state = blank()
        state.update(parent + block)
        parent = state.digest()
        hashes.append(parent)
    return hashes
