"""Names that settings use for parsers of tool calls and reasoning, and for the treatment of control
tokens; cheap to import."""

from __future__ import annotations

AUTO = "auto"
NONE = "none"
TOOL_PARSERS = (
    AUTO,
    NONE,
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "functionary",
    "function_tag",
    "glm",
    "harmony",
    "hermes",
    "kimi_k2",
    "llama3",
    "minimax_m2",
    "mistral",
    "nemotron",
    "pythonic",
    "qwen3_coder",
    "seed_oss",
    "xlam",
)
REASONING_PARSERS = (AUTO, NONE, "harmony", "think", "mistral", "seed_oss")
ESCAPE, ALLOW = "escape", "allow"
CONTROL_TOKENS = (ESCAPE, ALLOW)
