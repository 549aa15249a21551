"""Answers as each family of models writes them, for tests of parsers, grammars and templates."""

from __future__ import annotations

import json
from typing import Any

from gateway.chat.conversation import Conversation, Message, Tool
from gateway.chat.markup import TOOL_MARKUPS

Call = tuple[str, dict[str, Any]]
FAMILIES = sorted(TOOL_MARKUPS.keys() - {"harmony"})
"""Without the one in which all text has headers; it has tests of its own."""
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "more": {"anyOf": [{"type": "object"}, {"type": "array"}, {"type": "boolean"}]},
    },
}
TOOLS = (Tool("weather", parameters=PARAMETERS), Tool("get.time", parameters=PARAMETERS))
ASKED = Conversation((Message("user", "?"),), TOOLS)


def written(family: str, calls: list[Call], content: str = "") -> str:
    """A message with the content, then the calls."""
    if family == "functionary":
        parts = [f"all\n{content}"] if content else []
        parts += [f"{name}\n{_json(arguments)}" for name, arguments in calls]
        return ">>>".join(parts)
    text = _CALLS_OF[family](calls) if calls else ""
    return f"{content}\n{text}" if content and text else content + text


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _objects(calls: list[Call], key: str = "arguments") -> list[str]:
    return [_json({"name": name, key: arguments}) for name, arguments in calls]


def _keywords(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


def _tags(name: str, arguments: dict[str, Any]) -> str:
    parts = [
        f"<parameter={key}>\n{value if isinstance(value, str) else _json(value)}\n</parameter>\n"
        for key, value in arguments.items()
    ]
    return f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"


def _seed_tags(name: str, arguments: dict[str, Any]) -> str:
    parts = [
        f"<parameter={key}>{value if isinstance(value, str) else _json(value)}</parameter>\n"
        for key, value in arguments.items()
    ]
    return f"<seed:tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</seed:tool_call>"


_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_KIMI = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def _section(around: tuple[str, str], calls: list[str], separator: str = "") -> str:
    return f"{around[0]}{separator.join(calls)}{around[1]}"


_CALLS_OF = {
    "deepseek_v3": lambda calls: _section(
        _DEEPSEEK,
        [
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```"
            "<｜tool▁call▁end｜>"
            for name, arguments in calls
        ],
        "\n",
    ),
    "deepseek_v31": lambda calls: _section(
        _DEEPSEEK,
        [
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"
            for name, arguments in calls
        ],
    ),
    "kimi_k2": lambda calls: _section(
        _KIMI,
        [
            f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>"
            f"{_json(arguments)}<|tool_call_end|>"
            for place, (name, arguments) in enumerate(calls)
        ],
    ),
    "hermes": lambda calls: "\n".join(
        f"<tool_call>\n{each}\n</tool_call>" for each in _objects(calls)
    ),
    "llama3": lambda calls: "; ".join(_objects(calls, "parameters")),
    "mistral": lambda calls: "".join(
        f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls
    ),
    "nemotron": lambda calls: f"<TOOLCALL>[{', '.join(_objects(calls))}]</TOOLCALL>",
    "xlam": lambda calls: f"[{', '.join(_objects(calls))}]",
    "function_tag": lambda calls: "".join(
        f"<function={name}>{_json(arguments)}</function>" for name, arguments in calls
    ),
    "pythonic": lambda calls: f"[{', '.join(f'{n}({_keywords(a)})' for n, a in calls)}]",
    "qwen3_coder": lambda calls: "\n".join(_tags(*each) for each in calls),
    "seed_oss": lambda calls: "\n".join(_seed_tags(*each) for each in calls),
}
