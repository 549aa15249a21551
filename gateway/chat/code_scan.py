"""Finds where calls may begin in an answer's content, and the code around them.

A call between backticks or in quotation marks is an example. So is a call without a marker that
follows code or half a sentence. Fences are found here, too, because they may hold only calls. The
result does not depend on where the text is split.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

_MAX_SPAN_CHARS = 1024
_MAX_LINE_CHARS = 200
_BLANK_LINE = re.compile(r"[ \t>]*")
_LINE_START = re.compile(r" {0,3}(([-*•]|\d{1,3}[.)])[ \t]+)?")
_QUOTED = re.compile(r"""[ \t]*>[ \t>]*|.*["'“‘„«「『(]""")
_CLOSERS = ("]", "}")
_SENTENCE_END = re.compile(r"""([.!?…。！？]["'”’)]*|(?<!["'])[:：])[\s*_)]*$""")
_MIN_FENCE_CHARS = 3


class Kind(Enum):
    """What follows the content: nothing certain yet, the marker of a call, the opening line of a
    fence, or a fence in a single line."""

    UNKNOWN = auto()
    CALL = auto()
    FENCE = auto()
    ONE_LINE = auto()


@dataclass(frozen=True, slots=True)
class Found:
    """Content up to `start`, followed by `length` characters of this kind. A call that `is_quoted`
    is an example."""

    kind: Kind
    start: int
    length: int = 0
    is_quoted: bool = False


class CodeScan:
    """Scans one message; `line` is the end of the content so far, from its last line on."""

    def __init__(self) -> None:
        self.line = ""
        # Of the code span that the line has opened, if a run of backticks closes it.
        self._num_ticks = 0
        self._depth = 0  # of brackets in code or data, up to the next blank line

    def pass_content(self, text: str) -> None:
        """Note content that is not searched."""
        self._num_ticks = 0 if "\n" in text else self._num_ticks
        self._pass_line(text)

    def pass_calls(self) -> None:
        """Note calls, after which a new line begins."""
        self.line, self._num_ticks, self._depth = "", 0, 0

    def find(
        self, text: str, marked: tuple[str, ...], bare: tuple[str, ...], is_last: bool
    ) -> Found:
        """Find the first call or fence in the text after the content so far. Notes the content
        before it. `marked` are markers of calls; `bare` are characters that begin calls at certain
        places only. `is_last` says that no text will follow."""
        found = self._find(text, marked, bare, is_last)
        self._pass_line(text[: found.start])
        return found

    def _find(
        self, text: str, marked: tuple[str, ...], bare: tuple[str, ...], is_last: bool
    ) -> Found:
        markers = (*marked, *bare)
        others = (*_CLOSERS, "\n") if bare else ()
        if not _beginnings((*markers, *others)).search(text):  # quick, as it is for most tokens
            self._num_ticks = 0 if "\n" in text else self._num_ticks
            return Found(Kind.UNKNOWN, len(text))
        tokens = _tokens((*markers, *others))
        place = 0
        while (token := tokens.search(text, place)) is not None:
            if text.find("\n", place, token.start()) >= 0:
                self._num_ticks = 0
            if token.end() == len(text) and token[0][0] in "`~" and not is_last:
                return Found(Kind.UNKNOWN, token.start())
            after: int | Found
            if token[0] in others:
                after = self._pass_bracket(text, token)
            elif token[0] not in markers:
                after = self._pass_code(text, token, is_last)
            elif token[0] in bare and not self._may_begin(text, token):
                self._depth += 1
                after = token.end()
            else:
                after = self._pass_marker(text, token, is_last)
            if isinstance(after, Found):
                return after
            place = after
        if text.find("\n", place) >= 0:
            self._num_ticks = 0
        held = 0 if is_last else max((partial_end(text, each) for each in markers), default=0)
        return Found(Kind.UNKNOWN, len(text) - held)

    def _pass_marker(self, text: str, token: re.Match[str], is_last: bool) -> int | Found:
        """The marker, or the position to continue from if the marker is within a code span."""
        if self._num_ticks:
            is_known, end = _span_end(text, token.end(), "`" * self._num_ticks, is_last)
            if not is_known:
                return Found(Kind.UNKNOWN, token.start())
            self._num_ticks = 0
            if end is not None:
                return end
        is_quoted = _QUOTED.fullmatch(self._line_before(text, token.start())) is not None
        return Found(Kind.CALL, token.start(), len(token[0]), is_quoted)

    def _pass_code(self, text: str, token: re.Match[str], is_last: bool) -> int | Found:
        """A fence, or the position to continue from after a run of backticks or tildes."""
        run, start = token[0], token.start()
        if self._num_ticks:
            self._num_ticks = 0 if run == "`" * self._num_ticks else self._num_ticks
            return token.end()
        if len(run) >= _MIN_FENCE_CHARS and _BLANK_LINE.fullmatch(self._line_before(text, start)):
            is_known, end = _span_end(text, token.end(), run, is_last)
            if not is_known:
                return Found(Kind.UNKNOWN, start)
            if end is not None:
                return Found(Kind.ONE_LINE, start, end - start)
            newline = text.find("\n", start, token.end() + _MAX_SPAN_CHARS)
            if newline >= 0:
                return Found(Kind.FENCE, start, newline + 1 - start)
        if run[0] == "`":
            self._num_ticks = len(run)
        return token.end()

    def _pass_bracket(self, text: str, token: re.Match[str]) -> int:
        """Counts the brackets of code and data. Prose may lack some, but ends with a blank line."""
        if token[0] != "\n":
            self._depth = max(0, self._depth - 1)
            return token.end()
        self._num_ticks = 0
        if not self._line_before(text, token.start()).strip():
            self._depth = 0
        return token.end()

    def _may_begin(self, text: str, token: re.Match[str]) -> bool:
        """Whether a call without a marker may begin here: at the beginning of a line or a list
        item, or after a whole sentence."""
        line = self._line_before(text, token.start())
        if self._depth:
            return False
        if _LINE_START.fullmatch(line) or (line.strip() and _SENTENCE_END.search(line)):
            return True
        return unicodedata.category(line.rstrip()[-1:] or " ") == "So"

    def _pass_line(self, text: str) -> None:
        begin = text.rfind("\n") + 1
        line = text[begin:] if begin else self.line + text
        self.line = line[-_MAX_LINE_CHARS:]

    def _line_before(self, text: str, place: int) -> str:
        begin = text.rfind("\n", 0, place) + 1
        line = text[begin:place] if begin else self.line + text[:place]
        return line[-_MAX_LINE_CHARS:]


def partial_end(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


@lru_cache(maxsize=64)
def _beginnings(markers: tuple[str, ...]) -> re.Pattern[str]:
    """The characters with which markers and code begin."""
    return re.compile("[" + re.escape("".join({each[0] for each in (*markers, "`", "~")})) + "]")


@lru_cache(maxsize=64)
def _tokens(markers: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(markers, key=len, reverse=True)
    return re.compile("|".join([*map(re.escape, longest_first), "`+", "~+"]))


def _span_end(text: str, place: int, run: str, is_last: bool) -> tuple[bool, int | None]:
    """Two values. The first says whether the text is long enough to decide if the same run of
    backticks follows in this line, not too far away. The second is the end of that run."""
    window = text[place : place + _MAX_SPAN_CHARS]
    newline = window.find("\n")
    is_known = is_last or newline >= 0 or len(window) == _MAX_SPAN_CHARS
    if run[0] == "`":
        for other in re.finditer("`+", window[:newline] if newline >= 0 else window):
            if other[0] == run and (is_known or other.end() < len(window)):
                return True, place + other.end()
    return is_known, None
