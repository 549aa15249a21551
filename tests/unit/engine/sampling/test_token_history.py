"""What is kept of a sequence's tokens equals what walking through them gives."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.token_history import TokenHistory, mask_of, words_ends

TOKENS = st.lists(st.integers(0, 150), max_size=300)


@given(TOKENS, st.lists(TOKENS, max_size=4))
def test_counts_are_those_of_all_tokens_so_far(prompt: list[int], parts: list[list[int]]) -> None:
    history = TokenHistory(prompt)
    output: list[int] = []
    for part in parts:
        history.extend(part)
        output += part
        counts = zip(history.output_ids.tolist(), history.output_counts.tolist(), strict=True)
        assert dict(counts) == Counter(output)
        assert len(history.seen_ids) == len({*prompt, *output})
        assert set(history.seen_ids.tolist()) == {*prompt, *output}
        assert history.num_output == len(output)
        for place, token_id in enumerate(history.output_ids.tolist()):
            assert history.output_place(token_id) == place
        assert history.output_place(151) is None


@given(st.sets(st.integers(-5, 120), max_size=20), st.integers(1, 100))
def test_a_mask_has_the_bits_of_its_tokens(tokens: set[int], vocab_size: int) -> None:
    mask = mask_of(tuple(tokens), vocab_size)
    assert len(mask) == -(-vocab_size // 32)
    found = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert set(found.tolist()) == {token for token in tokens if 0 <= token < vocab_size}


WORDS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=5)


@given(WORDS, st.lists(st.integers(0, 2), max_size=8))
def test_a_word_ends_where_appending_its_last_token_completes_it(
    words: list[tuple[int, ...]], output: list[int]
) -> None:
    ends = set(words_ends(words, output))
    for token in range(3):
        text = (*output, token)
        assert (token in ends) == any(text[-len(word) :] == word for word in words)
