"""Grammars of calls in tags: which values they admit, with markers that are tokens and without."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.chat.conversation import Conversation, Message, Tool, ToolChoice, ToolMode
from gateway.chat.formats import glm, invoke_tags
from gateway.chat.markup import TOOL_MARKUPS, ChatMarkup
from gateway.chat.message_events import joined_calls
from gateway.output.output_text import TextDelta
from protocol.errors import InvalidRequest
from protocol.messages import FinishReason
from tests.unit.gateway.chat.families import written
from tests.unit.gateway.chat.test_tag_calls import FAMILIES, OPTIONAL_TEXT
from tests.unit.gateway.chat.test_tool_grammar import TAG_FAMILIES, Vocabulary

SCHEMA: dict[str, Any] = {
    "properties": {
        "text": {"type": "string"},
        "perhaps": OPTIONAL_TEXT,
        "unit": {"enum": ["c", "f", 1]},
        "size": {"anyOf": [{"$ref": "#/$defs/size"}, {"type": "null"}]},
        "count": {"type": "integer", "maximum": 9},
        "either": {"type": ["integer", "string"]},
        "any": {},
        "mixed": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "null"}}]},
    },
    "$defs": {"size": {"type": "string", "enum": ["S", "M"]}},
}


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "tokens"])
def vocabulary(request, tmp_path_factory) -> Vocabulary:
    return Vocabulary(tmp_path_factory.mktemp("vocabulary") / "tokenizer.json", request.param)


def form(family: str, vocabulary: Vocabulary) -> ChatMarkup:
    return ChatMarkup(TOOL_MARKUPS[family], None, vocabulary.ids, vocabulary.ids)


def requires(schema: dict[str, Any]) -> Conversation:
    tools = (Tool("f", parameters=schema),)
    return Conversation((Message("user", "?"),), tools, ToolChoice(ToolMode.REQUIRED))


def test_the_families_are_those_with_tags() -> None:
    assert sorted(TAG_FAMILIES) == sorted(FAMILIES)


ARGUMENTS: list[tuple[dict[str, Any], bool]] = [
    ({"text": "a </b> <x> \n\n 5"}, True),
    ({"text": ""}, True),
    ({"perhaps": "5"}, True),
    ({"perhaps": None}, True),
    ({"unit": "f"}, True),
    ({"unit": 1}, True),
    ({"unit": "k"}, False),
    ({"unit": "cc"}, False),
    ({"size": "M"}, True),
    ({"size": None}, True),
    ({"size": "L"}, False),
    ({"count": 9}, True),
    ({"count": 10}, False),
    ({"either": "so"}, True),
    ({"either": 5}, True),
    ({"any": "so"}, True),
    ({"mixed": [None]}, True),
    ({"mixed": [1]}, False),
    ({"text": "a", "count": 1, "any": "z"}, True),
    ({"other": "a"}, False),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_those_of_the_schema(family, vocabulary):
    asked, markup = requires(SCHEMA), form(family, vocabulary)
    grammar = markup.grammar(asked, "")
    for arguments, is_good in ARGUMENTS:
        text = written(family, [("f", arguments)])
        assert vocabulary.admits(grammar, text) == is_good, text
        if is_good:
            delta = TextDelta(text, [], finish=FinishReason.STOP)
            message = markup.parser(asked, "", "seed").push(delta)
            (call,) = joined_calls(message.events)
            assert json.loads(call.arguments) == arguments


def test_glm_may_write_its_tags_with_new_lines_between_them_or_without(vocabulary):
    grammar = form("glm", vocabulary).grammar(requires(SCHEMA), "")
    text = written("glm", [("f", {"text": "a", "count": 1})] * 2)
    for each in (text, text.replace("\n", "")):
        assert vocabulary.admits(grammar, each)
    assert not vocabulary.admits(grammar, text.replace("\n", "\n\n"))


def test_deepseek_s_tags_say_which_values_are_text(vocabulary):
    grammar = form("deepseek_v32", vocabulary).grammar(requires(SCHEMA), "")
    for arguments in ({"text": "a"}, {"count": 1}, {"unit": "c"}, {"unit": 1}, {"mixed": "so"}):
        text = written("deepseek_v32", [("f", arguments)])
        wrong = text.replace("true", "FALSE").replace("false", "true").replace("FALSE", "false")
        assert vocabulary.admits(grammar, text)
        assert not vocabulary.admits(grammar, wrong), wrong
    for value in ("5", '"5"', "[5]"):
        text = written("deepseek_v32", [("f", {"any": value})])
        assert vocabulary.admits(grammar, text)
        assert vocabulary.admits(grammar, text.replace("true", "false"))


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4", "glm", "minimax_m2"])
def test_markers_that_are_tokens_are_written_as_these(family, vocabulary):
    grammar = form(family, vocabulary).grammar(requires(SCHEMA), "")
    for marker in (*glm.MARKERS, invoke_tags.DSML, invoke_tags.MINIMAX_BEGIN):
        if marker not in TOOL_MARKUPS[family].markers:
            continue
        assert (f"<[{vocabulary.ids.get(marker)}]>" in grammar) == bool(vocabulary.ids)
        assert (marker in grammar) != bool(vocabulary.ids)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        *(("qwen3_coder", each) for each in ("a>b", "a\nb", " a", "")),
        ("glm", "a<b"),
        ("minimax_m2", 'a"b'),
        ("deepseek_v32", 'a"b'),
        ("seed_oss", "a" * 129),
    ],
)
def test_an_argument_that_no_tag_can_hold_is_refused(family, key, vocabulary):
    with pytest.raises(InvalidRequest, match="cannot be written by this model"):
        form(family, vocabulary).grammar(requires({"properties": {key: {}}}), "")
