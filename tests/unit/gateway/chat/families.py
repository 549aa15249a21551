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


def _tags(tag: str, padding: str, name: str, arguments: dict[str, Any]) -> str:
    parts = [
        f"<parameter={key}>{padding}{_as_text(value)}{padding}</parameter>\n"
        for key, value in arguments.items()
    ]
    return f"<{tag}>\n<function={name}>\n{''.join(parts)}</function>\n</{tag}>"


def _glm_tags(name: str, arguments: dict[str, Any]) -> str:
    parts = [
        f"<arg_key>{key}</arg_key>\n<arg_value>{_as_text(value)}</arg_value>\n"
        for key, value in arguments.items()
    ]
    return f"<tool_call>{name}\n{''.join(parts)}</tool_call>"


def _minimax_tags(name: str, arguments: dict[str, Any]) -> str:
    parts = [
        f'<parameter name="{key}">{_as_text(value)}</parameter>\n'
        for key, value in arguments.items()
    ]
    return f'<invoke name="{name}">\n{"".join(parts)}</invoke>\n'


def _dsml_tags(name: str, arguments: dict[str, Any]) -> str:
    parts = [
        f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
        f"{_as_text(value)}</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    ]
    return f'<｜DSML｜invoke name="{name}">\n{"".join(parts)}</｜DSML｜invoke>\n'


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


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
    "deepseek_v32": lambda calls: _section(
        ("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
        [_dsml_tags(*each) for each in calls],
    ),
    "deepseek_v4": lambda calls: _section(
        ("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"),
        [_dsml_tags(*each) for each in calls],
    ),
    "glm": lambda calls: "\n".join(_glm_tags(*each) for each in calls),
    "minimax_m2": lambda calls: _section(
        ("<minimax:tool_call>\n", "</minimax:tool_call>"),
        [_minimax_tags(*each) for each in calls],
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
    "qwen3_coder": lambda calls: "\n".join(_tags("tool_call", "\n", *each) for each in calls),
    "seed_oss": lambda calls: "\n".join(_tags("seed:tool_call", "", *each) for each in calls),
}
FRAGMENTS = [
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.add:0", "```"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "```json\n"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    *("<TOOLCALL>", "</TOOLCALL>", "<function=", "add>", "</function>", ">>>", "all\n", "add\n"),
    *("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "｜DSML｜", "</｜DSML｜function_calls>"),
    *('<｜DSML｜invoke name="add">', "</｜DSML｜invoke>", "</｜DSML｜parameter>"),
    *('<｜DSML｜parameter name="a" string="true">', '<｜DSML｜parameter name="x" string="false">'),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<arg_key>x</arg_key>\n"),
    *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="add">', "</invoke>"),
    *('<parameter name="a">', "<parameter name=", "\n</invoke>", "\n</function>", "x" * 70),
    *("<parameter=a>\n", "<parameter=", "</parameter>", "True", "1", "\\u12", "\\d"),
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<think>", "</think>", "{", "}", "[", "]", '"', "\\", ",", ":", ";", " ", "\n", "add", "x1"),
    *('"name"', '"arguments"', '"parameters"', '"add"', '{"name": "add", "arguments": {', "{}"),
    *(
        "<|python_start|>",
        "<|python_end|>",
        "[add(",
        "(",
        ")",
        "a=",
        "b = ",
        "'",
        '"' * 3,
        "\\x4",
        "-",
    ),
    *('"name": "get_weather"', '"parameters": {"q": "é😀"}}', "Hello", "null", "1.5"),
]
"""Pieces of which tests put texts together, some of them calls."""
