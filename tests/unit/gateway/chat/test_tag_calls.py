"""Calls in tags: which values are text, values with markup in them, and ends that models forget."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.chat.conversation import Conversation, Message, Tool, ToolChoice, ToolMode
from gateway.chat.formats.tag_values import choices_of_arguments, kinds_of_arguments
from gateway.chat.markup import REASONING_MARKERS, TOOL_MARKUPS, ChatMarkup
from gateway.chat.message_events import MessageDelta, ToolCallArguments, joined_calls
from gateway.output.output_text import TextDelta
from protocol.messages import FinishReason
from tests.effort import times
from tests.unit.gateway.chat.families import written

FAMILIES = ("deepseek_v32", "deepseek_v4", "glm", "minimax_m2", "qwen3_coder", "seed_oss")
OPTIONAL_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "perhaps": OPTIONAL_TEXT,
    "listed": {"type": ["string", "null"]},
    "unit": {"enum": ["1", "2"]},
    "either": {"type": ["integer", "string"]},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "flag": {"type": "boolean"},
    "more": {"type": "object"},
    "items": {"$ref": "#/$defs/items"},
    "mixed": {"anyOf": [{"type": "string"}, {"type": "array"}]},
}
SCHEMA = {"properties": PROPERTIES, "$defs": {"items": {"type": "array"}}}
TOOLS = (Tool("f", parameters=SCHEMA), Tool("get_time"))
ASKED = Conversation((Message("user", "?"),), TOOLS)


def parse(family: str, *pieces: str, asked: Conversation = ASKED, prompt: str = "") -> MessageDelta:
    reasoning = REASONING_MARKERS["think"]
    parser = ChatMarkup(TOOL_MARKUPS[family], reasoning).parser(asked, prompt, "seed")
    deltas = [parser.push(TextDelta(each, [])) for each in pieces]
    deltas.append(parser.push(TextDelta("", [], finish=FinishReason.STOP)))
    return MessageDelta([each for delta in deltas for each in delta.events], deltas[-1].finish)


def calls_of(message: MessageDelta) -> list[tuple[str, dict[str, Any]]]:
    return [
        (call.begin.name, json.loads(call.arguments))
        for call in joined_calls(message.events)
        if call.begin
    ]


def tag_written(family: str, key: str, value: str) -> str:
    """A call whose argument has this text as its value."""
    text = written(family, [("f", {key: "VALUE"})])
    return text.replace("VALUE", value).replace(' string="true"', "")


VALUES: list[tuple[str, str, object]] = [
    ("text", "5", "5"),
    ("text", "123_456", "123_456"),
    ("text", "null", "null"),
    ("text", '{"a": 1}', '{"a": 1}'),
    ("text", ' "a" ', ' "a" '),
    ("unknown", "007", "007"),
    ("perhaps", "5", "5"),
    ("perhaps", "null", None),
    ("perhaps", "None", None),
    ("perhaps", "[1, 2]", "[1, 2]"),
    ("perhaps", '"a"', '"a"'),
    ("perhaps", "x" * 200, "x" * 200),
    ("perhaps", "  indented", "  indented"),
    ("listed", "1.50", "1.50"),
    ("listed", "null", None),
    ("unit", "2", "2"),
    ("either", "5", 5),
    ("either", "5 km", "5 km"),
    ("either", "5.5", "5.5"),
    ("either", "1" * 70, "1" * 70),
    ("count", "5", 5),
    ("share", "1e3", 1000.0),
    ("share", "-0.5", -0.5),
    ("flag", "false", False),
    ("flag", "True", True),
    ("more", '{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
    ("items", "['x', 2]", ["x", 2]),
    ("mixed", "[1]", [1]),
    ("mixed", "so it is", "so it is"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_schema_says_what_a_value_is(family: str) -> None:
    for key, value, meant in VALUES:
        text = tag_written(family, key, value)
        for pieces in ((text,), tuple(text)):
            assert calls_of(parse(family, *pieces)) == [("f", {key: meant})]


@pytest.mark.parametrize(
    ("key", "is_string", "value", "meant"),
    [
        ("unknown", "false", "5", 5),
        ("unknown", "true", "5", "5"),
        ("text", "false", "5", "5"),
        ("count", "true", "5", 5),
        ("either", "true", "5", "5"),
        ("either", "false", "5", 5),
        ("either", "false", '"a"', "a"),
        ("mixed", "true", "[1]", "[1]"),
        ("unknown", "false", "no JSON", "no JSON"),
    ],
)
def test_where_the_schema_leaves_a_choice_deepseek_s_tag_decides(
    key: str, is_string: str, value: str, meant: object
) -> None:
    text = tag_written("deepseek_v32", key, value)
    text = text.replace(f'name="{key}"', f'name="{key}" string="{is_string}"')
    assert calls_of(parse("deepseek_v32", text)) == [("f", {key: meant})]


MARKUP = [
    *("<", "</", ">", "<b>", "</b>\n", "<tool_call>", "</tool_call>", "\n</tool_call>\nx", "\n"),
    *("<think>", "</think>", "<function=f>", "\n</function>\nx", "<invoke>", "\n</invoke> x", "`"),
    *("</minimax:tool_call>", "<arg_key>", "```\n", "{", '"', "\\", "é", " x "),
]


@settings(max_examples=times(30, 1000))
@given(
    family=st.sampled_from(FAMILIES),
    parts=st.lists(st.sampled_from(MARKUP), max_size=8),
    data=st.data(),
)
def test_text_with_markup_is_an_argument_unchanged(
    family: str, parts: list[str], data: st.DataObject
) -> None:
    value = f"a{''.join(parts)}z"
    text = written(family, [("f", {"text": value, "count": 1}), ("get_time", {})])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    calls = [("f", {"text": value, "count": 1}), ("get_time", {})]
    message = parse(family, *pieces)
    assert (calls_of(message), message.content) == (calls, "")


END_OF_VALUE = {
    "deepseek_v32": "</｜DSML｜parameter>",
    "deepseek_v4": "</｜DSML｜parameter>",
    "glm": "</arg_value>",
    "minimax_m2": "</parameter>",
    "qwen3_coder": "</parameter>\n",
    "seed_oss": "</parameter>",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_only_begins_like_the_next_tag_belongs_to_the_value(family: str) -> None:
    text = written(family, [("f", {"text": "a"}), ("get_time", {})])
    value_end = END_OF_VALUE[family].strip()
    argument = text[text.index("\n") : text.index("text")].replace("<function=f>", "")
    argument = argument[argument.rindex("\n") :]
    call_end = "</tool_call>" if family == "glm" else f"</{text.split('</')[2].split('>')[0]}>"
    for value in (f"a{argument}", f"a{argument} b", f"a\n{call_end} b", f"a\n{call_end}{' ' * 70}"):
        whole = text.replace(f"a\n{value_end}", f"{value}\n{value_end}", 1)
        whole = whole.replace(f">a{value_end}", f">{value}{value_end}", 1)
        assert value in whole
        for pieces in ((whole,), tuple(whole)):
            calls = calls_of(parse(family, *pieces))
            assert calls == [("f", {"text": value}), ("get_time", {})], whole


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_without_its_end_ends_at_the_next_tag(family: str) -> None:
    calls = [("f", {"text": "Köln", "count": 2})]
    text = written(family, calls).replace(END_OF_VALUE[family], "")
    for whole in (text, f"{text}\n{written(family, calls)}"):
        expected = calls * (2 if len(whole) > len(text) else 1)
        for pieces in ((whole,), tuple(whole)):
            assert calls_of(parse(family, *pieces)) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_tags_may_be_missing(family: str) -> None:
    calls = [("f", {"text": "Köln"}), ("get_time", {})]
    text = written(family, calls)
    assert text.endswith(">")
    if family != "glm":  # whose outer tag is the call's end
        assert calls_of(parse(family, text[: text.rindex("</")])) == calls
    message = parse(family, text[: text.rindex(">")])
    assert (calls_of(message)[0], message.finish) == (calls[0], "tool_calls")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>get_time</tool_call>",
        "<tool_call>get_time\n</tool_call>",
        "<think>So.</think><tool_call>get_time</tool_call>",
        "\n<think>So.</think>\n<tool_call>get_time\n</tool_call>",
        "<think>So.\n<tool_call>get_time</tool_call>",
    ],
)
def test_glm_calls_a_function_without_arguments(text: str) -> None:
    for pieces in ((text,), tuple(text)):
        message = parse("glm", *pieces)
        assert (calls_of(message), message.content) == ([("get_time", {})], "")
        assert message.finish == "tool_calls"
        assert message.reasoning in ("", "So.")


def test_glm_may_write_blanks_between_its_tags() -> None:
    text = (
        "Let me see: <tool_call>f <arg_key>text</arg_key> <arg_value>backend</arg_value> "
        "</tool_call>"
    )
    for pieces in ((text,), tuple(text)):
        message = parse("glm", *pieces)
        assert (message.content, calls_of(message)) == ("Let me see:", [("f", {"text": "backend"})])


def test_glm_may_forget_a_tag_around_a_value() -> None:
    text = written("glm", [("f", {"text": "<b> Köln", "count": 2})]).replace("\n", "")
    for tag in ("<arg_value>", "</arg_value>"):
        whole = f"{text.replace(tag, '')}{text}"
        for pieces in ((whole,), tuple(whole)):
            message = parse("glm", *pieces)
            assert calls_of(message) == [("f", {"text": "<b> Köln", "count": 2})] * 2
            assert message.content == ""


def test_calls_of_another_family_in_a_text_of_glm_are_text() -> None:
    calls = [("f", {"text": 'a</tool_call>\n<tool_call>\n{"name": "x"}\n</tool_call> b'})]
    text = written("glm", calls)
    for pieces in ((text,), tuple(text)):
        message = parse("glm", *pieces)
        assert (calls_of(message), message.content) == (calls, "")


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4"])
def test_deepseek_may_write_the_section_of_its_other_version(family: str) -> None:
    calls = [("f", {"text": "a", "count": 2}), ("get_time", {})]
    for other in ("deepseek_v32", "deepseek_v4"):
        text = f"So. {written(other, calls)}"
        for pieces in ((text,), tuple(text)):
            message = parse(family, *pieces)
            assert (message.content, calls_of(message)) == ("So.", calls)


@pytest.mark.parametrize("mark", ['"', "'", ""])
def test_minimax_may_write_names_in_other_quotation_marks(mark: str) -> None:
    text = written("minimax_m2", [("f", {"text": "a", "count": 2})]).replace('"', mark)
    for pieces in ((text,), tuple(text)):
        assert calls_of(parse("minimax_m2", *pieces)) == [("f", {"text": "a", "count": 2})]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("key", ["text", "perhaps"])
def test_a_long_text_streams_while_it_is_written(family: str, key: str) -> None:
    required = Conversation(ASKED.messages, TOOLS, ToolChoice(ToolMode.REQUIRED))
    text = written(family, [("f", {key: "word " * 40})]).replace(' string="true"', "")
    parser = ChatMarkup(TOOL_MARKUPS[family]).parser(required, "", "seed")
    told = [
        event.text
        for piece in text
        for event in parser.push(TextDelta(piece, [])).events
        if isinstance(event, ToolCallArguments)
    ]
    assert len(told) > 100
    assert json.loads("".join(told)) == {key: "word " * 40}


DEFINITIONS: dict[str, Any] = {
    "name": {"type": "string"},
    "unit": {"enum": ["c", None]},
    "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "null"}]},
    "twice": {"anyOf": [{"$ref": "#/$defs/name"}, {"$ref": "#/$defs/name"}]},
}


@pytest.mark.parametrize(
    ("wanted", "kinds"),
    [
        (None, None),
        (True, None),
        ({}, None),
        ({"anyOf": [{"type": "string"}, {}]}, None),
        ({"type": "number"}, {"number", "integer"}),
        ({"const": 1.5}, {"number", "integer"}),
        ({"enum": [1, "a", True, None, [], {}]},
         {"integer", "string", "boolean", "null", "array", "object"}),
        ({"enum": [10**400]}, {"integer"}),
        ({"$ref": "#/$defs/name"}, {"string"}),
        ({"$ref": "#/$defs/twice"}, {"string"}),
        ({"$ref": "#/$defs/loop"}, {"null"}),
        ({"$ref": "#/$defs/none"}, None),
        ({"allOf": [{"$ref": "#/$defs/name"}, {"minLength": 2}]}, {"string"}),
        ({"type": ["string", "null"], "enum": ["a"]}, {"string"}),
    ],
)  # fmt: skip
def test_kinds_are_those_that_a_schema_allows(wanted: object, kinds: set[str] | None) -> None:
    schema = {"properties": {"a": wanted}, "$defs": DEFINITIONS}
    assert kinds_of_arguments(schema) == {"a": kinds}


@pytest.mark.parametrize(
    ("wanted", "choices"),
    [
        ({"type": "string"}, None),
        ({"enum": ["a", 1]}, ["a", 1]),
        ({"anyOf": [{"const": "a"}, {"$ref": "#/$defs/unit"}, {"type": "null"}]},
         ["a", "c", None, None]),
        ({"anyOf": [{"const": "a"}, {"type": "string"}]}, None),
        ({"$ref": "#/$defs/loop"}, None),
        ({"allOf": [{"$ref": "#/$defs/unit"}], "default": "c"}, ["c", None]),
        ({"allOf": [{"enum": ["a"]}, {"minLength": 2}]}, None),
        (True, None),
    ],
)  # fmt: skip
def test_choices_are_listed_values(wanted: object, choices: list[object] | None) -> None:
    schema = {"properties": {"a": wanted}, "$defs": DEFINITIONS}
    assert choices_of_arguments(schema) == {"a": choices}


class Noted(dict[str, Any]):
    """A schema that notes how often it is read for a type."""

    num_reads = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.num_reads += key == "type"
        return super().get(key, default)


def test_definitions_are_read_once_however_many_arguments_refer_to_them() -> None:
    """Each definition has eight references to the next."""
    last = Noted({"type": "null"})
    branches: dict[str, Any] = {
        f"d{place}": {"anyOf": [{"$ref": f"#/$defs/d{place + 1}"}] * 8} for place in range(3)
    }
    argument = {"anyOf": [{"$ref": "#/$defs/d0"}, {"type": "string"}]}
    keys = [f"a{place}" for place in range(50)]
    schema = {"properties": dict.fromkeys(keys, argument), "$defs": {**branches, "d3": last}}
    assert kinds_of_arguments(schema) == dict.fromkeys(keys, frozenset(("null", "string")))
    assert last.num_reads == 1
    assert choices_of_arguments(schema) == dict.fromkeys(keys)
    assert last.num_reads == 2
