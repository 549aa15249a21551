"""Makes text of a server harmless for a terminal, which such text could otherwise steer.

Everything that commands print and did not write themselves passes through here: answers, errors,
names of models and workers, and other text from a router or a store.
"""

from __future__ import annotations

import unicodedata
from typing import IO, Any

from rich.console import Console

_KEPT = "\n\t\u200c\u200d"  # the last two shape letters of Persian and Hindi, and emoji
_LEFT_OUT = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))


def shown(text: str) -> str:
    """The text without characters that are invisible in a terminal but act there: control
    characters, those that change the direction or the order of letters, and halves of surrogate
    pairs."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        each for each in text if each in _KEPT or unicodedata.category(each) not in _LEFT_OUT
    )


def shown_json(value: Any) -> Any:
    """A decoded JSON value with `shown` applied to all its texts and names."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, list):
        return [shown_json(each) for each in value]
    if isinstance(value, dict):
        return {shown(name): shown_json(each) for name, each in value.items()}
    return value


def plain_console(soft_wrap: bool = True, file: IO[str] | None = None) -> Console:
    """A console that prints text unchanged, without markup in brackets and emoji in colons, to
    `file` or standard output."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap, file=file)
