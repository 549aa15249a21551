"""Bytes by link: from a listing of `ss`, from ports' counters, from a real socket."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from worker.link_counters import RDMA, TCP, LinkCounters, address_of, sent_by_socket

LISTING = """\
ESTAB 0      0   10.0.0.1:41463  10.0.0.2:59251 users:(("python",pid=118,fd=23))
\t bbr wscale:10,10 rto:208 bytes_sent:1900 bytes_acked:191 bytes_received:9 segs_out:8
ESTAB 0      0   10.0.0.1:41464  10.0.0.3:59251 users:(("python",pid=1180,fd=23))
\t bbr wscale:10,10 rto:208 bytes_sent:77 bytes_acked:191
ESTAB 0      0   [::ffff:10.0.0.1]:5  [fe80::1%eth0]:7 users:(("python",pid=118,fd=4))
\t cubic bytes_acked:191
ESTAB 0      0   10.0.0.1:1  10.0.0.2:2
"""


def test_sockets_of_one_process() -> None:
    assert sent_by_socket(LISTING, 118) == {("10.0.0.1:41463", "10.0.0.2:59251"): 1900}
    assert sent_by_socket("", 118) == {}
    assert sent_by_socket("\t bytes_sent:5\nnonsense", 118) == {}


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("10.0.0.2:59251", "10.0.0.2"),
        ("[fe80::1%eth0]:7", "fe80::1"),
        ("[::ffff:10.0.0.9]:7", "10.0.0.9"),
    ],
)
def test_addresses(endpoint: str, address: str) -> None:
    assert address_of(endpoint) == address


def test_rdma_ports_count_words(tmp_path: Path) -> None:
    counters = tmp_path / "mlx5_0" / "ports" / "1" / "counters"
    counters.mkdir(parents=True)
    (counters / "port_xmit_data").write_text("1000\n")
    links = LinkCounters(os.getpid(), tmp_path)
    assert links.measure()[RDMA] == 0
    (counters / "port_xmit_data").write_text("1500\n")
    assert links.measure()[RDMA] == 2000
    assert RDMA not in LinkCounters(os.getpid(), tmp_path / "none").measure()


@pytest.mark.skipif(shutil.which("ss") is None, reason="ss is not installed")
def test_bytes_of_a_real_socket_stay_counted_after_it_closed(tmp_path: Path) -> None:
    links = LinkCounters(os.getpid(), tmp_path)
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
