"""Ports that a test gives to a server: free, and not taken by anybody in the meantime."""

from __future__ import annotations

import socket


def held_port() -> socket.socket:
    """A socket that holds a free port of 127.0.0.1. It does not listen, so a server that asks for
    SO_REUSEADDR can; others get another port. Close it when the server has ended."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder
