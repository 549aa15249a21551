"""Regular expressions of JSON schemas and of formats, without the parts that an automaton cannot
follow.

Look-around is translated where it has an equal form, and otherwise removed, which accepts more. A
pattern with a back-reference is dropped. Formats are those of JSON Schema 2020-12, by the RFCs that
it names, as far as an automaton can follow them. Where a text has several equal forms, some are
left out: a leap second is written in UTC, and the local part of an e-mail address without quotes.
"""

from __future__ import annotations

import re
from typing import Any

from llguidance import LLMatcher

_LOOK = re.compile(r"\(\?(?:<?[=!])")
_BACK = re.compile(r"\\[1-9]|\\k<|\(\?P=")
_NOT_ONLY = re.compile(r"\(\?!\^?\[(?P<of>[^\]\\^]+)\]\*\$\)")
"""A look-ahead that excludes texts of only these characters, as pydantic writes it for decimal
numbers."""

BUILT_IN = frozenset(("duration", "ipv4", "ipv6", "uri", "uuid"))
"""Formats that llguidance itself enforces."""
NOT_ENFORCED = frozenset(("idn-email", "idn-hostname", "iri", "iri-reference", "regex"))
"""Formats of the standard that are not enforced; unknown names are annotations."""

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_FRACTION, _OFFSET = r"(?:\.[0-9]+)?", "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = (
    f"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}{_OFFSET}"
    f"|23:59:60{_FRACTION}(?:[zZ]|[+-]00:00))"
)
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_LABELS = rf"{_LABEL}(?:\.{_LABEL})*"
_NO_NUMBER_LAST = r"^(?:[^.]*\.)*[^.]*[^.0-9][^.]*$"
_ATEXT = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_HEX = "%[0-9a-fA-F]{2}"
_HOST_CHARS = r"a-zA-Z0-9\-._~!$&'()*+,;="
_SEGMENT_CHAR = f"(?:[{_HOST_CHARS}:@]|{_HEX})"
_NO_COLON = f"(?:[{_HOST_CHARS}@]|{_HEX})"
_SEGMENTS = f"(?:/{_SEGMENT_CHAR}*)*"
_AUTHORITY = f"(?:(?:[{_HOST_CHARS}:]|{_HEX})*@)?(?:[{_HOST_CHARS}]|{_HEX})*(?::[0-9]*)?"
_RELATIVE_REFERENCE = (
    f"^(?://{_AUTHORITY}{_SEGMENTS}|/(?:{_SEGMENT_CHAR}+{_SEGMENTS})?|{_NO_COLON}+{_SEGMENTS}|)"
    rf"(?:\?(?:{_SEGMENT_CHAR}|[/?])*)?(?:#(?:{_SEGMENT_CHAR}|[/?])*)?$"
)
_NAME_CHAR = f"(?:[a-zA-Z0-9_]|{_HEX})"
_VARIABLE = rf"{_NAME_CHAR}(?:\.?{_NAME_CHAR})*(?:\*|:[1-9][0-9]{{0,3}})?"
_LITERAL = '[^\\x00-\\x20"%<>\\\\^`{|}\\x7f]'
_EXPRESSION = rf"\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\}}"

_SCHEMAS: dict[str, list[dict[str, Any]]] = {
    "date": [{"pattern": f"^{_DATE}$"}],
    "time": [{"pattern": f"^{_TIME}$"}],
    "date-time": [{"pattern": f"^{_DATE}[tT]{_TIME}$"}],
    "hostname": [{"pattern": f"^{_LABELS}$", "maxLength": 253}, {"pattern": _NO_NUMBER_LAST}],
    "email": [
        {"pattern": rf"^{_ATEXT}(?:\.{_ATEXT})*@(?:{_LABELS}|\[(?:{_BYTE}\.){{3}}{_BYTE}\])$"},
        {"pattern": "^[^@]{1,64}@.{1,253}$"},
    ],
    "json-pointer": [{"pattern": f"^{_POINTER}$"}],
    "relative-json-pointer": [{"pattern": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$"}],
    "uri-reference": [{"anyOf": [{"format": "uri"}, {"pattern": _RELATIVE_REFERENCE}]}],
    "uri-template": [{"pattern": f"^(?:{_LITERAL}|{_HEX}|{_EXPRESSION})*$"}],
}
ENFORCED = BUILT_IN | _SCHEMAS.keys()


def format_schemas(name: str) -> list[dict[str, Any]]:
    """Schemas that together define a format that llguidance lacks; none for a format that cannot be
    enforced."""
    return _SCHEMAS.get(name, [])


def enforceable_pattern(pattern: str) -> tuple[list[str], bool]:
    """The patterns that replace `pattern`, and whether they are equivalent to it; otherwise they
    accept more. All of them must be found in a text."""
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


def can_follow(pattern: str) -> bool:
    """Whether llguidance can follow a pattern; not if it is none, or has word boundaries."""
    schema = {"type": "string", "pattern": pattern}
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))


def _without_look_around(pattern: str) -> str | None:
    """The pattern without its look-around; None if its brackets are not balanced, or if a
    repetition would then apply to something else."""
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
