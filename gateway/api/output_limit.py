"""How long an output may be: the limit that a request asks for, the default, and the room that is
left.

Without a limit in the request, the output may fill the context; only completions have a default
(`DEFAULT_MAX_TOKENS`).
"""

from __future__ import annotations

import msgspec

from protocol.errors import PromptTooLong


class OutputWish(msgspec.Struct, frozen=True):
    """The parameters that each kind of request expresses in its own way.

    `default_tokens` is the output limit if `requested_tokens` is None (None: the rest of the
    context). `prompt_param` is the field that holds the prompt. `grammar` constrains the output's
    text. `bad_words` are token sequences that the output must not contain. `prompt_logprobs` is
    the number of alternatives to compute per prompt token, or None for no log-probabilities.
    `num_choices` is the number of sequences generated for each prompt, and `prompt_copies` how
    often the answer repeats its report about a prompt. With `repeats_output`, the end of a stream
    repeats its report about the output. `may_be_kept` is False if the client does not want its
    answer stored.
    """

    requested_tokens: int | None
    default_tokens: int | None
    logprobs: int | None
    prompt_param: str
    grammar: str | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None
    num_choices: int = 1
    prompt_copies: int = 1
    repeats_output: bool = False
    may_be_kept: bool = True

    @property
    def is_echo_only(self) -> bool:
        """Whether the answer contains no generated tokens."""
        return self.requested_tokens == 0

    @property
    def generated_tokens(self) -> int | None:
        """The limit sent to workers: prompt log-probabilities come with a first output token."""
        if self.is_echo_only and self.prompt_logprobs is not None:
            return 1
        return self.requested_tokens


def output_limit(
    prompt_tokens: int, requested: int | None, default: int | None, max_context: int, param: str
) -> int:
    """How many tokens may be generated.

    Without a `requested` number, this is `default` or the rest of the context, whichever is less
    (with None, the rest). Raises PromptTooLong, with both numbers.
    """
    room = max_context - prompt_tokens
    needed = 1 if requested is None else requested
    if room < needed:
        raise PromptTooLong(max_context, prompt_tokens, needed, param)
    if requested is not None:
        return requested
    return room if default is None else min(default, room)


def min_given(first: int | None, second: int | None) -> int | None:
    """The smaller of two limits, each of which may be absent."""
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)
