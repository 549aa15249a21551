"""Token counts of a sequence, updated token by token.

Penalties use them, so that no step has to walk through all tokens. Also computes the masks of
allowed-token lists and the ends of forbidden words. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from engine.sampling.grammar_matcher import TokenMask

Ids = npt.NDArray[np.int64]
_FIRST_SIZE = 64


class TokenHistory:
    """Distinct tokens of a prompt and of the output that follows it, with the output's counts."""

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self._seen = _Counts(prompt_ids)
        self._output = _Counts()
        self.num_output = 0

    def extend(self, output_ids: Iterable[int]) -> None:
        """Add the output tokens since the last call."""
        for token_id in output_ids:
            self._seen.add(token_id)
            self._output.add(token_id)
            self.num_output += 1

    @property
    def seen_ids(self) -> Ids:
        """The distinct tokens of prompt and output."""
        return self._seen.ids

    @property
    def output_ids(self) -> Ids:
        """The distinct tokens of the output."""
        return self._output.ids

    @property
    def output_counts(self) -> Ids:
        """How often each of `output_ids` occurs."""
        return self._output.counts

    def output_place(self, token_id: int) -> int | None:
        """The index of a token in `output_ids`, or None."""
        return self._output.places.get(token_id)


class _Counts:
    """Distinct ids in order of first occurrence, and how often each was added; in arrays that grow
    by doubling. The `known` ids start with a count of 0."""

    def __init__(self, known: Iterable[int] = ()) -> None:
        ids = list(dict.fromkeys(known))  # at once: prompts are long
        self.places = {token_id: place for place, token_id in enumerate(ids)}
        self._table = np.zeros((2, max(_FIRST_SIZE, len(ids))), dtype=np.int64)  # ids, counts
        self._table[0, : len(ids)] = ids

    def add(self, token_id: int) -> None:
        place = self.places.get(token_id)
        if place is None:
            place = self.places[token_id] = len(self.places)
            if place == self._table.shape[1]:
                self._table = np.concatenate((self._table, np.zeros_like(self._table)), axis=1)
            self._table[0, place] = token_id
        self._table[1, place] += 1

    @property
    def ids(self) -> Ids:
        return self._table[0, : len(self.places)]

    @property
    def counts(self) -> Ids:
        return self._table[1, : len(self.places)]


@lru_cache(maxsize=64)
def mask_of(token_ids: tuple[int, ...], vocab_size: int) -> TokenMask:
    """The mask that allows only these tokens; read-only."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[[token_id for token_id in token_ids if 0 <= token_id < vocab_size]] = 1
    mask: TokenMask = np.packbits(bits, bitorder="little").view(np.int32)
    mask.flags.writeable = False
    return mask


def words_ends(words: Sequence[tuple[int, ...]], output_ids: Sequence[int]) -> list[int]:
    """The tokens that would complete one of the `words` (tuples of tokens) if they came next."""
    num_output = len(output_ids)
    return [
        word[-1]
        for word in words
        if len(word) <= num_output + 1
        and tuple(output_ids[num_output - len(word) + 1 :]) == word[:-1]
    ]
