"""The text in results of services' own tools, which may be any JSON. Results have many shapes, and
new ones appear. Text for people is found under a few names; ids and encrypted or encoded data are
under others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_NAMES = (
    "title", "url", "filename", "tool_name", "text", "stdout", "stderr", "logs", "lines",
    "error_code", "error_message", "message", "context", "content", "source", "output",
    "tool_references",
)  # fmt: skip
"""Names of text, and of objects that may have some, in the order in which it is shown."""
_UNREADABLE = frozenset(
    (
        "image", "input_image", "input_file", "computer_screenshot", "code_execution_output",
        "base64", "file", "url",
    )
)  # fmt: skip
"""Types of objects that stand for something other than text."""


def texts_in(value: Any) -> Iterator[str]:
    """All texts of a value, in order."""
    if isinstance(value, str):
        if value:
            yield value
    elif isinstance(value, list):
        for each in value:
            yield from texts_in(each)
    elif isinstance(value, dict):
        if value.get("media_type") == "text/plain":
            yield from texts_in(value.get("data"))
        elif not _is_unreadable(value):
            for name in _NAMES:
                yield from texts_in(value.get(name))


def text_in(value: Any) -> str:
    """All texts of a value, one in each line."""
    return "\n".join(texts_in(value))


def has_unreadable(value: Any) -> bool:
    """Whether a value contains something that text does not show: a file, an image, or encrypted
    data."""
    if isinstance(value, list):
        return any(map(has_unreadable, value))
    if not isinstance(value, dict):
        return False
    if _is_unreadable(value) or any(name.startswith("encrypted_") for name in value):
        return True
    return any(has_unreadable(value.get(name)) for name in _NAMES)


def _is_unreadable(value: dict[str, Any]) -> bool:
    kind = value.get("type")
    return isinstance(kind, str) and kind in _UNREADABLE
