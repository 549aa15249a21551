"""What a reader of the registry believes, given what it read; without any store."""

from __future__ import annotations

import msgspec
import pytest
import redis

from process.store.ignored_entries import REGISTRATION, IgnoredEntries
from process.store.registry import FleetView, client_from_url
from protocol import wire
from protocol.errors import ConfigError
from protocol.registration import WorkerInfo
from tests.registration import registration


def reply(epoch: str, *workers: WorkerInfo) -> list[bytes]:
    parts = [epoch.encode()]
    for each in workers:
        parts += [each.worker_id.encode(), wire.encode_worker_info(each)]
    return parts


A, B = registration("a"), registration("b")


def test_members_follow_what_is_read() -> None:
    view = FleetView(settle_s=3.0)
    assert view.take(reply("e", A, B), 0.0)
    assert view.members == {"a": A, "b": B}
    assert not view.take(reply("e", B, A), 1.0)
    assert view.take(reply("e", B), 2.0), "a lease that ended counts at once"
    assert view.members == {"b": B}
    assert view.take(reply("e", registration("b", "2")), 3.0)
    assert view.members["b"].incarnation == "2"


def test_a_store_without_memory_proves_nobody_gone() -> None:
    view = FleetView(settle_s=3.0)
    view.take(reply("old", A, B), 0.0)
    again = registration("b", "2")
    assert view.take(reply("new", again), 10.0)
    assert view.members == {"a": A, "b": again}
    assert not view.take(reply("new", again), 12.9)
    assert view.take(reply("new", again), 13.0), "after a while absence counts again"
    assert view.members == {"b": again}


def test_leases_may_have_ended_only_because_the_store_was_away() -> None:
    view = FleetView(settle_s=3.0)
    view.take(reply("e", A), 0.0)
    view.interrupted()
    assert not view.take(reply("e"), 10.0)
    assert view.members == {"a": A}
    assert view.take(reply("e"), 13.0)
    assert view.members == {}


def test_registrations_that_cannot_be_taken_are_counted_once_each() -> None:
    ignored = IgnoredEntries()
    view = FleetView(settle_s=3.0, ignored=ignored)
    bad = msgspec.json.encode({"worker_id": "x"})
    pairs = [b"x", bad, b"y", b"\xff{", b"z", wire.encode_worker_info(A)]
    for _ in range(3):
        view.take([*reply("e", A), *pairs], 0.0)
    assert view.members == {"a": A}
    assert ignored.counts[REGISTRATION] == 3
    view.take([b"e", b"x", b"{}"], 1.0)
    assert ignored.counts[REGISTRATION] == 4


def test_urls() -> None:
    with pytest.raises(ConfigError, match="redis_url"):
        client_from_url(redis.Redis, "redis://:word@host:port", 1.0)
    with pytest.raises(ConfigError) as error:
        client_from_url(redis.Redis, "ftp://:word@host", 1.0)
    assert "word" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:pa/word@h",
        "redis://user:12/word@h",
        "redis://user:12?word@h",
        "redis://:pa#word@h",
        "redis://:[word@h",
        "redis://:word\u2100@h",
        "redis://:word@h:port",
        "redis://h/0?db=word",
        "redis://h/0?passwort=word",
        "unix://:pa/word@/tmp/socket",
        "unix:///tmp/socket?passwort=word",
        "http://:word@h",
    ],
)
@pytest.mark.parametrize("kind", [redis.Redis, redis.asyncio.Redis])
def test_an_error_shows_nothing_of_a_malformed_url(url: str, kind: type) -> None:
    with pytest.raises(ConfigError, match="redis_url") as error:
        client_from_url(kind, url, 1.0)
    assert "word" not in str(error.value).replace("password", "")
