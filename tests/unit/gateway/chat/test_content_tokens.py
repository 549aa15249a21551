"""Which tokens are content: those whose text is, however reasoning and calls lie around them."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.chat.content_tokens import ContentTokens
from gateway.chat.conversation import Conversation, Message, Tool
from gateway.chat.markup import REASONING_MARKERS, TOOL_MARKUPS, ChatMarkup
from gateway.chat.message_events import ContentText
from gateway.output.output_text import OutputToken, TextDelta
from protocol.messages import FinishReason
from protocol.sampling import TokenLogprobs
from tests.unit.gateway.chat.families import FAMILIES

ASKED = Conversation((Message("user", "?"),), (Tool("add"),))
NO_LOGPROBS = TokenLogprobs(0.0, ())


def told(pieces: list[str], family: str = "hermes") -> tuple[str, list[str]]:
    """The content of a message that comes in these pieces, and the texts of its tokens."""
    markup = ChatMarkup(TOOL_MARKUPS[family], REASONING_MARKERS["think"])
    parser, tokens = markup.parser(ASKED, "", "seed"), ContentTokens()
    content, texts, start = "", [], 0
    for number, piece in enumerate([*pieces, ""]):
        token = OutputToken(number, NO_LOGPROBS, start, start + len(piece))
        finish = FinishReason.STOP if number == len(pieces) else None
        delta = TextDelta(piece, [number], [token] if piece else [], finish)
        start += len(piece)
        tokens.add(delta)
        for event in parser.push(delta).events:
            found = tokens.of(event)
            texts += [pieces[each.token_id] for each in found]
            content += event.text if isinstance(event, ContentText) else ""
    return content, texts


CALL = '<tool_call>{"name": "add", "arguments": {"a": "Well"}}</tool_call>'


@pytest.mark.parametrize(
    ("pieces", "texts"),
    [
        (["Hel", "lo", " you"], ["Hel", "lo", " you"]),
        (["<think>", "Well", "</think>", "\n\n", "Well", "!"], ["Well", "!"]),
        (["Well", "<tool", "_call>", "no"], ["Well", "<tool", "_call>", "no"]),
        (["Well", "\n", CALL, "\n", "Well"], ["Well", "\n", "Well"]),
        (["<think>a</think> b", "c"], ["<think>a</think> b", "c"]),
    ],
)
def test_tokens_of_the_content(pieces: list[str], texts: list[str]) -> None:
    assert told(pieces)[1] == texts


PARTS = ["<think>", "</think>", CALL, "<tool_call>", " ", "\n", "Well", "a", "{", "}", "é"]
PARTS += ["[add(a='Well', b={'a': 1})]", "[TOOL_CALLS]add[ARGS]{}", '{"name": "add"}', "[add("]
PARTS += ['<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>']


@given(st.sampled_from(FAMILIES), st.lists(st.sampled_from(PARTS), max_size=12))
@example("pythonic", ["[add(a='Well', b={'a': 1})]", " ", "Well", "{", "a", "}"])
def test_characters_of_the_content_are_its_tokens(family: str, parts: list[str]) -> None:
    content, texts = told(list("".join(parts)), family)
    assert "".join(texts) == content


@given(st.sampled_from(FAMILIES), st.lists(st.sampled_from(PARTS), max_size=12))
def test_a_token_that_holds_content_is_told_once(family: str, parts: list[str]) -> None:
    content, texts = told(parts, family)
    shown = iter("".join(texts))
    assert all(character in shown for character in content)
