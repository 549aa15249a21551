"""What a flood of one key does to another key's requests: memory, places, text work.

    python -m tests.hostile.neighbours [--only PATTERN] [--seconds 6]

Each flood goes on for some seconds through a real router with keys, mock workers behind it. All
the time a neighbour with another key asks for a completion of a text that a thread has to encode,
counts tokens, and asks for `/live`. A neighbour that is refused, or waits for more than
`MAX_WAIT_S`, shows that the flood does harm. So does a refusal of the flood without `Retry-After`.
Prints a line for each flood that did harm. If something else runs on the machine at the start, the
times without a core are subtracted, and the verdict is a provisional one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from bench.router.mock_fleet import RouterFleet, RouterFleetConfig
from bench.tools.paths import DEMO_MODEL
from protocol.messages import Role
from tests.hostile.client import body_of
from tests.hostile.core_waits import core_waits, is_busy, longest_wait_s
from tests.hostile.sizes import FULL, BodyAttack, Sizes, base_of

FLOOD, NEIGHBOUR, ADMIN = (f"baton-{letter * 40}" for letter in "fna")
MAX_WAIT_S = 1.0
_PATIENCE_S = 60.0
_HELLO = "Any object can be tested for truth value. "


@dataclass
class Flood:
    """A flood of one key; `statuses` are those of its own answers."""

    port: int
    sizes: Sizes
    ends_at: float
    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    async def post(self, path: str, body: bytes) -> None:
        """Send one request and read its answer."""
        status, head = await ask(self.port, FLOOD, path, body)
        self.statuses[status] += 1
        if status in (429, 503) and b"retry-after: " not in head:
            self.faults.append(f"{status} without Retry-After")
        if status in (429, 503):
            await asyncio.sleep(0.05)

    async def keep_posting(self, path: str, body: bytes, at_once: int) -> None:
        """Send the same request again and again."""

        async def one() -> None:
            while time.monotonic() < self.ends_at:
                with contextlib.suppress(ConnectionError, TimeoutError):
                    await self.post(path, body)

        await asyncio.gather(*(one() for _ in range(at_once)))

    async def stall(self, path: str, declared: int, sent: int, at_once: int) -> None:
        """Send bodies that stall, and hold them."""
        writers = []
        for _ in range(at_once):
            with contextlib.suppress(ConnectionError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(head_of(path, FLOOD, declared) + b" " * sent)
                writers.append(writer)
        await asyncio.sleep(max(0.0, self.ends_at - time.monotonic()))
        for writer in writers:
            writer.transport.abort()


Attack = Callable[[Flood], Awaitable[None]]


def head_of(path: str, key: str, num_bytes: int) -> bytes:
    """The head of a POST whose connection closes after its answer."""
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
        f"connection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {num_bytes}\r\n\r\n"
    ).encode()


async def ask(port: int, key: str, path: str, body: bytes) -> tuple[int, bytes]:
    """One POST; the status and the head of its answer, which is read to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                writer.write(head_of(path, key, len(body)) + body)
                await writer.drain()
            answer = await reader.read(4096)
            while await reader.read(1 << 18):
                pass
    finally:
        writer.transport.abort()
    if not answer:
        raise ConnectionError
    return int(answer[9:12]), answer.partition(b"\r\n\r\n")[0].lower()


def posts(path: str, at_once: int, **fields: Callable[[Sizes], Any]) -> Attack:
    """A flood of one request whose fields have these values."""

    async def run(flood: Flood) -> None:
        changed = {name: make(flood.sizes) for name, make in fields.items()}
        attack = BodyAttack("", path, lambda sizes: base_of(path, sizes) | changed)
        await flood.keep_posting(path, body_of(attack, flood.sizes), at_once)

    return run


def stalls(path: str, at_once: int, share: float) -> Attack:
    """Bodies that stall when this share of the largest size has come."""

    async def run(flood: Flood) -> None:
        size = flood.sizes.body_bytes
        await flood.stall(path, size, round(share * size), at_once)

    return run


def _text(sizes: Sizes) -> str:
    return (_HELLO * (sizes.text_chars // len(_HELLO) + 1))[: sizes.text_chars]


def _messages(sizes: Sizes) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[at % 2], "content": _HELLO} for at in range(sizes.items)]


async def _nothing(flood: Flood) -> None:
    """No flood: the neighbour's waits when it is alone, for comparison."""


FLOODS: dict[str, Attack] = {
    "nothing": _nothing,
    "stalled bodies": stalls("/v1/completions", 40, 0.9),
    "stalled bodies of /tokenize": stalls("/tokenize", 40, 0.9),
    "stalled bodies of one byte less": stalls("/v1/messages", 1200, 0.0),
    "texts to tokenize": posts("/tokenize", 60, prompt=_text),
    "names of tokens": posts("/tokenize", 20, prompt=_text, return_token_strs=lambda _: True),
    "token ids to decode": posts(
        "/detokenize", 20, tokens=lambda sizes: [5] * (sizes.token_ids - 1)
    ),
    "conversations to count": posts("/v1/messages/count_tokens", 40, messages=_messages),
    "conversations to truncate": posts(
        "/v1/responses",
        20,
        truncation=lambda _: "auto",
        input=lambda sizes: [
            {**each, "content": _HELLO * max(1, 4 * sizes.text_chars // sizes.items // len(_HELLO))}
            for each in _messages(sizes)
        ],
    ),
    "inputs to count": posts("/v1/responses/input_tokens", 40, input=_text),
    "bodies that are no JSON": posts("/v1/completions", 40, prompt=lambda s: "\\" * s.text_chars),
    "patterns to compile": posts(
        "/v1/completions", 40, structured_outputs=lambda _: {"regex": "((a|b|cd)*e){2,200}"}
    ),
    "completions": posts("/v1/completions", 100, prompt=_text),
}


@dataclass
class Seen:
    """What the neighbour saw: the longest waits in seconds, and answers other than 200."""

    waits: dict[str, float] = field(default_factory=lambda: {"completion": 0.0, "count": 0.0})
    live_s: float = 0.0
    num_answers: int = 0
    refused: Counter[int] = field(default_factory=Counter)


@contextlib.contextmanager
def timed(router_pid: int | None) -> Iterator[Callable[[], float]]:
    """Times a wait, without the times for which there was no core if `router_pid` is given."""
    pids = () if router_pid is None else (router_pid, os.getpid())
    began, before = time.monotonic(), core_waits(*pids)
    yield lambda: time.monotonic() - began - longest_wait_s(before, core_waits(*pids))


def neighbour(port: int, sizes: Sizes, ends_at: float, router_pid: int | None) -> Seen:
    """Send requests until `ends_at`. Run this in a process of its own, so that the flood does not
    delay it."""
    return asyncio.run(_neighbour(port, sizes, ends_at, router_pid))


async def _neighbour(port: int, sizes: Sizes, ends_at: float, router_pid: int | None) -> Seen:
    seen, number = Seen(), 0
    while time.monotonic() < ends_at:
        number += 1
        text = f"{number} {_HELLO * 300}"
        body: dict[str, Any] = {
            "model": sizes.model,
            "prompt": text[: sizes.context],
            "max_tokens": 1,
        }
        counted = {"model": sizes.model, "messages": [{"role": "user", "content": text}]}
        for name, path, asked in (
            ("completion", "/v1/completions", body),
            ("count", "/v1/messages/count_tokens", counted),
        ):
            with timed(router_pid) as waited:
                status, _ = await ask(port, NEIGHBOUR, path, json.dumps(asked).encode())
                seen.waits[name] = max(seen.waits[name], waited())
            seen.num_answers += 1
            if status != 200:
                seen.refused[status] += 1
        with timed(router_pid) as waited:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            await reader.read()
            writer.close()
            seen.live_s = max(seen.live_s, waited())
    return seen


async def run_flood(
    attack: Attack,
    port: int,
    sizes: Sizes,
    seconds: float,
    pool: Executor,
    router_pid: int | None = None,
) -> tuple[Flood, Seen]:
    """One flood beside its neighbour, which `pool` runs. With `router_pid`, times without a core do
    not count."""
    flood = Flood(port, sizes, time.monotonic() + seconds)
    flooding = asyncio.ensure_future(attack(flood))
    await asyncio.sleep(seconds / 6)
    asking = asyncio.get_running_loop().run_in_executor(
        pool, neighbour, port, sizes, flood.ends_at, router_pid
    )
    seen, _ = await asyncio.gather(asking, flooding)
    return flood, seen


class KeyedFleet(RouterFleet):
    """Mock workers behind a router with keys."""

    @property
    def _shared(self) -> dict[str, str]:
        keys = {"BATON_API_KEYS": f"{FLOOD},{NEIGHBOUR}", "BATON_ADMIN_KEYS": ADMIN}
        return super()._shared | keys

    def workers(self, router: str) -> dict[str, dict[str, Any]]:
        """See the base class."""
        with contextlib.suppress(OSError, ValueError):
            asked = urllib.request.Request(f"{self.url(router)}/fleet")
            asked.add_header("authorization", f"Bearer {ADMIN}")
            with urllib.request.urlopen(asked) as answer:
                shown = json.load(answer)["workers"]
                return {each["worker_id"]: each for each in shown if each["state"] != "lost"}
        return {}


def harm_of(flood: Flood, seen: Seen) -> str:
    """The bounds that a flood broke, in one line; empty if none."""
    waits = {**seen.waits, "/live": seen.live_s}
    harms = [
        f"{name} waited {1e3 * seconds:.0f} ms, bound {1e3 * MAX_WAIT_S:.0f}"
        for name, seconds in waits.items()
        if seconds > MAX_WAIT_S
    ]
    harms += [f"the neighbour got {count} x {status}" for status, count in seen.refused.items()]
    if not seen.num_answers:
        harms.append("the neighbour got no answer")
    return "; ".join([*harms, *dict.fromkeys(flood.faults)])


def main(argv: Sequence[str], busy: bool | None = None) -> int:
    """Run and print all floods. Returns 0 if none did harm. `busy`: whether the machine was busy
    when the suite began."""
    cli = argparse.ArgumentParser(prog="python -m tests.hostile.neighbours", description=__doc__)
    cli.add_argument("--only", default="", help="floods whose name matches this")
    cli.add_argument("--seconds", type=float, default=6.0)
    arguments = cli.parse_args(argv)
    ids = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(_HELLO).ids
    roles = (Role.PREFILL, Role.DECODE)
    table = Table(title=f"floods of one key, {os.cpu_count()} cores, {os.getloadavg()[0]:.1f} load")
    for column in ("flood", "completion ms", "count ms", "/live ms", "asked", "refused", "flood's"):
        table.add_column(column, justify="left" if column == "flood" else "right")
    busy = is_busy() if busy is None else busy
    harmful: dict[str, str] = {}
    config = RouterFleetConfig(DEMO_MODEL, roles, ids, FULL.context)
    with KeyedFleet(config) as fleet, ProcessPoolExecutor(1) as pool:
        for name, attack in FLOODS.items():
            if not re.search(arguments.only, name):
                continue
            port = fleet.port("router-1")
            pid = fleet.pids["router-1"] if busy else None
            flood, seen = asyncio.run(run_flood(attack, port, FULL, arguments.seconds, pool, pid))
            if harm := harm_of(flood, seen):
                harmful[name] = harm
            waits = [f"{1e3 * each:.0f}" for each in (*seen.waits.values(), seen.live_s)]
            counts = [str(seen.num_answers), str(dict(seen.refused)), str(dict(flood.statuses))]
            table.add_row(name, *waits, *counts)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    for name, harm in harmful.items():
        print(f"HARM {name}: {harm}")
    print(f"{len(harmful)} of {table.row_count} floods did harm")
    if busy:
        print("the machine was busy: times without a core were subtracted; run it idle")
    return 1 if harmful else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
