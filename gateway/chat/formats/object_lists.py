"""Tool calls in a list of JSON objects, `[{"name": ..., "arguments": {...}}]`.

xLAM writes the list alone; Nemotron writes it between markers.
"""

from __future__ import annotations

from gateway.chat.formats.object_calls import ObjectCallsParser
from gateway.chat.tool_grammar import CallForm

NEMOTRON_BEGIN = "<TOOLCALL>"
NEMOTRON_END = "</TOOLCALL>"
NEMOTRON_FORM = CallForm(
    opening=(NEMOTRON_BEGIN, "["), closing=("]", NEMOTRON_END), separator=(", ",)
)
FORM = CallForm(opening=("[",), closing=("]",), separator=(", ",), is_marked=False)


class ListParser(ObjectCallsParser):
    """A list without markers; its objects name tools that the caller offers."""

    begins = ()
    is_bare = True
    any_name = False


class NemotronParser(ObjectCallsParser):
    """A marked list."""

    certain_markers = begins = (NEMOTRON_BEGIN,)
    end = NEMOTRON_END
