"""Whether an unknown field would constrain or limit the answer.

Such a field is refused, since the answer without it would be another one. It is recognized by the
words of its name, in snake case or camel case, because every server has its own names.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

MAX_DEPTH = 3
MAX_INNER = 64
"""The most fields of one object that are examined."""
MAX_NAME_CHARS = 100
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_TEXT = "'structured_outputs' or 'response_format'"
_BY_WORD = {
    "'stop' or 'stop_token_ids'": frozenset(("eos", "stop", "stopping", "stops")),
    _TEXT: frozenset(
        """
        constrain constrained constraint constraints ebnf gbnf grammar grammars guidance guided
        lark regex regexp schema schemas structural structured
        """.split()  # noqa: SIM905
    ),
    "'bad_words', 'allowed_token_ids' or 'logit_bias'": frozenset(
        "allowed ban banned bans bad biases force forced logit logits suppress".split()  # noqa: SIM905
    ),
}
_BY_NAME = {
    _TEXT: frozenset(
        """
        choices enum force_json format json json_mode json_object json_only json_output
        output_format output_json output_type response_format response_mime_type result_format
        """.split()  # noqa: SIM905
    ),
    "'max_tokens'": frozenset(
        """
        n_predict new_tokens num_new_tokens num_output_tokens num_predict num_tokens output_length
        reasoning_budget response_length thinking_budget thinking_budget_tokens
        thinking_token_budget token_budget tokens_to_generate
        """.split()  # noqa: SIM905
    ),
    "'stop' or 'stop_token_ids'": frozenset(("end_token", "end_tokens", "end_token_ids")),
    "'repetition_penalty'": frozenset(("no_repeat_ngram_size",)),
}
_COUNTED = frozenset(
    """
    characters chars completion gen generated len length new output predict time token tokens words
    """.split()  # noqa: SIM905
)
_NOT_OUTPUT = frozenset(("batched", "context", "cached", "input", "model", "prompt", "total"))
_CONTAINERS = frozenset(
    """
    body config decoding extra extra_args extra_body generation_config guided_decoding
    inference_config nvext options output_config parameters params request sampling sampling_params
    text vllm_xargs
    """.split()  # noqa: SIM905
)
"""Names of objects in which servers and their clients put fields of a request."""
_HARMLESS = frozenset(
    """
    allowed_callers guided_decoding_backend guided_whitespace_pattern logit_bias_exp no_stop_trim
    return_logits stop_reason
    """.split()  # noqa: SIM905
)
"""Names that contain such words, but change only how the answer is made, not what it may be."""


def replacement(name: str) -> str | None:
    """The fields to use instead of an unknown one that would constrain or limit the answer; None
    for any other field."""
    words = [each.lower() for each in _WORDS.findall(name)]
    snake, given = "_".join(words), set(words)
    if snake in _HARMLESS:
        return None
    for fields, names in _BY_NAME.items():
        if snake in names:
            return fields
    for fields, known in _BY_WORD.items():
        if given & known:
            return fields
    if given & _COUNTED and not given & _NOT_OUTPUT:
        if given & {"limit", "max", "maximum"}:
            return "'max_tokens'"
        if given & {"min", "minimum"}:
            return "'min_tokens'"
    return None


def lost_constraint(name: str, value: Any, depth: int = 0) -> tuple[str, str] | None:
    """The path of a field that would constrain or limit the answer, and the fields to use instead.
    That is the unknown field itself, or a field in an object that it holds. None if there is no
    such field."""
    if len(name) > MAX_NAME_CHARS:
        return None
    if isinstance(value, dict) and _snake(name) in _CONTAINERS and depth < MAX_DEPTH:
        for inner, each in islice(value.items(), MAX_INNER):
            found = lost_constraint(inner, each, depth + 1)
            if found is not None:
                return f"{name}.{found[0]}", found[1]
        return None
    fields = None if _asks_for_nothing(value) else replacement(name)
    return None if fields is None else (name, fields)


def _snake(name: str) -> str:
    return "_".join(each.lower() for each in _WORDS.findall(name))


def _asks_for_nothing(value: Any) -> bool:
    """Whether clients switch a field off with this value."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value <= 0
    return not value or value == {"type": "text"} or value == "text"
