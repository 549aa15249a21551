"""Wherever the token limit cuts an answer off, it says the beginning of what the whole says, and
its markup stays markup."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.chat.conversation import Conversation, ToolChoice, ToolMode
from gateway.chat.markup import REASONING_MARKERS, TOOL_MARKUPS, ChatMarkup
from gateway.chat.message_events import MessageDelta, ToolCallBroken, joined_calls
from gateway.output.output_text import TextDelta
from protocol.messages import FinishReason
from tests.effort import times
from tests.unit.gateway.chat.families import ASKED, FAMILIES, TOOLS, Call, written

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def parse(
    family: str, text: str, finish: FinishReason, asked: Conversation = ASKED
) -> MessageDelta:
    parser = ChatMarkup(TOOL_MARKUPS[family], REASONING_MARKERS["think"]).parser(asked, "", "seed")
    return parser.push(TextDelta(text, [], finish=finish))


def calls_of(message: MessageDelta) -> list[Call]:
    return [
        (call.begin.name, json.loads(call.arguments))
        for call in joined_calls(message.events)
        if call.begin
    ]


words = st.text(st.sampled_from("abé {}[]\"'\\\n:,-1"), max_size=12)
values = st.recursive(
    st.one_of(words, st.integers(-99, 99), st.booleans(), st.none()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
containers = st.lists(values, max_size=3) | st.dictionaries(words, values, max_size=3)
arguments = st.fixed_dictionaries(
    {}, optional={"city": words, "days": st.integers(-99, 99), "more": containers}
)
calls = st.lists(
    st.tuples(st.sampled_from([tool.name for tool in TOOLS]), arguments), min_size=1, max_size=3
)
contents = st.sampled_from(["", "Well.", "Let me see:", "I ask, then\n\nI answer", "1 < 2", "é"])


@settings(max_examples=times(15, 400))
@given(
    family=st.sampled_from(FAMILIES),
    content=contents,
    calls=calls,
    thoughts=st.sampled_from(["", "<think>\nSo.\n</think>\n\n"]),
)
def test_no_cut_leaks_markup(family: str, content: str, calls: list[Call], thoughts: str) -> None:
    text = thoughts + written(family, calls, content)
    whole = parse(family, text, STOP)
    assert (whole.content, calls_of(whole), whole.finish) == (content, calls, "tool_calls")
    told = joined_calls(whole.events)
    for end in range(len(text)):
        cut = parse(family, text[:end], LENGTH)
        assert whole.content.startswith(cut.content.rstrip()), text[:end]
        assert whole.reasoning.startswith(cut.reasoning), text[:end]
        assert cut.finish == "length"
        begun = joined_calls(cut.events)
        assert [call.begin for call in begun] == [call.begin for call in told[: len(begun)]]
        assert all(
            all_of_it.arguments.startswith(part.arguments)
            for part, all_of_it in zip(begun, told, strict=False)
        )
        broken = [event for event in cut.events if isinstance(event, ToolCallBroken)]
        is_whole = not begun or begun[-1].arguments == told[len(begun) - 1].arguments
        assert is_whole or broken == [ToolCallBroken(len(begun) - 1)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", [ToolMode.REQUIRED, ToolMode.NAMED])
def test_a_required_call_that_is_cut_off_is_no_content(family: str, mode: ToolMode) -> None:
    choice = ToolChoice(mode, "weather" if mode is ToolMode.NAMED else None)
    asked = Conversation(ASKED.messages, TOOLS, choice)
    text = written(family, [("weather", {"city": "Köln"})])
    for end in range(len(text)):
        assert parse(family, text[:end], LENGTH, asked).content == ""


GOOD = '{"name": "weather", "arguments": {"days": 1}}'
WEATHER = ("weather", {"days": 1})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<tool_call>\n{GOOD}}}\n</tool_call>", "", [WEATHER]),
        (f"<tool_call>\n{GOOD}}}]}}\n</tool_call>\nDone", "Done", [WEATHER]),
        (f"<tool_call>\n{GOOD[:-1]}\n</tool_call>", "", [WEATHER]),
        (f"<tool_call>\n{GOOD[:-2]}\n</tool_call> Done", "Done", [WEATHER]),
        (f"<tool_call>\n{GOOD}\n{GOOD}\n</tool_call>", "", [WEATHER, WEATHER]),
        (f"<tool_call>\n{GOOD},{GOOD}\n</tool_call>", "", [WEATHER, WEATHER]),
        (f"<tool_call>\n[{GOOD}, {GOOD}]\n</tool_call>", "", [WEATHER, WEATHER]),
        (f"<tool_call>\n{GOOD}<tool_call>\n{GOOD}</tool_call>", "", [WEATHER, WEATHER]),
        (f"<tool_call>\n{GOOD}\nI hope so.\n</tool_call>", "", [WEATHER]),
        (f"<tool_call>\n{GOOD}\nI hope so.", "I hope so.", [WEATHER]),
        (
            f"<tool_call>\n{GOOD}\n{'so ' * 200}</tool_call>",
            f"{'so ' * 200}</tool_call>",
            [WEATHER],
        ),
    ],
)
def test_the_end_tag_ends_what_is_odd_in_a_call(text: str, content: str, calls: list[Call]) -> None:
    message = parse("hermes", text, STOP)
    assert (message.content, calls_of(message), message.finish) == (content, calls, "tool_calls")
