"""Tool calls as Qwen 2.5, Qwen 3 and Hermes write them: `<tool_call>{json}</tool_call>`."""

from __future__ import annotations

from gateway.chat.formats.object_calls import ObjectCallsParser
from gateway.chat.tool_grammar import CallForm

BEGIN = "<tool_call>"
END = "</tool_call>"
FORM = CallForm(begin=(BEGIN, "\n"), end=("\n", END), separator=("\n",))


class HermesParser(ObjectCallsParser):
    """Any number of marked objects, with content before, between and after them."""

    certain_markers = begins = (BEGIN,)
    end = END
