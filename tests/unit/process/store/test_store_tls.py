"""TLS of the store without a store: authorities, certificates of a password, warnings."""

from __future__ import annotations

import pytest
import redis
import redis.asyncio

from process.store.certificate_expiry import WARN_S, Expiry
from process.store.password_certificate import certificate_of
from process.store.registry import client_from_url
from process.store.store_tls import StoreTls
from protocol.errors import ConfigError
from tests.tls_store import PASSWORD


def test_warnings_come_once_a_day_from_two_weeks_before_the_end(caplog) -> None:
    expiry, end = Expiry(), 1e9
    assert expiry.warning(0) is None
    expiry.note(end, 0)
    expiry.log_warning("it", end - WARN_S - 1)
    assert not caplog.messages
    for now in (end - WARN_S, end - WARN_S + 3600, end - 86000, end + 1000):
        expiry.log_warning("it", now)
    assert [each.split(" (")[0] for each in caplog.messages] == [
        "the certificate of it expires in 14 days",
        "the certificate of it expires in 24 h",
        "the certificate of it has expired",
    ]
    expiry.note(end + 2 * WARN_S, end)
    assert expiry.warning(end) is None, "it was renewed"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://:p@h?trust=password", "trust needs TLS: use rediss://"),
        ("redis://:p@h?ssl_ca_certs=/x", "ssl_ca_certs needs TLS"),
        ("rediss://h?trust=password", "trust=password needs the store's password"),
        ("rediss://:p@h?trust=anybody", "trust=password needs"),
        ("rediss://:p@h?trust=password&ssl_ca_certs=/x", "trust=password needs"),
        ("rediss://:p@h?ssl_ca_certs=/no/such.pem", "cannot use /no/such.pem"),
        ("rediss://:p@h?ssl_keyfile=/no/such.pem", "redis_key_file needs redis_cert_file"),
        ("rediss://:p@h?ssl_validate_ocsp=1", "ssl_validate_ocsp is not a TLS parameter"),
        ("rediss://:p@h?ssl_cert_reqs=some", "ssl_cert_reqs must be required or none"),
    ],
)
def test_what_tls_cannot_be_made_of_is_one_line(url: str, says: str) -> None:
    with pytest.raises(ConfigError) as failed:
        client_from_url(redis.Redis, url, 1.0)
    assert says in str(failed.value)
    assert "\n" not in str(failed.value)


def test_a_host_s_authorities_are_read_once() -> None:
    """It takes 20 ms, and a router tries to connect every second while the store is away."""
    assert StoreTls().context() is StoreTls().context()


def test_a_password_always_makes_the_same_certificate_and_no_other_does() -> None:
    first = certificate_of(PASSWORD)
    certificate_of.cache_clear()
    again, other = certificate_of(PASSWORD), certificate_of(PASSWORD + "x")
    assert again is not first
    assert (again.certificate, again.key) == (first.certificate, first.key)
    assert other.certificate != first.certificate
    assert "PRIVATE" not in repr(first)
