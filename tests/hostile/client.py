"""A client of `tests.hostile`: sends bytes, reads the answer to its end, and judges it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from dataclasses import dataclass, field

from tests.hostile.sizes import BodyAttack, Sizes, base_of

PATIENCE_S = 180.0
_KEPT_BYTES = 16_384
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_RETRY_AFTER = re.compile(rb"\r\nretry-after: \d+\r\n", re.IGNORECASE)


@dataclass
class Answers:
    """The answers to one attack: how often each status came, and what was wrong. `num_cut` are
    requests beyond every limit whose connection was cut without an answer."""

    statuses: dict[int, int] = field(default_factory=dict)
    num_bytes: int = 0
    num_cut: int = 0
    faults: list[str] = field(default_factory=list)

    def take(self, head: bytes, num_bytes: int, may_be_cut: bool = False) -> None:
        """Judge one answer by its first bytes."""
        self.num_bytes += num_bytes
        matched = _STATUS.match(head)
        if not head and may_be_cut:
            self.num_cut += 1
            return
        if matched is None:
            self.faults.append(f"no answer: {head[:80]!r}")
            return
        status = int(matched[1])
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if status in (429, 503) and not _RETRY_AFTER.search(head):
            self.faults.append(f"{status} without Retry-After")
        elif status >= 500 and status != 503:
            self.faults.append(head.decode("latin-1")[:300])


def request_of(path: str, body: bytes, headers: tuple[tuple[str, str], ...] = ()) -> bytes:
    """A POST whose answer ends with the connection."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{lines}"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def body_of(attack: BodyAttack, sizes: Sizes) -> bytes:
    """The attack's body, cut at the largest size that is read."""
    made = attack.make(sizes)
    if isinstance(made, bytes):
        return made
    text = json.dumps(made, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


class HostileClient:
    """Opens connections to one router; `answers` collects what came back."""

    def __init__(self, host: str, port: int, sizes: Sizes) -> None:
        self.sizes = sizes
        self.answers = Answers()
        self._target = (host, port)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A new connection, which the caller closes."""
        return await asyncio.open_connection(*self._target)

    async def send(self, *pieces: bytes, reads: bool = True, may_be_cut: bool = False) -> None:
        """Send one request in pieces, and read its answer to the end. Without `reads`, the client
        leaves as soon as the answer has begun. The answer is read while the request is still sent:
        a refusal may come early, and the router does not wait for the rest of the body for ever. A
        request that goes on beyond a limit `may_be_cut`: what it sends after the answer resets the
        connection."""
        reader, writer = await self.connect()
        reading = asyncio.ensure_future(self._read(reader, reads, may_be_cut))
        try:
            async with asyncio.timeout(PATIENCE_S):
                with contextlib.suppress(ConnectionError):
                    for piece in pieces:
                        writer.write(piece)
                        await writer.drain()
                await reading
        except TimeoutError:
            self.answers.faults.append(f"not answered within {PATIENCE_S:g} s")
        finally:
            reading.cancel()
            writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader, to_end: bool, may_be_cut: bool) -> None:
        head, num_bytes = b"", 0
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(1 << 18):
                num_bytes += len(part)
                if len(head) < _KEPT_BYTES:
                    head += part
                if not to_end and b"\r\n\r\n" in head:
                    break
        self.answers.take(head, num_bytes, may_be_cut)

    async def attack(self, attack: BodyAttack) -> None:
        """Send an attack's body once."""
        data = request_of(attack.path, body_of(attack, self.sizes), attack.headers)
        await self.send(data)

    def small(self, path: str, **changes: object) -> bytes:
        """The smallest valid request of an endpoint, with some fields changed."""
        return request_of(path, json.dumps(base_of(path, self.sizes) | changes).encode())
