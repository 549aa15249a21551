"""Tool calls as Llama 3 writes them: a message that is `{"name": ..., "parameters": {...}}`.

The marker `<|python_tag|>` may come first, or a sentence; several objects are separated by `;`, or
stand in a list. With and without the marker, an object is a call only if it names a tool that the
caller offers, since the answer itself may be JSON, and the marker may be followed by Python code.
"""

from __future__ import annotations

from gateway.chat.formats.object_calls import ObjectCallsParser
from gateway.chat.tool_grammar import CallForm

MARKER = "<|python_tag|>"
FORM = CallForm(arguments_key="parameters")


class LlamaParser(ObjectCallsParser):
    """Objects anywhere in the message."""

    certain_markers = begins = (MARKER,)
    is_bare = True
    any_name = False
