"""Selects the candidates to return for each prompt, as in OpenAI's `best_of`."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from gateway.api.replies.answer_format import LOWEST
from gateway.output.choices import Choice
from gateway.output.output_text import TextDelta

_Text = tuple[Choice, TextDelta]


def best_of_each_prompt(texts: Sequence[_Text], kept: int) -> list[_Text]:
    """Keeps `kept` texts of each prompt and renumbers them. If a prompt has more, keeps those with
    the highest log-probability per token, the best first."""
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
    """The mean over the reported tokens; a text without tokens ranks last."""
    logprobs = [max(LOWEST, token.logprobs.logprob) for token in text.tokens]
    return sum(logprobs) / len(logprobs) if logprobs else LOWEST
