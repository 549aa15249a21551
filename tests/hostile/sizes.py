"""How large the attacks of `tests.hostile` are, and what one attack is.

`FULL` are the limits that the API allows, taken from the code that enforces them. Smaller sizes
serve tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gateway.api.chat_prompt import MAX_TOOLS_BYTES
from gateway.api.choice_planner import (
    MAX_REPEATED_VALUES,
    MAX_REPORTED_VALUES,
    MAX_STARTED_TOKENS,
    MIN_TEXT_BYTES,
)
from gateway.api.constraints.constraint_fields import MAX_CHOICE_TEXTS
from gateway.api.function_tools import MAX_TOOLS
from gateway.api.generation_fields import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_STRINGS,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
)
from gateway.api.strict_model import (
    MAX_ESCAPES,
    MAX_LIST_ITEMS,
    MAX_PARTS,
    MAX_TOKEN_IDS,
    MAX_VALUES,
    MAX_VALUES_WITH_IDS,
)
from gateway.grammars.grammar import MAX_GBNF_CHARS
from gateway.http.connection_limits import ConnectionLimits
from protocol.sampling import MAX_GRAMMAR_CHARS, MAX_LOGPROBS

_LIMITS = ConnectionLimits()


@dataclass(frozen=True)
class Sizes:
    """Sizes of inputs, each at its limit or below. Counts, unless the name says bytes or chars."""

    model: str = "demo_model"
    context: int = 131_072
    body_bytes: int = _LIMITS.max_body_bytes - 4096
    head_bytes: int = _LIMITS.max_head_bytes
    parts: int = MAX_PARTS
    values: int = MAX_VALUES
    escapes: int = MAX_ESCAPES
    values_with_ids: int = MAX_VALUES_WITH_IDS
    items: int = MAX_LIST_ITEMS
    token_ids: int = MAX_TOKEN_IDS
    text_chars: int = MIN_TEXT_BYTES
    tools_bytes: int = MAX_TOOLS_BYTES
    grammar_chars: int = MAX_GRAMMAR_CHARS
    gbnf_chars: int = MAX_GBNF_CHARS
    reported: int = MAX_REPORTED_VALUES
    repeated: int = MAX_REPEATED_VALUES
    started: int = MAX_STARTED_TOKENS
    tools: int = MAX_TOOLS
    choices: int = MAX_CHOICES
    choice_texts: int = MAX_CHOICE_TEXTS
    logprobs: int = MAX_LOGPROBS
    stops: int = MAX_STOP_STRINGS
    stop_chars: int = MAX_STOP_STRING_CHARS
    stop_tokens: int = MAX_STOP_TOKENS
    allowed_tokens: int = MAX_ALLOWED_TOKENS
    biases: int = MAX_LOGIT_BIASES
    bad_words: int = MAX_BAD_STRINGS
    output: int = 256
    vocabulary: int = 2000
    connections: int = 200
    crowd: int = 16

    def many(self, cost: int) -> int:
        """The length of a list whose entries have `cost` strings, lists and objects each."""
        return min(self.items, (self.parts - 100) // cost)


FULL = Sizes()
SMALL = replace(
    FULL,
    context=200,
    body_bytes=90_000,
    head_bytes=8192,
    parts=1500,
    values=3000,
    escapes=10_000,
    values_with_ids=5000,
    items=200,
    token_ids=3000,
    text_chars=5000,
    tools_bytes=20_000,
    grammar_chars=3000,
    gbnf_chars=2000,
    reported=4000,
    repeated=1000,
    started=100_000,
    tools=16,
    choices=8,
    choice_texts=50,
    output=8,
    vocabulary=250,
    allowed_tokens=200,
    biases=200,
    stop_chars=100,
    connections=10,
    crowd=3,
)

Body = dict[str, Any]


@dataclass(frozen=True)
class BodyAttack:
    """One POST; `make` returns its JSON, or bytes that are sent as they are."""

    name: str
    path: str
    make: Callable[[Sizes], Body | bytes]
    headers: tuple[tuple[str, str], ...] = ()


def base_of(path: str, sizes: Sizes) -> Body:
    """The smallest valid body of an endpoint."""
    messages = [{"role": "user", "content": "Hi"}]
    bodies: dict[str, Body] = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 1},
        "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
        "/v1/messages": {"messages": messages, "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": messages},
        "/v1/responses/input_tokens": {"input": "Hi"},
        "/tokenize": {"prompt": "Hi"},
        "/detokenize": {"tokens": [1]},
    }
    return {"model": sizes.model, **bodies[path]}


Field = Callable[[Sizes], Body]


def attacks_on(path: str, fields: dict[str, Field]) -> list[BodyAttack]:
    """Attacks that replace or add fields of the endpoint's smallest body; None removes a field."""

    def body(sizes: Sizes, changes: Field) -> Body:
        whole = base_of(path, sizes) | changes(sizes)
        return {name: value for name, value in whole.items() if value is not None}

    return [
        BodyAttack(name, path, lambda sizes, changes=changes: body(sizes, changes))  # type: ignore[misc]
        for name, changes in fields.items()
    ]
