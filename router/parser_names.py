"""The names of the parsers for tool calls and reasoning in settings; cheap to import."""

from __future__ import annotations

AUTO = "auto"
NONE = "none"
TOOL_PARSERS = (AUTO, NONE, "hermes", "llama3", "mistral", "pythonic")
REASONING_PARSERS = (AUTO, NONE, "think", "mistral")
