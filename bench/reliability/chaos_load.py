"""Steady load for the chaos bench: streams whose every token is compared with a known answer.

Knows routers by their URLs and no other part of the fleet. A client whose router dies counts as
cut. It resumes its stream on another router by the id of its last event, as often as needed; if it
got no event, it sends the request again.
"""

from __future__ import annotations

import asyncio
import json
import pydoc_data.topics
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.tools.extras import missing_extra

try:
    import httpx
except ModuleNotFoundError as error:
    raise missing_extra(error) from error

MIN_MARGIN = 1e-3
"""Answers with a smaller margin between two tokens may differ by rounding and are not used."""
ABORTED = 0.3
"""Share of requests whose client goes away."""
UNCACHED = 0.7
"""Share of requests with no cached blocks on any worker, so that their blocks must move."""
TURNS = 2
TURN_TOKENS = 40
"""Tokens of a client's reply to an answer."""
_TIMEOUT_S = 90.0


@dataclass(frozen=True)
class Known:
    """A prompt, its greedy continuation and the continuation's text; perhaps the next turn of the
    same conversation."""

    prompt: list[int]
    output: list[int]
    text: str
    next_turn: Known | None = None


@dataclass
class Tally:
    """The clients' results. `turns` counts requests that continued a conversation. Pauses are the
    longest gap between two events of each stream, ms."""

    requests: int = 0
    turns: int = 0
    finished: int = 0
    aborted: int = 0
    cut: int = 0
    resumed: int = 0
    tokens: int = 0
    mismatches: int = 0
    duplicates: int = 0
    losses: int = 0
    refused: int = 0
    errors: list[str] = field(default_factory=list)
    pauses_ms: list[float] = field(default_factory=list)

    def judge(self, known: Known, tokens: list[int], text: str) -> bool:
        """Compare a finished stream with the known answer; whether they are equal."""
        self.finished += 1
        self.losses += max(0, len(known.output) - len(tokens))
        self.duplicates += max(0, len(tokens) - len(known.output))
        is_right = tokens == known.output and text == known.text
        self.mismatches += not is_right
        return is_right


class Load:
    """Clients that send known prompts until `run`'s condition holds."""

    def __init__(self, model: str, routers: Callable[[], dict[str, str]], seed: int) -> None:
        """`routers` returns the URLs of the routers that should be serving now, by name."""
        self.tally = Tally()
        self.doomed: set[str] = set()
        """Routers that are being killed: a broken request on one of them is no error."""
        self._model = model
        self._routers = routers
        self._rng = random.Random(seed)
        self._known: list[Known] = []
        self._corpus = _corpus(model)

    @property
    def known(self) -> list[Known]:
        """The answers learned so far."""
        return self._known

    async def learn(self, lengths: list[int], num_tokens: int) -> None:
        """Record the answers before any fault; raises if an undisturbed request fails."""
        async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
            for length in lengths:
                self._known.append(await self._learn_turns(client, [], length, num_tokens, TURNS))

    async def run(self, num_clients: int, until: Callable[[], bool]) -> None:
        """Keep `num_clients` clients busy; returns when the last of their streams has ended."""
        async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
            await asyncio.gather(*(self._client(client, until) for _ in range(num_clients)))

    async def _client(self, client: httpx.AsyncClient, until: Callable[[], bool]) -> None:
        while not until():
            turn: Known | None = self._rng.choice(self._known)
            salt = f"{self._rng.getrandbits(64):x}" if self._rng.random() < UNCACHED else None
            leaves = self._rng.random() < ABORTED
            while turn is not None:
                abort_after = self._rng.randrange(1, 20) if leaves else None
                is_right = await self._ask(client, turn, salt, abort_after)
                turn = turn.next_turn if is_right else None
                self.tally.turns += turn is not None

    async def _ask(
        self, client: httpx.AsyncClient, known: Known, salt: str | None, abort_after: int | None
    ) -> bool:
        """Run one request to its end, on another router if its own is killed; whether it got the
        right answer."""
        self.tally.requests += 1
        tokens: list[int] = []
        text = ""
        body, last_id = self._new_body(known, salt), ""
        while True:
            name, url = self._rng.choice(list(self._routers().items()))
            self.tally.resumed += bool(last_id)
            try:
                async for event_id, fresh, piece in self._events(client, url, body, last_id):
                    tokens += fresh
                    text += piece
                    last_id = event_id
                    if abort_after is not None and len(tokens) >= abort_after:
                        self.tally.aborted += 1
                        return False
            except (httpx.HTTPError, OSError) as error:
                if name not in self.doomed:
                    self.tally.errors.append(f"{name}: {error!r}")
                    return False
                self.tally.cut += 1
                await asyncio.sleep(0.05)
                continue
            except _Refused as error:
                if error.retry_after_s is not None:
                    self.tally.refused += 1
                    await asyncio.sleep(error.retry_after_s)
                    continue
                if name not in self.doomed:
                    self.tally.errors.append(f"{name}: {error}")
                    return False
                continue
            return self.tally.judge(known, tokens, text)

    async def _events(
        self, client: httpx.AsyncClient, url: str, body: dict[str, Any], last_id: str
    ) -> AsyncIterator[tuple[str, list[int], str]]:
        """Ids, new tokens and their text, event by event; notes the longest pause. Raises _Refused,
        HTTPError.

        With `last_id`, the id of a broken answer's last event, only later events.
        """
        headers = {"accept": "text/event-stream"}
        if last_id:
            headers["Last-Event-ID"] = last_id
        event_id = ""
        longest, last = 0.0, time.monotonic()
        async with client.stream(
            "POST", f"{url}/v1/completions", json=body, headers=headers
        ) as answer:
            if answer.status_code != 200:
                await answer.aread()
                retry_after = answer.headers.get("retry-after")
                raise _Refused(
                    f"{answer.status_code} {answer.text}",
                    float(retry_after) if answer.status_code == 503 and retry_after else None,
                )
            is_done = False
            async for line in answer.aiter_lines():
                is_done = is_done or line == "data: [DONE]"
                if line.startswith("id: "):
                    event_id = line.removeprefix("id: ")
                if not line.startswith("data: {"):
                    continue
                event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    is_full = event["error"].get("code") == "overloaded"
                    raise _Refused(event["error"]["message"], 1.0 if is_full else None)
                fresh = [token for choice in event["choices"] for token in choice["token_ids"]]
                longest, last = max(longest, time.monotonic() - last), time.monotonic()
                self.tally.tokens += len(fresh)
                yield event_id, fresh, "".join(choice["text"] for choice in event["choices"])
            if not is_done:
                raise httpx.ReadError("the stream ended without [DONE]")
        self.tally.pauses_ms.append(longest * 1e3)

    def _new_body(self, known: Known, salt: str | None) -> dict[str, Any]:
        """The request's body; with a new salt only earlier turns are cached."""
        body = self._body(known.prompt, len(known.output)) | {"stream": True}
        return body if salt is None else body | {"cache_salt": salt}

    async def _learn_turns(
        self, client: httpx.AsyncClient, said: list[int], length: int, num_tokens: int, turns: int
    ) -> Known:
        """Record a conversation of `turns` turns that adds `length` tokens to `said`."""
        known = None
        while known is None:
            start = self._rng.randrange(len(self._corpus) - length)
            prompt = said + self._corpus[start : start + length]
            known = await self._try_learn(client, prompt, num_tokens)
        if turns == 1:
            return known
        said = known.prompt + known.output
        later = await self._learn_turns(client, said, TURN_TOKENS, num_tokens, turns - 1)
        return replace(known, next_turn=later)

    async def _try_learn(
        self, client: httpx.AsyncClient, prompt: list[int], num_tokens: int
    ) -> Known | None:
        _, url = self._rng.choice(list(self._routers().items()))
        body = self._body(prompt, num_tokens) | {"logprobs": 2}
        answer = (await client.post(f"{url}/v1/completions", json=body)).raise_for_status().json()
        choice = answer["choices"][0]
        ranked = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
        margin = min((top[0] - top[1] for top in ranked if len(top) > 1), default=0.0)
        is_clear = margin >= MIN_MARGIN
        return Known(prompt, choice["token_ids"], choice["text"]) if is_clear else None

    def _body(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        return {
            "model": Path(self._model).name,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }


class _Refused(Exception):
    """A router answered with an error; if it is lack of room, the client may ask again."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def _corpus(model: str) -> list[int]:
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids: list[int] = Tokenizer.from_file(str(Path(model) / "tokenizer.json")).encode(text).ids
    return ids
