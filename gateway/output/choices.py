"""Running the sequences of one HTTP request concurrently.

A choice is one generated sequence with its text, which goes to a sink as soon as its tokens are
read. Cancelling the run, or a failure of one choice, ends every generation at once. Knows
neither HTTP nor the format of any answer.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from gateway.history.answers import AnswerMemory, PromptText
from gateway.metrics import LatencyProbe
from gateway.output.event_ids import NOTHING, RESTORED_BYTES, Position
from gateway.output.output_text import OutputText, TextDelta
from protocol.errors import GenerationFailed
from protocol.messages import FinishReason
from router.requests.interface import GenerationRequest, Generator, TokenDelta


class Choice(msgspec.Struct, frozen=True):
    """A sequence to run. `index` is its place in the answer, `prompt_index` that of its prompt.

    - `echo`: the prompt's text if the answer repeats it, otherwise empty.
    - `is_echo_only`: the choice reports no output, although one token may be generated to get the
      prompt's log-probabilities.
    - `known`: how much of a resumed stream the client already has.
    - `prompt_text`: the text of the prompt, if the answer may be remembered.
    - `by_token`: the text comes token by token, so that the events of a stream with numbered events
      do not depend on how tokens arrived.
    """

    index: int
    prompt_index: int
    request: GenerationRequest
    output: OutputText
    echo: str = ""
    is_echo_only: bool = False
    known: Position = NOTHING
    prompt_text: PromptText | None = None
    by_token: bool = False


def restored_digest(choices: Sequence[Choice]) -> str:
    """A digest of the prompts that have ids of remembered answers; empty if none has."""
    digest = None
    for choice in choices:
        if choice.prompt_text is not None and choice.prompt_text.is_restored:
            digest = digest or hashlib.blake2b(digest_size=RESTORED_BYTES)
            digest.update(b"%d," % choice.index + array("I", choice.request.token_ids).tobytes())
    return "" if digest is None else digest.hexdigest()


class TextSink(Protocol):
    """Receives the text of all choices as it arrives; see `interface.DeltaSink`."""

    @property
    def is_full(self) -> bool: ...
    async def wait_room(self) -> None: ...
    def take(self, choice: Choice, delta: TextDelta) -> None:
        """Take a delta at once; the last one of a choice carries `finish`. An exception raised
        here ends all choices."""
        ...


async def run_choices(
    generator: Generator,
    choices: Sequence[Choice],
    sink: TextSink,
    probe: Callable[[Choice], LatencyProbe],
    answers: AnswerMemory | None = None,
) -> None:
    """Run all choices to their ends, and remember their answers. The first error ends all choices
    and is raised.

    Starting a choice takes time, so other requests get their turn between two starts.
    """
    if len(choices) == 1:  # the usual case needs no task
        await _run(generator, choices[0], sink, probe(choices[0]), answers)
        return
    tasks: list[asyncio.Future[None]] = []
    try:
        for choice in choices:
            run = _run(generator, choice, sink, probe(choice), answers)
            tasks.append(asyncio.ensure_future(run))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(
    generator: Generator,
    choice: Choice,
    sink: TextSink,
    probe: LatencyProbe,
    answers: AnswerMemory | None,
) -> None:
    if choice.is_echo_only and choice.request.sampling.prompt_logprobs is None:
        sink.take(choice, TextDelta("", [], finish=FinishReason.LENGTH))
        return
    decoding = _Decoding(choice, sink, probe)
    token_ids = await generator.generate(choice.request, decoding)
    if decoding.error is not None:
        raise decoding.error
    if not decoding.is_finished:
        name = choice.request.request_id
        raise GenerationFailed(f"request {name}: the generation broke off")
    if answers is not None and choice.prompt_text is not None:
        shown = choice.output.shown(token_ids)
        await answers.note(choice.prompt_text, choice.request.token_ids, shown)


class _Decoding:
    """Turns the tokens of one choice into text; implements `DeltaSink`."""

    def __init__(self, choice: Choice, sink: TextSink, probe: LatencyProbe) -> None:
        self.error: Exception | None = None
        self.is_finished = False
        self._choice = choice
        self._sink = sink
        self._probe = probe
        self._known = choice.known.num_tokens
        self._is_plain = not (choice.by_token or choice.is_echo_only or self._known)
        self._push = choice.output.push

    @property
    def is_full(self) -> bool:
        return self._sink.is_full

    async def wait_room(self) -> None:
        await self._sink.wait_room()

    def take(self, delta: TokenDelta) -> bool:
        try:
            if self._is_plain and delta.prompt_logprobs is None:  # nearly every delta
                return self._pass_on(self._push(delta))
            if self._choice.by_token:
                return all(self._decode(part) for part in delta.one_by_one())
            if self._known <= 0:
                return self._decode(delta)
            return all(self._decode(part) for part in delta.split(self._known))
        except Exception as error:  # noqa: BLE001 - raised again where the choice is awaited
            self.error = error
            return False

    def _decode(self, delta: TokenDelta) -> bool:
        """Pass on the text of one delta. Tokens that the client of a resumed stream already has
        come in a delta of their own and are not counted."""
        choice, prompt_logprobs = self._choice, delta.prompt_logprobs
        if choice.is_echo_only:
            out = TextDelta("", [], [], FinishReason.LENGTH, delta.cached_tokens, prompt_logprobs)
        else:
            out = choice.output.push(delta)
            if prompt_logprobs is not None:
                out = msgspec.structs.replace(out, prompt_logprobs=prompt_logprobs)
        is_known, self._known = self._known > 0, self._known - len(delta.token_ids)
        return self._pass_on(out, is_known)

    def _pass_on(self, out: TextDelta, is_known: bool = False) -> bool:
        """Pass on a delta of text. `is_known`: the client already has it."""
        self._probe.observe(0 if is_known else len(out.token_ids), out.cached_tokens)
        self._sink.take(self._choice, out)
        if out.finish is None:
            return True
        self.is_finished = True
        return False
