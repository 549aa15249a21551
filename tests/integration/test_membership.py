"""Leases of workers in a real Valkey: they live, end, lapse and outlive what others write."""

from __future__ import annotations

import logging
import time

import msgspec
import pytest
import redis

from cli.main import main as baton
from process.store.drain_requests import request_drain, request_resume
from process.store.embedded_valkey import EmbeddedValkey
from process.store.fleet_watcher import read_fleet
from process.store.registry import Registry
from process.store.worker_lease import WorkerLease
from protocol.errors import ServiceError
from protocol.registration import WorkerInfo, WorkerState
from tests.effort import some
from tests.garbage import GARBAGE, keys_of, spoil
from tests.integration.lease_holder import LONG_S, renewed
from tests.integration.watched_fleet import WAIT_S
from tests.polling import until
from tests.registration import registration


def test_a_worker_registers_renews_and_leaves(valkey, cluster, leases) -> None:
    lease_ms = int(LONG_S * 1000)
    lease = leases(registration("a"))
    assert lease.wait_registered(WAIT_S)
    assert read_fleet(valkey.url, cluster) == {"a": registration("a")}
    with redis.Redis.from_url(valkey.url) as client:
        key = Registry(cluster).worker_key("a")
        assert 0 < client.pttl(key) <= lease_ms
        shorter_ms = lease_ms // 2
        client.pexpire(key, shorter_ms)
        until(lambda: renewed(lease) and client.pttl(key) > shorter_ms)
    lease.close()
    assert read_fleet(valkey.url, cluster) == {}
    assert (lease.lapses, lease.refusal) == (0, None)


def test_a_registration_ends_by_itself_when_nobody_renews_it(valkey, cluster, leases) -> None:
    info = registration("a")
    with redis.Redis.from_url(valkey.url) as client:
        client.eval(*Registry(cluster).claim(info, LONG_S))
        assert read_fleet(valkey.url, cluster) == {"a": info}
        key = Registry(cluster).worker_key("a")
        assert 0 < client.pttl(key) <= 1000 * LONG_S
        client.pexpire(key, 1)
        until(lambda: read_fleet(valkey.url, cluster) == {})
        assert client.smembers(Registry(cluster).workers_key) == set(), "and no id is left over"


def test_a_new_state_is_announced(valkey, cluster, leases) -> None:
    lease = leases(registration("a"))
    assert lease.wait_registered(WAIT_S)
    lease.update(WorkerState.DRAINING)
    draining = msgspec.structs.replace(registration("a"), state=WorkerState.DRAINING)
    until(lambda: read_fleet(valkey.url, cluster) == {"a": draining})


def test_the_phases_of_a_start_are_announced_once_it_is_over(valkey, cluster) -> None:
    lease = WorkerLease(valkey.url, cluster, registration("a"), LONG_S)
    told: list[dict[str, WorkerInfo]] = []

    def on_registered() -> None:
        told.append(dict(read_fleet(valkey.url, cluster)))
        lease.note_start({"weights": 8000, "registration": 20})

    lease.start(on_registered)
    try:
        until(lambda: told)
        assert told == [{"a": registration("a")}], "registered by then"
        started = msgspec.structs.replace(
            registration("a"), start_ms={"weights": 8000, "registration": 20}
        )
        until(lambda: read_fleet(valkey.url, cluster) == {"a": started})
    finally:
        lease.close()
    assert len(told) == 1


def test_after_a_lapse_a_worker_comes_back_as_another_and_not_by_itself(
    valkey, cluster, leases, caplog
) -> None:
    lease = leases(registration("a"))
    assert lease.wait_registered(WAIT_S)
    assert time.monotonic() < lease.holds_until() <= time.monotonic() + LONG_S
    with redis.Redis.from_url(valkey.url) as client:
        client.delete(Registry(cluster).worker_key("a"))
    until(lambda: renewed(lease) and lease.has_lapsed)
    held_until = lease.holds_until()
    assert read_fleet(valkey.url, cluster) == {}
    assert lease.holds_until() == held_until, "nothing is renewed meanwhile"
    lease.register_again("life-2")
    until(lambda: read_fleet(valkey.url, cluster) == {"a": registration("a", "life-2")})
    assert (lease.lapses, lease.has_lapsed, lease.refusal) == (1, False, None)
    assert "the lease of a ended early: the store's clock was set forward" in caplog.text


def test_a_worker_that_comes_back_at_once_has_lapsed_once(valkey, cluster, leases) -> None:
    """The owner's thread may see that it lapsed before the lease's thread has said so."""
    lease = leases(registration("a"))
    assert lease.wait_registered(WAIT_S)

    class Hasty(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if lease.has_lapsed:
                lease.register_again(f"life-{lease.lapses + 1}")

    handler = Hasty()
    log = logging.getLogger("process.store.worker_lease")
    log.addHandler(handler)
    try:
        with redis.Redis.from_url(valkey.url) as client:
            client.delete(Registry(cluster).worker_key("a"))
        until(lambda: renewed(lease) and read_fleet(valkey.url, cluster))
    finally:
        log.removeHandler(handler)
    assert read_fleet(valkey.url, cluster) == {"a": registration("a", "life-2")}


def test_a_request_to_drain_reaches_the_incarnation_that_it_was_meant_for(
    valkey, cluster, leases
) -> None:
    flags = ["--redis-url", valkey.url, f"--cluster={cluster}", "--wait-s", "0"]
    assert baton(["drain", *flags, "a"]) == 1, "no such worker"
    former = leases(registration("a"))
    assert former.wait_registered(WAIT_S)
    assert baton(["drain", "a", *flags]) == 0
    until(lambda: renewed(former) and former.is_asked_to_drain)
    former.close()
    successor = leases(registration("a", "life-2"))
    assert successor.wait_registered(WAIT_S)
    assert not successor.is_asked_to_drain


def test_a_request_to_drain_can_be_taken_back(valkey, cluster, leases) -> None:
    assert request_resume(valkey.url, cluster, "a") is None
    lease = leases(registration("a"))
    assert lease.wait_registered(WAIT_S)
    request_drain(valkey.url, cluster, "a")
    until(lambda: renewed(lease) and lease.is_asked_to_drain)
    assert request_resume(valkey.url, cluster, "a") == registration("a")
    until(lambda: renewed(lease) and not lease.is_asked_to_drain)


def test_whether_another_worker_is_alive(valkey, cluster, leases) -> None:
    lease = leases(registration("a"))
    assert lease.wait_registered(WAIT_S)
    other = leases(registration("b", "life-7"))
    until(lambda: renewed(lease) and lease.is_alive("b", "life-7"))
    assert not lease.is_alive("b", "life-6")
    other.close()
    until(lambda: renewed(lease) and not lease.is_alive("b", "life-7"))


def test_clusters_do_not_see_each_other(valkey, cluster, leases) -> None:
    assert leases(registration("a")).wait_registered(WAIT_S)
    assert read_fleet(valkey.url, cluster + "x") == {}


def test_nobody_answers() -> None:
    with EmbeddedValkey() as gone:
        url = gone.url
    with pytest.raises(ServiceError, match=r"cannot read the fleet from redis://127\.0\.0\.1:\d+:"):
        read_fleet(url, "default", 1.0)
    lease = WorkerLease(url, "default", registration("a"), LONG_S)
    lease.start()
    assert not lease.wait_registered(0.3)
    assert lease.is_alive("b", "any"), "nothing shows that somebody is gone"
    lease.close()


@pytest.mark.parametrize("first", some(range(len(GARBAGE)), 4))
def test_a_worker_stays_in_the_fleet_whatever_the_store_holds(
    valkey, cluster, leases, first: int
) -> None:
    lease = leases(registration("a"))
    with redis.Redis.from_url(valkey.url) as client:
        spoil(client, keys_of(cluster, ["a"], []), first)
    until(lambda: renewed(lease) and "a" in read_fleet(valkey.url, cluster))
    assert (lease.refusal, lease.has_lapsed, lease.is_asked_to_drain) == (None, False, False)


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_registration_that_is_overwritten_is_restored(valkey, cluster, leases, kind: str) -> None:
    lease = leases(registration("a"))
    assert lease.wait_registered(WAIT_S)
    with redis.Redis.from_url(valkey.url) as client:
        spoil(client, [Registry(cluster).worker_key("a")], list(GARBAGE).index(kind))
    until(lambda: renewed(lease) and "a" in read_fleet(valkey.url, cluster))
    assert (lease.refusal, lease.has_lapsed) == (None, False)
