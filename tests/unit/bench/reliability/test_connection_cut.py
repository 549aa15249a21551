"""Cutting a connection breaks that one, and leaves its neighbours alone."""

from __future__ import annotations

import os
import socket

import pytest

from bench.reliability.connection_cut import can_cut, connections_of, cut, listening_ports


def connected(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    client = socket.socket(family)
    client.connect((address, port))
    return client


@pytest.mark.parametrize(
    ("family", "address"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")],
    ids=["IPv4", "IPv4 by an IPv6 socket, as ZeroMQ's"],
)
def test_one_connection_breaks_and_its_neighbour_does_not(
    family: socket.AddressFamily, address: str
) -> None:
    if not can_cut():
        pytest.skip("connections cannot be cut here: that takes Linux, ss, and the right to")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port in listening_ports(os.getpid())
        first, second = (connected(family, address, port) for _ in range(2))
        ends = [server.accept()[0] for _ in range(2)]
        with first, second, ends[0], ends[1]:
            found = {each[0][1]: each for each in connections_of(os.getpid(), {port})}
            assert sorted(found) == sorted(each.getsockname()[1] for each in (first, second))
            connection = found[first.getsockname()[1]]
            assert cut(connection)
            first.settimeout(60)
            with pytest.raises(OSError, match=r"abort|reset"):
                first.recv(1)
            second.sendall(b"x")
            assert ends[1].recv(1) == b"x"
            assert not cut(connection), "it is not there any more"
