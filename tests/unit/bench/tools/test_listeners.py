"""What counts as a socket on which a process can be reached."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import ExitStack

import pytest

from bench.tools.listeners import Listener, listeners_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def bound(stack: ExitStack, family: int, kind: int, address: object) -> socket.socket:
    made = stack.enter_context(socket.socket(family, kind))
    made.bind(address)
    return made


def test_sockets_that_others_can_reach_and_no_others() -> None:
    before = listeners_of(os.getpid())
    tcp, udp, unix = socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.AF_UNIX
    with ExitStack() as stack:
        v4 = bound(stack, socket.AF_INET, tcp, ("127.0.0.1", 0))
        v6 = bound(stack, socket.AF_INET6, tcp, ("::1", 0))
        local = bound(stack, unix, tcp, f"\0listeners-{os.getpid()}")
        for each in (v4, v6, local):
            each.listen()
        datagrams = bound(stack, socket.AF_INET, udp, ("127.0.0.2", 0))
        bound(stack, socket.AF_INET, tcp, ("127.0.0.1", 0))  # does not listen
        bound(stack, unix, tcp, f"\0silent-{os.getpid()}")
        for each in (v4, local):
            ours = stack.enter_context(socket.socket(each.family, tcp))
            ours.connect(each.getsockname())
            stack.enter_context(each.accept()[0])
        found = [each for each in listeners_of(os.getpid()) if each not in before]
        ports = [each.getsockname()[1] for each in (v4, v6, datagrams)]
    assert found == [
        Listener("TCP", "127.0.0.1", ports[0]),
        Listener("TCP", "::1", ports[1]),
        Listener("UDP", "127.0.0.2", ports[2]),
        Listener("Unix", f"@listeners-{os.getpid()}", 0),
    ]
    assert str(found[1]) == f"TCP [::1]:{ports[1]}"
    assert listeners_of(os.getpid()) == before
