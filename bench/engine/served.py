"""Runs the engine benchmark's works on a server, with one client: streams token-id completions.

A prompt's time is the time to its first token. Decode is measured only while all streams of a batch
run, because the server computes their prompts one after the other while earlier streams decode.
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
"""Tokens of each stream of a batch: enough for the first stream to run long after the last one has
begun."""
PROMPTS = 4
"""Number of prompts, one after the other, for one prefill figure."""
MIN_EVENTS = 8
"""The fewest events of each stream while all run; fewer are not meaningful."""

Arrivals = list[tuple[float, int]]
"""For one stream: when tokens arrived (`time.perf_counter`), and how many at once."""


class ServedRun:
    """Measures one server, which runs only during the measurement."""

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
        """Tokens per second of prompts sent one at a time, each for one output token."""
        seconds = 0.0
        for prompt in prompts:
            body = completion_body(self._server.model, prompt, 1)
            sent_at = time.perf_counter()
            answer = await completion(HOST, self._server.port, body)
            first_at, _ = next(answer.events())
            seconds += first_at - sent_at
        return sum(map(len, prompts)) / seconds

    async def _decode(self, prompts: list[list[int]]) -> float:
        """Decoded tokens per second with all prompts sent at once."""
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
    """Number of tokens in an event of a completion; 0 for an event that only reports the end."""
    choices = json.loads(event).get("choices") or [{}]
    return len(choices[0].get("token_ids") or [])


def decode_rate(streams: list[Arrivals]) -> float:
    """Tokens per second of streams while all of them ran.

    The window lasts from the start of the last stream to the end of the first. The result is the
    sum of each stream's rate between its first and last tokens within the window, so that a step
    cut by the window's edges counts as a whole or not at all. Raises BatonError if the streams ran
    side by side for too short a time.
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
