"""Lets grammars follow their sequences' outputs: consumes tokens, computes the next masks.

Threads of a pool do this while the step continues, without the interpreter's lock; a step waits for
them for a short time. Handing work to a thread costs more than the work on an ordinary grammar,
above all on a busy host. Therefore the engine's thread does the work for grammars that have been
quick several times in a row. If a trusted grammar becomes slow, it delays one step by one token;
after that no grammar is trusted for a while. Imports no torch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import (
    consume_token_par,
    fill_next_token_bitmask,
    fill_next_token_bitmask_par,
)

from engine.sampling.grammar_matcher import GrammarLimits, GrammarMatcher, TokenMask, error_of
from engine.sampling.mask_pool import Lane, MaskPool

log = logging.getLogger(__name__)

_FEW = 8
_QUICK_S = 0.001
_TRUSTED_AFTER = 8  # quick tokens in a row
_DISTRUST_S = 60.0
_MOST_TO_CONSUME = 8
"""llguidance consumes tokens in its own thread, whose measured time includes waiting for a core;
hence at most this many times the mask's own time is counted."""
_NO_GRAMMAR = "start: <|nothing|>"


class _Watch:
    """Measures this thread's work from now on. Reading a thread's CPU time is a system call; wall
    time is enough while the work is quick."""

    def __init__(self) -> None:
        self._lap_began = time.monotonic()
        self._core_s = time.thread_time()

    def lap(self) -> float:
        """Seconds of work since the last lap. Waiting for a core is left out unless the work was
        quick."""
        now = time.monotonic()
        seconds, self._lap_began = now - self._lap_began, now
        if seconds <= _QUICK_S:
            return seconds
        before, self._core_s = self._core_s, time.thread_time()
        return min(seconds, self._core_s - before)


class GrammarFollower:
    """Follows the grammars of one worker, until `close`. `wake` is called in another thread when a
    mask has come that a step did not wait for."""

    def __init__(
        self,
        vocabulary: LLTokenizer,
        vocab_size: int,
        limits: GrammarLimits,
        wake: Callable[[], None],
    ) -> None:
        """`vocab_size` is the model's; the vocabulary may have more tokens."""
        self.pool = MaskPool(self._follow, limits.step_s)
        self._vocabulary = vocabulary
        self._num_words = -(-vocab_size // 32)
        self._limits = limits
        self._wake = wake
        self._executor = LLExecutor()
        self._tools = threading.local()
        self._distrusted_until = 0.0

    # -- the engine's thread ------------------------------------------------------------------

    def give(self, chosen: Sequence[tuple[GrammarMatcher, int]]) -> None:
        """Consume each matcher's chosen token. Returns when that is done or a step's wait is over;
        `GrammarMatcher.advance` follows."""
        for matcher, token_id in chosen:
            matcher.begin(token_id)
        pooled = []
        watch = _Watch()
        for matcher, token_id in chosen:
            if not self._trusts(matcher.lane):
                pooled.append(matcher)
                continue
            matcher.state.consume_token(token_id)
            matcher.consumed()
            self._note_here(matcher, watch.lap())
            matcher.is_deferred = True
        if pooled:
            self.pool.submit(pooled)
            self.pool.wait_for(pooled, lambda matcher: not matcher.is_consuming)

    def wait_for_masks(self, matchers: Sequence[GrammarMatcher]) -> None:
        """Compute deferred masks, and wait for the others no longer than a step's wait. Do not wait
        for requests that have used up their time."""
        deferred = [matcher for matcher in matchers if matcher.is_deferred]
        if len(deferred) > _FEW and all(self._trusts(matcher.lane) for matcher in deferred):
            self._compute_many(deferred)
        watch = _Watch()
        for matcher in deferred:
            if self.expects_late(matcher) or not matcher.is_deferred:
                continue
            matcher.is_deferred = False
            matcher.end(self.mask_of(matcher.state), error_of(matcher.state))
            self._note_here(matcher, watch.lap())
        pending = [matcher for matcher in matchers if matcher.is_pending]
        if pending:
            self.pool.wait_for(pending, lambda each: not each.is_pending or each.time.is_spent)

    def expects_late(self, matcher: GrammarMatcher) -> bool:
        """Whether a pending mask will be late for a step that is planned now. A deferred one goes
        to the pool if its grammar is no longer trusted."""
        if matcher.is_deferred:
            if self._trusts(matcher.lane):
                return False
            matcher.is_deferred = False
            self.pool.submit([matcher])
        if not self.pool.is_slow(matcher.lane):
            return False
        matcher.is_missed = True
        return matcher.is_pending

    def close(self) -> None:
        """End the threads once their current work is done; `wake` is no longer called after
        that."""
        self.pool.close()

    # -- any thread ---------------------------------------------------------------------------

    def consume(self, chosen: list[tuple[LLMatcher, int]]) -> None:
        """Consume one token of each, without the interpreter's lock: `consume_token` keeps it, and
        so does this call for a single matcher."""
        if len(chosen) == 1:
            chosen = [*chosen, (self._spare(), 0)]
        if chosen:
            consume_token_par(self._own_executor(), chosen)

    def mask_of(self, state: LLMatcher) -> TokenMask | None:
        """The tokens that may come next; None after an error."""
        masks = self._empty_masks(1)
        fill_next_token_bitmask(state, masks)
        return None if state.is_error() else masks[0, : self._num_words]

    # -- helpers of the engine's thread -------------------------------------------------------

    def _trusts(self, lane: Lane) -> bool:
        return lane.num_quick >= _TRUSTED_AFTER and time.monotonic() >= self._distrusted_until

    def _note_here(self, matcher: GrammarMatcher, seconds: float) -> None:
        """Count the time that a token took in this thread, where others waited for it."""
        self._note(matcher, seconds)
        if seconds > self._limits.step_s:
            self._distrusted_until = time.monotonic() + _DISTRUST_S
            log.warning("a grammar that had been quick delayed a step by %.0f ms", seconds * 1e3)

    def _compute_many(self, matchers: list[GrammarMatcher]) -> None:
        """Compute deferred masks in all of llguidance's threads."""
        masks = self._empty_masks(len(matchers))
        rows = [(matcher.state, row) for row, matcher in enumerate(matchers)]
        started = time.monotonic()
        fill_next_token_bitmask_par(self._executor, rows, masks)
        taken_s = time.monotonic() - started
        for matcher, mask in zip(matchers, masks, strict=True):
            if taken_s > self._limits.step_s:
                matcher.lane.num_quick = 0  # at least one of them is slow
            error = error_of(matcher.state)
            matcher.is_deferred = False
            matcher.end(None if error else mask[: self._num_words], error)

    # -- the pool's threads -------------------------------------------------------------------

    def _follow(self, matchers: list[GrammarMatcher]) -> None:
        """Consume the pending tokens together, then compute the masks one by one."""
        try:
            consume_s = self._consume_pending(matchers)
            for matcher in matchers:
                self._compute_mask(matcher, consume_s)
        except Exception as error:  # the top of a task: other grammars still need the thread
            log.exception("following a grammar failed")
            for matcher in [each for each in matchers if each.is_pending]:
                self._end(matcher, None, f"{type(error).__name__} on the worker")

    def _consume_pending(self, matchers: list[GrammarMatcher]) -> float:
        """Consume the pending tokens; returns the seconds for each."""
        left = [each for each in matchers if each.is_consuming and not each.time.is_spent]
        started = time.monotonic()
        self.consume([(matcher.state, matcher.token_id) for matcher in left])
        taken_s = time.monotonic() - started
        for matcher in left:
            matcher.consumed()
            self.pool.note(matcher)
        return taken_s / max(1, len(left))

    def _compute_mask(self, matcher: GrammarMatcher, consume_s: float) -> None:
        """Compute a pending mask, unless nobody needs it; count the time."""
        mask, error = None, ""
        if not (matcher.is_closed or matcher.time.is_spent):
            started = time.thread_time()
            mask, error = self.mask_of(matcher.state), error_of(matcher.state)
            mask_s = time.thread_time() - started
            self._note(matcher, mask_s + min(consume_s, _MOST_TO_CONSUME * mask_s))
        self._end(matcher, mask, error)

    def _note(self, matcher: GrammarMatcher, seconds: float) -> None:
        """Count the time that a token took."""
        lane = matcher.lane
        lane.cost_s = seconds
        lane.num_quick = lane.num_quick + 1 if seconds <= _QUICK_S else 0
        matcher.time.add(seconds)

    def _end(self, matcher: GrammarMatcher, mask: TokenMask | None, error: str) -> None:
        matcher.end(mask, error)
        self.pool.note(matcher)
        if matcher.is_missed:
            self._wake()

    def _empty_masks(self, count: int) -> TokenMask:
        """[count, words of the vocabulary]."""
        return np.zeros((count, -(-self._vocabulary.vocab_size // 32)), dtype=np.int32)

    def _own_executor(self) -> LLExecutor:
        """This thread's executor, which has one thread of the same priority."""
        if not hasattr(self._tools, "executor"):
            self._tools.executor = LLExecutor(1)
        executor: LLExecutor = self._tools.executor
        return executor

    def _spare(self) -> LLMatcher:
        """This thread's matcher that consumes nothing."""
        if not hasattr(self._tools, "spare"):
            self._tools.spare = LLMatcher(self._vocabulary, _NO_GRAMMAR, log_level=0)
        spare: LLMatcher = self._tools.spare
        return spare
