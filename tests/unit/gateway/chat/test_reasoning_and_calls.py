"""Reasoning before content and calls, and calls within reasoning, in every family."""

from __future__ import annotations

import pytest

from gateway.chat.conversation import Conversation, Message
from gateway.chat.message_events import ContentText, ReasoningText
from tests.unit.gateway.chat.test_tool_parsers import HERMES_CALL, PLAIN, WEATHER, calls_of, parse


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
        ("<think>\nHm</think>Yes", "...<think>\n", "Hm", "Yes"),
        ("<think><think>Hm</think></think>\n</think> Yes", "", "Hm", "Yes"),
        ("</think>\n\nYes", "...<think></think>", "", "Yes"),
        ("</thin", "", "", "</thin"),
        ("Yes, </think> is a tag", "", "", "Yes, </think> is a tag"),
        ("<think>Hm</think> </thi", "", "Hm", "</thi"),
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


@pytest.mark.parametrize(
    ("prefill", "text", "reasoning", "content"),
    [
        ("<think>\nSo", " far</think>Yes", "far", "Yes"),
        ("<think>So</think>Well", ", yes", "", ", yes"),
        ("Well", ", yes", "", ", yes"),
    ],
)
def test_a_message_that_goes_on_may_have_opened_its_reasoning(prefill, text, reasoning, content):
    messages = (Message("user", "?"), Message("assistant", prefill))
    conversation = Conversation(messages, continue_final_message=True)
    for pieces in ([text], list(text)):
        message = parse("hermes", pieces, conversation, f"user: ? assistant: {prefill}")
        assert (message.reasoning, message.content) == (reasoning, content)


CALLS_BY_FAMILY = {
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Köln {}"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"city": "Köln {}"}<|tool_call_end|><|tool_calls_section_end|>',
    "hermes": HERMES_CALL,
    "llama3": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Köln {}"}}',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Köln {}"}',
    "nemotron": '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Köln {}"}}]</TOOLCALL>',
    "function_tag": '<function=get_weather>{"city": "Köln {}"}</function>',
    "pythonic": "<|python_start|>[get_weather(city='Köln {}')]<|python_end|>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Köln {}</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "glm": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Köln {}</arg_value>"
    "</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n'
    '<parameter name="city">Köln {}</parameter>\n</invoke>\n</minimax:tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln {}\n</parameter>\n"
    "</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Köln {}</parameter>\n"
    "</function>\n</seed:tool_call>",
}


@pytest.mark.parametrize(("family", "call"), sorted(CALLS_BY_FAMILY.items()))
def test_a_call_in_reasoning_that_is_never_closed_is_a_call(family, call):
    for text, prompt in ((f"<think>I ask.\n{call}", ""), (f"I ask.\n{call}", "<think>\n")):
        for pieces in ([text], list(text)):
            message = parse(family, pieces, prompt=prompt)
            assert (message.reasoning, message.content) == ("I ask.", "")
            assert (calls_of(message), message.finish) == ([WEATHER], "tool_calls")


@pytest.mark.parametrize(("family", "call"), sorted(CALLS_BY_FAMILY.items()))
def test_a_call_in_reasoning_that_is_closed_later_is_reasoning(family, call):
    text = f"<think>I could ask {call} or not.</think>No."
    for pieces in ([text], list(text)):
        message = parse(family, pieces)
        assert message.reasoning == f"I could ask {call} or not."
        assert (message.content, message.finish) == ("No.", "stop")
    text = "<think>I know <tool_call>, [TOOL_CALLS] and <function="
    assert parse(family, list(text)).reasoning == text.removeprefix("<think>")
