"""What an operator may call the parsers of tool calls and reasoning; light to import."""

from __future__ import annotations

AUTO = "auto"
NONE = "none"
TOOL_PARSERS = (AUTO, NONE, "hermes", "llama3", "mistral", "pythonic")
REASONING_PARSERS = (AUTO, NONE, "think", "mistral")
