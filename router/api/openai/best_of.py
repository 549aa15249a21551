"""Which of a prompt's candidates are answered, as OpenAI's `best_of` has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from router.api.openai.logprobs import LOWEST
from router.requests.choices import Choice
from router.requests.output_text import TextDelta

_Text = tuple[Choice, TextDelta]


def best_of_each_prompt(texts: Sequence[_Text], kept: int) -> list[_Text]:
    """So many of each prompt's texts, numbered anew; if there are more, those with the highest
    log-probability per token, the best first."""
    by_prompt: dict[int, list[_Text]] = {}
    for each in texts:
        by_prompt.setdefault(each[0].prompt_index, []).append(each)
    best: list[_Text] = []
    for candidates in by_prompt.values():
        if len(candidates) > kept:
            candidates.sort(key=lambda each: -_mean_logprob(each[1]))
        best += candidates[:kept]
    return [(replace(choice, index=index), text) for index, (choice, text) in enumerate(best)]


def _mean_logprob(text: TextDelta) -> float:
    """Of the reported tokens; a text without any is the least likely."""
    logprobs = [max(LOWEST, token.logprobs.logprob) for token in text.tokens]
    return sum(logprobs) / len(logprobs) if logprobs else LOWEST
