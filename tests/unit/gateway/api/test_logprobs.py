"""What log-probabilities cost the garbage collector."""

from __future__ import annotations

import gc

from gateway.api.openai.logprobs import TokenNames, chat_logprobs
from gateway.output.output_text import OutputToken
from gateway.text.tokenizer import Tokenizer
from protocol.sampling import TokenLogprobs


def test_log_probabilities_are_left_out_of_garbage_collection(tokenizer: Tokenizer) -> None:
    """An answer may have a million of them, and a collection that visits each stalls all streams:
    tuples are left out once they have been seen, the rest at once."""
    top = tuple((token, -1.5) for token in range(20))
    tokens = [OutputToken(1, TokenLogprobs(-1.0, top), 0, 1) for _ in range(50)]
    entries = chat_logprobs(tokens, TokenNames(tokenizer)).content
    gc.collect()
    places = [top for entry in entries for top in entry.top_logprobs]
    parts = [
        *tokens,
        *(each.logprobs for each in tokens),
        *entries,
        *(each.bytes for each in entries),
        *places,
        *(each.bytes for each in places),
    ]
    assert len(places) == 1000
    assert not any(gc.is_tracked(each) for each in parts)
