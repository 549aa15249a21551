"""Words that an output may not contain, as the token sequences that would write them.

As in vLLM, a word is encoded as at the start of a text and as after a space, since most
vocabularies use different tokens for the two. Other ways to split a word into tokens are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.text.tokenizer import Tokenizer


async def bad_word_tokens(
    tokenizer: Tokenizer, words: Sequence[str]
) -> tuple[tuple[int, ...], ...]:
    """The token sequences without duplicates, encoded off the event loop."""
    if not words:
        return ()

    def encode() -> tuple[tuple[int, ...], ...]:
        spellings = [spelling for word in words for spelling in (word, f" {word.lstrip()}")]
        encoded = [tuple(tokenizer.encode(each, add_special_tokens=False)) for each in spellings]
        return tuple(dict.fromkeys(ids for ids in encoded if ids))

    return await tokenizer.in_thread(encode)
