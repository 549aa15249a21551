"""Load for pools that hold few prompts, mixed so that workers admit requests in different orders.

Prompts of mixed lengths come over several routers, some with priorities, grammars or two choices,
and some clients go away. Each answer is compared with the answer of one worker with a large pool. A
request ends well with a complete and correct answer, or with 503 and Retry-After.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.reliability.chaos_load import Known
from bench.tools.extras import missing_extra

try:
    import httpx
except ModuleNotFoundError as error:
    raise missing_extra(error) from error

TIMEOUT_S = 120.0
ABORTED, GRAMMAR, PRIORITY, CHOICES, CACHED = 0.15, 0.2, 0.3, 0.1, 0.2
"""Shares of requests."""
_LONGEST_PAUSE_S = 2.0


@dataclass
class Outcome:
    """The results of one run. Waits are the times to the first token, s."""

    finished: int = 0
    aborted: int = 0
    refused: int = 0
    tokens: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        """Whether every request ended correctly or with a proper refusal."""
        return self.finished > 0 and not self.wrong and not self.errors

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def wait_percentiles(self) -> tuple[float, float]:
        """p50 and p99, s."""
        if len(self.waits_s) < 2:
            return (0.0, 0.0)
        cuts = statistics.quantiles(self.waits_s, n=100)
        return (cuts[49], cuts[98])


class TightLoad:
    """`num_clients` clients that send known prompts to routers, each one request at a time."""

    def __init__(self, model: str, known: list[Known], num_clients: int, seed: int) -> None:
        self._model = Path(model).name
        self._known = known
        self._num_clients = num_clients
        self._seed = seed

    async def run(self, urls: Callable[[], list[str]], num_requests: int) -> Outcome:
        """Send `num_requests`; returns when the last one has ended."""
        outcome, rng = Outcome(), random.Random(self._seed)
        requests = iter([self._request(rng) for _ in range(num_requests)])
        started = time.monotonic()
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:

            async def work() -> None:
                for known, body, leaves_after in requests:
                    url = rng.choice(urls())
                    await self._ask(client, url, known, body, leaves_after, outcome)

            await asyncio.gather(*(work() for _ in range(self._num_clients)))
        outcome.seconds = time.monotonic() - started
        return outcome

    def _request(self, rng: random.Random) -> tuple[Known, dict[str, Any], int | None]:
        """A prompt, its request's body, and after how many tokens its client goes away."""
        known = rng.choice(self._known)
        body = self.body(known)
        if rng.random() > CACHED:
            body["cache_salt"] = f"{rng.getrandbits(64):x}"
        if rng.random() < GRAMMAR:
            body |= any_text(rng.randrange(1000, 100_000))
        if rng.random() < PRIORITY:
            body["priority"] = rng.randrange(-2, 3)
        if rng.random() < CHOICES:
            body["n"] = 2
        leaves = rng.random() < ABORTED
        return known, body, rng.randrange(len(known.output)) if leaves else None

    def body(self, known: Known) -> dict[str, Any]:
        """The plain request for an answer."""
        return {
            "model": self._model,
            "prompt": known.prompt,
            "max_tokens": len(known.output),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }

    async def _ask(
        self,
        client: httpx.AsyncClient,
        url: str,
        known: Known,
        body: dict[str, Any],
        leaves_after: int | None,
        outcome: Outcome,
    ) -> None:
        """One request to its end."""
        choices: list[list[int]] = [[] for _ in range(body.get("n", 1))]
        asked, is_done = time.monotonic(), False
        try:
            async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    await self._take_refusal(answer, outcome)
                    return
                async for line in answer.aiter_lines():
                    is_done = is_done or line == "data: [DONE]"
                    if not line.startswith("data: {"):
                        continue
                    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        self._take_error(event["error"], outcome)
                        return
                    for choice in event["choices"]:
                        choices[choice["index"]] += choice["token_ids"]
                        outcome.tokens += len(choice["token_ids"])
                    if asked and any(choices):
                        outcome.waits_s.append(time.monotonic() - asked)
                        asked = 0.0
                    if leaves_after is not None and len(choices[0]) > leaves_after:
                        outcome.aborted += 1
                        return
        except (httpx.HTTPError, OSError) as error:
            outcome.errors.append(repr(error))
            return
        outcome.finished += 1
        outcome.wrong += not is_done or any(tokens != known.output for tokens in choices)

    async def _take_refusal(self, answer: httpx.Response, outcome: Outcome) -> None:
        """A 503 with Retry-After is an accepted end; the client waits as told."""
        await answer.aread()
        retry_after = answer.headers.get("retry-after", "")
        if answer.status_code != 503 or not retry_after:
            outcome.errors.append(f"{answer.status_code} {answer.text}")
            return
        outcome.refused += 1
        await asyncio.sleep(min(float(retry_after), _LONGEST_PAUSE_S))

    def _take_error(self, error: dict[str, Any], outcome: Outcome) -> None:
        """In a stream that has begun, the error's code says what its status would have been."""
        if error.get("code") == "overloaded":
            outcome.refused += 1
        else:
            outcome.errors.append(str(error.get("message")))


def any_text(most: int) -> dict[str, Any]:
    """A grammar that allows every text of up to `most` characters; each is compiled on its own."""
    return {"structured_outputs": {"regex": f"(.|\\n){{0,{most}}}"}}


async def without_grammar_changes(model: str, known: list[Known], url: str) -> list[Known]:
    """The answers that stay the same under a grammar which allows every text."""
    load, kept = TightLoad(model, known, 1, 0), []
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        for each in known:
            body = load.body(each) | any_text(5000) | {"stream": False}
            answer = (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()
            if answer.json()["choices"][0]["token_ids"] == each.output:
                kept.append(each)
    return kept
