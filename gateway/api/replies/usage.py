"""Adds up what a request used: tokens of prompts, from caches, of output, of reasoning."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from gateway.output.choices import Choice
from gateway.output.output_text import TextDelta


class CachedTokens(Struct, frozen=True):
    """Details of the prompt's tokens."""

    cached_tokens: int


class OutputDetails(Struct, frozen=True):
    """Details of the output's tokens: the tokens of reasoning, including its markers."""

    reasoning_tokens: int


class Usage(Struct, frozen=True):
    """Token counts of a whole HTTP request; every prompt counts once. Only models that reason have
    details of the output."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: OutputDetails | UnsetType = UNSET

    @property
    def reasoning_tokens(self) -> int:
        """The output's tokens of reasoning."""
        details = self.completion_tokens_details
        return 0 if details is UNSET else details.reasoning_tokens


class UsageCount:
    """Adds up the usage of a request: `num_prompt` tokens of all prompts, `num_output` so far.
    Cache hits of a prompt are counted for its first choice."""

    def __init__(self, choices: list[Choice]) -> None:
        self.num_prompt = self.num_output = 0
        self._choices = choices
        self._cached: dict[int, int] = {}  # by index of each prompt's first choice
        prompts: set[int] = set()
        for each in choices:
            if each.prompt_index not in prompts:
                prompts.add(each.prompt_index)
                self.num_prompt += len(each.request.token_ids)
                self._cached[each.index] = 0
            if each.known.has_ended:
                self.num_output += each.known.num_tokens

    def counts_cached(self, choice: Choice) -> bool:
        """Whether this choice counts the cache hits of its prompt."""
        return choice.index in self._cached

    def add(self, choice: Choice, delta: TextDelta) -> None:
        """Count a delta."""
        self.num_output += len(delta.token_ids)
        cached = delta.cached_tokens
        if cached and cached > self._cached.get(choice.index, cached):
            self._cached[choice.index] = cached

    def total(self) -> Usage:
        """The usage so far."""
        prompt, output = self.num_prompt, self.num_output
        reasoning = [each.output.reasoning_tokens for each in self._choices]
        details = UNSET if None in reasoning else OutputDetails(sum(filter(None, reasoning)))
        cached = CachedTokens(sum(self._cached.values()))
        return Usage(prompt, output, prompt + output, cached, details)
