"""Test prompts: requests that an operator sends and follows.

A test prompt takes its place in the queues like any request. The texts of prompt and answer are not
kept. The trace is kept, as for every request.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from protocol.errors import InvalidRequest, RequestError, ServiceError
from protocol.messages import Role
from protocol.sampling import SamplingParams
from router.fleet.fleet import Fleet
from router.requests.interface import TEST_PREFIX, GenerationRequest, Generator, TokenDelta

log = logging.getLogger(__name__)

MAX_CHARS = 4000
MAX_TOKENS = 64
DEADLINE_MS = 60_000


@dataclass(frozen=True, slots=True)
class SamplePrompt:
    """A prompt to send; `prefill` and `decode` name the workers, or leave the choice open."""

    prompt: str
    max_tokens: int
    prefill: str | None = None
    decode: str | None = None


class _Discarded:
    """A sink that takes every token and keeps none."""

    is_full = False

    async def wait_room(self) -> None:
        """There is always room."""

    def take(self, delta: TokenDelta) -> bool:
        return True


Encode = Callable[[str], Awaitable[list[int]]]
"""Returns the token ids of a text, with the special tokens that begin a prompt."""


class SamplePrompts:
    """Sends test prompts; owns their tasks, which `close` ends."""

    def __init__(self, generator: Generator, encode: Encode, fleet: Fleet) -> None:
        self._generator = generator
        self._encode = encode
        self._fleet = fleet
        self._tasks: set[asyncio.Task[None]] = set()

    async def send(self, test: SamplePrompt) -> str:
        """Start the request; returns its id. Raises InvalidRequest for a prompt that is empty or
        too long, or for a worker that takes no requests."""
        if not 0 < len(test.prompt) <= MAX_CHARS:
            raise InvalidRequest(f"'prompt' must have 1 to {MAX_CHARS} characters", "prompt")
        if not 0 < test.max_tokens <= MAX_TOKENS:
            raise InvalidRequest(f"'max_tokens' must be 1 to {MAX_TOKENS}", "max_tokens")
        self._check_worker("prefill", Role.PREFILL, test.prefill)
        self._check_worker("decode", Role.DECODE, test.decode)
        request = GenerationRequest(
            request_id=f"{TEST_PREFIX}{secrets.token_hex(16)}-0",
            token_ids=await self._encode(test.prompt),
            sampling=SamplingParams(max_tokens=test.max_tokens, seed=0, temperature=0.0),
            priority=0,
            deadline_ms=DEADLINE_MS,
            cache_salt="",
            only_workers=frozenset(filter(None, (test.prefill, test.decode))),
        )
        task = asyncio.create_task(self._run(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return request.request_id

    async def close(self) -> None:
        """End the test prompts that are still running."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, request: GenerationRequest) -> None:
        try:
            await self._generator.generate(request, _Discarded())
        except (RequestError, ServiceError) as error:  # its trace shows the failure, too
            log.warning("test prompt %s failed: %s", request.request_id, error.message)

    def _check_worker(self, field: str, role: Role, name: str | None) -> None:
        ready = sorted(each.worker_id for each in self._fleet.ready(role))
        if name is not None and name not in ready:
            raise InvalidRequest(
                f"'{field}' names no worker that takes requests; these do: {', '.join(ready)}",
                field,
            )
