"""The JSON of each kind of answer, whole or in chunks, optionally with usage and timing added."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from gateway.api.replies.json_pieces import with_last_changed
from gateway.api.replies.timing import TIMING_HEADER, Timing, add_timing, choice_timing
from gateway.api.replies.usage import Usage
from gateway.output.choices import Choice
from gateway.output.output_text import TextDelta
from protocol.errors import InvalidRequest
from router.requests.interface import TimingLookup

LOWEST = -9999.0
"""The least log-probability that answers show: JSON has no infinity."""
_NO_USAGE = b'"usage":null'


class AnswerFormat(Protocol):
    """JSON documents of one kind of completion."""

    def chunk(self, choice: Choice, delta: TextDelta, is_first: bool) -> bytes:
        """One chunk of a stream; `is_first` marks the first chunk of its choice."""
        ...

    def long_chunk(self, choice: Choice, delta: TextDelta, is_first: bool) -> Iterator[bytes]:
        """Like `chunk`, with the log-probabilities of the prompt. Yields the chunk in pieces."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last chunk of a stream whose client asked for the usage."""
        ...

    def answer(self, texts: Sequence[tuple[Choice, TextDelta]], usage: Usage) -> Iterator[bytes]:
        """The whole answer, made from the complete text of each choice. Yields it in pieces."""
        ...


def wants_timing(header: str | None) -> bool:
    """Whether the client asked for timing. `header` is None if it was not sent. Raises
    InvalidRequest for a value other than 0 and 1."""
    if header not in (None, "0", "1"):
        raise InvalidRequest(f"the header '{TIMING_HEADER}' must be 0 or 1", TIMING_HEADER)
    return header == "1"


class CountingFormat:
    """Adds the usage so far, as returned by `count`, to every chunk."""

    def __init__(self, inner: AnswerFormat, count: Callable[[], Usage]) -> None:
        self._inner = inner
        self._count = count

    def chunk(self, choice: Choice, delta: TextDelta, is_first: bool) -> bytes:
        """See AnswerFormat."""
        return self._counted(self._inner.chunk(choice, delta, is_first))

    def long_chunk(self, choice: Choice, delta: TextDelta, is_first: bool) -> Iterator[bytes]:
        """See AnswerFormat."""
        return map(self._counted, self._inner.long_chunk(choice, delta, is_first))

    def usage_chunk(self, usage: Usage) -> bytes:
        """See AnswerFormat."""
        return self._inner.usage_chunk(usage)

    def answer(self, texts: Sequence[tuple[Choice, TextDelta]], usage: Usage) -> Iterator[bytes]:
        """See AnswerFormat."""
        return self._inner.answer(texts, usage)

    def _counted(self, document: bytes) -> bytes:
        """JSON text with the usage in place of null. Inside strings the quotes would be escaped."""
        return document.replace(_NO_USAGE, b'"usage":' + msgspec.json.encode(self._count()))


class TimedFormat:
    """Adds the field `baton` to a whole answer, or to the last chunk of a stream."""

    def __init__(
        self,
        inner: AnswerFormat,
        choices: Sequence[Choice],
        has_usage: bool,
        timing_of: TimingLookup,
    ) -> None:
        self._inner = inner
        self._choices = choices
        self._has_usage = has_usage
        self._timing_of = timing_of
        self._num_open = sum(not each.known.has_ended for each in choices)

    def chunk(self, choice: Choice, delta: TextDelta, is_first: bool) -> bytes:
        """See AnswerFormat."""
        document = self._inner.chunk(choice, delta, is_first)
        self._num_open -= delta.finish is not None
        is_last = self._num_open == 0 and not self._has_usage
        return self._timed(document, self._choices) if is_last else document

    def long_chunk(self, choice: Choice, delta: TextDelta, is_first: bool) -> Iterator[bytes]:
        """See AnswerFormat."""
        pieces = self._inner.long_chunk(choice, delta, is_first)
        self._num_open -= delta.finish is not None
        if self._num_open or self._has_usage:
            return pieces
        return with_last_changed(pieces, lambda last: self._timed(last, self._choices))

    def usage_chunk(self, usage: Usage) -> bytes:
        """See AnswerFormat."""
        return self._timed(self._inner.usage_chunk(usage), self._choices)

    def answer(self, texts: Sequence[tuple[Choice, TextDelta]], usage: Usage) -> Iterator[bytes]:
        """See AnswerFormat."""
        shown = [choice for choice, _ in texts]
        pieces = self._inner.answer(texts, usage)
        return with_last_changed(pieces, lambda last: self._timed(last, shown))

    def _timed(self, document: bytes, shown: Sequence[Choice]) -> bytes:
        """Adds the timing of the shown choices, with their indexes, then of all others."""
        places: dict[str, int | None] = {each.request.request_id: each.index for each in shown}
        for each in self._choices:
            places.setdefault(each.request.request_id, None)
        found = [(place, self._timing_of(name)) for name, place in places.items()]
        timings = [choice_timing(place, timing) for place, timing in found if timing is not None]
        return add_timing(document, Timing(timings))
