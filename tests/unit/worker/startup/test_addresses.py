"""What a worker checks before it loads its model: ports, hosts, addresses and the store."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from process.store.embedded_valkey import EmbeddedValkey
from process.store.first_contact import check_store
from protocol.errors import ConfigError
from tests.ports import held_port
from worker.settings import WorkerSettings
from worker.startup.addresses import advertised, advertised_address, check_ports, checked


def settings(**changes: object) -> WorkerSettings:
    known = {"model": "m", "redis_url": "redis://127.0.0.1:1", "cluster_secret": "x" * 16}
    return WorkerSettings(**(known | changes))


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("name", ["control_port", "events_port"])
def test_a_port_that_is_taken_is_found(name: str, taken_port: int) -> None:
    check_ports(settings())
    with pytest.raises(ConfigError, match=f"cannot listen on tcp://127.0.0.1:{taken_port}"):
        check_ports(settings(**{name: taken_port}))


def test_one_port_for_both_sockets_is_found() -> None:
    with held_port() as holder:
        port = holder.getsockname()[1]
        check_ports(settings(control_port=port))
        check_ports(settings(control_port=port))  # the check leaves nothing behind
        with pytest.raises(ConfigError, match="Address already in use"):
            check_ports(settings(control_port=port, events_port=port))


def test_a_host_that_is_not_ours_is_found() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on tcp://192\.0\.2\.1"):
        check_ports(settings(host="192.0.2.1"))


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("192.0.2.1", "this host has no such address"),
        ("no-host.invalid", "this is neither an interface of this host nor a name that resolves"),
    ],
)
def test_the_reason_is_in_plain_words(host: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f": {reason}[^(]*$"):
        check_ports(settings(host=host))


@pytest.mark.parametrize(
    ("changes", "address"),
    [
        ({}, "127.0.0.1"),
        ({"host": "10.0.0.2"}, "10.0.0.2"),
        ({"host": "0.0.0.0", "advertise_address": "10.1.2.3"}, "10.1.2.3"),
        ({"host": "10.0.0.2", "advertise_address": "worker-1.pods"}, "worker-1.pods"),
    ],
)
def test_the_advertised_address(changes: dict[str, str], address: str) -> None:
    assert advertised_address(settings(**changes)) == address


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "*"])
def test_a_wildcard_is_never_advertised(host: str) -> None:
    assert advertised_address(settings(host=host)) not in ("0.0.0.0", "::", "*")
    with pytest.raises(ConfigError, match="not an address that others can reach"):
        settings(advertise_address=host)


def test_the_address_is_found_once() -> None:
    """What a name server says later changes nothing."""
    found = checked(settings(host="0.0.0.0"))
    assert found.advertise_address == advertised_address(settings(host="0.0.0.0"))
    assert checked(settings(advertise_address="worker-1")).advertise_address == "worker-1"


def test_endpoints_as_others_reach_them() -> None:
    assert advertised("tcp://0.0.0.0:4100", "10.1.2.3") == "tcp://10.1.2.3:4100"
    assert advertised("tcp://[::]:4100", "[fd00::7]") == "tcp://[fd00::7]:4100"
    assert advertised("tcp://[::]:4100", "fd00::7") == "tcp://[fd00::7]:4100"


def test_a_folder_of_kernels_that_is_missing_is_found(tmp_path: Path) -> None:
    checked(settings(kernels_dir=str(tmp_path)))
    for name in ("none", "n" * 300):  # the second one is longer than any name of a file
        with pytest.raises(ConfigError, match=rf"kernels_dir .*/{name}: there is no such folder"):
            checked(settings(kernels_dir=str(tmp_path / name)))


@pytest.mark.parametrize("ports", ["9-8", "0-10", "1-65536"])
def test_ports_for_kv_blocks_are_a_range(ports: str) -> None:
    with pytest.raises(ConfigError, match="kv_ports"):
        settings(kv_ports=ports)
    assert settings(kv_ports="41000-41000").kv_ports == "41000-41000"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://127.0.0.1:6379/abc", "the database 'abc' is not a number"),
        ("redis://127.0.0.1:6379/1/2", "the database '1/2' is not a number"),
        ("redis://127.0.0.1:99999", "malformed"),
        ("redis://127.0.0.1:x", "malformed"),
        ("redis://:secret@:6379", "malformed"),
        ("rediss://host:0/1", "malformed"),
    ],
)
def test_a_store_url_that_cannot_be_meant_is_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"redis_url .*{words}") as error:
        check_store(url, "c")
    assert "secret" not in str(error.value)


def test_a_store_that_is_away_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_store("redis://127.0.0.1:1/0", "c")
    assert "cannot reach redis://127.0.0.1:1/0 yet" in caplog.text


def test_a_store_that_refuses_us_is_found() -> None:
    with EmbeddedValkey() as valkey:
        check_store(valkey.url, "c")
        with pytest.raises(ConfigError, match=r"refuses it: .*out of range"):
            check_store(f"{valkey.url}/99", "c")
        with pytest.raises(ConfigError, match="refuses it"):
            check_store(f"redis://:wrong@127.0.0.1:{valkey.port}", "c")
        with pytest.raises(ConfigError, match="refuses it"):
            check_store(f"redis://127.0.0.1:{valkey.port}", "c")
