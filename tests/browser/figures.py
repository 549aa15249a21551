"""The figures of the page as numbers."""

from __future__ import annotations

import re

_SCALES = {"ms": 1e-3, "s": 1.0, "k": 1e3, "": 1.0, "%": 1e-2, "×": 1.0}


def number(text: str) -> float:
    """The first number of a figure, in seconds where it is a time."""
    match = re.match(r"([\d,.]+)\s*(ms|s|k|%|×)?(?!\w)", text)
    assert match is not None, text
    return float(match[1].replace(",", "")) * _SCALES[match[2] or ""]
