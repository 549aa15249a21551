"""The one line that a command prints when it cannot do its work."""

from __future__ import annotations

_MAX_CHARS = 2000


def one_line(error: object) -> str:
    """The text of an error on one line, of bounded length. Control characters are escaped, because
    a stranger's file may have chosen them for a terminal."""
    words = " ".join(str(error).split())
    text = "".join(each if each.isprintable() else repr(each)[1:-1] for each in words)
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."
