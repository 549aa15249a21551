"""Attacks on the other endpoints that take bodies, and the table of all attacks in bodies."""

from __future__ import annotations

from typing import Any

from protocol.retention import MAX_PRIORITY, MAX_SECONDS
from tests.hostile import grammars
from tests.hostile.bodies import (
    CACHED,
    COMPLETION_FIELDS,
    SHARED,
    TEXTS,
    huge,
    messages,
    other_tools,
    parts,
    text,
    user,
)
from tests.hostile.chat import (
    CHAT_FIELDS,
    all_message_fields,
    calls,
    chat_tools,
    function_calls,
)
from tests.hostile.histories import (
    BLOCK_HISTORIES,
    CHAT_HISTORIES,
    ITEM_HISTORIES,
    other_messages,
)
from tests.hostile.other_names import OTHER_NAMES, SAMPLING, format_fields
from tests.hostile.sizes import Body, BodyAttack, Field, Sizes, attacks_on


def _labels(_: Sizes) -> Body:
    return {
        "metadata": {f"{i:02}" + "k" * 60: "v" * 512 for i in range(16)},
        "user": "u" * 512,
        "safety_identifier": "s" * 512,
        "prompt_cache_key": "k" * 512,
    }


def _items(sizes: Sizes) -> list[Body]:
    item = {"type": "message", "role": "user", "content": "x", "id": "i", "status": "completed"}
    return [item | {"phase": "commentary"}] * sizes.many(13)


def _turns(sizes: Sizes) -> list[Body]:
    """A conversation of many turns that is too long for the context."""
    count = sizes.many(14) // 2
    content = "lorem ipsum " * (sizes.text_chars // count // 12)
    turn = [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]
    return turn * count


def _other_items(sizes: Sizes) -> list[Body]:
    part = [{"type": "reasoning_text", "text": "r"}]
    call: Body = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output: Body = {"type": "function_call_output", "call_id": "c", "output": "x"}
    reasoning: Body = {"type": "reasoning", "summary": part, "content": part}
    reasoning["encrypted_content"] = "e"
    shown = {"id": "i", "status": "completed"}
    some = [reasoning | shown, call | shown, output | shown]
    return some * (sizes.many(20) // 3) + user("x")


def _item_parts(sizes: Sizes) -> list[Body]:
    part = {"type": "input_text", "text": "x", "logprobs": [1], "annotations": [1]}
    return user([part] * sizes.many(10))


PROMPT_FIELDS: dict[str, Field] = {
    **ITEM_HISTORIES,
    **format_fields("text", "format"),
    "items": lambda sizes: {"input": _items(sizes)},
    "items of other kinds": lambda sizes: {"input": _other_items(sizes)},
    "parts": lambda sizes: {"input": _item_parts(sizes)},
    "logprobs of a part": lambda sizes: {
        "input": user([{"type": "input_text", "text": "x", "logprobs": [1] * sizes.items}])
    },
    "long text": lambda sizes: {"input": text(sizes)},
    "huge text": lambda sizes: {"input": huge(sizes, "é")},
    "instructions": lambda sizes: {"instructions": text(sizes)},
    "truncation": lambda sizes: {"input": _turns(sizes), "truncation": "auto"},
    "tools": lambda sizes: {
        "tools": [{"type": "function", **each} for each in grammars.tools(sizes)],
        "parallel_tool_calls": True,
    },
    "required tools": lambda sizes: {
        "tools": [{"type": "function", **each} for each in grammars.tools(sizes)],
        "tool_choice": "required",
    },
    "named tool": lambda sizes: {
        "tools": [{"type": "function", **each} for each in grammars.tools(sizes)],
        "tool_choice": {"type": "function", "name": "tool_1"},
    },
    "effort": lambda sizes: {
        "reasoning": {"effort": "high", "summary": "detailed", "generate_summary": "auto"}
    },
    "plain format": lambda sizes: {"text": {"format": {"type": "text"}, "verbosity": "low"}},
    "other tools": lambda sizes: {"tools": other_tools(sizes)},
    "allowed tools": lambda sizes: {
        "tools": [{"type": "function", **each} for each in grammars.tools(sizes)],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "tool_1"}] * sizes.tools,
        },
    },
    "object format": lambda sizes: {"text": {"format": {"type": "json_object"}}},
    **{
        f"schema, {name}": lambda sizes, make=make: {  # type: ignore[misc]
            "text": {
                "format": {
                    "type": "json_schema",
                    "name": "n" * 64,
                    "description": "d",
                    "schema": make(sizes),
                    "strict": True,
                }
            }
        }
        for name, make in grammars.SCHEMAS.items()
    },
}
KEPT_FIELDS: dict[str, Field] = {
    "an earlier response": lambda sizes: {"previous_response_id": "resp_" + "r" * 251},
}
RESPONSE_FIELDS: dict[str, Field] = {
    "numbers": lambda sizes: {"temperature": 2, "top_p": 0.000001, **_labels(sizes)},
    "stream options": lambda sizes: {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    "log-probabilities": lambda sizes: {
        "include": ["message.output_text.logprobs"] * sizes.items,
        "top_logprobs": sizes.logprobs,
        "max_output_tokens": min(
            sizes.repeated // (sizes.logprobs + 1), sizes.context - sizes.output
        ),
    },
    "log-probabilities, streamed": lambda sizes: {
        "include": ["message.output_text.logprobs"],
        "top_logprobs": sizes.logprobs,
        "max_output_tokens": None,
        "stream": True,
        "stream_options": {"include_obfuscation": False},
    },
    "in the background": lambda sizes: {"background": True, "store": True},
    **KEPT_FIELDS,
    "hints": lambda sizes: {
        "cache_salt": "s" * 256,
        "cache_retention": {"seconds": MAX_SECONDS, "priority": MAX_PRIORITY},
        "session_id": "é" * 512,
        "store": True,
        "service_tier": "t" * 1000,
        "prompt_cache_retention": "24h",
        "max_tool_calls": 10**9,
        "include": [f"{i}" + "i" * 100 for i in range(sizes.many(1))],
    },
    "instructions, streamed": lambda sizes: {"instructions": text(sizes), "stream": True},
}


def _blocks(sizes: Sizes) -> list[Body]:
    block = {"type": "text", "text": "x", "citations": [1], **CACHED}
    return user([block] * sizes.many(11))


def _uses(sizes: Sizes) -> list[Body]:
    count = sizes.many(40) // 2
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": [1]}, **CACHED}
    use["caller"] = {"type": "server"}
    result = {"type": "tool_result", "tool_use_id": "c", "is_error": True, **CACHED}
    result["content"] = [{"type": "text", "text": "x"}]
    thought = {"type": "thinking", "thinking": "t", "signature": "s"}
    assistant = {"role": "assistant", "content": [thought, *[use] * count]}
    return [assistant, *user([result] * count)]


def _anthropic_tools(sizes: Sizes) -> list[Body]:
    return [
        {
            "type": "custom",
            "name": each["name"],
            "description": each["description"],
            "input_schema": each["parameters"],
            "strict": True,
            "eager_input_streaming": True,
            "defer_loading": True,
            "allowed_callers": ["x"],
            **CACHED,
        }
        for each in grammars.tools(sizes)
    ]


def _counted_fields() -> dict[str, Field]:
    """The fields that `/v1/messages` and `/v1/messages/count_tokens` share."""

    def of_schema(make: Any) -> Field:
        return lambda sizes: {
            "output_config": {"format": {"type": "json_schema", "schema": make(sizes)}}
        }

    return {
        **BLOCK_HISTORIES,
        **format_fields("output_config", "format"),
        **format_fields("output_format"),
        "messages": lambda sizes: {"messages": messages(sizes)},
        "blocks": lambda sizes: {"messages": _blocks(sizes)},
        "calls and results": lambda sizes: {"messages": _uses(sizes)},
        "wide input": lambda sizes: {
            "messages": [
                {
                    "role": "assistant",
                    "content": [
                        {
                            "type": "tool_use",
                            "id": "c",
                            "name": "f",
                            "input": {"numbers": [1] * (sizes.values - 200)},
                        }
                    ],
                },
                *user("x"),
            ]
        },
        "system blocks": lambda sizes: {"system": parts(sizes)},
        **{
            f"text of {name}": lambda sizes, pattern=pattern: {  # type: ignore[misc]
                "messages": user(text(sizes, pattern))
            }
            for name, pattern in TEXTS.items()
        },
        "huge text": lambda sizes: {"system": huge(sizes, "\n")},
        "tools": lambda sizes: {
            "tools": _anthropic_tools(sizes),
            "tool_choice": {"type": "tool", "name": "tool_1", "disable_parallel_tool_use": True},
        },
        "any tool": lambda sizes: {
            "tools": _anthropic_tools(sizes),
            "tool_choice": {"type": "any"},
        },
        "thinking": lambda sizes: {
            "thinking": {"type": "enabled", "budget_tokens": 2**31, "display": "omitted"},
            "output_config": {"effort": "max"},
            **CACHED,
        },
        "other tools": lambda sizes: {"tools": other_tools(sizes)},
        "hints": lambda sizes: {
            "mcp_servers": [{"a": 1}] * (sizes.parts // 4),
            "context_management": {"edits": [1] * (sizes.values // 4)},
            "speed": "fast",
        },
        **{f"schema, {name}": of_schema(make) for name, make in grammars.SCHEMAS.items()},
    }


MESSAGE_FIELDS: dict[str, Field] = {
    **_counted_fields(),
    "every limit": lambda sizes: {
        "max_tokens": sizes.output,
        "stop_sequences": ["x" * 1024] * sizes.stops,
        "temperature": 1,
        "top_p": 0.000001,
        "top_k": 2**31 - 1,
        "metadata": {"user_id": "u" * 512},
        "stream": True,
    },
    "output": lambda sizes: {"max_tokens": 2**31 - 1},
    "hints, generating": lambda sizes: {
        "service_tier": "t" * 1000,
        "cache_salt": "s" * 256,
        "cache_retention": {"seconds": MAX_SECONDS, "priority": MAX_PRIORITY},
        "session_id": "é" * 512,
        "container": {"skills": [1] * (sizes.values // 4)},
    },
}

TOKENIZE_FIELDS: dict[str, Field] = {
    **{
        f"text of {name}": lambda sizes, pattern=pattern: {"prompt": text(sizes, pattern)}  # type: ignore[misc]
        for name, pattern in TEXTS.items()
    },
    "huge text": lambda sizes: {"prompt": huge(sizes, "x")},
    "names": lambda sizes: {
        "prompt": text(sizes, "a "),
        "return_token_strs": True,
        "add_special_tokens": True,
    },
    "messages": lambda sizes: {"prompt": None, "messages": messages(sizes)},
    "other services' messages": lambda sizes: {"prompt": None, "messages": other_messages(sizes)},
    "parts": lambda sizes: {"prompt": None, "messages": user(parts(sizes))},
    "message fields": lambda sizes: {"prompt": None, "messages": all_message_fields(sizes)},
    "calls": lambda sizes: {"prompt": None, "messages": calls(sizes)},
    "function calls": lambda sizes: {"prompt": None, "messages": function_calls(sizes)},
    "other tools": lambda sizes: {
        "prompt": None,
        "messages": user("x"),
        "tools": other_tools(sizes),
    },
    "tools": lambda sizes: {
        "prompt": None,
        "messages": user("x"),
        "tools": chat_tools(sizes),
        "add_generation_prompt": True,
        "continue_final_message": False,
        "chat_template_kwargs": {f"k{i}": 1 for i in range(100)},
    },
}

DETOKENIZE_FIELDS: dict[str, Field] = {
    "tokens": lambda sizes: {"tokens": [sizes.vocabulary - 1] * sizes.token_ids},
    "one id outside": lambda sizes: {"tokens": [1] * (sizes.token_ids - 1) + [2**31]},
}

COUNTED_SALT: dict[str, Field] = {"a long salt": lambda _: {"cache_salt": "s" * 256}}

BODY_ATTACKS: list[BodyAttack] = [
    *attacks_on("/v1/chat/completions", SHARED | CHAT_FIELDS | CHAT_HISTORIES | OTHER_NAMES),
    *attacks_on("/v1/completions", SHARED | COMPLETION_FIELDS | OTHER_NAMES),
    *attacks_on("/v1/responses", PROMPT_FIELDS | RESPONSE_FIELDS | SAMPLING | OTHER_NAMES),
    *attacks_on("/v1/responses/input_tokens", PROMPT_FIELDS | KEPT_FIELDS | COUNTED_SALT),
    *attacks_on("/v1/messages", MESSAGE_FIELDS | SAMPLING | OTHER_NAMES),
    *attacks_on("/v1/messages/count_tokens", _counted_fields() | COUNTED_SALT),
    *attacks_on("/tokenize", TOKENIZE_FIELDS | COUNTED_SALT),
    *attacks_on("/detokenize", DETOKENIZE_FIELDS),
]
