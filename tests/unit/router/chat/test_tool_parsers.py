"""Tool calls of every family: any split of the text says the same, and nothing is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.messages import FinishReason
from router.chat.conversation import Conversation, Message, Tool, ToolChoice, ToolMode
from router.chat.events import ContentText, JoinedCall, MessageDelta, ReasoningText, joined_calls
from router.chat.markup import REASONING_MARKERS, TOOL_MARKUPS, ChatMarkup
from router.requests.output_text import TextDelta

TOOLS = (Tool("get_weather"), Tool("add"))
ASKED = Conversation((Message("user", "?"),), TOOLS)
PLAIN = Conversation((Message("user", "?"),))

HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln {}"}}\n</tool_call>'
WEATHER = ("get_weather", {"city": "Köln {}"})
ADD = ("add", {"a": [1, {"b": "}"}]})
ADD_TEXT = '{"a": [1, {"b": "}"}]}'


def parse(
    family: str, pieces: list[str], conversation: Conversation = ASKED, prompt: str = ""
) -> MessageDelta:
    """Everything that the pieces say, as one delta with its neighbours joined."""
    reasoning = REASONING_MARKERS["think"]
    parser = ChatMarkup(TOOL_MARKUPS[family], reasoning).parser(conversation, prompt, "seed")
    deltas = [parser.push(TextDelta(piece, [])) for piece in pieces]
    deltas.append(parser.push(TextDelta("", [], finish=FinishReason.STOP)))
    return MessageDelta([event for delta in deltas for event in delta.events], deltas[-1].finish)


def said(message: MessageDelta) -> tuple[str, str, list[JoinedCall], str | None]:
    return message.content, message.reasoning, joined_calls(message.events), message.finish


def calls_of(message: MessageDelta) -> list[tuple[str, object]]:
    calls = joined_calls(message.events)
    assert [call.index for call in calls] == list(range(len(calls)))
    assert all(call.begin for call in calls)
    return [(call.begin.name, json.loads(call.arguments)) for call in calls if call.begin]


@pytest.mark.parametrize(
    ("family", "text", "content", "calls"),
    [
        ("hermes", HERMES_CALL, "", [WEATHER]),
        ("hermes", f"I look.\n\n{HERMES_CALL}\n", "I look.", [WEATHER]),
        (
            "hermes",
            f'{HERMES_CALL}\n<tool_call>{{"arguments": {ADD_TEXT}, "name": "add"}}</tool_call>',
            "",
            [WEATHER, ADD],
        ),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", {})]),
        ("hermes", '<tool_call>{"name": "add", "arguments": null}', "", [("add", {})]),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
            "",
            [("add", {"a": 1})],
        ),
        ("hermes", f"{HERMES_CALL} Done. ", "Done.", [WEATHER]),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}', "", [("unknown", {})]),
        ("llama3", '{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
        (
            "llama3",
            '<|python_tag|>{"name": "add", "parameters": {}}; {"name": "get_weather"}',
            "",
            [("add", {}), ("get_weather", {})],
        ),
        (
            "llama3",
            'Let me. <|python_tag|>{"type": "function", "name": "add", "parameters": {}}',
            "Let me.",
            [("add", {})],
        ),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "get_weather"}]',
            "",
            [("add", {"a": 1}), ("get_weather", {})],
        ),
        (
            "mistral",
            f"Well [TOOL_CALLS]add[ARGS]{ADD_TEXT}[TOOL_CALLS]get_weather[CALL_ID]a1[ARGS]{{}}",
            "Well",
            [ADD, ("get_weather", {})],
        ),
        ("mistral", "[TOOL_CALLS]add{}", "", [("add", {})]),
        ("pythonic", "[get_weather(city='Köln {}')]", "", [WEATHER]),
        ("pythonic", '[add(a=[1, {"b": "}"},]), get_weather()]', "", [ADD, ("get_weather", {})]),
        (
            "pythonic",
            " <|python_start|>[ add (x = -1.5 , y=(True, None), )]<|python_end|> Done.",
            "Done.",
            [("add", {"x": -1.5, "y": [True, None]})],
        ),
        ("pythonic", "[add(a=1), other(b=2)]", ", other(b=2)]", [("add", {"a": 1})]),
    ],
)
def test_a_call_is_read(family, text, content, calls):
    for pieces in ([text], list(text)):
        message = parse(family, pieces)
        assert message.content == content
        assert calls_of(message) == calls
        assert message.finish == "tool_calls"


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "no call, a < b, <tool"),
        ("hermes", "<tool_call>not json</tool_call>"),
        ("hermes", "a\n<tool_call>{} b </tool_call>  "),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add"'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": ['),
        ("hermes", " <tool_call>\n "),
        ("llama3", '{"answer": 42}'),
        ("llama3", '{"name": "Bob", "parameters": {}}'),
        ("llama3", '<|python_tag|>print("x")'),
        ("llama3", " a {"),
        ("mistral", "[TOOL_CALLS] what?"),
        ("mistral", "[TOOL_CALLS]add[ARGS] 12"),
        ("mistral", f"[TOOL_CALLS]add[ARGS]{' ' * 65}{{}}"),
        ("mistral", '[TOOL_CALLS] [{"nam": 1}]'),
        ("mistral", "[TOOL_CALLS] [  "),
        ("mistral", "a [TOOL_CALL"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[add(1)]"),
        ("pythonic", "[other(a=1)]"),
        ("pythonic", "Well: [add(a=1)]"),
        ("pythonic", " [add(a"),
        ("pythonic", "<|python_start|>print(1)"),
        ("pythonic", "<|python_st"),
    ],
)
def test_what_is_no_call_is_content_unchanged(family, text):
    for pieces in ([text], list(text)):
        message = parse(family, pieces)
        assert message.content == text
        assert message.finish == "stop"


@pytest.mark.parametrize("family", sorted(TOOL_MARKUPS))
def test_a_call_that_breaks_off_keeps_what_it_said(family):
    text = {
        "hermes": '<tool_call>{"name": "add", "arguments": {"a": "x',
        "llama3": '{"name": "add", "parameters": {"a": "x',
        "mistral": '[TOOL_CALLS]add[ARGS]{"a": "x',
        "pythonic": "[add(a='x",
    }[family]
    [call] = joined_calls(parse(family, list(text)).events)
    assert call.arguments == '{"a": "x'


def test_arguments_stream_while_they_are_written():
    parser = ChatMarkup(TOOL_MARKUPS["hermes"]).parser(ASKED, "", "seed")
    head = parser.push(TextDelta('<tool_call>{"name": "add", "arguments": {"a"', []))
    more = parser.push(TextDelta(": 1", []))
    assert [call.arguments for call in joined_calls(head.events)] == ['{"a"']
    assert [call.arguments for call in joined_calls(more.events)] == [": 1"]


def test_without_tools_or_with_none_chosen_nothing_is_a_call():
    for conversation in (
        PLAIN,
        Conversation(ASKED.messages, TOOLS, ToolChoice(ToolMode.NONE)),
    ):
        message = parse("hermes", [HERMES_CALL], conversation)
        assert (message.content, message.finish) == (HERMES_CALL, "stop")


def test_without_parallel_calls_the_first_one_counts():
    conversation = Conversation(ASKED.messages, TOOLS, parallel_tool_calls=False)
    message = parse("hermes", [HERMES_CALL * 3], conversation)
    assert calls_of(message) == [WEATHER]


def test_ids_are_the_same_in_every_attempt_and_differ_between_calls():
    first, second = (joined_calls(parse("mistral", [t]).events) for t in ("[TOOL_CALLS]add{}",) * 2)
    assert first == second
    ids = TOOL_MARKUPS["mistral"].call_ids("seed")
    assert len({ids(0), ids(1), TOOL_MARKUPS["mistral"].call_ids("other")(0)}) == 3
    assert all(len(ids(index)) == 9 and ids(index).isalnum() for index in range(50))


@pytest.mark.parametrize(
    ("text", "prompt", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.\n", "", "Hm.", "Yes.\n"),
        ("Hm </think> Yes.", "...<think>\n", "Hm", "Yes."),
        ("<think>never", "", "never", ""),
        ("a <think>b</think>", "", "", "a <think>b</think>"),
        (" <thin", "", "", " <thin"),
        ("Hm </thin", "<think>", "Hm </thin", ""),
        ("<think></think>Yes", "", "", "Yes"),
    ],
)
def test_reasoning_is_apart_from_content(text, prompt, reasoning, content):
    for pieces in ([text], list(text)):
        message = parse("hermes", pieces, PLAIN, prompt)
        assert (message.reasoning, message.content) == (reasoning, content)


def test_reasoning_then_a_call():
    message = parse("hermes", [f"<think>\nI need it.\n</think>\n\n{HERMES_CALL}"])
    assert message.reasoning == "I need it."
    assert (message.content, calls_of(message)) == ("", [WEATHER])
    assert isinstance(message.events[0], ReasoningText)
    assert not any(isinstance(event, ContentText) for event in message.events)


FRAGMENTS = [
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


@given(
    family=st.sampled_from(sorted(TOOL_MARKUPS)),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=24),
    data=st.data(),
)
@example("hermes", ["<tool_call>", '{"name": "add", "arguments": {', "}", "x1"], None)
@example("mistral", ["[TOOL_CALLS]", "add", "[ARGS]", "{", "]", "[TOOL_CALLS]", "add", "{}"], None)
def test_any_split_says_the_same_as_the_whole(family, fragments, data):
    text = "".join(fragments)
    whole = said(parse(family, [text]))
    if data is not None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert said(parse(family, pieces)) == whole
    assert said(parse(family, list(text))) == whole


@given(
    family=st.sampled_from(sorted(TOOL_MARKUPS)),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=24),
)
def test_text_without_calls_and_reasoning_is_unchanged(family, fragments):
    text = "".join(fragments)
    message = parse(family, list(text))
    if not joined_calls(message.events) and "think" not in text:
        assert message.content == text
