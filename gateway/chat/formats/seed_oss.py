"""Tool calls as Seed-OSS writes them: Qwen3-Coder's tags in an outer tag of its own, and values
without new lines around them.
"""

from __future__ import annotations

from functools import partial

from gateway.chat.formats.qwen_coder import FUNCTION, QwenCoderParser, tag_call
from gateway.chat.tool_grammar import CallForm

BEGIN = "<seed:tool_call>"
END = "</seed:tool_call>"
FORM = CallForm(
    begin=(BEGIN, "\n"),
    end=("\n", END),
    separator=("\n",),
    call_rules=partial(tag_call, padding=""),
)


class SeedParser(QwenCoderParser):
    """Any number of calls, with content before, between and after them."""

    certain_markers = (BEGIN, FUNCTION)
    begin = BEGIN
    end = END
    padding = ""
