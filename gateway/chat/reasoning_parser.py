"""Splits a model's reasoning, between two markers at the beginning, from its answer.

White space next to the markers belongs to the format. Markers that the model repeats are dropped.
The result does not depend on where the text is split. A message that ends before the second
marker is all reasoning, except for a call at its end: models may forget to close their thoughts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from gateway.chat.code_scan import partial_end


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The markers before and after reasoning.

    A format whose answers have headers has `next` between reasoning and what follows, `answer`
    before the answer, and `tokens` that are parts of all these. A chat template that contains the
    text `sign` (default: `end`) belongs to this format.
    """

    begin: str
    end: str
    next: str = ""
    answer: str = ""
    tokens: tuple[str, ...] = ()
    sign: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be single tokens."""
        return self.tokens or (self.begin, self.end)

    def is_open(self, prompt: str, prefill: str = "") -> bool:
        """Whether the prompt opens the reasoning, so that the answer begins inside it. `prefill` is
        the beginning of an answer that is continued."""
        if self.begin in prefill:
            return prefill.rfind(self.begin) > prefill.rfind(self.end)
        return prompt.rstrip().endswith(self.begin)


class _Place(Enum):
    START = auto()
    INSIDE = auto()
    AT_CALL = auto()
    BEHIND = auto()
    CONTENT = auto()


class ReasoningParser:
    """Splits one message; `is_open` says whether the prompt already opened the reasoning. A text
    of `call_markers` inside may begin a call."""

    def __init__(
        self, markers: ReasoningMarkers, is_open: bool, call_markers: tuple[str, ...] = ()
    ) -> None:
        self._markers = markers
        self._call_markers = call_markers
        self._place = _Place.INSIDE if is_open else _Place.START
        self._pending = ""
        self._began = False

    @property
    def is_over(self) -> bool:
        """Whether all further text is content, so that nothing needs to be pushed any more."""
        return self._place is _Place.CONTENT

    def push(self, text: str) -> tuple[str, str]:
        """The reasoning and content that are certain after this text."""
        if self._place is _Place.CONTENT:
            return "", text
        self._pending += text
        if self._place is _Place.START:
            self._step_start()
        reasoning = self._step_inside() if self._place is _Place.INSIDE else ""
        if self._place is _Place.AT_CALL:
            reasoning += self._step_at_call()
        return reasoning, self._content()

    def flush(self, is_cut: bool) -> tuple[str, str, str]:
        """The remaining reasoning and content, and text inside the reasoning that may be a call,
        at the end of the text; `is_cut` if the token limit ended it."""
        rest, self._pending = self._pending, ""
        if is_cut:
            rest = rest[: len(rest) - self._held(rest)]
        if self._place is _Place.AT_CALL:
            return "", "", rest
        if self._place is _Place.INSIDE:
            return rest.rstrip(), "", ""
        return "", rest.lstrip() if self._place is _Place.BEHIND else rest, ""

    def _step_start(self) -> None:
        text = self._pending.lstrip()
        if text.startswith(self._markers.begin):
            self._pending = text[len(self._markers.begin) :]
            self._place = _Place.INSIDE
        elif text.startswith(self._markers.end):
            self._place = _Place.BEHIND
        elif not (self._markers.begin.startswith(text) or self._markers.end.startswith(text)):
            self._place = _Place.CONTENT

    def _step_inside(self) -> str:
        if not self._began:
            self._pending = _without(self._pending, self._markers.begin)
            if self._markers.begin.startswith(self._pending):
                return ""
        end = self._pending.find(self._markers.end)
        calls = [self._pending.find(each) for each in self._call_markers]
        call = min((start for start in calls if start >= 0), default=None)
        if call is not None and not 0 <= end < call:
            reasoning = self._pending[:call].rstrip()
            self._pending = self._pending[len(reasoning) :]
            self._began = True
            self._place = _Place.AT_CALL
            return reasoning
        if end >= 0:
            reasoning = self._pending[:end].rstrip()
            self._pending = self._pending[end:]
            self._place = _Place.BEHIND
            return reasoning
        held = self._held(self._pending)
        reasoning = self._pending[: len(self._pending) - held].rstrip()
        self._pending = self._pending[len(reasoning) :]
        self._began = self._began or bool(reasoning)
        return reasoning

    def _step_at_call(self) -> str:
        """After a call's marker: if the reasoning is closed later, all text before its end marker
        is reasoning."""
        end = self._pending.find(self._markers.end)
        if end < 0:
            return ""
        reasoning, self._pending = self._pending[:end], self._pending[end:]
        self._place = _Place.BEHIND
        return reasoning.rstrip()

    def _held(self, text: str) -> int:
        """Length of the end of the text that may begin a marker."""
        markers = [self._markers.end]
        if self._place in (_Place.START, _Place.INSIDE):
            markers += [self._markers.begin, *self._call_markers]
        return max(partial_end(text, each) for each in markers)

    def _content(self) -> str:
        if self._place is _Place.BEHIND:
            self._pending = _without(self._pending, self._markers.end)
            if self._pending and not self._markers.end.startswith(self._pending):
                self._place = _Place.CONTENT
        if self._place is not _Place.CONTENT:
            return ""
        content, self._pending = self._pending, ""
        return content


def _without(text: str, marker: str) -> str:
    """The text without white space and markers at its beginning."""
    text = text.lstrip()
    while text.startswith(marker):
        text = text[len(marker) :].lstrip()
    return text
