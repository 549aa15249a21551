"""Tool calls as Seed-OSS writes them: Qwen3-Coder's tags in an outer tag of its own, and values
without new lines around them.
"""

from __future__ import annotations

from gateway.chat.formats.qwen_coder import FUNCTION, QwenCoderParser, form

BEGIN = "<seed:tool_call>"
END = "</seed:tool_call>"
FORM = form(BEGIN, END, padding="")


class SeedParser(QwenCoderParser):
    """See TagCallsParser."""

    certain_markers = (BEGIN, FUNCTION)
    begin, end = BEGIN, END
    padding = ""
