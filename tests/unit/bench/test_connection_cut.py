"""Cutting a connection breaks that one, and leaves its neighbours alone."""

from __future__ import annotations

import os
import socket

import pytest

from bench.connection_cut import can_cut, connections_of, cut, listening_ports


def test_one_connection_breaks_and_its_neighbour_does_not():
    if not can_cut():
        pytest.skip("connections cannot be cut here: that takes Linux, ss, and the right to")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port in listening_ports(os.getpid())
        first, second = (socket.create_connection(server.getsockname()) for _ in range(2))
        ends = [server.accept()[0] for _ in range(2)]
        with first, second, ends[0], ends[1]:
            found = connections_of(os.getpid(), {port})
            assert sorted(each[0] for each in found) == sorted(
                [first.getsockname(), second.getsockname()]
            )
            connection = (first.getsockname(), first.getpeername())
            assert cut(connection)
            first.settimeout(5)
            with pytest.raises(OSError, match=r"abort|reset"):
                first.recv(1)
            second.sendall(b"x")
            assert ends[1].recv(1) == b"x"
            assert not cut(connection), "it is not there any more"
