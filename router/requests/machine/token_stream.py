"""One generation's tokens in order, from any worker, duplicates included.

Pure. Takes indexed pieces of output, from a prefill and a decode worker over several attempts, and
returns new pieces in order. Duplicates are dropped and counted; a gap fails the attempt. One gap is
allowed: two connections have no common order, so the decode worker's tokens may overtake the
prefill worker's first token. They are held until it arrives.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

import msgspec

from protocol.errors import ProtocolError
from protocol.messages import FinishReason
from protocol.sampling import PromptLogprobs, TokenLogprobs


class Piece(Protocol):
    """Consecutive output tokens; `index` is the first one's index in the whole output.

    A worker's message already satisfies this protocol.
    """

    @property
    def index(self) -> int: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[TokenLogprobs] | None: ...
    @property
    def finish(self) -> FinishReason | None: ...
    @property
    def prompt_logprobs(self) -> PromptLogprobs | None: ...


class TokenPiece(msgspec.Struct, frozen=True):
    """A piece that the router makes itself."""

    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish: FinishReason | None
    prompt_logprobs: PromptLogprobs | None = None


class TokenStream:
    """The output of one generation so far; `token_ids` are all tokens, in order. `held` are pieces
    that overtook the first token of their attempt.

    The first token comes with the log-probabilities of the prompt's `scored_prompt` tokens, or with
    none if `scored_prompt` is 0. There are at most `max_tokens` tokens.
    """

    def __init__(self, scored_prompt: int = 0, max_tokens: int = sys.maxsize) -> None:
        self._scored_prompt = scored_prompt
        self._max_tokens = max_tokens
        self.token_ids: list[int] = []
        self.finish: FinishReason | None = None
        self.duplicates = 0
        self._overtakes_from: int | None = None
        self.held: list[Piece] = []

    def start_attempt(self, is_remote: bool) -> None:
        """Prepare for a new attempt's pieces; drop the pieces held from an earlier one."""
        self.held.clear()
        self._overtakes_from = len(self.token_ids) + 1 if is_remote else None

    def take(self, piece: Piece) -> Sequence[Piece]:
        """Add a piece; returns the new pieces, in order.

        Raises ProtocolError for a gap, and for log-probabilities of output or prompt that do not
        fit their tokens.
        """
        if piece.index + len(piece.token_ids) > self._max_tokens:
            raise ProtocolError(f"more tokens came than the {self._max_tokens} that were asked for")
        if (
            piece.index == len(self.token_ids)
            and piece.logprobs is None
            and piece.token_ids
            and self.finish is None
            and not self.held
            and not self._scored_prompt
        ):  # nearly every piece
            self.token_ids += piece.token_ids
            self.finish = piece.finish
            return (piece,)
        if piece.logprobs is not None and len(piece.logprobs) != len(piece.token_ids):
            raise ProtocolError(
                f"{len(piece.token_ids)} tokens came with {len(piece.logprobs)} log-probabilities"
            )
        if self._scored_prompt and not self.token_ids and piece.index == 0:
            prompt_logprobs = piece.prompt_logprobs
            if prompt_logprobs is None or not prompt_logprobs.fits(self._scored_prompt):
                raise ProtocolError("the prompt's log-probabilities are not what was asked for")
        if self.finish is not None:
            self.duplicates += len(piece.token_ids)
            return []
        if piece.index > len(self.token_ids):
            self._hold(piece)
            return []
        fresh = [self._accept(piece)]
        while self.held and self.held[0].index <= len(self.token_ids) and not self.finish:
            fresh.append(self._accept(self.held.pop(0)))
        return [each for each in fresh if each.token_ids or each.finish]

    def _hold(self, piece: Piece) -> None:
        """Hold a piece whose predecessor travels on another connection."""
        expected = len(self.token_ids)
        if self.held:
            expected = max(each.index + len(each.token_ids) for each in self.held)
        elif self._overtakes_from == expected + 1:
            expected += 1
        if piece.index > expected:
            raise ProtocolError(
                f"tokens from index {piece.index} arrived where {expected} was expected"
            )
        self.held.append(piece)

    def _accept(self, piece: Piece) -> Piece:
        """The new part of a piece that starts at or before the end of the output.

        The prompt's log-probabilities are new only with the very first token.
        """
        prompt_logprobs = None if self.token_ids else piece.prompt_logprobs
        known = min(len(self.token_ids) - piece.index, len(piece.token_ids))
        self.duplicates += known
        fresh = list(piece.token_ids[known:])
        logprobs = None if piece.logprobs is None else list(piece.logprobs[known:])
        index = len(self.token_ids)
        self.token_ids.extend(fresh)
        reaches_end = piece.index + len(piece.token_ids) == len(self.token_ids)
        finish = piece.finish if reaches_end else None
        self.finish = finish
        return TokenPiece(index, fresh, logprobs, finish, prompt_logprobs)
