"""Hosts as operators write them: what is loopback, and where brackets belong."""

from __future__ import annotations

import pytest

from process.sockets.host_names import (
    bracketed,
    is_address,
    is_loopback,
    is_wildcard,
    unbracketed,
)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "[::]", "", "*", "10.0.0.1", "fe80::1", "127.0.0.1.example", "localhost.x"],
)
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("host", "shown"), [("::1", "[::1]"), ("[::1]", "[::1]"), ("10.0.0.1", "10.0.0.1"), ("x", "x")]
)
def test_brackets(host: str, shown: str) -> None:
    assert bracketed(host) == shown


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "*"])
def test_wildcards(host: str) -> None:
    assert is_wildcard(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.0.0.1", "localhost", ""])
def test_not_wildcards(host: str) -> None:
    assert not is_wildcard(host)


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "::1", "[::1]", "fe80::1%eth0", "fe80::1%" + 56 * "x"]
)
def test_addresses(host: str) -> None:
    assert is_address(host)


@pytest.mark.parametrize("host", ["", "x", "10.0.0.1:80", "10.0.0", "fe80::1%" + 57 * "x"])
def test_no_addresses(host: str) -> None:
    """Nor is a text that is too long to be kept for the next call."""
    assert not is_address(host)


@pytest.mark.parametrize(("host", "bare"), [("[::1]", "::1"), ("::1", "::1"), ("x", "x")])
def test_without_brackets(host: str, bare: str) -> None:
    assert unbracketed(host) == bare
