"""Finds the end of a message that the answer continues, in the prompt that a template renders.

The message gets a tag at its end before the prompt is rendered. Its own text could not be searched
for: a text as short as `e` also occurs in the tokens that end the message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.text.control_tokens import free_mark
from protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class OpenEnd:
    """The end of the last message: its last `content`, and the `tag` after the content."""

    content: str
    tag: str

    def cut(self, text: str, param: str) -> str:
        """The prompt up to the end of the message. Space at the end stays if the template keeps
        it. Raises InvalidRequest, naming `param`, if the template changes the message."""
        end = text.rfind(self.tag)
        before = text[: max(end, 0)]
        if end < 0 or not before.rstrip().endswith(self.content.strip()):
            raise InvalidRequest(f"'{param}': the chat template changes the last message", param)
        is_trimmed = not text.startswith(f"{self.tag} ", end)
        return before.rstrip() if is_trimmed else before


def open_end(messages: list[dict[str, Any]], *others: Any) -> OpenEnd:
    """Tags the last of a template's messages. The tag is a character that neither the messages nor
    the `others` contain, and a space, which shows whether the template trims the message. Raises
    InvalidRequest if no character is left."""
    tag = free_mark(messages, *others)
    last = messages[-1]
    if isinstance(last["content"], str):
        content = last["content"]
        messages[-1] = last | {"content": f"{content}{tag} "}
        return OpenEnd(content, tag)
    *parts, part = last["content"]
    content = part["text"]
    messages[-1] = last | {"content": [*parts, part | {"text": f"{content}{tag} "}]}
    return OpenEnd(content, tag)
