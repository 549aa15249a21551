"""A grammar's state in one sequence, and the time that a request's grammars have taken.

The engine's thread owns a matcher, except while a token `is_pending` in the pool's threads. Imports
no torch.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from engine.sampling.mask_pool import Lane

TokenMask = npt.NDArray[np.int32]
"""Words of 32 tokens, the least significant bit first; a set bit allows its token."""


@dataclass(frozen=True)
class GrammarLimits:
    """How long a step waits for masks, and how long the masks of one request may take on a worker,
    over all its sequences. The first `free_s` of each token do not count."""

    step_s: float = 0.05
    request_s: float = 10.0
    free_s: float = 0.001


DEFAULT_LIMITS = GrammarLimits()


@dataclass(eq=False)
class MaskTime:
    """The time that one request's grammars have taken on this worker, beyond what is free."""

    limits: GrammarLimits
    used_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count the time that one token took."""
        self.used_s += max(0.0, seconds - self.limits.free_s)

    @property
    def is_spent(self) -> bool:
        """Whether the request has used all its time."""
        return self.used_s >= self.limits.request_s


@dataclass(frozen=True)
class Started:
    """A grammar's state after the output so far, and the next token's mask, None after an error."""

    lane: Lane
    state: LLMatcher
    mask: TokenMask | None
    error: str


class Follower(Protocol):
    """Makes a matcher's steps: see `grammar_follower`."""

    def give(self, chosen: list[tuple[GrammarMatcher, int]]) -> None:
        """Consume chosen tokens."""

    def expects_late(self, matcher: GrammarMatcher) -> bool:
        """Whether a pending mask will be late for a step that is planned now."""


class GrammarMatcher:
    """A grammar's state in one sequence; `Grammars.matcher` makes it.

    From `begin` to `end` a token `is_pending`: it is consumed first (`is_consuming`), then the mask
    of the next one is computed, in the pool or, if it `is_deferred`, by the engine's thread.
    """

    def __init__(self, started: Future[Started], follower: Follower, spent: MaskTime) -> None:
        self._started = started
        self._mask: TokenMask | None = None
        self._error: str | None = None
        self._is_given = False  # a token that `advance` has not collected yet
        self.follower = follower
        self.time = spent
        self.token_id = 0  # the latest
        self.is_pending = False
        self.is_consuming = False
        self.is_deferred = False
        self.is_complete = False
        self.is_closed = False
        self.is_missed = False  # a step left the sequence out

    @property
    def is_ready(self) -> bool:
        """Whether the grammar is compiled; the other members wait until it is."""
        return self._started.done()

    @property
    def awaits_mask(self) -> bool:
        """Whether the next token's mask is missing and not expected in time for a step; if so,
        `Grammars.wake` is called when it has come."""
        return self.is_pending and not self.time.is_spent and self.follower.expects_late(self)

    @property
    def lane(self) -> Lane:
        """The lane of the compiled grammar."""
        return self._started.result().lane

    @property
    def state(self) -> LLMatcher:
        """llguidance's matcher, advanced by the output so far."""
        return self._started.result().state

    @property
    def mask(self) -> TokenMask | None:
        """The tokens that may come next; None after an error. No token may be pending."""
        assert not self.is_pending
        return self._started.result().mask if self._error is None else self._mask

    @property
    def error(self) -> str:
        """Why no token can be chosen any more, or an empty string. The grammar cannot be compiled,
        exceeds a limit, or forbids the output so far. No token may be pending."""
        assert not self.is_pending
        return self._started.result().error if self._error is None else self._error

    def advance(self, token_id: int) -> bool:
        """Consume a chosen token; True if the grammar is complete and allows no further token.

        No token may be pending. If a thread still consumes the token after a step's wait, that is
        not known yet: then the next mask allows only the end of the text.
        """
        if not self._is_given:
            self.follower.give([(self, token_id)])
        assert self.token_id == token_id, (self.token_id, token_id)
        self._is_given = False
        return self.is_complete and not self.is_consuming

    def close(self) -> None:
        """End the sequence: its next mask need not be computed."""
        self.is_closed = True

    def wait(self) -> None:
        """Wait until the grammar is compiled."""
        self._started.result()

    # -- calls by the follower ----------------------------------------------------------------

    def begin(self, token_id: int) -> None:
        """Note the token that was chosen by the current mask."""
        assert not self.is_pending
        self.token_id, self._is_given = token_id, True
        self.is_consuming = self.is_pending = True
        self.is_deferred = self.is_complete = self.is_missed = False

    def consumed(self) -> None:
        """Note that the token is consumed."""
        self.is_complete = self.state.is_stopped() and not self.state.is_error()
        self.is_consuming = False

    def end(self, mask: TokenMask | None, error: str) -> None:
        """Take the next token's mask; None after an `error`."""
        self._mask, self._error = mask, error
        self.is_consuming = self.is_pending = False


def error_of(state: LLMatcher) -> str:
    """The first line of a matcher's error; empty if there is none."""
    return state.get_error().strip().partition("\n")[0]
