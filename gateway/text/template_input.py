"""The input of a chat template, and the control tokens that must not come from text in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.text.control_tokens import ControlTokens, free_mark


class TemplateInput(msgspec.Struct):
    """The input of one rendering, in the template's form."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    documents: list[dict[str, Any]]
    variables: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ControlText:
    """Control tokens that must not come from text. The list `from_assistant`, for the assistant's
    texts, is shorter than `everywhere`: these texts may have the markup of earlier answers. The
    assistant's calls contain no such markup, because they were parsed from it."""

    everywhere: ControlTokens
    from_assistant: ControlTokens

    def mark(self, given: TemplateInput) -> str | None:
        """Mark the look-alikes in the input; returns the mark. Raises InvalidRequest."""
        if self._is_plain(given):
            return None
        rest = [given.tools, given.documents, given.variables]
        if not (any(map(self._are_in, given.messages)) or any(map(self.everywhere.are_in, rest))):
            return None
        mark = free_mark(given.messages, *rest)
        given.messages = [self._marked(each, mark) for each in given.messages]
        given.tools = self.everywhere.marked(given.tools, mark)
        given.documents = self.everywhere.marked(given.documents, mark)
        given.variables = self.everywhere.marked(given.variables, mark)
        return mark

    def _is_plain(self, given: TemplateInput) -> bool:
        """Whether a quick check finds no look-alikes, as in most requests."""
        if given.tools or given.documents or given.variables:
            return False
        starts = self.everywhere.starts
        for message in given.messages:
            for value in message.values():
                if type(value) is not str:
                    return False
                for start in starts:
                    if start in value:
                        return False
        return True

    def _are_in(self, message: dict[str, Any]) -> bool:
        return any(self._of(message, name).are_in(value) for name, value in message.items())

    def _marked(self, message: dict[str, Any], mark: str) -> dict[str, Any]:
        return {name: self._of(message, name).marked(each, mark) for name, each in message.items()}

    def _of(self, message: dict[str, Any], name: str) -> ControlTokens:
        """The tokens that must not come from this field."""
        is_own_text = message["role"] == "assistant" and name != "tool_calls"
        return self.from_assistant if is_own_text else self.everywhere
