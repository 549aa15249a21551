"""Every client of the store through TLS: whom it trusts, and what its one line of error says."""

from __future__ import annotations

import asyncio
import datetime
import logging
import math
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
import redis.asyncio
import trustme

from process.store.drain_requests import request_drain
from process.store.first_contact import check_store
from process.store.fleet_watcher import FleetWatcher, read_fleet
from process.store.registry import client_from_url, expiry_of
from process.store.response_records import ResponseName, ResponseRecord, ResponseRecords
from process.store.router_board import RouterBoard
from process.store.router_leases import RouterLease
from process.store.store_tls import StoreTls
from process.store.store_url import store_url
from process.store.worker_lease import WorkerLease
from protocol.errors import ConfigError, ServiceError
from tests.registration import registration
from tests.tls_store import PASSWORD, TlsStore, context_of, tls_store
from tests.unit.gateway.http.test_tls_attacks import ATTACKS, HELLO

WAIT_S = 60.0
LIMITS_S = (0.5, 5.0, WAIT_S)
"""Limits for a client whose peer never answers. A busy machine may take longer than the first."""


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ca_file(ca: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("ca") / "ca.pem"
    ca.cert_pem.write_to_path(str(file))
    return file


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsStore]:
    """One whose certificate comes from its password."""
    with tls_store(tmp_path_factory.mktemp("s")) as running:
        yield running


@pytest.fixture(scope="module")
def own_store(ca: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsStore]:
    """One with a certificate of an authority."""
    folder = tmp_path_factory.mktemp("o")
    with tls_store(folder, context_of(folder, ca.issue_cert("127.0.0.1"))) as running:
        yield running


async def until(happened: asyncio.Event) -> None:
    await asyncio.wait_for(happened.wait(), WAIT_S)


async def test_every_client_of_a_fleet_speaks_tls(store: TlsStore) -> None:
    seen, leased = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def take(members) -> None:
        if "a" in members:
            seen.set()

    lease = WorkerLease(store.url, "fleet", registration("a"), 60.0)
    lease.start(lambda: loop.call_soon_threadsafe(leased.set))
    boards = [
        RouterBoard(store.url, "fleet", lambda: b"mine", lambda peers: None, lambda asked: b"yes")
        for _ in range(2)
    ]
    router = RouterLease(store.url, "fleet", "router")
    records = ResponseRecords(store.url, "fleet", 1 << 24, time.monotonic)
    running = [
        asyncio.create_task(each.run())
        for each in (FleetWatcher(store.url, "fleet", take), router, *boards)
    ]
    try:
        await until(leased)
        await until(seen)
        kept = ResponseRecord("completed", False, b"a" * 300_000, b"i" * 300_000)
        await records.put(ResponseName("owner", "id"), kept)
        assert await records.read(ResponseName("owner", "id")) == kept
        answer = None
        async with asyncio.timeout(WAIT_S):
            while answer is None:
                await asyncio.sleep(0.02)
                answer = await boards[0].ask(b"?", 1.0)
        assert answer == b"yes"
        found = await asyncio.to_thread(request_drain, store.url, "fleet", "a")
        assert found == registration("a")
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await records.close()
        await asyncio.to_thread(lease.close)
    assert read_fleet(store.url, "fleet") == {}


async def test_pods_with_and_without_tls_are_one_fleet(store: TlsStore) -> None:
    """As during an upgrade from a release without TLS."""
    fleets: dict[str, set[str]] = {}
    changed = asyncio.Event()

    def watcher(url: str) -> FleetWatcher:
        def take(members) -> None:
            fleets[url] = set(members)
            changed.set()

        return FleetWatcher(url, "both", take)

    urls = (store.plain_url, store.url)
    leases = [
        WorkerLease(url, "both", registration(name), 60.0)
        for url, name in zip(urls, ("former", "new"), strict=True)
    ]
    watching = [asyncio.create_task(watcher(url).run()) for url in urls]

    async def assert_all_see(*names: str) -> None:
        """Now, or within a time."""
        async with asyncio.timeout(WAIT_S):
            while fleets != {url: set(names) for url in urls}:
                changed.clear()
                await changed.wait()

    try:
        for lease in leases:
            lease.start()
        await assert_all_see("former", "new")
        await asyncio.to_thread(leases[0].close)
        await assert_all_see("new")
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        for lease in leases:
            await asyncio.to_thread(lease.close)


async def test_a_stranger_that_stays_silent_is_closed(
    store: TlsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("process.store.front._FIRST_BYTES_S", 0.05)
    tls = StoreTls(password=PASSWORD)
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", store.tls_port, ssl=tls.context(), server_hostname=tls.server_name("h")
    )
    assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
    writer.close()


async def test_strangers_at_the_tls_port_reach_nothing_and_keep_nobody_out(store: TlsStore) -> None:
    """What is no handshake is cut off; handshakes that are held open cost members nothing."""
    held = []
    for number in range(40):
        _, writer = await asyncio.open_connection("127.0.0.1", store.tls_port)
        writer.write((b"", HELLO[:100], HELLO[: number + 1], HELLO)[number % 4])
        held.append(writer)
    async with client_from_url(redis.asyncio.Redis, store.url, WAIT_S) as member:
        for attack in (*ATTACKS.values(), b"*1\r\n$4\r\nPING\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", store.tls_port)
            writer.write(attack)
            writer.write_eof()
            answer = b""
            with suppress(ConnectionError):
                answer = await asyncio.wait_for(reader.read(), WAIT_S)
            assert answer[:1] not in (b"+", b"-"), "Valkey does not see it"
            writer.transport.abort()
            assert await member.ping()
        for writer in held:
            writer.transport.abort()
        assert int((await member.info("clients"))["connected_clients"]) < len(held)


def url_with(url: str, **parameters: object) -> str:
    return url + "?" + "&".join(f"{name}={value}" for name, value in parameters.items())


async def failures(url: str, timeout_s: float = WAIT_S) -> set[str]:
    """What a synchronous and an asynchronous client say."""
    said = set()
    with client_from_url(redis.Redis, url, timeout_s) as client:
        with pytest.raises(redis.RedisError) as failed:
            await asyncio.to_thread(client.ping)
        said.add(str(failed.value))
    async with client_from_url(redis.asyncio.Redis, url, timeout_s) as client:
        with pytest.raises(redis.RedisError) as failed:
            await client.ping()
        said.add(str(failed.value))
    for text in said:
        assert PASSWORD not in text
        assert "\n" not in text
    return said


def first_line(url: str) -> str:
    """What a router or worker with this URL ends with."""
    with pytest.raises(ConfigError) as failed:
        check_store(url, "default")
    assert PASSWORD not in str(failed.value)
    return str(failed.value)


async def test_another_password_makes_another_certificate(store: TlsStore) -> None:
    url = store.url.replace(PASSWORD, "some-other-password")
    (said,) = await failures(url)
    assert "its certificate does not come from the password in redis_url" in said
    shown = f"redis_url rediss://127.0.0.1:{store.tls_port}: its certificate does not come"
    assert first_line(url).startswith(shown)


async def test_an_authority_that_is_named_is_the_only_one(
    own_store: TlsStore, ca_file: Path, tmp_path: Path
) -> None:
    named = url_with(own_store.tls_url, ssl_ca_certs=ca_file)
    assert read_fleet(named, "default") == {}
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    (said,) = await failures(url_with(own_store.tls_url, ssl_ca_certs=other))
    assert said.startswith(f"no authority in {other} vouches for its certificate")
    (said,) = await failures(own_store.tls_url)
    assert "name its CA by redis_ca_file, or give ?trust=password" in said
    (said,) = await failures(own_store.url)
    assert "does not come from the password" in said
    for tls in (StoreTls(password=PASSWORD), StoreTls(ssl_ca_certs=str(ca_file))):
        assert len(tls.context().get_ca_certs()) == 1


async def test_a_certificate_is_of_the_name_in_the_url(own_store: TlsStore, ca_file: Path) -> None:
    url = url_with(own_store.tls_url.replace("127.0.0.1", "localhost"), ssl_ca_certs=ca_file)
    (said,) = await failures(url)
    assert "not valid for 'localhost': use a name of its certificate in redis_url" in said
    assert first_line(url).endswith("use a name of its certificate in redis_url")


def dates(days: float) -> dict[str, datetime.datetime]:
    """Of a certificate that ends after so many days, and began a year before."""
    ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    return {"not_before": ends - datetime.timedelta(days=365), "not_after": ends}


async def test_an_expired_certificate_is_refused_and_one_that_expires_soon_is_named(
    ca: trustme.CA, ca_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = context_of(tmp_path, ca.issue_cert("127.0.0.1", **dates(3.2)))
    with tls_store(tmp_path, context) as store:
        url = url_with(store.tls_url, ssl_ca_certs=ca_file)
        watcher = FleetWatcher(url, "default", lambda members: None)
        assert math.isnan(watcher.certificate_end)
        watching = asyncio.create_task(watcher.run())
        async with asyncio.timeout(WAIT_S):
            while watcher.notice is None:
                await asyncio.sleep(0.01)
        assert watcher.certificate_end == pytest.approx(time.time() + 3.2 * 86400, abs=120)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        caplog.clear()
        async with client_from_url(redis.asyncio.Redis, url, WAIT_S) as client:
            await client.ping()
            assert "expires in 3 days (" in (expiry_of(client).warning(time.time()) or "")
        with caplog.at_level(logging.WARNING):
            assert read_fleet(url, "default") == {}
        (line,) = caplog.messages
        where = f"the certificate of rediss://127.0.0.1:{store.tls_port} expires in 3 days ("
        assert line.startswith(where)
        ca.issue_cert("127.0.0.1", **dates(-1)).configure_cert(context)
        (said,) = await failures(url)
        assert said == "its certificate has expired: renew it at the store"
        with pytest.raises(ServiceError, match="has expired: renew it"):
            read_fleet(url, "default")
        assert "its certificate has expired" in first_line(url)


async def test_a_running_client_takes_an_authority_that_was_replaced(
    ca: trustme.CA, tmp_path: Path
) -> None:
    trusted = tmp_path / "trusted.pem"
    ca.cert_pem.write_to_path(str(trusted))
    context = context_of(tmp_path, ca.issue_cert("127.0.0.1"))
    with tls_store(tmp_path, context) as store:
        url = url_with(store.tls_url, ssl_ca_certs=trusted)
        sync = client_from_url(redis.Redis, url, WAIT_S)
        async with client_from_url(redis.asyncio.Redis, url, WAIT_S) as client:
            await client.ping()
            await asyncio.to_thread(sync.ping)
            successor = trustme.CA()
            successor.issue_cert("127.0.0.1").configure_cert(context)
            assert await client.ping(), "open connections go on"
            successor.cert_pem.write_to_path(str(trusted))
            await client.connection_pool.disconnect()
            sync.connection_pool.disconnect()
            assert await client.ping()
            assert await asyncio.to_thread(sync.ping)
        sync.close()


async def test_a_store_may_ask_for_a_certificate_of_its_clients(
    ca: trustme.CA, ca_file: Path, tmp_path: Path
) -> None:
    context = context_of(tmp_path, ca.issue_cert("127.0.0.1"))
    context.verify_mode = ssl.CERT_REQUIRED
    ca.configure_trust(context)
    own = tmp_path / "own.pem"
    ca.issue_cert("router").private_key_and_cert_chain_pem.write_to_path(str(own))
    with tls_store(tmp_path, context) as store:
        files = {"ssl_ca_certs": ca_file, "ssl_certfile": own}
        assert read_fleet(url_with(store.tls_url, **files), "default") == {}
        with pytest.raises(ServiceError, match=r"of its clients.*set redis_cert_file"):
            read_fleet(url_with(store.tls_url, ssl_ca_certs=ca_file), "default")


async def test_a_port_without_tls_and_one_with_it_are_told_apart(
    store: TlsStore, caplog: pytest.LogCaptureFixture
) -> None:
    mistaken = f"rediss://:{PASSWORD}@127.0.0.1:{store.plain_port}?trust=password"
    told = ("TLS at this port", "does this port speak TLS?")
    for limit_s in LIMITS_S:
        said = await failures(mistaken, limit_s)
        if all(any(each in line for each in told) for line in said):
            break
    else:
        pytest.fail(f"neither of {told} is in each of {said}")
    mistaken = f"redis://:{PASSWORD}@127.0.0.1:{store.tls_port}"
    with pytest.raises(ServiceError, match="if it speaks TLS at this port, give rediss://"):
        read_fleet(mistaken, "default")
    check_store(mistaken, "default")
    assert "if it speaks TLS at this port, give rediss://" in caplog.text
    assert read_fleet(store.plain_url, "default") == {}


@dataclass(frozen=True)
class Named:
    """Settings that name a store."""

    redis_url: str | None
    redis_ca_file: str | None = None
    redis_cert_file: str | None = None
    redis_key_file: str | None = None


async def test_settings_name_the_files(own_store: TlsStore, ca_file: Path, tmp_path: Path) -> None:
    """A folder's name may have characters that a URL escapes."""
    folder = tmp_path / "a b&c=%41"
    folder.mkdir()
    copied = folder / "ca.pem"
    copied.write_bytes(ca_file.read_bytes())
    url = store_url(Named(own_store.tls_url, redis_ca_file=str(copied)))
    assert store_url(Named(url, redis_ca_file=str(copied))) == url
    assert read_fleet(url, "default") == {}
    assert store_url(Named("redis://h")) == "redis://h"
    for named in (None, "redis://h"):
        with pytest.raises(ConfigError, match=r"redis_ca_file: .*only rediss:// has TLS"):
            store_url(Named(named, redis_ca_file="/ca.pem"))
