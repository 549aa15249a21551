"""Attacks on chat completions: the largest and the worst messages, tools and choices of tools."""

from __future__ import annotations

from tests.hostile import grammars
from tests.hostile.bodies import (
    CACHED,
    TEXTS,
    huge,
    messages,
    nested,
    other_tools,
    parts,
    text,
    user,
)
from tests.hostile.sizes import Body, Field, Sizes


def chat_tools(sizes: Sizes, strict: bool = False) -> list[Body]:
    made = grammars.tools(sizes, strict)
    return [{"type": "function", "function": each, **CACHED} for each in made]


def unknown_everywhere(sizes: Sizes) -> list[Body]:
    """As many messages as allowed, each with an unknown field that is nearly a known one."""
    return [{"role": "user", "content": "x", f"reasoning_co{i}": 1} for i in range(sizes.many(7))]


def function_calls(sizes: Sizes) -> list[Body]:
    """As many legacy calls and results as allowed."""
    call = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
    return [call, {"role": "function", "name": "f", "content": "x"}] * (sizes.many(24) // 2)


def calls(sizes: Sizes) -> list[Body]:
    """As many earlier calls in one message as allowed."""
    call = {"name": "f", "arguments": '{"a": 1}', "parsed_arguments": {"a": 1}}
    each = {"id": "c", "type": "function", "function": call, "index": 0}
    return [{"role": "assistant", "tool_calls": [each] * sizes.many(12)}, *user("x")]


def all_message_fields(sizes: Sizes) -> list[Body]:
    """As many messages with every field as allowed."""
    whole = {
        "role": "tool",
        "content": "x",
        "name": "n",
        "tool_call_id": "c",
        "reasoning_content": "r",
        "reasoning": "r",
        "parsed": [1],
        "refusal": None,
        "annotations": [{"type": "url_citation"}],
        "prefix": False,
        "partial": False,
        **CACHED,
    }
    return [whole] * sizes.many(27)


CHAT_FIELDS: dict[str, Field] = {
    "messages": lambda sizes: {"messages": messages(sizes)},
    "message fields": lambda sizes: {"messages": all_message_fields(sizes)},
    "parts": lambda sizes: {"messages": user(parts(sizes))},
    "tool calls": lambda sizes: {"messages": calls(sizes)},
    "deep arguments": lambda sizes: {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "c",
                        "function": {
                            "name": "f",
                            "arguments": "[" * (sizes.text_chars // 2)
                            + "]" * (sizes.text_chars // 2),
                        },
                    }
                ],
            },
            *user("x"),
        ],
    },
    **{
        f"text of {name}": lambda sizes, pattern=pattern: {"messages": user(text(sizes, pattern))}  # type: ignore[misc]
        for name, pattern in TEXTS.items()
    },
    "huge text": lambda sizes: {"messages": user(huge(sizes, "x"))},
    "truncated text": lambda sizes: {
        "messages": user(text(sizes, "lorem ipsum ")),
        "truncate_prompt_tokens": 1,
        "truncation_side": "right",
    },
    "tools": lambda sizes: {"tools": chat_tools(sizes), "parallel_tool_calls": False},
    "required tools": lambda sizes: {"tools": chat_tools(sizes), "tool_choice": "required"},
    "named tool": lambda sizes: {
        "tools": chat_tools(sizes),
        "tool_choice": {"type": "function", "function": {"name": "tool_1"}},
    },
    "strict tools": lambda sizes: {"tools": chat_tools(sizes, True), "n": sizes.choices},
    "log-probabilities": lambda sizes: {
        "logprobs": True,
        "top_logprobs": sizes.logprobs,
        "n": sizes.choices,
        "max_tokens": sizes.reported // (sizes.logprobs + 1) // sizes.choices,
    },
    "log-probabilities of one choice": lambda sizes: {
        "logprobs": True,
        "top_logprobs": sizes.logprobs,
        "max_completion_tokens": min(
            sizes.reported // (sizes.logprobs + 1), sizes.context - sizes.output
        ),
        "max_tokens": None,
    },
    "log-probabilities, streamed": lambda sizes: {
        "logprobs": True,
        "top_logprobs": sizes.logprobs,
        "n": sizes.choices,
        "max_tokens": sizes.output,
        "stream": True,
        "return_token_ids": True,
    },
    "prompt log-probabilities": lambda sizes: {
        "messages": user(_reported_chars(sizes, sizes.logprobs + 2)),
        "prompt_logprobs": sizes.logprobs,
        "return_token_ids": True,
        "n": sizes.choices,
    },
    "prompt log-probabilities, streamed": lambda sizes: {
        "messages": user(_reported_chars(sizes, (sizes.logprobs + 2) * sizes.choices)),
        "prompt_logprobs": sizes.logprobs,
        "n": sizes.choices,
        "stream": True,
    },
    "other tools": lambda sizes: {"tools": other_tools(sizes)},
    "allowed tools": lambda sizes: {
        "tools": chat_tools(sizes),
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "tool_1"}}] * sizes.tools,
            },
        },
    },
    "functions": lambda sizes: {
        "functions": grammars.tools(sizes),
        "function_call": {"name": "tool_1"},
    },
    "function calls": lambda sizes: {"messages": function_calls(sizes)},
    "slips": lambda sizes: {"messages": unknown_everywhere(sizes)},
    "hints": lambda sizes: {
        "prediction": {"content": [1] * (sizes.values - 200)},
        "store": True,
        "verbosity": "v" * 1000,
        "web_search_options": {"a": [1]},
        "prompt_cache_retention": "24h",
        "stream": True,
        "stream_options": {"include_obfuscation": True},
    },
    "labels": lambda sizes: {
        "metadata": {f"{i:02}" + "k" * 60: "v" * 512 for i in range(16)},
        "service_tier": "default",
        "prompt_cache_key": "k" * 512,
        "safety_identifier": "k" * 512,
        "include_reasoning": False,
        "add_generation_prompt": True,
    },
    "effort": lambda sizes: {"reasoning_effort": "max"},
    "continued": lambda sizes: {
        "messages": user(" " * (sizes.text_chars // 2) + "x"),
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "template variables": lambda sizes: {
        "chat_template_kwargs": {f"k{i}": i for i in range(sizes.parts - 200)}
    },
    "deep template variables": lambda sizes: {"chat_template_kwargs": {"k": nested(150)}},
    "documents": lambda sizes: {"documents": [{"text": "x"}] * sizes.many(3)},
    "one wide document": lambda sizes: {
        "documents": [{f"k{i}": 1 for i in range(sizes.parts - 200)}]
    },
}


def _reported_chars(sizes: Sizes, per_token: int) -> str:
    """A prompt of about as many tokens as an answer may report with `per_token` values each."""
    return "a " * (min(sizes.reported // per_token, sizes.context - sizes.output - 100) // 3)
