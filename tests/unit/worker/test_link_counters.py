"""Bytes by link: from ports' counters and from real sockets."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from worker.link_counters import RDMA, TCP, LinkCounters, address_of


@pytest.mark.parametrize(
    ("host", "address"),
    [("10.0.0.2", "10.0.0.2"), ("fe80::1%eth0", "fe80::1"), ("::ffff:10.0.0.9", "10.0.0.9")],
)
def test_addresses(host: str, address: str) -> None:
    assert address_of(host) == address


def test_rdma_ports_count_words(tmp_path: Path) -> None:
    counters = tmp_path / "mlx5_0" / "ports" / "1" / "counters"
    counters.mkdir(parents=True)
    (counters / "port_xmit_data").write_text("1000\n")
    links = LinkCounters(tmp_path)
    assert links.measure()[RDMA] == 0
    (counters / "port_xmit_data").write_text("1500\n")
    assert links.measure()[RDMA] == 2000
    assert RDMA not in LinkCounters(tmp_path / "none").measure()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what a socket sent")
def test_bytes_of_a_real_socket_stay_counted_after_it_closed(tmp_path: Path) -> None:
    links = LinkCounters(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        link = f"{TCP}127.0.0.1"
        before = links.measure().get(link, 0)
        sender.sendall(b"x" * 100_000)
        assert len(receiver.recv(100_000, socket.MSG_WAITALL)) == 100_000
        assert links.measure()[link] - before >= 100_000
        sender.close()
        receiver.close()
    assert links.measure()[link] - before >= 100_000


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what a socket sent")
def test_sockets_that_a_library_opened_count_and_stay_as_they_are(tmp_path: Path) -> None:
    links = LinkCounters(tmp_path)
    other, kind = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, other, kind:
        descriptor = socket.create_connection(server.getsockname()).detach()
        os.set_blocking(descriptor, False)
        receiver, _ = server.accept()
        with receiver:
            before = links.measure().get(f"{TCP}127.0.0.1", 0)
            os.write(descriptor, b"x" * 1000)
            assert links.measure()[f"{TCP}127.0.0.1"] - before == 1000
            assert not os.get_blocking(descriptor)
            os.close(descriptor)
