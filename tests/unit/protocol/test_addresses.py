"""No part of a password is ever shown, wherever in an address it stands."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.addresses import (
    MALFORMED,
    parsed_address,
    shown_address,
    with_addresses_shown,
)
from tests.effort import times

SECRET = "S3CRET"
PLACES = (
    "{scheme}://:{password}@h:1/0",
    "{scheme}://user:{password}@h:1/0",
    "{scheme}://{password}:x@h:1/0",
    "{scheme}://{password}@h",
    "{scheme}://h:1/0?password={password}",
    "{scheme}://h?db=0&password={password}#x",
    "{scheme}://h:1/0#{password}",
    "{scheme}://u:{password}@[::1]:1/0",
    "{scheme}://u:{password}@[h]:1",
    "{scheme}://u:{password}@h:port",
    "{scheme}://u:{password}@h:1:2",
    "unix://u:{password}@/tmp/socket",
    "unix:///tmp/socket?password={password}",
)


@settings(max_examples=times(200, 5000), deadline=None)
@given(
    st.sampled_from(PLACES),
    st.sampled_from(["redis", "rediss", "unix", "http", "https"]),
    st.text("/?#@:[]%&=;\\ aA1\u2100", max_size=6),
    st.text("/?#@:[]%&=;\\ aA1\u2100", max_size=6),
)
def test_no_password_is_shown(place: str, scheme: str, before: str, after: str) -> None:
    address = place.format(scheme=scheme, password=f"{before}{SECRET}{after}")
    assert SECRET not in shown_address(address)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("redis://:a/b@h", MALFORMED),
        ("redis://user:12/b@h", MALFORMED),
        ("redis://user:12?b@h", MALFORMED),
        ("redis://pass?word@h", MALFORMED),
        ("redis://:pa\u2100ss@h", MALFORMED),
        ("redis://:[x@h", MALFORMED),
        ("redis://host:port", MALFORMED),
        ("redis://:word@", MALFORMED),
        ("word", MALFORMED),
        ("redis://user:pa:ss@host:1/2", "redis://host:1/2"),
        ("redis://h?password=word", "redis://h"),
        ("unix:///tmp/s?password=word", "unix:///tmp/s"),
        ("http://u:w@[::1]:4318/v1/traces?key=word#x", "http://[::1]:4318/v1/traces"),
        ("redis://host:1", "redis://host:1"),
    ],
)
def test_what_is_shown(address: str, shown: str) -> None:
    assert shown_address(address) == shown
    assert (parsed_address(address) is None) == (shown == MALFORMED)


def test_addresses_in_errors_of_others_are_shown_in_the_same_way() -> None:
    text = "cannot GET 'https://me:word@hub/api?token=word', (http://hub/x): try http://a/b."
    shown = "cannot GET 'https://hub/api', (http://hub/x): try http://a/b."
    assert with_addresses_shown(text) == shown
