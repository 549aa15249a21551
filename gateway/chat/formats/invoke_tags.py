"""Tool calls in tags `invoke` and `parameter`, in a section of their own. MiniMax M2 writes

    <minimax:tool_call>
    <invoke name="NAME">
    <parameter name="KEY">VALUE</parameter>
    </invoke>
    </minimax:tool_call>

DeepSeek V3.2 and V4 write a token into each tag, and say which values are text:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

V4's section is `tool_calls`.
"""

from __future__ import annotations

import re

from gateway.chat.formats.tag_calls import NAME, SPACE, TagCallsParser
from gateway.chat.formats.tag_grammar import TagForm
from gateway.chat.tool_grammar import CallForm

MINIMAX_BEGIN, MINIMAX_END = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE, _INVOKE_END = "<invoke name=", "</invoke>"
_PARAMETER, _PARAMETER_END = "<parameter name=", "</parameter>"
MINIMAX_FORM = CallForm(
    opening=(MINIMAX_BEGIN, "\n"),
    end=("\n",),
    closing=(MINIMAX_END,),
    separator=(),
    call_rules=TagForm(
        call=f'{_INVOKE}"{{name}}">\n',
        argument=lambda key, is_text: f'{_PARAMETER}"{key}">',
        value_end=f"{_PARAMETER_END}\n",
        call_end=_INVOKE_END,
        not_in_keys="'\"<>\n",
    ),
)


class MinimaxParser(TagCallsParser):
    """See TagCallsParser. The quotation marks around names may be others, or missing."""

    certain_markers = (MINIMAX_BEGIN, _INVOKE)
    begin, end = MINIMAX_BEGIN, MINIMAX_END
    call, call_end = _INVOKE, _INVOKE_END
    argument, value_end = _PARAMETER, _PARAMETER_END
    head = re.compile(rf"{SPACE}{_INVOKE}[\"']?(?P<name>{NAME})[\"']?{SPACE}>")
    head_so_far = re.compile(rf"{SPACE}{_INVOKE}[\"']?[\w.-]{{0,256}}[\"']?{SPACE}")
    key = re.compile(rf"{_PARAMETER}[\"']?(?P<key>[^\"'<>\n]{{1,256}})[\"']?{SPACE}>")
    key_so_far = re.compile(rf"{_PARAMETER}[\"']?[^\"'<>\n]{{0,256}}[\"']?{SPACE}")


DSML = "｜DSML｜"
_DSML_INVOKE, _DSML_INVOKE_END = f"<{DSML}invoke", f"</{DSML}invoke>"
_DSML_PARAMETER, _DSML_PARAMETER_END = f"<{DSML}parameter", f"</{DSML}parameter>"
V32_BEGIN, V32_END = f"<{DSML}function_calls>", f"</{DSML}function_calls>"
V4_BEGIN, V4_END = f"<{DSML}tool_calls>", f"</{DSML}tool_calls>"


def dsml_form(begin: str, end: str) -> CallForm:
    """The form of calls in this section."""
    call = TagForm(
        call=f'{_DSML_INVOKE} name="{{name}}">\n',
        argument=lambda key, is_text: (
            f'{_DSML_PARAMETER} name="{key}" string="{str(is_text).lower()}">'
        ),
        value_end=f"{_DSML_PARAMETER_END}\n",
        call_end=_DSML_INVOKE_END,
        tells_kinds=True,
        not_in_keys='"\n',
    )
    return CallForm(
        opening=(begin, "\n"), end=("\n",), closing=(end,), separator=(), call_rules=call
    )


class DeepSeekV32Parser(TagCallsParser):
    """See TagCallsParser. Models of either version write sections of the other, too."""

    certain_markers = (V32_BEGIN, V4_BEGIN, _DSML_INVOKE)
    begin, end = V32_BEGIN, V32_END
    call, call_end = _DSML_INVOKE, _DSML_INVOKE_END
    argument, value_end = _DSML_PARAMETER, _DSML_PARAMETER_END
    tags_begin_lines = False
    head = re.compile(rf"{SPACE}{_DSML_INVOKE}{SPACE} name=\"(?P<name>{NAME})\"{SPACE}>")
    head_so_far = re.compile(rf"{SPACE}{_DSML_INVOKE}[^>\n]{{0,400}}")
    key = re.compile(
        rf"{_DSML_PARAMETER}{SPACE} name=\"(?P<key>[^\"\n]{{1,256}})\""
        rf"({SPACE} string=\"(?P<string>true|false)\")?{SPACE}>"
    )
    key_so_far = re.compile(rf"{_DSML_PARAMETER}[^\n]{{0,400}}")

    @property
    def _begins(self) -> tuple[str, ...]:
        return (V32_BEGIN, V4_BEGIN, _DSML_INVOKE)

    @property
    def _outer_ends(self) -> tuple[str, ...]:
        return (V32_END, V4_END)


class DeepSeekV4Parser(DeepSeekV32Parser):
    """See TagCallsParser."""

    begin, end = V4_BEGIN, V4_END
