"""Calls that are JSON objects, `{"name": ..., "arguments": {...}}`, alone or in a list.

The base of several families, which differ in their markers. Between the markers, text that is no
call is dropped once a call was read there: a bracket too many, or the rest of a call that went
wrong. Without markers, only an object that names one of the caller's tools is a call, since the
answer itself may be JSON.
"""

from __future__ import annotations

from collections.abc import Set
from enum import Enum, auto
from typing import ClassVar

from router.chat.call_reader import CallReader
from router.chat.tool_parser import ToolParser

_MAX_JUNK_CHARS = 256


class _Place(Enum):
    CONTENT = auto()
    HEAD = auto()
    ITEM = auto()
    AFTER_ITEM = auto()
    SKIP = auto()


class ObjectCallsParser(ToolParser):
    """Parses objects behind one of the `begins`; `end` may follow them. With `is_bare`, objects
    and lists also count without a marker. With `any_name`, a marked call need not name a tool."""

    begins: ClassVar[tuple[str, ...]]
    end: ClassVar[str | None] = None
    is_bare: ClassVar[bool] = False
    any_name: ClassVar[bool] = True

    _place = _Place.CONTENT
    _held = ""  # what is content again if no call follows
    _reader: CallReader | None = None
    _is_marked = False
    _in_list = False

    def _step(self) -> bool:
        if self._place is _Place.CONTENT:
            return self._step_content()
        if self._place is _Place.HEAD:
            return self._step_head()
        if self._place is _Place.ITEM:
            return self._step_item()
        if self._place is _Place.AFTER_ITEM:
            return self._step_after_item()
        return self._step_skip()

    @property
    def _markers(self) -> tuple[str, ...]:
        return self.begins if self.end is None else (*self.begins, self.end)

    def _step_content(self) -> bool:
        openers = ("{", "[") if self.is_bare else ()
        found = self._take_content_before(*self.begins, *openers)
        if found is None:
            return False
        self._is_marked, self._in_list = found in self.begins, False
        if self._is_marked:
            self._held = found
        else:
            self._pending = found + self._pending
        self._place = _Place.HEAD
        return True

    def _step_head(self) -> bool:
        """Before an object: a list may open first."""
        self._held += self._take_space()
        if not self._pending:
            return False
        if self._pending[0] == "[" and not self._in_list:
            self._held += self._take(1)
            self._in_list = True
        elif self._pending[0] == "{":
            self._place = _Place.ITEM
        else:
            self._restore()
        return True

    def _step_item(self) -> bool:
        reader = self._reader = self._reader or self._new_reader(self._wanted_names())
        self._read(reader)
        if reader.broken and self.end is not None:
            if self._is_partial(self.end):
                return False
            if self._is_at_end() and reader.close():
                self._read(reader)
        if reader.done:
            self._after_item()
        elif reader.broken and reader.begun:
            self._skip_call()
        elif reader.broken:
            self._reader = None
            self._restore(reader.raw)
        return reader.broken or reader.done

    def _is_at_end(self) -> bool:
        return self.end is not None and self._pending.startswith(self.end)

    def _after_item(self) -> None:
        self._reader, self._held = None, ""
        self._place = _Place.AFTER_ITEM

    def _skip_call(self) -> None:
        """Marks a call that went wrong as incomplete; what follows is not content."""
        self._break_call()
        self._reader, self._held = None, ""
        self._place = _Place.SKIP

    def _wanted_names(self) -> Set[str] | None:
        return None if self._is_marked and self.any_name else self._tools.keys()

    def _step_after_item(self) -> bool:
        """After an object: the end marker, another object, or content."""
        self._held += self._take_space()
        if not self._pending or self._is_partial(*self._markers):
            return False
        if self.end is not None and self._is_at_end():
            self._take(len(self.end))
            self._leave()
        elif any(self._pending.startswith(each) for each in self.begins):
            self._leave()
        elif self._pending[0] in ",;":
            self._held += self._take(1)
        elif self._pending[0] == "]" and self._in_list:
            self._take(1)
            self._in_list = False
        elif self._pending[0] in "]}":
            self._take(1)
        elif self._pending[0] == "{":
            self._place = _Place.ITEM
        else:
            return self._step_junk()
        return True

    def _step_junk(self) -> bool:
        """Other text after a call: dropped if the end marker follows, else content."""
        if self.end is not None and self._is_marked:
            end, begin = (_find(self._pending, each) for each in ((self.end,), self.begins))
            if 0 <= end <= _MAX_JUNK_CHARS and not 0 <= begin < end:
                self._take(end)
                return True
            if begin < 0 and len(self._pending) < _MAX_JUNK_CHARS + len(self.end):
                return False
        self._restore()
        return True

    def _step_skip(self) -> bool:
        if not self._skip_to(*self._markers):
            return False
        if self.end is not None and self._is_at_end():
            self._take(len(self.end))
        self._leave()
        return True

    def _leave(self) -> None:
        self._held = ""
        self._place = _Place.CONTENT

    def _restore(self, text: str = "") -> None:
        """Makes the held text and `text` content."""
        self._add_content(self._held + text)
        self._leave()

    def _end(self, is_cut: bool) -> None:
        reader, self._reader = self._reader, None
        if self._place is _Place.ITEM and reader is not None:
            if reader.begun:
                if is_cut or not reader.close():
                    self._break_call()
                else:
                    self._read(reader)
            elif not (is_cut and (self._is_marked or reader.may_be_call)):
                self._add_content(self._held + reader.raw)
        elif self._place is _Place.SKIP:
            self._pending = ""
        elif not is_cut:
            self._add_content(self._held)
        if is_cut and (self._place is _Place.HEAD or self._is_partial(*self._markers)):
            self._pending = ""
        self._held = ""
        self._place = _Place.CONTENT


def _find(text: str, markers: tuple[str, ...]) -> int:
    """Where the first of the markers begins, or -1."""
    starts = [start for start in map(text.find, markers) if start >= 0]
    return min(starts, default=-1)
