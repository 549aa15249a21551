"""Identity of KV blocks: a hash chain over full blocks of tokens.

`h_i = H(h_{i-1}, tokens of block i)`, `h_{-1} = H(seed, model fingerprint, salt)`. 128-bit
BLAKE2b, keyed by the fleet's seed through the root, so hashes mean the same on every worker. The
seed comes from the cluster's secret: nobody outside can predict a block's hash.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

HASH_BYTES = 16
_SEED_PURPOSE = b"baton blocks"


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


def more_hashes(
    hashes: Sequence[bytes], root: bytes, tokens: Sequence[int], block_size: int
) -> list[bytes]:
    """The hashes of all full blocks of `tokens`, of which `hashes` has the first ones."""
    parent = hashes[-1] if hashes else root
    return [*hashes, *block_hashes(parent, tokens[len(hashes) * block_size :], block_size)]


def block_hashes(root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """One hash for each full block of `tokens`; a trailing partial block has none."""
    data = array("I", tokens)
    size = block_size * data.itemsize
    whole = data.tobytes()
    hashes: list[bytes] = []
    parent = root
    for start in range(0, len(whole) - size + 1, size):
        parent = blake2b(parent + whole[start : start + size], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes
