"""Calls that are JSON objects, `{"name": ..., "arguments": {...}}`, alone or in a list.

The base of several families, which differ in their markers. After a call, other text up to the end
marker is dropped: a stray bracket, the rest of a malformed call. Without markers, only an object
that names one of the caller's tools is a call, because the answer itself may be JSON.
"""

from __future__ import annotations

import re
from collections.abc import Set
from enum import Enum, auto
from typing import ClassVar

from gateway.chat.call_reader import CallReader
from gateway.chat.tool_parser import ToolParser

_MAX_JUNK_CHARS = 256
_FENCE = re.compile(r"```[\w+-]{0,32}\s+")
_FENCE_SO_FAR = re.compile(r"`{1,2}|```[\w+-]{0,32}")
_FENCE_END = "```"


class _Place(Enum):
    CONTENT = auto()
    HEAD = auto()
    ITEM = auto()
    AFTER_ITEM = auto()
    SKIP = auto()


class ObjectCallsParser(ToolParser):
    """Parses objects that follow one of the markers in `begins`. The marker `end` may follow the
    objects. If `is_bare`, objects and lists without a marker are parsed too. With `any_name`, a
    call after a marker may have any name, not only that of a tool."""

    begins: ClassVar[tuple[str, ...]]
    end: ClassVar[str | None] = None
    any_name: ClassVar[bool] = True

    _place = _Place.CONTENT
    _reader: CallReader | None = None
    _in_list = False
    _in_fence = False

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
        found = self._find_block(self.begins, ("{", "[") if self.is_bare else ())
        if found is None:
            return False
        self._in_list = self._in_fence = False
        if self._open_block.is_marked:
            self._take(len(found))
        self._place = _Place.HEAD
        return True

    def _step_head(self) -> bool:
        """Before the first object: a fence after the marker, or the start of a list, may precede
        the object."""
        self._take_space()
        if not self._pending or _FENCE_SO_FAR.fullmatch(self._pending):
            return False
        fence = None if self._in_fence else _FENCE.match(self._pending)
        if fence is not None and self._open_block.is_marked:
            self._take(fence.end())
            self._in_fence = True
        elif self._pending[0] == "[" and not self._in_list:
            self._take(1)
            self._in_list = True
        elif self._pending[0] == "{":
            self._place = _Place.ITEM
        else:
            self._give_up()
        return True

    def _step_item(self) -> bool:
        reader = self._reader = self._reader or self._new_reader(self._allowed_names())
        self._read(reader)
        if reader.broken and self.end is not None:
            if self._is_partial(self.end):
                return False
            if self._is_at_end() and reader.close():
                self._read(reader)
        if reader.done:
            self._after_item()
        elif reader.broken:
            self._give_up()
        return reader.broken or reader.done

    def _is_at_end(self) -> bool:
        return self.end is not None and self._pending.startswith(self.end)

    def _after_item(self) -> None:
        self._open_block.end_call()
        self._reader = None
        self._place = _Place.AFTER_ITEM

    def _allowed_names(self) -> Set[str] | None:
        return None if self._open_block.is_marked and self.any_name else self._tools.keys()

    def _step_after_item(self) -> bool:
        """After an object: the end marker, another object, or content."""
        self._take_space()
        fences = (_FENCE_END,) if self._in_fence else ()
        if not self._pending or self._is_partial(*self._markers, *fences):
            return False
        if self.end is not None and self._is_at_end():
            self._take(len(self.end))
            self._open_block.end_call()
            self._leave()
        elif self._in_fence and self._pending.startswith(_FENCE_END):
            self._take(len(_FENCE_END))
            self._open_block.end_call()
            self._in_fence = False
        elif any(self._pending.startswith(each) for each in self.begins):
            self._leave()
        elif self._pending[0] in ",;":
            self._take(1)
        elif self._pending[0] in "]}":
            self._in_list = self._in_list and self._pending[0] != "]"
            self._take(1)
            self._open_block.end_call()
        elif self._pending[0] == "{":
            self._place = _Place.ITEM
        else:
            return self._step_junk()
        return True

    def _step_junk(self) -> bool:
        """Drop other text after a call if the end marker follows; otherwise it is content."""
        if self.end is not None and self._open_block.is_marked:
            end, begin = (_find(self._pending, each) for each in ((self.end,), self.begins))
            is_before_begin = begin is None or (end is not None and end < begin)
            if end is not None and end <= _MAX_JUNK_CHARS and is_before_begin:
                self._take(end)
                return True
            if begin is None and len(self._pending) < _MAX_JUNK_CHARS + len(self.end):
                return False
        if self._in_list and not self._open_block.is_marked:
            self._give_up()
        else:
            self._leave()
        return True

    def _step_skip(self) -> bool:
        """Drop the rest of a block that could not be read: the text up to the next marker."""
        if not self._skip_to(*self._markers):
            return False
        if self.end is not None and self._is_at_end():
            self._take(len(self.end))
        self._place = _Place.CONTENT
        return True

    def _leave(self) -> None:
        """End the block after its last call."""
        self._leave_block()
        self._place = _Place.CONTENT

    def _give_up(self) -> None:
        """End the block at text that is not a call or cannot be read as a call. Earlier objects of
        the block stay calls, unless they belong to the same list as this text or an end marker
        should have come first."""
        self._reader = None
        block = self._open_block
        is_joined = self._in_list or (block.is_marked and self.end is not None)
        is_broken = block.in_call and self._may_stream(block)
        if block.has_whole_calls and not is_joined and not is_broken:
            self._leave()
        else:
            self._place = _Place.CONTENT if self._try_restore() else _Place.SKIP

    def _end(self, is_cut: bool) -> None:
        reader, place = self._reader, self._place
        if place is _Place.ITEM:
            self._end_item(reader or self._new_reader(None), is_cut)
        elif place is _Place.AFTER_ITEM:
            self._end_behind_call(is_cut, *self._markers)
        elif place is _Place.HEAD and not is_cut:
            self._restore()
        elif place is _Place.HEAD:
            self._block = None
            self._pending = ""
        elif place is _Place.SKIP:
            self._pending = ""
        elif is_cut:
            self._drop_start()
        self._reader, self._place = None, _Place.CONTENT

    def _end_item(self, reader: CallReader, is_cut: bool) -> None:
        if is_cut and (reader.begun or self._open_block.is_marked or reader.may_be_call):
            self._break_call()
            self._pending = ""
        elif not is_cut and reader.begun and reader.close():
            self._read(reader)
            self._open_block.end_call()
            self._leave()
        else:
            self._give_up()
            if self._place is _Place.SKIP:
                self._pending = ""


def _find(text: str, markers: tuple[str, ...]) -> int | None:
    """Where the first of the markers begins; None if there is none."""
    return min((start for start in map(text.find, markers) if start >= 0), default=None)
