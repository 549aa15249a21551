"""Grammars that constrain sequences' output: compiles and follows them, computes token masks.

llguidance does the work, without the interpreter's lock. A thread compiles a grammar while its
sequence waits to be admitted; the most recently used grammars are cached. A step's masks are
computed after its forward pass is launched, so that a card computes meanwhile. A matcher's state
depends only on the grammar and the output, so any worker can rebuild it from the output's tokens.
Imports no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from protocol.errors import InvalidRequest

TokenMask = npt.NDArray[np.int32]
"""Words of 32 tokens, the least significant bit first; a set bit allows its token."""

_MAX_COMPILED = 128
_FEW = 8
_LIMITS = LLParserLimits(verbose_errors=False)


class GrammarMatcher:
    """A grammar's state in one sequence. The engine's thread uses it once it `is_ready`."""

    def __init__(self, matcher: Future[LLMatcher]) -> None:
        self._matcher = matcher

    @property
    def is_ready(self) -> bool:
        """Whether the grammar is compiled; the other members wait until it is."""
        return self._matcher.done()

    @property
    def error(self) -> str:
        """Why no token can be chosen any more, or an empty string. The grammar cannot be compiled,
        exceeds a limit, or forbids the output so far."""
        return self.state.get_error().strip().partition("\n")[0]

    @property
    def state(self) -> LLMatcher:
        """llguidance's matcher, advanced by the output so far."""
        return self._matcher.result()

    def advance(self, token_id: int) -> bool:
        """Consume a chosen token; True if the grammar is complete and allows no further token."""
        state = self.state
        return state.consume_token(token_id) and state.is_stopped() and not state.is_error()


class Grammars:
    """The grammars of one worker, until `close`. If grammars are not available, `unavailable` says
    why. `wake` is called in the compiler's thread when a matcher has become ready."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        """`vocab_size` is the model's; `end_ids` end a text, and may come once it is complete."""
        self._num_words = -(-vocab_size // 32)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._executor = LLExecutor()
        self._vocabulary: LLTokenizer | None = None
        self.wake: Callable[[], None] = lambda: None
        self.unavailable = ""
        if not tokenizer_file.is_file():
            self.unavailable = f"{tokenizer_file.name} is missing"
            return
        try:
            self._vocabulary = _load_vocabulary(tokenizer_file, vocab_size, end_ids)
        except ValueError as error:
            self.unavailable = f"{tokenizer_file.name}: {error}"

    def matcher(self, grammar: str, output_ids: Sequence[int]) -> GrammarMatcher:
        """A matcher for the grammar after this output; a thread compiles the grammar.

        Raises InvalidRequest if the checkpoint's tokenizer does not support grammars.
        """
        if self._vocabulary is None:
            raise InvalidRequest(
                f"the worker cannot follow grammars: {self.unavailable}", "grammar"
            )
        started = self._compiler.submit(self._start, grammar, list(output_ids))
        started.add_done_callback(lambda _: self.wake())
        return GrammarMatcher(started)

    def masks(self, matchers: Sequence[GrammarMatcher]) -> list[TokenMask | None]:
        """The tokens that may come next, for each matcher; None if the matcher has an `error`."""
        num_words = self._num_words
        if self._vocabulary is not None:
            num_words = -(-self._vocabulary.vocab_size // 32)
        masks = np.zeros((len(matchers), num_words), dtype=np.int32)
        states = [matcher.state for matcher in matchers]
        rows = [(state, row) for row, state in enumerate(states)]
        if len(states) <= _FEW:  # waking other threads would take longer
            for state, row in rows:
                fill_next_token_bitmask(state, masks, row)
        else:
            fill_next_token_bitmask_par(self._executor, rows, masks)
        return [None if state.is_error() else masks[row, : self._num_words] for state, row in rows]

    def close(self) -> None:
        """End the compiler's thread after the current grammar; then `wake` is no longer called."""
        self._compiler.shutdown(cancel_futures=True)

    def _start(self, grammar: str, output_ids: list[int]) -> LLMatcher:
        """Compile, or copy a cached grammar. Only the compiler's thread uses the cache."""
        compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            assert self._vocabulary is not None
            compiled = LLMatcher(self._vocabulary, grammar, log_level=0, limits=_LIMITS)
        self._compiled[grammar] = compiled
        if len(self._compiled) > _MAX_COMPILED:
            self._compiled.popitem(last=False)
        matcher = compiled.deep_copy()
        if output_ids:
            matcher.consume_tokens(output_ids)
        return matcher


def _load_vocabulary(tokenizer_file: Path, vocab_size: int, end_ids: Sequence[int]) -> LLTokenizer:
    """The tokenizer's vocabulary. The model may have more tokens (a padded vocabulary) or fewer.

    Raises ValueError for a tokenizer that llguidance cannot read.
    """
    ends = list(end_ids) or None
    known = LLTokenizer(str(tokenizer_file), eos_token=ends, slices=[]).vocab_size
    return LLTokenizer(str(tokenizer_file), n_vocab=max(known, vocab_size), eos_token=ends)
