"""A descriptor is taken with the digest that was made for it, and with no other."""

from __future__ import annotations

import msgspec
import pytest

from kv_transfer.authentication import authenticate_descriptor, verify_descriptor
from kv_transfer.handoff.shard_peer import admit_shard, describe_shard
from kv_transfer.head_slices import plan_head_slices
from protocol.errors import ConfigError, ProtocolError
from protocol.layout import KvLayout
from protocol.messages import PeerDescriptor

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


def shard(layout: KvLayout, secret: bytes = b"secret") -> PeerDescriptor:
    return describe_shard(secret, "nixl", "agent", b"descriptor", (12, layout))


def test_a_shard_is_taken_for_the_heads_that_it_has() -> None:
    slices = admit_shard(b"secret", RANK.unsharded, "nixl", shard(RANK))
    assert slices == plan_head_slices(RANK.unsharded, RANK)


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        (shard(RANK, b"other"), "not authentic"),
        (msgspec.structs.replace(shard(RANK), layout=RANK.unsharded.shard(0, 2)), "not authentic"),
        (msgspec.structs.replace(shard(RANK), layout=None), "not authentic"),
        (msgspec.structs.replace(shard(RANK), transport="shm"), "transport differs"),
        (shard(msgspec.structs.replace(RANK, dtype="float16")), "differ in more"),
        (shard(RANK.unsharded.shard(3, 4)), "shares no head"),
    ],
)
def test_a_shard_that_is_not_one_of_ours_is_refused(forged: PeerDescriptor, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        admit_shard(b"secret", RANK.unsharded.shard(0, 2), "nixl", forged)


def test_the_number_of_ranks_divides_that_of_the_heads() -> None:
    with pytest.raises(ConfigError, match="4 KV heads have no rank 0 of 3"):
        RANK.unsharded.shard(0, 3)
    with pytest.raises(ConfigError, match="no rank 2 of 2"):
        RANK.unsharded.shard(2, 2)
