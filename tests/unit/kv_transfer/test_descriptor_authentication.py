"""A descriptor is taken with the digest that was made for it, and with no other."""

from __future__ import annotations

import pytest

from kv_transfer.authentication import authenticate_descriptor, verify_descriptor
from protocol.errors import ProtocolError

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
