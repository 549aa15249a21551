"""Steady streams with long prompts arriving among them; records when each token arrived.

Two kinds of load on one server, as completions of token ids: streams that decode all the time (a
new one follows each that ends), and long prompts with few output tokens. Arrivals and prompts
depend only on the seed, so every server gets the same. Parses only as much as it needs to count
tokens.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from protocol.errors import BatonError

_EVENT = b"data: {"
_DONE = b"data: [DONE]"
_NAME_LENGTH = len(b"data: ")
_LONGEST_EVENT = 1 << 24


@dataclass(frozen=True, kw_only=True)
class StreamLoad:
    """The load to send. Lengths are in tokens, `arrivals_per_s` is for long prompts (Poisson).
    Prompts share no cached blocks with those of another `cache_salt`."""

    model: str
    vocab_size: int
    num_streams: int
    stream_prompt: int = 32
    stream_tokens: int
    long_prompt: int
    long_tokens: int = 2
    arrivals_per_s: float
    seed: int = 1
    cache_salt: str | None = None


@dataclass
class Phase:
    """The results of a time span: gaps between a stream's tokens, and TTFT of long prompts, s.

    `stream_tokens` and `prompt_tokens` count the tokens finished within the span.
    """

    seconds: float
    gaps_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    stream_tokens: int = 0
    prompt_tokens: int = 0
    num_sent: int = 0


class StreamClient:
    """One server under load. `quiet` and `disturbed` are its two phases, in this order."""

    def __init__(self, url: str, load: StreamLoad) -> None:
        self._endpoint = Endpoint.of(url)
        self._load = load
        self._phase: Phase | None = None

    async def run(
        self, warm_up_s: float, quiet_s: float, disturbed_s: float
    ) -> tuple[Phase, Phase]:
        """Raises BatonError as soon as a request fails."""
        phases = asyncio.create_task(self._phases(warm_up_s, quiet_s, disturbed_s))
        streams = [asyncio.create_task(self._stream(i)) for i in range(self._load.num_streams)]
        try:
            done, _ = await asyncio.wait((phases, *streams), return_when=asyncio.FIRST_COMPLETED)
            for stream in done - {phases}:
                stream.result()  # raises, because no stream ends by itself
            return phases.result()
        except OSError as error:
            raise BatonError(f"a connection broke: {error}") from error
        finally:
            for task in (phases, *streams):
                task.cancel()
            await asyncio.gather(phases, *streams, return_exceptions=True)

    async def _phases(
        self, warm_up_s: float, quiet_s: float, disturbed_s: float
    ) -> tuple[Phase, Phase]:
        await asyncio.sleep(warm_up_s)
        quiet = await self._during(quiet_s, self._nothing())
        return quiet, await self._during(disturbed_s, self._arrivals(disturbed_s))

    async def _during(self, seconds: float, work: Coroutine[None, None, None]) -> Phase:
        self._phase = phase = Phase(seconds)
        task = asyncio.ensure_future(work)
        try:
            await asyncio.sleep(seconds)
            self._phase = None
            await task
        finally:
            task.cancel()
        return phase

    async def _nothing(self) -> None:
        pass

    async def _arrivals(self, seconds: float) -> None:
        """Send the long prompts of a phase; return when all are answered."""
        load, rng = self._load, random.Random(load_seed(self._load, "arrivals"))
        at, sent = 0.0, []
        started = time.perf_counter()
        phase = self._phase
        assert phase is not None
        while (at := at + rng.expovariate(load.arrivals_per_s)) < seconds:
            await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
            prompt = [rng.randrange(3, load.vocab_size) for _ in range(load.long_prompt)]
            sent.append(asyncio.create_task(self._long(prompt, phase)))
        phase.num_sent = len(sent)
        await asyncio.gather(*sent)

    async def _long(self, prompt: list[int], phase: Phase) -> None:
        sent_at = time.perf_counter()
        times = [at async for at, _ in self._events(prompt, self._load.long_tokens)]
        phase.ttft_s.append(times[0] - sent_at)
        if phase is self._phase:
            phase.prompt_tokens += len(prompt)

    async def _stream(self, number: int) -> None:
        """Run streams one after the other until cancelled."""
        load, turn = self._load, 0
        while True:
            rng = random.Random(load_seed(load, f"stream {number} {turn}"))
            prompt = [rng.randrange(3, load.vocab_size) for _ in range(load.stream_prompt)]
            turn += 1
            before = None
            async for at, _ in self._events(prompt, load.stream_tokens):
                if self._phase is not None:
                    self._phase.stream_tokens += 1
                    if before is not None:
                        self._phase.gaps_s.append(at - before)
                before = at

    def _events(
        self, prompt: list[int], max_tokens: int
    ) -> AsyncGenerator[tuple[float, bytes], None]:
        load = self._load
        body = completion_body(load.model, prompt, max_tokens, load.cache_salt)
        return stream_events(self._endpoint, body)


def completion_body(
    model: str, prompt: list[int], max_tokens: int, cache_salt: str | None = None
) -> bytes:
    """A streamed, greedy completion of token ids that ends after `max_tokens` tokens, as JSON."""
    body: dict[str, object] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    return json.dumps(body).encode()


@dataclass(frozen=True)
class Endpoint:
    """A server of completions, and the API key to use there."""

    host: str
    port: int
    is_tls: bool = False
    key: str | None = None
    path: str = ""

    @classmethod
    def of(cls, url: str, key: str | None = None) -> Endpoint:
        """The endpoint at a URL without `/v1`. Raises BatonError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise BatonError(f"{url!r} is no URL of a server")
        is_tls = parts.scheme == "https"
        port = parts.port or (443 if is_tls else 80)
        return cls(parts.hostname, port, is_tls, key, parts.path.rstrip("/"))


async def stream_events(
    endpoint: Endpoint, body: bytes, headers: Mapping[str, str] | None = None
) -> AsyncGenerator[tuple[float, bytes], None]:
    """The time (`time.perf_counter`) and the JSON of each event of a streamed completion.

    Raises BatonError if the completion is refused or breaks off.
    """
    host, all_headers = endpoint.host, dict(headers or {})
    if endpoint.key is not None:
        all_headers["authorization"] = f"Bearer {endpoint.key}"
    reader, writer = await asyncio.open_connection(
        host, endpoint.port, ssl=endpoint.is_tls or None, limit=_LONGEST_EVENT
    )
    try:
        head = f"POST {endpoint.path}/v1/completions HTTP/1.1\r\nhost: {host}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in all_headers.items())
        head += "connection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            rest = await reader.read()
            raise BatonError(f"{status.decode().strip()}: {rest.decode()[-300:]}")
        async for line in reader:
            if line.startswith(_EVENT):
                yield time.perf_counter(), line[_NAME_LENGTH:]
            elif line.startswith(_DONE):
                return
        raise BatonError("a stream broke off")
    finally:
        writer.close()


def load_seed(load: StreamLoad, what: str) -> str:
    """A seed for one part of the load."""
    return f"{load.seed} {what}"
