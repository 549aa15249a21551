"""Prompts of a session's turns: synthetic, but of the recorded sizes, with the recorded prefixes.

Equal blocks of a trace become equal words. A turn that continues the prompt and answer before it
repeats the answer that really came; new words follow.
"""

from __future__ import annotations

import random
from functools import lru_cache

from bench.replay.vocabulary import Vocabulary, text_of
from simulator.traces.sessions import BlockRuns, Turn

Prompt = str | list[int]


class Conversation:
    """The prompts of one session. Pure; `seed` and `name` decide the words."""

    def __init__(self, vocabulary: Vocabulary, as_text: bool, seed: int, name: str) -> None:
        self._vocabulary = vocabulary
        self._as_text = as_text
        self._seed = seed
        self._name = name
        self._former: Turn | None = None
        self._said: Prompt = "" if as_text else []
        self._num_said = 0
        self._number = 0

    def prompt(self, turn: Turn) -> Prompt:
        """The next turn's prompt."""
        if self._former is None or not continues(self._former, turn, self._num_said):
            self._said = "" if self._as_text else []
            self._num_said = self._vocabulary.overhead if self._as_text else 0
        missing = max(0 if self._num_said else 1, turn.num_prompt - self._num_said)
        indexes = self._indexes(turn, self._num_said, missing)
        self._number += 1
        return self._add(indexes)

    def take(self, turn: Turn, answer: Prompt, num_tokens: int) -> None:
        """Take the answer to the last prompt; prompt and answer have `num_tokens` together."""
        self._former = turn
        if isinstance(self._said, str):
            assert isinstance(answer, str)
            self._said += answer
        else:
            self._said = self._said + list(answer)  # type: ignore[arg-type]
        self._num_said = num_tokens

    def _add(self, indexes: list[int]) -> Prompt:
        known = self._vocabulary
        if isinstance(self._said, str):
            self._said += text_of([known.words[each] for each in indexes])
        else:
            self._said = self._said + [known.ids[each] for each in indexes]
        return self._said

    def _indexes(self, turn: Turn, first: int, count: int) -> list[int]:
        """Words at these places of a prompt."""
        most = len(self._vocabulary.words)
        found: list[int] = []
        if turn.blocks is not None:
            size = turn.blocks.block_tokens
            ids = _block_ids(turn.blocks, (first + count) // size)
            for block in range(first // size, len(ids)):
                words = _block_words(self._seed, turn.blocks.space, ids[block], size, most)
                start = max(first, block * size)
                found += words[start - block * size : max(0, first + count - block * size)]
        rng = random.Random(f"{self._seed} {self._name} {self._number}")
        return found + [rng.randrange(most) for _ in range(count - len(found))]


def continues(former: Turn, turn: Turn, num_said: int) -> bool:
    """Whether a turn repeats the former one's prompt and answer, which have `num_said` tokens."""
    if former.blocks is None or turn.blocks is None or turn.num_prompt < num_said:
        return False
    whole = former.num_prompt // former.blocks.block_tokens
    return whole > 0 and _block_ids(former.blocks, whole) == _block_ids(turn.blocks, whole)


def _block_ids(blocks: BlockRuns, most: int) -> list[int]:
    found: list[int] = []
    for first, count in blocks.runs:
        if len(found) >= most:
            break
        found += range(first, first + min(count, most - len(found)))
    return found


@lru_cache(maxsize=1 << 14)
def _block_words(seed: int, space: int, block: int, size: int, most: int) -> list[int]:
    rng = random.Random(f"{seed} {space} {block}")
    return [rng.randrange(most) for _ in range(size)]
