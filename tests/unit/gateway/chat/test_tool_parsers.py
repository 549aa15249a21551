"""Tool calls of every family: any split of the text says the same, and nothing is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.chat.call_reader import CallReader
from gateway.chat.conversation import Conversation, Message, Tool, ToolChoice, ToolMode
from gateway.chat.markup import REASONING_MARKERS, TOOL_MARKUPS, ChatMarkup
from gateway.chat.message_events import (
    JoinedCall,
    MessageDelta,
    ToolCallBroken,
    joined_calls,
)
from gateway.chat.tool_parser import MAX_HELD_CHARS
from gateway.output.output_text import TextDelta
from protocol.messages import FinishReason
from tests.unit.gateway.chat.families import FAMILIES, FRAGMENTS

NUMBERS = {"properties": {"a": {"type": "array"}, "x": {"type": "number"}}}
TOOLS = (Tool("get_weather"), Tool("add", parameters=NUMBERS))
ASKED = Conversation((Message("user", "?"),), TOOLS)
PLAIN = Conversation((Message("user", "?"),))

HERMES_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln {}"}}\n</tool_call>'
WEATHER = ("get_weather", {"city": "Köln {}"})
ADD = ("add", {"a": [1, {"b": "}"}]})
ADD_TEXT = '{"a": [1, {"b": "}"}]}'


def parse(
    family: str,
    pieces: list[str],
    conversation: Conversation = ASKED,
    prompt: str = "",
    finish: FinishReason = FinishReason.STOP,
) -> MessageDelta:
    """Everything that the pieces say, as one delta with its neighbours joined."""
    reasoning = REASONING_MARKERS["think"]
    parser = ChatMarkup(TOOL_MARKUPS[family], reasoning).parser(conversation, prompt, "seed")
    deltas = [parser.push(TextDelta(piece, [])) for piece in pieces]
    deltas.append(parser.push(TextDelta("", [], finish=finish)))
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
        ("pythonic", "Well, see [1]: [add(a=1)]", "Well, see [1]:", [("add", {"a": 1})]),
        ("pythonic", "<|python_tag|>[add(a=1)]", "", [("add", {"a": 1})]),
        (
            "llama3",
            'Let me {see}: [{"name": "add", "parameters": {}}, {"name": "add"}]',
            "Let me {see}:",
            [("add", {}), ("add", {})],
        ),
        ("llama3", '{"name": "add"}\n{"name": "add"}', "", [("add", {}), ("add", {})]),
        (
            "xlam",
            f'[{{"name": "add", "arguments": {ADD_TEXT}}}, {{"name": "get_weather"}}]',
            "",
            [ADD, ("get_weather", {})],
        ),
        (
            "nemotron",
            f'<TOOLCALL>[{{"name": "add", "arguments": {ADD_TEXT}}}]</TOOLCALL> Done',
            "Done",
            [ADD],
        ),
        (
            "function_tag",
            f"<function=add>{ADD_TEXT}</function><function=get_weather>{{}}</function> Done",
            "Done",
            [ADD, ("get_weather", {})],
        ),
        (
            "functionary",
            f"all\nWell.\n>>>add\n{ADD_TEXT}\n>>>get_weather\n{{}}",
            "Well.",
            [ADD, ("get_weather", {})],
        ),
        ("functionary", f">>>add\n{ADD_TEXT}", "", [ADD]),
        (
            "qwen3_coder",
            "Well.\n<tool_call>\n<function=add>\n<parameter=a>\n[1, {'b': '}'}]\n</parameter>\n"
            "<parameter=x>\n-1.5\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
            "<function=get_weather>\n<parameter=city>\nKöln {}\n</parameter>\n</function>\n"
            "</tool_call>",
            "Well.",
            [("add", {"a": [1, {"b": "}"}], "x": -1.5}), WEATHER],
        ),
        (
            "qwen3_coder",
            "<function=get_weather>\n<parameter=city>\n\n<a>\nb\n\n</parameter>\n</function>",
            "",
            [("get_weather", {"city": "\n<a>\nb\n"})],
        ),
        ("qwen3_coder", "<tool_call><function=add></function></tool_call>", "", [("add", {})]),
        (
            "deepseek_v3",
            "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
            '```json\n{"city": "Köln {}"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
            f"<｜tool▁sep｜>add\n```json\n{ADD_TEXT}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "Well.",
            [WEATHER, ADD],
        ),
        (
            "deepseek_v31",
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{ADD_TEXT}<｜tool▁call▁end｜>",
            "",
            [ADD],
        ),
        (
            "kimi_k2",
            "Well.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
            '<|tool_call_argument_begin|>{"city": "Köln {}"}<|tool_call_end|><|tool_call_begin|>'
            f"functions.add:1<|tool_call_argument_begin|>{ADD_TEXT}<|tool_call_end|>"
            "<|tool_calls_section_end|> Done.",
            "Well. Done.",
            [WEATHER, ADD],
        ),
        (
            "seed_oss",
            "Well.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>\n<a>\n</parameter>\n"
            "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=add>\n"
            "<parameter=x>-1.5</parameter>\n</function>\n</seed:tool_call>",
            "Well.",
            [("get_weather", {"city": "\n<a>\n"}), ("add", {"x": -1.5})],
        ),
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
        ("deepseek_v3", "<｜tool▁calls▁begin｜>what? {}<｜tool▁calls▁end｜>"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜> a <｜tool▁"),
        ("kimi_k2", "<|tool_call_begin|>functions.add:0{}<|tool_call_end|>"),
        ("kimi_k2", "<|tool_calls_section_begin|>" + "x" * 700),
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
        ("pythonic", "Well: [other(a=1)]"),
        ("xlam", '[{"name": "Bob", "arguments": {}}]'),
        ("xlam", 'See [1] and {"a": 2}'),
        ("nemotron", "<TOOLCALL>[1]</TOOLCALL>"),
        ("function_tag", "<function=add>(1)</function>"),
        ("functionary", "Hello"),
        ("functionary", ">>> print(1)"),
        ("qwen3_coder", "<tool_call>\n{}</tool_call> <function= f(x)"),
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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_breaks_off_keeps_what_it_said(family):
    text = {
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
        '```json\n{"a": "x',
        "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": "x',
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
        '<|tool_call_argument_begin|>{"a": "x',
        "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="a" string="true">x',
        "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="a" string="true">x',
        "glm": "<tool_call>get_weather\n<arg_key>a</arg_key>\n<arg_value>x",
        "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="a">x',
        "hermes": '<tool_call>{"name": "add", "arguments": {"a": "x',
        "llama3": '{"name": "add", "parameters": {"a": "x',
        "mistral": '[TOOL_CALLS]add[ARGS]{"a": "x',
        "pythonic": "[add(a='x",
        "xlam": '[{"name": "add", "arguments": {"a": "x',
        "nemotron": '<TOOLCALL>[{"name": "add", "arguments": {"a": "x',
        "function_tag": '<function=add>{"a": "x',
        "functionary": 'add\n{"a": "x',
        "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=a>\nx",
        "seed_oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=a>x",
    }[family]
    message = parse(family, list(text), finish=FinishReason.LENGTH)
    [call] = joined_calls(message.events)
    assert call.arguments.replace(": ", ":") == '{"a":"x'
    assert message.finish == "length", "no client takes it for a whole call"
    assert message.events[-1] == ToolCallBroken(0)
    message = parse(family, list(text))
    assert (message.content, message.finish, message.events[1:]) == (text, "stop", [])


def test_arguments_of_long_and_required_calls_stream_while_they_are_written():
    required = Conversation(ASKED.messages, TOOLS, ToolChoice(ToolMode.REQUIRED))
    for conversation, start in ((ASKED, "x" * MAX_HELD_CHARS), (required, "")):
        parser = ChatMarkup(TOOL_MARKUPS["hermes"]).parser(conversation, "", "seed")
        text = f'<tool_call>{{"name": "add", "arguments": {{"{start}'
        head = parser.push(TextDelta(text, []))
        more = parser.push(TextDelta('": "1', []))
        assert [call.arguments for call in joined_calls(head.events)] == [f'{{"{start}']
        assert [call.arguments for call in joined_calls(more.events)] == ['": "1']


def test_a_short_call_is_held_back_until_it_is_whole():
    parser = ChatMarkup(TOOL_MARKUPS["hermes"]).parser(ASKED, "", "seed")
    assert not parser.push(TextDelta(HERMES_CALL.removesuffix(">"), [])).events
    assert len(joined_calls(parser.push(TextDelta(">", [])).events)) == 1


@pytest.mark.parametrize("rest", [', "x": }', " oops}", ', "x": ' + "[" * 300])
def test_an_object_that_goes_wrong_behind_its_arguments_is_a_call(rest):
    reader = CallReader(0, "id")
    reader.push('{"name": "f", "arguments": {"a": 1}' + rest)
    assert (reader.begun, reader.done, reader.broken) == (True, True, False)
    (call,) = joined_calls(reader.events)
    assert (call.begin.name, call.arguments) == ("f", '{"a": 1}')


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


def test_kimi_s_calls_keep_their_ids_if_these_are_numbered_and_new():
    """A chat template of Kimi writes a past call by its id."""
    names = ("functions.add:3", "functions.add:3", "add", "get_weather:4")
    calls = [
        f"<|tool_call_begin|>{each}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        for each in names
    ]
    text = f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"
    for pieces in ([text], list(text)):
        found = [call.begin for call in joined_calls(parse("kimi_k2", pieces).events)]
        assert [each.name for each in found] == ["add", "add", "add", "get_weather"]
        ids = [each.id for each in found]
        assert (ids[0], ids[3]) == ("functions.add:3", "get_weather:4")
        assert all(each.startswith("call_") for each in ids[1:3])
        assert len(set(ids)) == 4


def test_ids_are_the_same_in_every_attempt_and_differ_between_calls():
    first, second = (joined_calls(parse("mistral", [t]).events) for t in ("[TOOL_CALLS]add{}",) * 2)
    assert first == second
    ids = TOOL_MARKUPS["mistral"].call_ids("seed")
    assert len({ids(0), ids(1), TOOL_MARKUPS["mistral"].call_ids("other")(0)}) == 3
    assert all(len(ids(index)) == 9 and ids(index).isalnum() for index in range(50))


@given(
    family=st.sampled_from(FAMILIES),
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
    family=st.sampled_from(FAMILIES),
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=24),
)
def test_text_without_calls_and_reasoning_is_unchanged(family, fragments):
    text = "".join(fragments)
    message = parse(family, list(text))
    if not joined_calls(message.events) and "think" not in text:
        assert message.content == text
