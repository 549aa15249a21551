"""An HTTP client for tests; `httpx.get` would load all certificate authorities each time."""

from __future__ import annotations

import httpx

HTTP = httpx.Client(
    timeout=60.0,  # httpx's default of 5 s is too short on a busy machine
    verify=False,  # routers under test serve plain HTTP
    limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
)
"""Usable from every thread; each request has a connection of its own."""
