"""Calls in a section of their own, each a name and a JSON object between markers: those of DeepSeek
V3, R1 and V3.1, and Kimi K2's.

Kimi's calls begin with their ids, `functions.NAME:NUMBER`. Its chat template writes a past call by
its id alone, so the id that the model wrote is the call's.
"""

from __future__ import annotations

import re
from typing import ClassVar

from gateway.chat.formats.named_calls import NamedCallsParser
from gateway.chat.message_events import ToolCallBegin
from gateway.chat.tool_grammar import CallForm
from gateway.grammars.grammar import text_part

_MAX_HEAD_CHARS = 600
"""More than any head has that the patterns below match."""
_NAME = r"[\w.-]{1,256}"
_SPACE = r"\s{0,16}"


class SectionCallsParser(NamedCallsParser):
    """Parses calls from `section` or `begin` up to `section_end`."""

    section: ClassVar[str]
    section_end: ClassVar[str]
    end: ClassVar[str]

    @property
    def _begins(self) -> tuple[str, ...]:
        return (self.section, self.begin)

    @property
    def _ends(self) -> tuple[str, ...]:
        return (self.end, self.section_end)

    def _may_become_head(self) -> bool:
        return "{" not in self._pending and len(self._pending) <= _MAX_HEAD_CHARS


DEEPSEEK_SECTION, DEEPSEEK_SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_BEGIN, DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEP = "<｜tool▁sep｜>"
DEEPSEEK_MARKERS = (
    DEEPSEEK_SECTION, DEEPSEEK_SECTION_END, DEEPSEEK_BEGIN, DEEPSEEK_END, DEEPSEEK_SEP,
)  # fmt: skip
DEEPSEEK_V3_LEAD = f"{DEEPSEEK_SECTION}{DEEPSEEK_BEGIN}function{DEEPSEEK_SEP}"
DEEPSEEK_V3_FORM = CallForm(
    opening=(DEEPSEEK_SECTION,),
    begin=(DEEPSEEK_BEGIN, "function", DEEPSEEK_SEP),
    middle=("\n```json\n",),
    end=("\n```", DEEPSEEK_END),
    separator=("\n",),
    closing=(DEEPSEEK_SECTION_END,),
    arguments_key=None,
)
DEEPSEEK_V31_FORM = CallForm(
    opening=(DEEPSEEK_SECTION,),
    begin=(DEEPSEEK_BEGIN,),
    middle=(DEEPSEEK_SEP,),
    end=(DEEPSEEK_END,),
    separator=(),
    closing=(DEEPSEEK_SECTION_END,),
    arguments_key=None,
)


class DeepSeekParser(SectionCallsParser):
    """`function`, the name and a fence (V3, R1), or the name and the arguments (V3.1)."""

    certain_markers = (DEEPSEEK_SECTION, DEEPSEEK_BEGIN)
    section, section_end = DEEPSEEK_SECTION, DEEPSEEK_SECTION_END
    begin, end = DEEPSEEK_BEGIN, DEEPSEEK_END
    tail = "]}` \t\r\n"
    head = re.compile(
        rf"({_SPACE}{DEEPSEEK_BEGIN})?{_SPACE}(function{DEEPSEEK_SEP})?(?P<name>{_NAME}){_SPACE}"
        rf"({DEEPSEEK_SEP})?{_SPACE}(```json{_SPACE})?(?=\{{)"
    )

    def _step_broken(self) -> bool:
        """Takes the rest of the call first: its fence is no code."""
        found = [self._pending.find(each) for each in self._markers]
        first = min((place for place in found if place >= 0), default=None)
        if first is None and len(self._pending) <= _MAX_HEAD_CHARS:
            return False
        self._take(first or 0)
        return super()._step_broken()


KIMI_SECTION, KIMI_SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_BEGIN, KIMI_END = "<|tool_call_begin|>", "<|tool_call_end|>"
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
KIMI_MARKERS = (KIMI_SECTION, KIMI_SECTION_END, KIMI_BEGIN, KIMI_END, KIMI_ARGUMENTS)
KIMI_FORM = CallForm(
    opening=(KIMI_SECTION,),
    begin=(KIMI_BEGIN,),
    middle=(KIMI_ARGUMENTS,),
    end=(KIMI_END,),
    separator=(),
    closing=(KIMI_SECTION_END,),
    arguments_key=None,
    name_part=lambda name: f"{text_part(f'functions.{name}:')} /[0-9]{{1,4}}/",
)
_SECTION, _BEGIN, _ARGUMENTS, _END, _SECTION_END = map(
    re.escape, (KIMI_SECTION, KIMI_BEGIN, KIMI_ARGUMENTS, KIMI_END, KIMI_SECTION_END)
)
KIMI_SKETCH = re.compile(
    rf"(<think>.*</think>\s*)?{_SECTION}\s*{_BEGIN}.*{_ARGUMENTS}\s*\{{.*\}}\s*{_END}\s*"
    rf"{_SECTION_END}",
    re.DOTALL,
)


class KimiParser(SectionCallsParser):
    """Calls whose ids are those that the model wrote, if these are numbered and new."""

    certain_markers = (KIMI_SECTION, KIMI_BEGIN)
    section, section_end = KIMI_SECTION, KIMI_SECTION_END
    begin, end = KIMI_BEGIN, KIMI_END
    head = re.compile(
        rf"({_SPACE}{_BEGIN})?{_SPACE}(?P<id>(functions\.)?(?P<name>[\w.-]{{1,256}}?)"
        rf"(?P<number>:[0-9]{{1,9}})?){_SPACE}{_ARGUMENTS}{_SPACE}(?=\{{)"
    )

    _ids: frozenset[str] = frozenset()

    def _begin_named(self, head: re.Match[str]) -> None:
        call_id: str = head["id"]
        if head["number"] is None or call_id in self._ids:
            call_id = self._call_ids(self._num_calls)
        self._ids |= {call_id}
        self._add_call_event(ToolCallBegin(self._num_calls, call_id, head["name"]))
