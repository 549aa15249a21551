"""TLS of the store's clients: whom they trust, and why a handshake fails. The URL of the store says
whom to trust, so that all clients of a process share it: redis-py's `ssl_...` parameters, and
`trust=password` for a `baton store`, whose certificate comes from its password. If the URL names an
authority, no other authority counts. Files that have changed are read again for the next
connection, so that a certificate may be replaced while the process runs.
"""

from __future__ import annotations

import functools
import os
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from process.sockets.certificate_chain import load_chain
from process.store.certificate_expiry import Expiry
from process.store.password_certificate import SERVER_NAME, certificate_of
from protocol.addresses import shown_address
from protocol.errors import ConfigError

_TRUST, _PASSWORD = "trust", "password"
_REDIS_PREFIX = "ssl_"
_NO = frozenset({"0", "f", "false", "n", "no", ""})
_EXPIRED, _NOT_YET = 10, 9
_OTHER_NAME = frozenset({62, 64})
"""X.509 errors of OpenSSL: another host name, another IP address."""
_OF_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"})
_OF_CLIENTS = ("CERTIFICATE_REQUIRED", "ALERT_UNKNOWN_CA", "ALERT_BAD_CERTIFICATE", "ALERT_CERT")


class TlsError(OSError):
    """A handshake with the store failed; the text says what to do."""


class CertificateError(TlsError):
    """The store's certificate is not one that we trust; asking again does not help."""


@dataclass(frozen=True)
class StoreTls:
    """TLS of one client. Fields that begin with `ssl_` are redis-py's parameters of URLs."""

    password: str | None = field(default=None, repr=False)
    """The password that the store's certificate must come from; None: authorities count."""
    ssl_ca_certs: str | None = None
    ssl_ca_path: str | None = None
    ssl_ca_data: str | None = field(default=None, repr=False)
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_password: str | None = field(default=None, repr=False)
    ssl_cert_reqs: str = "required"
    ssl_check_hostname: bool = True
    expiry: Expiry = field(default_factory=Expiry, compare=False)

    def context(self) -> ssl.SSLContext:
        """The context of a new connection. Raises OSError for files that cannot be used."""
        files = (self.ssl_ca_certs, self.ssl_certfile, self.ssl_keyfile)
        return _context(self, tuple(_stamp(each) for each in files if each))

    def server_name(self, host: str) -> str:
        """The name that a handshake with a host asks for."""
        return SERVER_NAME if self.password else host

    def check_files(self, where: str) -> None:
        """Raises ConfigError for files that cannot be used."""
        if not (self.names_authorities or self.ssl_certfile or self.ssl_keyfile):
            return
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError(f"redis_url {where}: redis_key_file needs redis_cert_file")
        try:
            self.context()
        except (OSError, ValueError) as error:
            files = [self.ssl_ca_certs, self.ssl_ca_path, self.ssl_certfile, self.ssl_keyfile]
            named = ", ".join(each for each in files if each)
            raise ConfigError(f"redis_url {where}: cannot use {named}: {error}") from error

    def explained(self, error: OSError) -> OSError:
        """An error of a handshake, with advice in its text; other errors unchanged."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return CertificateError(self._of_certificate(error))
        if isinstance(error, ssl.SSLError):
            reason = error.reason or ""
            if reason in _OF_NO_TLS:
                return TlsError(
                    "it does not speak TLS at this port: name its TLS port, or give redis:// for a "
                    "store without TLS"
                )
            if any(each in reason for each in _OF_CLIENTS):
                return TlsError(
                    f"it wants another certificate of its clients ({reason}): set redis_cert_file"
                )
            return TlsError(f"the TLS handshake failed: {reason or error}")
        if "handshake" in str(error):
            return TlsError("it does not answer the TLS handshake: does this port speak TLS?")
        return error

    def _of_certificate(self, error: ssl.SSLCertVerificationError) -> str:
        if error.verify_code == _EXPIRED:
            return "its certificate has expired: renew it at the store"
        if error.verify_code == _NOT_YET:
            return "its certificate is not valid yet: compare the clocks of this host and the store"
        if error.verify_code in _OTHER_NAME:
            return f"{error.verify_message.rstrip('.')}: use a name of its certificate in redis_url"
        if self.password:
            return (
                "its certificate does not come from the password in redis_url: it has another "
                "password, or is not a `baton store` with --tls-port"
            )
        if self.names_authorities:
            named = self.ssl_ca_certs or self.ssl_ca_path or "ssl_ca_data"
            return f"no authority in {named} vouches for its certificate ({error.verify_message})"
        return (
            f"no authority of this host vouches for its certificate ({error.verify_message}): name "
            "its CA by redis_ca_file, or give ?trust=password for a `baton store`"
        )

    @property
    def names_authorities(self) -> bool:
        """Whether authorities are named, so that those of the host do not count."""
        return bool(self.ssl_ca_certs or self.ssl_ca_path or self.ssl_ca_data)

    def note_certificate(self, certificate: Mapping[str, Any] | None) -> None:
        """Take the certificate that a handshake has shown; None or an empty one changes nothing."""
        if certificate and "notAfter" in certificate:
            self.expiry.note(ssl.cert_time_to_seconds(certificate["notAfter"]), time.time())


@functools.lru_cache(maxsize=8)
def _context(tls: StoreTls, stamps: tuple[object, ...]) -> ssl.SSLContext:
    """The context, made again only when files have changed: reading a host's authorities takes 20
    ms."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    is_checked = tls.ssl_cert_reqs != "none"
    context.check_hostname = is_checked and tls.ssl_check_hostname and not tls.password
    if not is_checked:
        context.verify_mode = ssl.CERT_NONE
    elif tls.password:
        context.load_verify_locations(cadata=certificate_of(tls.password).certificate)
    elif tls.names_authorities:
        context.load_verify_locations(tls.ssl_ca_certs, tls.ssl_ca_path, tls.ssl_ca_data)
    else:
        context.load_default_certs()
    if tls.ssl_certfile:
        load_chain(context, tls.ssl_certfile, tls.ssl_keyfile, tls.ssl_password)
    return context


def _stamp(path: str) -> tuple[int, int, int]:
    """A value that changes when a file is replaced or written to. Raises OSError."""
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


def split_tls(redis_url: str) -> tuple[str, StoreTls | None]:
    """The URL without its TLS parameters, and the TLS that they describe; None for a store without
    TLS. Raises ConfigError for parameters that would have no effect."""
    parts = urlsplit(redis_url)
    where = f"redis_url {shown_address(redis_url)}"
    query = parse_qsl(parts.query, keep_blank_values=True)
    ours = {
        name: value for name, value in query if name == _TRUST or name.startswith(_REDIS_PREFIX)
    }
    if parts.scheme != "rediss":
        if ours:
            raise ConfigError(f"{where}: {min(ours)} needs TLS: use rediss://")
        return redis_url, None
    rest = urlencode([(name, value) for name, value in query if name not in ours])
    password = None
    if (trust := ours.pop(_TRUST, None)) is not None:
        password = unquote(parts.password or "")
        if trust != _PASSWORD or not password or ours:
            raise ConfigError(
                f"{where}: trust=password needs the store's password before the @, and allows no "
                "other parameter of TLS"
            )
    known = StoreTls.__dataclass_fields__.keys()
    if unknown := ours.keys() - known:
        raise ConfigError(f"{where}: {min(unknown)} is not a TLS parameter that Baton knows")
    if ours.get("ssl_cert_reqs", "required") not in ("required", "none"):
        raise ConfigError(f"{where}: ssl_cert_reqs must be required or none")
    values: dict[str, Any] = dict(ours)
    if "ssl_check_hostname" in ours:
        values["ssl_check_hostname"] = ours["ssl_check_hostname"].lower() not in _NO
    tls = StoreTls(password=password, **values)
    tls.check_files(shown_address(redis_url))
    return parts._replace(query=rest).geturl(), tls
