"""A server on a free port for the clients of benches: takes requests with bodies, one a connection,
and answers as its kind does."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from typing import Any, Self


class AnsweringServer(ABC):
    """Serves within `async with`; remembers the bodies."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(header(head, "content-length"))
        self.bodies.append(json.loads(await reader.readexactly(length)))
        try:
            await self.answer(head, self.bodies[-1], writer)
            await writer.drain()
        except ConnectionError:
            pass  # the client left
        finally:
            writer.close()

    @abstractmethod
    async def answer(self, head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Write the answer; `head` is in lower case."""


class StreamingServer(AnsweringServer):
    """Streams as many events as tokens were asked for."""

    def __init__(self, status: str = "200 OK") -> None:
        super().__init__()
        self._status = status

    async def answer(self, head: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {self._status}\r\n\r\n".encode())
        for _ in range(body["max_tokens"]):
            writer.write(b"data: {}\n\n")
            await writer.drain()
            await asyncio.sleep(0.002)
        writer.write(b"data: [DONE]\n\n")


def header(head: str, name: str) -> str:
    """The value of a header; empty if the header is absent."""
    return head.partition(f"\r\n{name}: ")[2].partition("\r\n")[0]
