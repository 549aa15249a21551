"""Regular expressions of JSON schemas, without what an automaton cannot follow.

Look-around is translated where it has an equal form, and otherwise removed, which accepts more. A
pattern with a back-reference is dropped.
"""

from __future__ import annotations

import re

_LOOK = re.compile(r"\(\?(?:<?[=!])")
_BACK = re.compile(r"\\[1-9]|\\k<|\(\?P=")
_NOT_ONLY = re.compile(r"\(\?!\^?\[(?P<of>[^\]\\^]+)\]\*\$\)")
"""Not these characters alone, as pydantic writes it of decimal numbers."""


def enforceable_pattern(pattern: str) -> tuple[list[str], bool]:
    """Patterns that must all be found in a text instead of `pattern`, and whether they are equal to
    it; otherwise they accept more."""
    if _BACK.search(pattern):
        return [], False
    if not _LOOK.search(pattern):
        return [pattern], True
    others: list[str] = []
    anchor = "^" if pattern.startswith("^") else ""
    rest = pattern.removeprefix("^")
    found = _NOT_ONLY.match(rest)
    if anchor and found:
        others.append(f"[^{found['of']}]")
        rest = rest[found.end() :]
    stripped = _without_look_around(rest)
    if stripped is None:
        return others, False
    return [anchor + stripped, *others], stripped == rest


def _without_look_around(pattern: str) -> str | None:
    """The pattern without its look-around; None if its groups do not match up, or if what follows
    would repeat something else."""
    kept, place = "", 0
    while place < len(pattern):
        if pattern[place] == "\\":
            kept += pattern[place : place + 2]
            place += 2
        elif pattern[place] == "[":
            end = _end_of_class(pattern, place)
            kept += pattern[place:end]
            place = end
        elif _LOOK.match(pattern, place):
            behind = _end_of_group(pattern, place)
            if behind is None or (behind < len(pattern) and pattern[behind] in "*+?{"):
                return None
            place = behind
        else:
            kept += pattern[place]
            place += 1
    return kept


def _end_of_group(pattern: str, place: int) -> int | None:
    """Where the group that begins here ends."""
    depth = 0
    while place < len(pattern):
        char = pattern[place]
        if char == "\\":
            place += 2
            continue
        if char == "[":
            place = _end_of_class(pattern, place)
            continue
        depth += (char == "(") - (char == ")")
        place += 1
        if depth == 0:
            return place
    return None


def _end_of_class(pattern: str, place: int) -> int:
    """Where the character class that begins here ends."""
    place += 1
    if pattern[place : place + 1] == "^":
        place += 1
    if pattern[place : place + 1] == "]":
        place += 1
    while place < len(pattern) and pattern[place] != "]":
        place += 2 if pattern[place] == "\\" else 1
    return place + 1
