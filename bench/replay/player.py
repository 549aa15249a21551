"""Sends a trace's requests and notes when their tokens came.

Sessions begin at their times whatever the system does; within a session each turn starts after the
former one's end and its pause, and not before its recorded time. A request that fails counts as
failed, and its session goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from math import nan
from typing import Any

import msgspec

from bench.replay.prompts import Conversation, Prompt
from bench.replay.vocabulary import Target, Vocabulary
from bench.tools.stream_load import Endpoint, stream_events
from protocol.errors import BatonError
from simulator.traces.sessions import Session, Trace, Turn

ANSWER_S = 600.0
"""An answer that has not ended after this time counts as an error."""


@dataclass
class Played:
    """One request; times are seconds from the begin of the replay. `gaps_s` are the times between
    the events that bring tokens. `error` is "" if it was served."""

    session: str
    turn: int
    sent: float
    first_token: float = nan
    end: float = nan
    num_prompt: int = 0
    num_output: int = 0
    cached_tokens: int = 0
    request_id: str = ""
    error: str = ""
    gaps_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Seconds from sending the request to its first token."""
        return self.first_token - self.sent

    @property
    def total_s(self) -> float:
        """Seconds from sending the request to its last token."""
        return self.end - self.sent

    @property
    def tpot_s(self) -> float:
        """The mean time of an output token after the first; 0 if there is none."""
        return (self.end - self.first_token) / (self.num_output - 1) if self.num_output > 1 else 0.0


@dataclass(frozen=True)
class Manner:
    """How prompts are sent: as text or as token ids, which words they consist of, and under which
    `cache_salt`, if any."""

    vocabulary: Vocabulary
    as_text: bool = True
    seed: int = 0
    cache_salt: str | None = None


@dataclass
class _Answer:
    """The outcome of one request."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    request_id: str = ""


class Player:
    """Replays traces against one system. `on_end` is called with each request that is over."""

    def __init__(
        self, target: Target, manner: Manner, on_end: Callable[[Played], None] = lambda _: None
    ) -> None:
        self._target = target
        self._endpoint = Endpoint.of(target.url, target.key)
        self._manner = manner
        self._on_end = on_end
        self._began = 0.0
        self.began_wall_s = 0.0
        """The begin of the latest replay, in seconds since the Unix epoch."""
        self._played: list[Played] = []

    async def play(self, trace: Trace) -> list[Played]:
        """Every request of the trace, in the order in which they were sent."""
        self._began, self.began_wall_s, self._played = time.perf_counter(), time.time(), []
        async with asyncio.TaskGroup() as group:
            for session in trace.sessions:
                group.create_task(self._play(session, session.start_s, group))
        return sorted(self._played, key=lambda each: each.sent)

    @property
    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _play(self, session: Session, start_s: float, group: asyncio.TaskGroup) -> None:
        manner = self._manner
        talk = Conversation(manner.vocabulary, manner.as_text, manner.seed, session.name)
        due = start_s
        for number, turn in enumerate(session.turns):
            due = max(due + turn.pause_s, start_s + turn.not_before_s)
            await asyncio.sleep(max(0.0, due - self._now))
            request = await self._send(session, number, talk)
            due = request.end
            for child in turn.starts:
                group.create_task(self._play(child, due + child.start_s, group))

    async def _send(self, session: Session, number: int, talk: Conversation) -> Played:
        turn, headers = session.turns[number], dict[str, str]()
        if len(session.turns) > 1:
            headers["x-session-id"] = session.name
        body = self._body(talk.prompt(turn), turn)
        request = Played(session.name, number, self._now)
        events, times = list[bytes](), list[float]()
        self._played.append(request)
        try:
            async with asyncio.timeout(ANSWER_S):
                async for at, event in stream_events(self._endpoint, body, headers):
                    if not events:
                        request.first_token = at - self._began
                    request.end = at - self._began
                    events.append(event)
                    times.append(at)
            answer = _answer_of(events)
            request.gaps_s = [after - at for at, after in pairwise(times[:-1])]  # the last: usage
            request.num_prompt = answer.usage.get("prompt_tokens", turn.num_prompt)
            request.num_output = answer.usage.get("completion_tokens", turn.num_output)
            details = answer.usage.get("prompt_tokens_details") or {}
            request.cached_tokens = details.get("cached_tokens") or 0
            request.request_id = answer.request_id
            said = answer.text if self._manner.as_text else answer.ids
            talk.take(turn, said, request.num_prompt + request.num_output)
        except (BatonError, OSError, asyncio.IncompleteReadError) as error:
            request.error, request.end = str(error) or type(error).__name__, self._now
        self._on_end(request)
        return request

    def _body(self, prompt: Prompt, turn: Turn) -> bytes:
        body = {
            "model": self._target.model,
            "prompt": prompt,
            "max_tokens": turn.num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": not self._manner.as_text,
        }
        if self._manner.cache_salt is not None:
            body["cache_salt"] = self._manner.cache_salt
        return msgspec.json.encode(body)


def _answer_of(events: list[bytes]) -> _Answer:
    """Text, ids and usage. Raises BatonError for an error among the events."""
    answer, texts = _Answer(), list[str]()
    for raw in events:
        event = msgspec.json.decode(raw)
        if "error" in event:
            raise BatonError(str(event["error"])[:300])
        for choice in event.get("choices", ()):
            texts.append(choice.get("text") or "")
            answer.ids += choice.get("token_ids") or ()
        answer.usage = event.get("usage") or answer.usage
        answer.request_id = event.get("id") or answer.request_id
    answer.text = "".join(texts)
    return answer
