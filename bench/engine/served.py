"""The engine benchmark's works by a server: one client for all, streaming completions of token ids.

A prompt's time is that to its first token. Decode is measured while all streams of a batch run:
their prompts are computed one after the other, and streams that have begun decode beside them.
"""

from __future__ import annotations

import asyncio
import json
import random
import time

from bench.engine.server_process import HOST, Server
from bench.engine.workloads import Work
from bench.tools.raw_stream import RawStream, completion
from bench.tools.stream_load import completion_body
from protocol.errors import BatonError

STREAM_TOKENS = 64
"""Of each stream of a batch: so many that the first still runs long after the last has begun."""
PROMPTS = 4
"""One after the other, for one figure of prefill."""
MIN_EVENTS = 8
"""Of each stream while all run; fewer say nothing."""

Arrivals = list[tuple[float, int]]
"""Of one stream: when tokens came, by `time.perf_counter`, and how many at once."""


class ServedRun:
    """Measures one server, which is awake only meanwhile."""

    def __init__(self, server: Server, vocab_size: int, stream_tokens: int = STREAM_TOKENS) -> None:
        self._server = server
        self._vocab_size = vocab_size
        self._stream_tokens = stream_tokens

    def measure(self, work: Work, rng: random.Random) -> float:
        """Tokens per second. Raises BatonError if a request fails."""
        count = PROMPTS if work.kind == "prefill" else work.batch
        prompts = [
            [rng.randrange(3, self._vocab_size) for _ in range(work.length)] for _ in range(count)
        ]
        measured = self._prefill if work.kind == "prefill" else self._decode
        with self._server.awake():
            return asyncio.run(measured(prompts))

    async def _prefill(self, prompts: list[list[int]]) -> float:
        """Of prompts one at a time, each for one token."""
        seconds = 0.0
        for prompt in prompts:
            body = completion_body(self._server.model, prompt, 1)
            sent_at = time.perf_counter()
            answer = await completion(HOST, self._server.port, body)
            first_at, _ = next(answer.events())
            seconds += first_at - sent_at
        return sum(map(len, prompts)) / seconds

    async def _decode(self, prompts: list[list[int]]) -> float:
        """Of all prompts at once."""
        bodies = [
            completion_body(self._server.model, prompt, self._stream_tokens) for prompt in prompts
        ]
        answers = [completion(HOST, self._server.port, body) for body in bodies]
        return decode_rate(list(map(self._arrivals, await asyncio.gather(*answers))))

    def _arrivals(self, answer: RawStream) -> Arrivals:
        arrivals = [(at, num_tokens(event)) for at, event in answer.events()]
        total = sum(count for _, count in arrivals)
        if total != self._stream_tokens:
            raise BatonError(f"a stream of {self._stream_tokens} tokens brought {total}")
        return [(at, count) for at, count in arrivals if count]


def num_tokens(event: bytes) -> int:
    """That an event of a completion brought; 0 for one that only says that it has ended."""
    choices = json.loads(event).get("choices") or [{}]
    return len(choices[0].get("token_ids") or [])


def decode_rate(streams: list[Arrivals]) -> float:
    """Tokens per second of streams while all of them ran.

    From when the last one began until the first one ended: for each stream its rate between its
    own first and last tokens within that time, summed, so that a step that the time's edges cut
    counts for none or whole. Raises BatonError if they ran side by side too shortly.
    """
    begun = max(stream[0][0] for stream in streams)
    ended = min(stream[-1][0] for stream in streams)
    rate = 0.0
    for stream in streams:
        within = [(at, count) for at, count in stream if begun <= at <= ended]
        if len(within) < MIN_EVENTS:
            raise BatonError(f"{len(streams)} streams ran side by side for too few tokens")
        seconds = within[-1][0] - within[0][0]
        rate += sum(count for _, count in within[1:]) / seconds
    return rate
