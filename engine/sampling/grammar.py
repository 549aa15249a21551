"""Grammars that constrain what sequences may say: compiled, followed, turned into token masks.

llguidance does the work, without the interpreter's lock. A grammar is compiled in a thread, while
its sequence waits to be admitted; the last compiled ones are kept. The masks of a step are
computed once its forward pass is launched, so that a card computes meanwhile. The state of a
matcher is a function of the grammar and the output alone: any worker rebuilds it from the
output's tokens. Imports no torch.
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
    """A grammar's state in one sequence. Used by the engine's thread, once it `is_ready`."""

    def __init__(self, matcher: Future[LLMatcher]) -> None:
        self._matcher = matcher

    @property
    def is_ready(self) -> bool:
        """Whether the grammar is compiled; what else is asked for waits for that."""
        return self._matcher.done()

    @property
    def error(self) -> str:
        """Why nothing can be chosen any more, or nothing: the grammar cannot be compiled, exceeds
        a limit, or forbids what the output already says."""
        return self.state.get_error().strip().partition("\n")[0]

    @property
    def state(self) -> LLMatcher:
        """llguidance's matcher after the output so far."""
        return self._matcher.result()

    def advance(self, token_id: int) -> bool:
        """Follow a chosen token; whether the grammar is complete and nothing more can come."""
        state = self.state
        return state.consume_token(token_id) and state.is_stopped() and not state.is_error()


class Grammars:
    """The grammars of one worker, until `close`. `unavailable` says why there can be none, if so;
    `wake` is called in the compiler's thread when a matcher has become ready."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, end_ids: Sequence[int]) -> None:
        """`vocab_size` is the model's; `end_ids` end a text, and may come where it is complete."""
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
        """A grammar's state after this output; it is compiled in a thread.

        Raises InvalidRequest if the checkpoint's vocabulary allows no grammars.
        """
        if self._vocabulary is None:
            raise InvalidRequest(
                f"the worker cannot follow grammars: {self.unavailable}", "grammar"
            )
        started = self._compiler.submit(self._start, grammar, list(output_ids))
        started.add_done_callback(lambda _: self.wake())
        return GrammarMatcher(started)

    def masks(self, matchers: Sequence[GrammarMatcher]) -> list[TokenMask | None]:
        """Which tokens may come next, of each; None where the matcher has an `error`."""
        num_words = self._num_words
        if self._vocabulary is not None:
            num_words = -(-self._vocabulary.vocab_size // 32)
        masks = np.zeros((len(matchers), num_words), dtype=np.int32)
        states = [matcher.state for matcher in matchers]
        rows = [(state, row) for row, state in enumerate(states)]
        if len(states) <= _FEW:  # waking other threads takes longer
            for state, row in rows:
                fill_next_token_bitmask(state, masks, row)
        else:
            fill_next_token_bitmask_par(self._executor, rows, masks)
        return [None if state.is_error() else masks[row, : self._num_words] for state, row in rows]

    def close(self) -> None:
        """End the compiler's thread, after what it compiles now; `wake` is called no more then."""
        self._compiler.shutdown(cancel_futures=True)

    def _start(self, grammar: str, output_ids: list[int]) -> LLMatcher:
        """In the compiler's thread, the only one that knows what is compiled."""
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
    """The checkpoint's tokens; the model may know more (its own are padded) or fewer than these.

    Raises ValueError for a tokenizer that llguidance does not read.
    """
    ends = list(end_ids) or None
    known = LLTokenizer(str(tokenizer_file), eos_token=ends, slices=[]).vocab_size
    return LLTokenizer(str(tokenizer_file), n_vocab=max(known, vocab_size), eos_token=ends)
