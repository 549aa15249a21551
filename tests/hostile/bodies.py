"""Attacks on completions, and on what they share with other endpoints: the largest and the worst
value of every field.

Each entry changes fields of the endpoint's smallest body. A test checks against the OpenAPI
document that no field is missing.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from protocol.retention import MAX_PRIORITY, MAX_SECONDS
from tests.hostile import grammars
from tests.hostile.sizes import Body, Field, Sizes

# -- texts and lists that several endpoints take ----------------------------------------------


def text(sizes: Sizes, pattern: str = "lorem ipsum ") -> str:
    """The longest text that may be encoded."""
    num_chars = (sizes.text_chars - 400) * len(pattern) // len(pattern.encode())
    return (pattern * (num_chars // len(pattern) + 1))[:num_chars]


TEXTS = {
    "words": "lorem ipsum ",
    "one word": "a",
    "blanks": " ",
    "lines": "\n",
    "digits": "7",
    "emoji": "😀",
    "quotes": '"\\',
    "unknown words": "zqxj vkwp jjqz ",
}


def huge(sizes: Sizes, pattern: str) -> str:
    """A text that fills a body."""
    return pattern * (
        (sizes.body_bytes - 1000) // (len(json.dumps(pattern, ensure_ascii=False).encode()) - 2)
    )


CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def user(content: object) -> list[Body]:
    """One message of the user."""
    return [{"role": "user", "content": content}]


def messages(sizes: Sizes) -> list[Body]:
    """As many messages as allowed."""
    return [{"role": "user", "content": "x"}] * sizes.many(5)


def parts(sizes: Sizes, kind: str = "text") -> list[Body]:
    """As many content parts as allowed."""
    return [{"type": kind, "text": "x", **CACHED}] * sizes.many(9)


def nested(depth: int) -> Any:
    """Lists in lists."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def other_tools(sizes: Sizes) -> list[Body]:
    """As many tools as allowed, of kinds that Baton does not have."""
    wide = {f"k{i}": None for i in range((sizes.parts - 1000) // sizes.tools)}
    return [{"type": f"{i}" + "t" * 200, **wide} for i in range(sizes.tools)]


def structural_tags(sizes: Sizes) -> Body:
    """As many tags as fit into a grammar."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    count = min(128, sizes.grammar_chars // 300)
    tags = [{"begin": f"<f{i}>", "schema": schema, "end": "</f>"} for i in range(count)]
    return {"structures": tags, "triggers": ["<f"]}


# -- fields that chat completions and completions share -----------------------------------------


def _every_limit(sizes: Sizes) -> Body:
    """Every small field at its limit."""
    return {
        "min_tokens": 1,
        "temperature": 2,
        "top_p": 0.000001,
        "top_k": 2**31 - 1,
        "min_p": 1,
        "presence_penalty": 2,
        "frequency_penalty": 2,
        "repetition_penalty": 10,
        "logit_bias": {str(i): 100 for i in range(min(sizes.biases, sizes.vocabulary))},
        "seed": 2**63 - 1,
        "stop": ["x" * sizes.stop_chars] * sizes.stops,
        "stop_token_ids": [i % sizes.vocabulary for i in range(sizes.stop_tokens)],
        "allowed_token_ids": [i % sizes.vocabulary for i in range(sizes.allowed_tokens)],
        "bad_words": [f"{i:04}" + "x" * 96 for i in range(sizes.bad_words)],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "add_special_tokens": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "request_id": "r" * 128,
        "user": "u" * 512,
        "priority": 2**31 - 1,
        "cache_salt": "s" * 256,
        "cache_retention": {"seconds": MAX_SECONDS, "priority": MAX_PRIORITY},
        "session_id": "é" * 512,
        "n": sizes.choices,
        "max_tokens": sizes.output,
    }


def _formats(sizes: Sizes, make: Any) -> Body:
    named = {"name": "n" * 64, "description": "d" * 1000, "schema": make(sizes), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _structured(name: str, make: Any, n: int = 1) -> Field:
    return lambda sizes: {
        "structured_outputs": {name: make(sizes)},
        "n": min(n, sizes.choices),
        "max_tokens": sizes.output,
    }


SHARED: dict[str, Field] = {
    "every limit": _every_limit,
    "every limit, streamed": lambda sizes: (
        _every_limit(sizes)
        | {
            "stream": True,
            "stream_options": {
                "include_usage": True,
                "continuous_usage_stats": True,
                "include_obfuscation": False,
            },
        }
    ),
    "model": lambda sizes: {"model": huge(sizes, "m")},
    "output": lambda sizes: {"max_tokens": 2**31 - 1},
    "text format": lambda sizes: {"response_format": {"type": "text"}},
    "object format": lambda sizes: {
        "response_format": {"type": "json_object"},
        "n": sizes.choices,
        "max_tokens": sizes.output,
    },
    **{f"schema, {name}": partial(_formats, make=make) for name, make in grammars.SCHEMAS.items()},
    **{f"json, {name}": _structured("json", make) for name, make in grammars.SCHEMAS.items()},
    "json_object": _structured("json_object", lambda sizes: True),
    "regex": _structured("regex", grammars.regex),
    "counted regex": _structured("regex", grammars.counted_regex, 128),
    "choice": _structured("choice", grammars.texts, 128),
    "ambiguous grammar": _structured("grammar", grammars.ambiguous, 128),
    "long grammar": _structured("grammar", grammars.long_lark),
    "GBNF": _structured("grammar", grammars.gbnf),
    **{
        f"guided, {name}": lambda sizes, name=name, make=make: {f"guided_{name}": make(sizes)}  # type: ignore[misc]
        for name, make in {
            "json": grammars.wide,
            "json_object": lambda sizes: True,
            "regex": grammars.regex,
            "choice": grammars.texts,
            "grammar": grammars.ambiguous,
        }.items()
    },
    "structural tag": lambda sizes: {
        "response_format": {"type": "structural_tag", **structural_tags(sizes)},
        "n": sizes.choices,
    },
    "structural tag's format": lambda sizes: {
        "response_format": {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": ["<f"],
                "tags": structural_tags(sizes)["structures"],
            },
        }
    },
    "structural tag as text": _structured(
        "structural_tag", lambda sizes: json.dumps(structural_tags(sizes)), 128
    ),
    "GBNF, too long": _structured("grammar", grammars.too_long_gbnf),
    "truncated": lambda sizes: {
        "truncate_prompt_tokens": -1,
        "truncation_side": "left",
    },
}


# -- completions --------------------------------------------------------------------------------


COMPLETION_FIELDS: dict[str, Field] = {
    **{
        f"text of {name}": lambda sizes, pattern=pattern: {"prompt": text(sizes, pattern)}  # type: ignore[misc]
        for name, pattern in TEXTS.items()
    },
    **{
        f"huge text of {name}": lambda sizes, pattern=pattern: {"prompt": huge(sizes, pattern)}  # type: ignore[misc]
        for name, pattern in TEXTS.items()
    },
    "texts": lambda sizes: {"prompt": ["x y z " * (sizes.context // 400)] * sizes.choices},
    "token ids": lambda sizes: {"prompt": [1] * (sizes.context - 10)},
    "token ids, n": lambda sizes: {
        "prompt": [1] * min(sizes.context - 10, sizes.started // sizes.choices),
        "n": sizes.choices,
    },
    "special token ids, n": lambda sizes: {
        "prompt": [2045] * (sizes.context - 10),
        "n": sizes.started // sizes.context,
    },
    "too many token ids, n": lambda sizes: {
        "prompt": [1] * (sizes.context - 10),
        "n": sizes.choices,
    },
    "lists of token ids": lambda sizes: {
        "prompt": [[1] * ((sizes.values_with_ids - 1500) // sizes.choices)] * sizes.choices
    },
    "token ids, truncated": lambda sizes: {
        "prompt": [1] * sizes.token_ids,
        "truncate_prompt_tokens": 10,
    },
    "long token ids, truncated": lambda sizes: {
        "prompt": [10**18] * min(sizes.token_ids, sizes.body_bytes // 21),
        "truncate_prompt_tokens": 10,
    },
    "texts, truncated": lambda sizes: {
        "prompt": ["lorem ipsum " * (sizes.text_chars // 24)] * 8,
        "truncate_prompt_tokens": 10,
    },
    "suffix": lambda sizes: {"suffix": text(sizes, "lorem ipsum ")},
    "best_of": lambda sizes: {
        "best_of": sizes.choices,
        "logprobs": sizes.logprobs,
        "max_tokens": sizes.reported // (sizes.logprobs + 1) // sizes.choices,
    },
    "log-probabilities": lambda sizes: {
        "logprobs": sizes.logprobs,
        "n": sizes.choices,
        "max_tokens": sizes.reported // (sizes.logprobs + 1) // sizes.choices,
    },
    "prompt log-probabilities": lambda sizes: {
        "prompt": [5] * min(sizes.reported // (sizes.logprobs + 1), sizes.context - 10),
        "prompt_logprobs": sizes.logprobs,
    },
    "prompt log-probabilities, n": lambda sizes: {
        "prompt": [5] * (sizes.reported // (sizes.logprobs + 1) // sizes.choices),
        "prompt_logprobs": sizes.logprobs,
        "n": sizes.choices,
    },
    "3,900 tokens, prompt log-probabilities, n": lambda sizes: {
        "prompt": [5] * min(3900, sizes.context - 10),
        "prompt_logprobs": sizes.logprobs,
        "n": sizes.choices,
    },
    "echo": lambda sizes: {
        "prompt": [5] * min(sizes.reported // (sizes.logprobs + 2), sizes.context - 10),
        "echo": True,
        "logprobs": sizes.logprobs,
    },
    "echo, streamed": lambda sizes: {
        "prompt": [5] * (sizes.reported // (sizes.logprobs + 2) // sizes.choices),
        "echo": True,
        "logprobs": sizes.logprobs,
        "n": sizes.choices,
        "stream": True,
    },
    "echo alone": lambda sizes: {
        "prompt": [5] * min(sizes.reported // sizes.choices, sizes.context - 10),
        "echo": True,
        "max_tokens": 0,
        "n": sizes.choices,
    },
    "repeated token ids": lambda sizes: {
        "prompt": [5] * min(sizes.reported // sizes.choices, sizes.context - 10),
        "return_token_ids": True,
        "n": sizes.choices,
    },
}
