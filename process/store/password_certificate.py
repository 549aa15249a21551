"""The certificate that `baton store` and its clients derive from the store's password.

Both ends derive the same key and, byte for byte, the same certificate; it names no host and never
expires. A server that shows it has the key, and therefore knows the password. So the password must
be random: anyone who connects can test guesses against the certificate. scrypt makes each guess
cost tens of milliseconds.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

SERVER_NAME = "password.baton-store"
"""The server name that clients ask for if they check the certificate by the password, since a
server may have several certificates."""
_PURPOSE = b"baton store certificate 1"
_COST, _BLOCK_SIZE = 1 << 14, 8
_MEMORY_BYTES = 64 << 20
_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "baton store")])
_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_FOREVER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
"""RFC 5280's date for certificates without an end."""


@dataclass(frozen=True)
class PasswordCertificate:
    """A self-signed certificate and its key, as PEM."""

    certificate: str
    key: str = field(repr=False)


@functools.lru_cache(maxsize=8)
def certificate_of(password: str) -> PasswordCertificate:
    """The certificate of the servers and clients that know this password."""
    seed = hashlib.scrypt(
        password.encode(),
        salt=_PURPOSE,
        n=_COST,
        r=_BLOCK_SIZE,
        p=1,
        maxmem=_MEMORY_BYTES,
        dklen=32,
    )
    key = Ed25519PrivateKey.from_private_bytes(seed)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_NAME)
        .issuer_name(_NAME)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_FROM)
        .not_valid_after(_FOREVER)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    key_pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    certificate_pem = certificate.public_bytes(serialization.Encoding.PEM)
    return PasswordCertificate(certificate_pem.decode(), key_pem.decode())
