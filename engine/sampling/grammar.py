"""Grammars that constrain sequences' output: compiles them and makes their matchers.

llguidance does the work. Threads compile a grammar and compute its first mask while its sequence
waits to be admitted; the most recently used grammars are cached. `grammar_follower` follows the
output from then on. The time that the sequences of one request may take together is limited. A
matcher's state depends only on the grammar and the output, so any worker can rebuild it from the
output's tokens. Imports no torch.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from checkpoint.vocabularies.tokenizer_json import path_or_content
from engine.sampling.grammar_follower import GrammarFollower
from engine.sampling.grammar_matcher import (
    DEFAULT_LIMITS,
    GrammarLimits,
    GrammarMatcher,
    MaskTime,
    Started,
    TokenMask,
    error_of,
)
from engine.sampling.mask_pool import Lane
from protocol.errors import InvalidRequest

_MAX_COMPILED = 128
_NUM_COMPILERS = 2
_LIMITS = LLParserLimits(verbose_errors=False)


@dataclass(frozen=True, eq=False)
class _Compiled:
    """A grammar at its beginning; sequences copy the state."""

    lane: Lane
    state: LLMatcher
    mask: TokenMask | None


class Grammars:
    """The grammars of one worker, until `close`. If grammars are not available, `unavailable` says
    why. `wake` is called in another thread when a matcher is ready, or when a mask is ready that a
    step did not wait for."""

    def __init__(
        self,
        tokenizer_file: Path,
        vocab_size: int,
        end_ids: Sequence[int],
        limits: GrammarLimits = DEFAULT_LIMITS,
    ) -> None:
        """`vocab_size` is the model's. `end_ids` end a text once it is complete."""
        self.wake: Callable[[], None] = lambda: None
        self.unavailable = ""
        self._limits = limits
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()
        self._lock = threading.Lock()  # of the cache
        self._compilers = ThreadPoolExecutor(_NUM_COMPILERS, thread_name_prefix="grammar")
        self._times: WeakValueDictionary[str, MaskTime] = WeakValueDictionary()
        if not tokenizer_file.is_file():
            self.unavailable = f"{tokenizer_file.name} is missing"
            return
        try:
            self._vocabulary = _load_vocabulary(tokenizer_file, vocab_size, end_ids)
        except ValueError as error:
            self.unavailable = f"{tokenizer_file.name}: {error}"
            return
        self.follower = GrammarFollower(self._vocabulary, vocab_size, limits, lambda: self.wake())

    def matcher(self, grammar: str, output_ids: Sequence[int], request: str = "") -> GrammarMatcher:
        """A matcher for the grammar after this output; a thread compiles the grammar. Matchers of
        one `request` have one time limit together; with an empty `request`, each has its own.

        Raises InvalidRequest if the checkpoint's tokenizer does not support grammars.
        """
        if self.unavailable:
            raise InvalidRequest(
                f"the worker cannot follow grammars: {self.unavailable}", "grammar"
            )
        spent = self._times.get(request) or MaskTime(self._limits)
        if request:
            self._times[request] = spent
        started = self._compilers.submit(self._start, grammar, list(output_ids), spent)
        started.add_done_callback(lambda _: self.wake())
        return GrammarMatcher(started, self.follower, spent)

    def close(self) -> None:
        """End the threads once their current work is done; `wake` is no longer called after
        that."""
        self._compilers.shutdown(cancel_futures=True)
        if not self.unavailable:
            self.follower.close()

    # -- the compilers' threads ---------------------------------------------------------------

    def _start(self, grammar: str, output_ids: list[int], spent: MaskTime) -> Started:
        """Compile, or copy a cached grammar, and consume the output so far."""
        compiled = self._compile(grammar, spent)
        state, mask = compiled.state.deep_copy(), compiled.mask
        for token_id in output_ids:
            started = time.monotonic()
            self.follower.consume([(state, token_id)])
            spent.add(time.monotonic() - started)
            if spent.is_spent:
                break
        if output_ids:
            mask = self.follower.mask_of(state)
        return Started(compiled.lane, state, mask, error_of(state))

    def _compile(self, grammar: str, spent: MaskTime) -> _Compiled:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
        state = LLMatcher(self._vocabulary, grammar, log_level=0, limits=_LIMITS)
        started = time.thread_time()
        mask = self.follower.mask_of(state)
        cost_s = time.thread_time() - started
        spent.add(cost_s)
        with self._lock:
            compiled = self._compiled.setdefault(grammar, _Compiled(Lane(cost_s), state, mask))
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled


def _load_vocabulary(tokenizer_file: Path, vocab_size: int, end_ids: Sequence[int]) -> LLTokenizer:
    """The tokenizer's vocabulary. The model may have more tokens (a padded vocabulary) or fewer.

    Raises ValueError for a tokenizer that llguidance cannot read.
    """
    ends, source = list(end_ids) or None, path_or_content(tokenizer_file)
    known = LLTokenizer(source, eos_token=ends, slices=[]).vocab_size
    return LLTokenizer(source, n_vocab=max(known, vocab_size), eos_token=ends)
