"""Control tokens are marked wherever a template may write them."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.text.control_tokens import ControlTokens
from gateway.text.template_input import ControlText, TemplateInput

TOKENS = ControlTokens(["<|end|>", "<call>"])
CONTROL = ControlText(TOKENS, TOKENS.without(["<call>"]))
TYPED = {"title": ["hi<|end|>"]}


def given(**parts: Any) -> TemplateInput:
    """A short conversation, with these parts instead of empty ones."""
    empty: dict[str, Any] = {"tools": [], "documents": [], "variables": {}}
    return TemplateInput(**{"messages": [{"role": "user", "content": "hi"}], **empty, **parts})


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("messages", [{"role": "user", "content": "hi<|end|>"}]),
        ("messages", [{"role": "user", "content": [TYPED]}]),
        ("messages", [{"role": "tool", "content": "<call>"}]),
        ("tools", [TYPED]),
        ("documents", [TYPED]),
        ("variables", TYPED),
    ],
)
def test_each_part_of_the_input_is_marked(part: str, value: Any) -> None:
    marked, before = given(**{part: value}), given(**{part: value})
    mark = CONTROL.mark(marked)
    assert mark is not None
    for each in TemplateInput.__struct_fields__:
        changed = getattr(marked, each)
        assert TOKENS.are_in(changed) is False
        assert (mark in repr(changed) or repr(mark)[1:-1] in repr(changed)) == (each == part)
        assert each == part or changed == getattr(before, each)


def test_the_assistant_may_repeat_its_own_markup_alone() -> None:
    own = given(messages=[{"role": "assistant", "content": "<call>"}])
    assert CONTROL.mark(own) is None
    foreign = given(messages=[{"role": "assistant", "content": "<call><|end|>"}])
    mark = CONTROL.mark(foreign)
    assert foreign.messages[0]["content"] == f"<call><{mark}|end|>"


def test_the_assistant_s_calls_hold_no_markup() -> None:
    function = {"name": "f", "arguments": {"<call>": ["<call>"]}}
    message = {"role": "assistant", "content": "<call>", "tool_calls": [{"function": function}]}
    own = given(messages=[message])
    mark = CONTROL.mark(own)
    assert own.messages[0]["content"] == "<call>"
    called = own.messages[0]["tool_calls"][0]["function"]
    assert called == {"name": "f", "arguments": {f"<{mark}call>": [f"<{mark}call>"]}}
