"""Prompts for text between two given texts, for models trained to fill in the middle.

The order prefix, suffix, middle is that of Qwen's coders and StarCoder. A model supports it if its
vocabulary has the three tokens.
"""

from __future__ import annotations

from gateway.text.tokenizer import Tokenizer
from protocol.errors import InvalidRequest

_MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
)


def fill_in_middle(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """Token ids of the prompt. Raises InvalidRequest if the model lacks these tokens."""
    for markers in _MARKERS:
        ids = [tokenizer.added_token_id(marker) for marker in markers]
        before, behind, middle = ids
        if before is not None and behind is not None and middle is not None:
            first = tokenizer.encode(prefix, add_special_tokens=False)
            second = tokenizer.encode(suffix, add_special_tokens=False)
            return [before, *first, behind, *second, middle]
    raise InvalidRequest(
        "'suffix' is not supported: the model has no tokens for filling in the middle", "suffix"
    )
