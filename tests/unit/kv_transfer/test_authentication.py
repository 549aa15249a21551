"""A descriptor is taken with the digest that was made for it, and with no other."""

from __future__ import annotations

import pytest

from kv_transfer.authentication import authenticate_descriptor, verify_descriptor
from protocol.errors import ConfigError, ProtocolError
from protocol.layout import KvLayout

GENUINE = (b"secret", "agent", b"descriptor", 12)


@pytest.mark.parametrize("secret", [b"", b"secret", b"long" * 100])
def test_the_genuine_is_taken(secret: bytes) -> None:
    digest = authenticate_descriptor(secret, "agent", b"descriptor", 12)
    assert len(digest) == 32
    verify_descriptor(secret, "agent", b"descriptor", 12, digest)


@pytest.mark.parametrize(
    "forged",
    [
        (b"other", "agent", b"descriptor", 12),
        (b"", "agent", b"descriptor", 12),
        (b"secret", "agen", b"tdescriptor", 12),
        (b"secret", "agent", b"descriptoR", 12),
        (b"secret", "agent", b"descriptor", 13),
        (b"secret", "agent1", b"descriptor", 2),
    ],
)
def test_the_forged_is_refused(forged: tuple[bytes, str, bytes, int]) -> None:
    with pytest.raises(ProtocolError, match="not authentic"):
        verify_descriptor(*forged, authenticate_descriptor(*GENUINE))


@pytest.mark.parametrize("digest", [b"", b"\0" * 32, authenticate_descriptor(*GENUINE)[:-1]])
def test_a_wrong_digest_is_refused(digest: bytes) -> None:
    with pytest.raises(ProtocolError):
        verify_descriptor(*GENUINE, digest)


RANK = KvLayout(
    model_fingerprint="m",
    dtype="bfloat16",
    num_layers=2,
    num_kv_heads=4,
    block_size=16,
    head_dim=8,
).shard(1, 2)


def test_the_layout_of_ranks_is_authentic_or_refused() -> None:
    digest = authenticate_descriptor(*GENUINE, RANK)
    verify_descriptor(*GENUINE, digest, RANK)
    for forged in (None, RANK.unsharded, RANK.unsharded.shard(0, 4)):
        with pytest.raises(ProtocolError, match="not authentic"):
            verify_descriptor(*GENUINE, digest, forged)


def test_the_number_of_ranks_divides_that_of_the_heads() -> None:
    with pytest.raises(ConfigError, match="4 KV heads have no rank 0 of 3"):
        RANK.unsharded.shard(0, 3)
    with pytest.raises(ConfigError, match="no rank 2 of 2"):
        RANK.unsharded.shard(2, 2)
