"""A streamed completion as received: pieces of bytes, and when each was read.

For clients that share a small machine with the server they measure: while streams run, a piece
costs a read and a list entry; events are parsed after the stream has ended.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from protocol.errors import BatonError

DEADLINE_S = 600.0
"""For a whole answer: far longer than any measured server takes."""

_EVENT = b"data: {"
_DONE = b"data: [DONE]"
_NAME_LENGTH = len(b"data: ")


@dataclass
class RawStream:
    """One answer; `times` and `sent_at` are of `time.perf_counter`."""

    pieces: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    sent_at: float = 0.0

    def events(self) -> Iterator[tuple[float, bytes]]:
        """The arrival time of each event's last byte, and its JSON.

        Raises BatonError if the completion was refused or broke off.
        """
        whole = b"".join(self.pieces)
        status, _, _ = whole.partition(b"\r\n")
        if b" 200 " not in status:
            raise BatonError(f"{status.decode()}: {whole.decode(errors='replace')[-300:]}")
        ends = list(itertools.accumulate(map(len, self.pieces)))
        at = 0
        for line in whole.splitlines(keepends=True):
            at += len(line)
            if line.startswith(_EVENT):
                yield self.times[bisect.bisect_left(ends, at)], line[_NAME_LENGTH:]
            elif line.startswith(_DONE):
                return
        raise BatonError("a stream broke off")


class _Reader(asyncio.Protocol):
    def __init__(self, request: bytes) -> None:
        self._request = request
        self.stream = RawStream(sent_at=time.perf_counter())
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.stream.times.append(time.perf_counter())
        self.stream.pieces.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def completion(host: str, port: int, body: bytes, path: str = "/v1/completions") -> RawStream:
    """The whole answer to a completion, on its own connection.

    Raises BatonError if the answer is not complete after `DEADLINE_S`.
    """
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    transport, reader = await loop.create_connection(
        lambda: _Reader(head.encode() + body), host, port
    )
    try:
        await asyncio.wait_for(reader.ended, DEADLINE_S)
    except TimeoutError:
        raise BatonError(f"an answer had not ended after {DEADLINE_S:g} s") from None
    finally:
        transport.close()
    return reader.stream
