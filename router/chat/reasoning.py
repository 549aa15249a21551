"""Splits a model's reasoning, between two markers at the beginning, from its answer.

White space next to the markers belongs to the format. The result does not depend on where the
text is split. A message that ends before the second marker is all reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from router.chat.tool_parser import partial_end


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The markers before and after reasoning."""

    begin: str
    end: str

    def is_open(self, prompt: str) -> bool:
        """Whether the prompt opens the reasoning, so that the answer begins inside it."""
        return prompt.rstrip().endswith(self.begin)


class _Place(Enum):
    START = auto()
    INSIDE = auto()
    BEHIND = auto()
    CONTENT = auto()


class ReasoningParser:
    """Splits one message; `is_open` says whether the prompt already opened the reasoning."""

    def __init__(self, markers: ReasoningMarkers, is_open: bool) -> None:
        self._markers = markers
        self._place = _Place.INSIDE if is_open else _Place.START
        self._pending = ""
        self._began = False

    def push(self, text: str) -> tuple[str, str]:
        """The reasoning and content that are certain after this text."""
        if self._place is _Place.CONTENT:
            return "", text
        self._pending += text
        if self._place is _Place.START:
            self._step_start()
        reasoning = self._step_inside() if self._place is _Place.INSIDE else ""
        return reasoning, self._content()

    def flush(self) -> tuple[str, str]:
        """The remaining reasoning and content, at the end of the text."""
        rest, self._pending = self._pending, ""
        if self._place is _Place.INSIDE:
            return rest.rstrip(), ""
        return "", "" if self._place is _Place.BEHIND else rest

    def _step_start(self) -> None:
        text = self._pending.lstrip()
        if text.startswith(self._markers.begin):
            self._pending = text[len(self._markers.begin) :]
            self._place = _Place.INSIDE
        elif not self._markers.begin.startswith(text):
            self._place = _Place.CONTENT

    def _step_inside(self) -> str:
        if not self._began:
            self._pending = self._pending.lstrip()
        end = self._pending.find(self._markers.end)
        if end >= 0:
            reasoning = self._pending[:end].rstrip()
            self._pending = self._pending[end + len(self._markers.end) :]
            self._place = _Place.BEHIND
            return reasoning
        held = partial_end(self._pending, self._markers.end)
        reasoning = self._pending[: len(self._pending) - held].rstrip()
        self._pending = self._pending[len(reasoning) :]
        self._began = self._began or bool(reasoning)
        return reasoning

    def _content(self) -> str:
        if self._place is _Place.BEHIND:
            self._pending = self._pending.lstrip()
            if self._pending:
                self._place = _Place.CONTENT
        if self._place is not _Place.CONTENT:
            return ""
        content, self._pending = self._pending, ""
        return content
