"""Adds up what a request used: tokens of prompts, from caches, of output, of reasoning."""

from __future__ import annotations

from msgspec import UNSET

from router.api.openai.answers import CachedTokens, OutputDetails, Usage
from router.requests.choices import Choice
from router.requests.output_text import TextDelta


def prompt_lengths(choices: list[Choice]) -> dict[int, int]:
    """The tokens of each prompt."""
    return {choice.prompt_index: len(choice.request.token_ids) for choice in choices}


def counting_choices(choices: list[Choice]) -> dict[int, int]:
    """For each prompt, the choice for which its cached tokens are counted: the first."""
    return {choice.prompt_index: choice.index for choice in reversed(choices)}


class UsageCount:
    """Adds up the usage of a request. Cache hits of a prompt are counted for its first choice."""

    def __init__(self, choices: list[Choice]) -> None:
        self._choices = choices
        self._prompts = prompt_lengths(choices)
        self._counting = counting_choices(choices)
        self._cached = dict.fromkeys(self._prompts, 0)
        self._output = sum(each.known.num_tokens for each in choices if each.known.has_ended)

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return self._output

    def add(self, choice: Choice, delta: TextDelta) -> None:
        """Count a delta."""
        self._output += len(delta.token_ids)
        prompt = choice.prompt_index
        if self._counting[prompt] == choice.index:
            self._cached[prompt] = max(self._cached[prompt], delta.cached_tokens)

    def total(self) -> Usage:
        """The usage so far."""
        prompt = sum(self._prompts.values())
        cached = CachedTokens(sum(self._cached.values()))
        reasoning = [choice.output.reasoning_tokens for choice in self._choices]
        counts = [count for count in reasoning if count is not None]
        details = OutputDetails(sum(counts)) if counts else UNSET
        return Usage(prompt, self._output, prompt + self._output, cached, details)
