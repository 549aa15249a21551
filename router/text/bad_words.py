"""Words that an output may not contain, as the token sequences that would write them.

As in vLLM a word stands at a text's start and behind a space, which most vocabularies write with
different tokens; other ways to cut a word into tokens are not looked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.text.tokenizer import Tokenizer


async def bad_word_tokens(
    tokenizer: Tokenizer, words: Sequence[str]
) -> tuple[tuple[int, ...], ...]:
    """The sequences of tokens, encoded off the event loop; no two are the same."""
    if not words:
        return ()

    def encode() -> tuple[tuple[int, ...], ...]:
        spellings = [spelling for word in words for spelling in (word, f" {word.lstrip()}")]
        encoded = [tuple(tokenizer.encode(each, add_special_tokens=False)) for each in spellings]
        return tuple(dict.fromkeys(ids for ids in encoded if ids))

    return await tokenizer.in_thread(encode)
