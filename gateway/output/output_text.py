"""From the tokens of one sequence to the text that its client sees.

Combines detokenizing and stop strings, and keeps log-probabilities aligned with text: a token's
entry is reported together with the end of its text. The token that ends a sequence (end of text,
or a stop token) has no text unless the caller wants it. Stop strings are not searched for in the
reasoning before an answer, nor in calls of tools.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from gateway.text.detokenizer import Detokenizer
from gateway.text.reasoning_end import ThoughtMarkers, ThoughtScan
from gateway.text.stop_strings import ContentScan, ContentStops, StopMatcher
from protocol.messages import FinishReason
from protocol.sampling import PromptLogprobs, TokenLogprobs
from router.requests.interface import TokenDelta


class OutputToken(msgspec.Struct, frozen=True, gc=False):
    """A reported token; `start` and `end` are character offsets of its text in the output."""

    token_id: int
    logprobs: TokenLogprobs
    start: int
    end: int


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """New text of a sequence. `token_ids` are all generated tokens, with or without text.

    `prompt_logprobs` come with the first delta if they were requested.
    """

    text: str
    token_ids: list[int]
    tokens: list[OutputToken] = []
    finish: FinishReason | None = None
    cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None


class StopRules(msgspec.Struct, frozen=True):
    """When text ends. Stop strings are searched for once `min_tokens` tokens were generated.

    Of the stop `token_ids`, the caller gave those in `named`; they are reported as stop reason.
    """

    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    named: frozenset[int] = frozenset()
    min_tokens: int = 0
    include_in_output: bool = False


class OutputText:
    """The state of one sequence's text; nothing may be pushed after a delta with `finish`.

    `thoughts` marks the reasoning of a model that reasons before it answers, `contents` tells the
    content of one that may call tools.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: StopRules,
        thoughts: ThoughtMarkers | None = None,
        contents: ContentScan | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._scan = None if thoughts is None else ThoughtScan(thoughts)
        self._thoughts = self._scan
        self._is_plain = not stop.strings and thoughts is None
        self._stop = stop
        self._matcher = _matcher_of(stop, contents)
        self._num_tokens = 0
        self._decoded = 0
        self._emitted = 0
        self._unreported: deque[OutputToken] = deque()
        self._ended_by: int | None = None
        self._ends_silently = False

    @property
    def reasoning_tokens(self) -> int | None:
        """Number of tokens of reasoning so far; None if the model does not reason."""
        return None if self._scan is None else self._scan.num_tokens

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._matcher.matched

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or named token that ended the text, if one did."""
        return self._ended_by if self._matcher.matched is None else self._matcher.matched

    def shown(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The leading ids of the whole output whose text is exactly the emitted text: all ids
        except a token that ended the output silently, or the tokens of a stop string. Empty if a
        stop string begins within a token."""
        if self.matched_stop is None:
            return token_ids[:-1] if self._ends_silently else token_ids
        detokenizer, num_chars = self._detokenizer.fresh(), 0
        for place, each in enumerate(token_ids):
            if num_chars >= self._emitted:
                return token_ids[:place] if num_chars == self._emitted else ()
            num_chars += len(detokenizer.push(each))
        return token_ids if num_chars == self._emitted else ()

    def push(self, delta: TokenDelta) -> TextDelta:
        """Text and tokens that `delta` completes; a matched stop string also sets `finish`."""
        if self._is_plain and delta.finish is None and delta.logprobs is None:
            ids, push = delta.token_ids, self._detokenizer.push
            text = push(ids[0]) if len(ids) == 1 else "".join(map(push, ids))
            self._num_tokens += len(ids)
            num_chars = len(text)
            self._decoded += num_chars
            self._emitted += num_chars
            return TextDelta(text, ids, cached_tokens=delta.cached_tokens)
        return self._push_tokens(delta)

    def _push_tokens(self, delta: TokenDelta) -> TextDelta:
        """The general case: the delta may end the text, and its tokens are reported or searched
        one by one."""
        pieces: list[str] = []
        taken = 0
        for token_id in delta.token_ids:
            taken += 1
            logprobs = delta.logprobs[taken - 1] if delta.logprobs else None
            if self._is_silent_end(delta, taken):
                self._ends_silently = True
                self._note(token_id, logprobs, self._decoded)
                break
            pieces.append(self._push_token(token_id, logprobs))
            if self._matcher.matched:
                break
        if delta.finish is FinishReason.STOP and delta.token_ids:
            last = delta.token_ids[-1]
            self._ended_by = last if last in self._stop.named else None
        if delta.finish and not self._matcher.matched:
            pieces.append(self._rest(is_cut=delta.finish is FinishReason.LENGTH))
        finish = FinishReason.STOP if self._matcher.matched else delta.finish
        text = "".join(pieces)
        self._emitted += len(text)
        return TextDelta(
            text=text,
            token_ids=delta.token_ids[:taken],
            tokens=self._report(finish),
            finish=finish,
            cached_tokens=delta.cached_tokens,
        )

    def _is_silent_end(self, delta: TokenDelta, taken: int) -> bool:
        return (
            delta.finish is FinishReason.STOP
            and taken == len(delta.token_ids)
            and delta.token_ids[-1] in self._stop.token_ids
            and not self._stop.include_in_output
        )

    def _push_token(self, token_id: int, logprobs: TokenLogprobs | None) -> str:
        self._num_tokens += 1
        piece = self._detokenizer.push(token_id)
        start = self._decoded
        self._decoded += len(piece)
        self._note(token_id, logprobs, start)
        if self._thoughts is None:
            return self._match(piece)
        reasoning, answer = self._thoughts.push(piece)
        if self._thoughts.is_over:
            self._thoughts, self._is_plain = None, not self._stop.strings
        return reasoning + self._match(answer)

    def _note(self, token_id: int, logprobs: TokenLogprobs | None, start: int) -> None:
        """Note a token to report, whose text begins at `start` and ends where the text does."""
        if logprobs is not None:
            self._unreported.append(OutputToken(token_id, logprobs, start, self._decoded))

    def _match(self, piece: str) -> str:
        if self._num_tokens < self._stop.min_tokens:
            return self._matcher.skip(piece)
        return self._matcher.push(piece)

    def _rest(self, is_cut: bool) -> str:
        """The text held back, at the end of the output; `is_cut` if the token limit ended it."""
        rest = self._detokenizer.flush()
        if self._thoughts is not None:
            rest = self._thoughts.flush() + rest
            self._thoughts = None
        text = self._match(rest)
        return text if self._matcher.matched else text + self._matcher.flush(is_cut)

    def _report(self, finish: FinishReason | None) -> list[OutputToken]:
        """Take the tokens whose text was emitted; at the end, all. The text of tokens that a stop
        string cut off lies beyond the end."""
        ready: list[OutputToken] = []
        while self._unreported and (finish or self._unreported[0].end <= self._emitted):
            ready.append(self._unreported.popleft())
        return ready


def _matcher_of(stop: StopRules, contents: ContentScan | None) -> StopMatcher | ContentStops:
    """The search for the stop strings: in all text, or in content alone."""
    if contents is None or not stop.strings:
        return StopMatcher(stop.strings, stop.include_in_output)
    return ContentStops(contents, stop.strings, stop.include_in_output)
