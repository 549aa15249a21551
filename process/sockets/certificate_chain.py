"""Loads a process's own certificate and key from PEM files.

A key with a passphrase is refused: OpenSSL would ask for it at the terminal, at the start and again
whenever the files are renewed, and stop the whole process until somebody answers.
"""

from __future__ import annotations

import ssl


def load_chain(
    context: ssl.SSLContext, cert: str, key: str | None = None, passphrase: str | None = None
) -> None:
    """Load the certificate with its chain, and its key if that is in another file. Raises OSError,
    also as ssl.SSLError, if they cannot be used."""

    def refuse() -> str:
        file = key or cert
        raise OSError(
            f"the key in {file} has a passphrase: give a key without one, as `openssl pkey -in "
            f"{file}` writes it"
        )

    context.load_cert_chain(cert, key, passphrase or refuse)
