"""Holds a conversation with a server over the chat API, each answer sent back as it was received.

Knows one client's side only; every server of OpenAI's API that returns token ids can be talked to.
"""

from __future__ import annotations

import json
from typing import Any

from bench.tools.raw_stream import RawStream, completion
from bench.turns.accounts import TurnResult
from bench.turns.conversations import Conversation
from protocol.errors import BatonError

HOST = "127.0.0.1"
PATH = "/v1/chat/completions"
TEMPERATURE = 0.7


class Talk:
    """One conversation with one server, which is sent a seed with each request if it
    `takes_seeds`."""

    def __init__(
        self, port: int, model: str, words_per_token: float, *, takes_seeds: bool = True
    ) -> None:
        self._port = port
        self._model = model
        self._words_per_token = words_per_token
        self._takes_seeds = takes_seeds

    async def hold(self, conversation: Conversation) -> list[TurnResult]:
        """All turns, one after the other. Raises BatonError if the server refuses one."""
        messages: list[dict[str, Any]] = []
        sizes: list[int] = []
        results: list[TurnResult] = []
        for number, turn in enumerate(conversation.turns):
            if turn.kept_tokens is not None:
                kept = _num_kept(sizes, turn.kept_tokens)
                del messages[kept:], sizes[kept:]
            content = conversation.text(number, self._words_per_token)
            messages.append({"role": "user", "content": content})
            seed = conversation.seed + number
            result, text = await self._turn(conversation, number, messages, seed)
            messages.append({"role": "assistant", "content": text})
            sizes += [turn.new_tokens, turn.answer_tokens]
            results.append(result)
        return results

    async def _turn(
        self, conversation: Conversation, number: int, messages: list[dict[str, Any]], seed: int
    ) -> tuple[TurnResult, str]:
        num_tokens = conversation.turns[number].answer_tokens
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": num_tokens,
            "min_tokens": num_tokens,
            "temperature": TEMPERATURE,
            "seed": seed if self._takes_seeds else None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        stream = await completion(HOST, self._port, json.dumps(body).encode(), PATH)
        return _read(stream, conversation.name, number)


def _num_kept(sizes: list[int], kept_tokens: int) -> int:
    """How many messages the kept tokens fill: whole turns, since a user's message follows."""
    total = kept = 0
    for place in range(0, len(sizes), 2):
        total += sum(sizes[place : place + 2])
        if total > kept_tokens:
            break
        kept = place + 2
    return kept


def _read(stream: RawStream, name: str, number: int) -> tuple[TurnResult, str]:
    """The turn, and the text of its answer."""
    prompt: list[int] = []
    answer: list[int] = []
    texts: list[str] = []
    first_at, cached = 0.0, 0
    for at, event in stream.events():
        document = json.loads(event)
        if "error" in document:
            raise BatonError(f"{name}: the server said {document['error']}")
        prompt = document.get("prompt_token_ids") or prompt
        usage = document.get("usage")
        if usage:
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in document.get("choices", ()):
            ids = choice.get("token_ids") or []
            if ids and not answer:
                first_at = at
            answer += ids
            texts.append(choice["delta"].get("content") or "")
    if not prompt or not answer:
        raise BatonError(f"{name}: the server returned no token ids")
    ttft_ms = 1e3 * (first_at - stream.sent_at)
    return TurnResult(name, number, prompt, answer, cached, ttft_ms), "".join(texts)
