"""Steady mixed load for the soak bench: answers are not compared, but every request must get one.

Completions and conversations, streamed and whole, short and long, some aborted midway by their
client. Knows routers by their URLs and no other part of the fleet.
"""

from __future__ import annotations

import asyncio
import pydoc_data.topics
import random
import string
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.tools.extras import missing_extra
from gateway.text.word_table import MAX_WORDS

try:
    import httpx
except ModuleNotFoundError as error:
    raise missing_extra(error) from error

PROMPT_CHARACTERS = (30, 200, 800, 3000, 6000)
MAX_TOKENS = (1, 8, 24, 48, 96)
TURNS = 4
WORD_CACHES = MAX_WORDS  # words that a router caches; its tokenizer caches fewer
WORDS_AT_ONCE = 1000
_TIMEOUT_S = 120.0


class SoakLoad:
    """Clients that keep sending requests, each to a random router."""

    def __init__(self, model: str, urls: list[str], seed: int) -> None:
        self.answered: Counter[str] = Counter()
        """Finished requests by router, including aborted ones."""
        self.kinds: Counter[str] = Counter()
        self.errors: list[str] = []
        self._model = Path(model).name
        self._urls = urls
        self._rng = random.Random(seed)
        topics = pydoc_data.topics.topics
        self._text = "\n\n".join(topics[name] for name in sorted(topics))

    async def run(self, num_clients: int, until: Callable[[], bool]) -> None:
        """Keep `num_clients` clients busy; returns when the last of their requests has ended."""
        async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
            await asyncio.gather(*(self._client(client, until) for _ in range(num_clients)))

    async def fill_word_caches(self) -> None:
        """Have every router tokenize more distinct words than it caches, until it has evicted some
        twice.

        Under load alone this bounded cache (some MiB) grows for an hour and looks like a leak.
        Raises httpx.HTTPError.
        """
        rng = random.Random(1)
        number = WORD_CACHES * 5 // 4
        words = ["".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(number)]
        async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
            for url in self._urls:
                for first in range(0, len(words), WORDS_AT_ONCE):
                    text = " ".join(words[first : first + WORDS_AT_ONCE])
                    body = {"model": self._model, "prompt": text}
                    (await client.post(f"{url}/tokenize", json=body)).raise_for_status()

    async def _client(self, client: httpx.AsyncClient, until: Callable[[], bool]) -> None:
        kinds: dict[str, Callable[[httpx.AsyncClient, str], Awaitable[None]]] = {
            "whole": self._ask_whole,
            "streamed": self._ask_streamed,
            "aborted": self._ask_and_leave,
            "conversations": self._converse,
        }
        while not until():
            kind = self._rng.choice(list(kinds))
            url = self._rng.choice(self._urls)
            try:
                await kinds[kind](client, url)
            except httpx.HTTPError as error:
                self.errors.append(f"{kind}: {error!r}")
            else:
                self.kinds[kind] += 1

    async def _ask_whole(self, client: httpx.AsyncClient, url: str) -> None:
        answer = await client.post(f"{url}/v1/completions", json=self._completion())
        self._judge(url, answer.status_code, answer.text)

    async def _ask_streamed(self, client: httpx.AsyncClient, url: str) -> None:
        body = self._completion() | {"stream": True}
        await self._stream(client, url, "completions", body)

    async def _ask_and_leave(self, client: httpx.AsyncClient, url: str) -> None:
        body = self._completion() | {"stream": True, "max_tokens": 200, "ignore_eos": True}
        await self._stream(client, url, "completions", body, leave_after=self._rng.randrange(40))

    async def _converse(self, client: httpx.AsyncClient, url: str) -> None:
        """A chat of several turns, each with all earlier messages."""
        messages: list[dict[str, str]] = []
        for _ in range(TURNS):
            messages.append({"role": "user", "content": self._excerpt(400)})
            body: dict[str, Any] = {"model": self._model, "messages": messages, "max_tokens": 32}
            answer = await client.post(f"{url}/v1/chat/completions", json=body)
            self._judge(url, answer.status_code, answer.text)
            if answer.status_code != 200:
                return
            said = answer.json()["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": said or ""})

    async def _stream(
        self,
        client: httpx.AsyncClient,
        url: str,
        endpoint: str,
        body: dict[str, Any],
        leave_after: int | None = None,
    ) -> None:
        events = 0
        last = ""
        async with client.stream("POST", f"{url}/v1/{endpoint}", json=body) as answer:
            async for line in answer.aiter_lines():
                last = line or last
                events += line.startswith("data: ")
                if leave_after is not None and events > leave_after:
                    break
        left = leave_after is not None and events > leave_after
        is_whole = left or last == "data: [DONE]"
        self._judge(url, answer.status_code if is_whole else 0, last)

    def _completion(self) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": self._excerpt(self._rng.choice(PROMPT_CHARACTERS)),
            "max_tokens": self._rng.choice(MAX_TOKENS),
            "temperature": self._rng.choice((0, 0.8)),
            "seed": self._rng.randrange(1000),
        }

    def _excerpt(self, length: int) -> str:
        start = self._rng.randrange(len(self._text) - length)
        return self._text[start : start + length]

    def _judge(self, url: str, status: int, text: str) -> None:
        self.answered[url] += 1
        if status != 200:
            self.errors.append(f"{status} {text[:200]}")
