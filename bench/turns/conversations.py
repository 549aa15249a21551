"""The conversations that are held with every contestant: how long each turn is, and its text.

Pure. Lengths are in tokens; texts have about as many, since each tokenizer has its own. Recorded
sessions of agents are scaled to the model's context: every length by the same factor, so that the
longest prompt with its answer fits.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

TURNS = 6
HISTORY_TOKENS, NEW_TOKENS, ANSWER_TOKENS = (500, 4000), (20, 1500), (50, 400)
MAX_TURNS = 12
"""The most turns taken from a recorded session."""
LEAST_TOKENS = 4
WRAP_TOKENS = 32
"""Tokens that are kept free for the template's text around each turn."""
_SAMPLE_WORDS = 2000
TEXT_MARGIN = 1.3
"""How many times the intended tokens a text may have."""
_WORDS = " ".join(pydoc_data.topics.topics.values()).split()


@dataclass(frozen=True)
class Turn:
    """One request. It keeps a number of the history's tokens (None: all), adds `new_tokens`, and is
    answered with `answer_tokens`."""

    new_tokens: int
    answer_tokens: int
    kept_tokens: int | None = None


@dataclass(frozen=True)
class Conversation:
    """Turns that follow each other. `seed` makes the text."""

    name: str
    turns: tuple[Turn, ...]
    seed: int

    def text(self, turn: int, words_per_token: float) -> str:
        """The new text of a turn."""
        rng = random.Random(f"{self.seed} {turn}")
        count = max(1, round(self.turns[turn].new_tokens * words_per_token))
        start = rng.randrange(max(1, len(_WORDS) - count))
        return " ".join([f"{rng.randrange(10**6)}", *_WORDS[start : start + count - 1]])


def sample_text() -> str:
    """A text like those of the turns, to see how many tokens its words have."""
    rng = random.Random(0)
    return " ".join(rng.choices(_WORDS, k=_SAMPLE_WORDS))


def six_turns(num: int, max_context: int, seed: int) -> list[Conversation]:
    """Conversations of six turns, the first with a history; shortened to fit into the context."""
    rng = random.Random(seed)
    made = []
    for number in range(num):
        news = [rng.randint(*HISTORY_TOKENS)]
        news += [rng.randint(*NEW_TOKENS) for _ in range(TURNS - 1)]
        turns = [Turn(new, rng.randint(*ANSWER_TOKENS)) for new in news]
        made.append(Conversation(f"chat {number}", _fitted(turns, max_context), seed + number))
    return made


def agent_sessions(
    lines: Iterable[str], num: int, max_context: int, seed: int
) -> list[Conversation]:
    """The first recorded sessions of at least two requests, scaled to the context."""
    made: list[Conversation] = []
    for line in lines:
        if len(made) == num:
            break
        known = [
            each for each in json.loads(line)["requests"] if each.get("in") and each.get("out")
        ]
        turns = list(_recorded(known[:MAX_TURNS]))
        if len(turns) > 1:
            name = f"agent {len(made)}"
            made.append(Conversation(name, _fitted(turns, max_context), seed + len(made)))
    return made


def _recorded(requests: Sequence[dict[str, Any]]) -> Iterator[Turn]:
    before: dict[str, Any] | None = None
    for each in requests:
        if before is None:
            yield Turn(each["in"], each["out"])
        else:
            history = before["in"] + before["out"]
            common = _common_share(before, each)
            is_whole = common > _WHOLE
            kept = history if is_whole else round(common * history)
            new = max(LEAST_TOKENS, each["in"] - kept)
            yield Turn(new, each["out"], None if is_whole else kept)
        before = each


_WHOLE = 0.97
"""A prompt's last block is seldom full, and the answer follows it."""


def _common_share(before: dict[str, Any], each: dict[str, Any]) -> float:
    """The share of the earlier prompt that the later one repeats. Without blocks, a prompt that
    grew is taken to repeat all."""
    one, other = before.get("blocks", ()), each.get("blocks", ())
    if not (one and other):
        return 1.0 if each["in"] >= before["in"] else 0.0
    return _common_blocks(one, other) / max(1, sum(count for _, count in one))


def _common_blocks(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> int:
    """How many blocks two prompts share from their beginnings; runs are [first id, count]."""
    first, second = _ids(one), _ids(other)
    shared = 0
    for left, right in zip(first, second, strict=False):
        if left != right:
            break
        shared += 1
    return shared


def _ids(runs: Sequence[Sequence[int]]) -> Iterator[int]:
    return (first + step for first, count in runs for step in range(count))


def _fitted(turns: Sequence[Turn], max_context: int) -> tuple[Turn, ...]:
    """The turns, all shorter by the same factor if the longest would not fit."""
    room = int(max_context / TEXT_MARGIN) - WRAP_TOKENS * (len(turns) + 1)
    longest = history = 0
    for turn in turns:
        kept = history if turn.kept_tokens is None else min(history, turn.kept_tokens)
        history = kept + turn.new_tokens + turn.answer_tokens
        longest = max(longest, history)
    scale = min(1.0, room / longest)
    return tuple(_scaled(each, scale) for each in turns)


def _scaled(turn: Turn, scale: float) -> Turn:
    kept = turn.kept_tokens
    return replace(
        turn,
        new_tokens=max(LEAST_TOKENS, int(turn.new_tokens * scale)),
        answer_tokens=max(LEAST_TOKENS, int(turn.answer_tokens * scale)),
        kept_tokens=None if kept is None else int(kept * scale),
    )
