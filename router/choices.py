"""Running the sequences of one HTTP request side by side.

A choice is one generated sequence with its text. Whoever closes the stream of choices, or fails
in it, closes every generation at once. Knows neither HTTP nor the shape of any answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from protocol.errors import GenerationFailed
from router.api_metrics import LatencyProbe
from router.generation import GenerationRequest, Generator
from router.output import OutputText, TextDelta


@dataclass(frozen=True, slots=True)
class Choice:
    """A sequence to run. `index` is its place in the answer, `prompt_index` that of its prompt.

    `echo` is the prompt's text where the answer repeats it, and empty otherwise.
    """

    index: int
    prompt_index: int
    request: GenerationRequest
    output: OutputText
    echo: str = ""


ChoiceDeltas = AsyncGenerator[tuple[Choice, TextDelta], None]
_Item = tuple[Choice, TextDelta] | Exception | None


async def run_choice(generator: Generator, choice: Choice, probe: LatencyProbe) -> ChoiceDeltas:
    """Deltas of one choice; the last one carries `finish`, and the generation is closed then."""
    async with aclosing(generator.generate(choice.request)) as deltas:
        async for delta in deltas:
            out = choice.output.push(delta)
            probe.observe(len(out.token_ids), out.cached_tokens)
            yield choice, out
            if out.finish is not None:
                return
    raise GenerationFailed(f"request {choice.request.request_id}: the generation broke off")


async def merge(streams: Sequence[ChoiceDeltas]) -> ChoiceDeltas:
    """Deltas of several choices as they come. The first error ends all of them."""
    if len(streams) == 1:  # the usual case needs no task and no queue
        async with aclosing(streams[0]) as only:
            async for pair in only:
                yield pair
        return
    queue: asyncio.Queue[_Item] = asyncio.Queue(maxsize=len(streams))
    pumps = [asyncio.ensure_future(_pump(stream, queue)) for stream in streams]
    try:
        running = len(pumps)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(stream: ChoiceDeltas, queue: asyncio.Queue[_Item]) -> None:
    """Moves a stream into the queue, then its error, or None for its end."""
    end: Exception | None = None
    try:
        async with aclosing(stream):
            async for item in stream:
                await queue.put(item)
    except Exception as error:  # noqa: BLE001 - merge() raises it again
        end = error
    await queue.put(end)
