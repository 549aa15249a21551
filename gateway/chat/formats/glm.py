"""Tool calls as GLM writes them, from 4.5 on:

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

GLM 4.7 and 5 write no new lines between the tags.
"""

from __future__ import annotations

import re

from gateway.chat.formats.tag_calls import NAME, SPACE, TagCallsParser
from gateway.chat.formats.tag_grammar import TagForm
from gateway.chat.tool_grammar import CallForm

BEGIN, END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
MARKERS = (BEGIN, END, _KEY, _KEY_END, _VALUE, _VALUE_END)
FORM = CallForm(
    begin=(BEGIN,),
    separator=(),
    call_rules=TagForm(
        call="{name}",
        argument=lambda key, is_text: f"{_KEY}{key}{_KEY_END}",
        before_value=_VALUE,
        value_end=_VALUE_END,
        call_end=END,
        gap=r"/\n?/",
        not_in_keys="<\n",
    ),
)


class GlmParser(TagCallsParser):
    """See TagCallsParser. Models may forget the tag before a value."""

    certain_markers = (BEGIN,)
    begin, end = BEGIN, END
    argument, value_end = _KEY, _VALUE_END
    tags_begin_lines = False
    head = re.compile(rf"{SPACE}(?P<name>{NAME}){SPACE}(?={_KEY}|{END})")
    head_so_far = re.compile(rf"{SPACE}[\w.-]{{0,256}}{SPACE}(<[\w/]{{0,10}})?")
    key = re.compile(
        rf"{_KEY}(?P<key>[^<\n]{{1,256}}){_KEY_END}({SPACE}{_VALUE}|(?!{SPACE}(<\w{{0,9}})?\Z))"
    )
    key_so_far = re.compile(rf"{_KEY}[^<\n]{{0,256}}(</?\w{{0,7}}|{_KEY_END}{SPACE}(<\w{{0,9}})?)?")
