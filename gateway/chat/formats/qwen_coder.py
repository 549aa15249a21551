"""Tool calls as Qwen3-Coder writes them, in tags, with one tag for each argument:

<tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re

from gateway.chat.formats.tag_calls import NAME, SPACE, TagCallsParser
from gateway.chat.formats.tag_grammar import TagForm
from gateway.chat.tool_grammar import CallForm

BEGIN = "<tool_call>"
END = "</tool_call>"
FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


def form(begin: str, end: str, padding: str) -> CallForm:
    """The form with these outer tags, and `padding` around values."""
    call = TagForm(
        call=f"{FUNCTION}{{name}}>\n",
        argument=lambda key, is_text: f"{_PARAMETER}{key}>{padding}",
        value_end=f"{padding}{_PARAMETER_END}\n",
        call_end=_FUNCTION_END,
    )
    return CallForm(begin=(begin, "\n"), end=("\n", end), separator=("\n",), call_rules=call)


FORM = form(BEGIN, END, "\n")


class QwenCoderParser(TagCallsParser):
    """See TagCallsParser."""

    certain_markers = (BEGIN, FUNCTION)
    begin, end = BEGIN, END
    call, call_end = FUNCTION, _FUNCTION_END
    argument, value_end, padding = _PARAMETER, _PARAMETER_END, "\n"
    head = re.compile(rf"{SPACE}{FUNCTION}{SPACE}(?P<name>{NAME}){SPACE}>")
    head_so_far = re.compile(rf"{SPACE}{FUNCTION}{SPACE}[\w.-]{{0,256}}{SPACE}")
    key = re.compile(rf"{_PARAMETER}(?P<key>[^<>\n]{{1,256}})>")
    key_so_far = re.compile(rf"{_PARAMETER}[^<>\n]{{0,256}}(>)?")
