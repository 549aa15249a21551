"""Stop strings count in content alone, whatever the format of calls and however text arrives."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.chat.content_scan import ToolContentScan
from gateway.chat.markup import TOOL_MARKUPS
from gateway.chat.message_events import ContentText, ToolCallArguments, ToolEvent
from gateway.chat.tool_parser import MAX_HELD_CHARS, ToolParser
from gateway.text.stop_strings import ContentStops
from tests.effort import times
from tests.unit.gateway.chat.families import FAMILIES, TOOLS, written

STOP = "stop"


def parser(family: str) -> ToolParser:
    return TOOL_MARKUPS[family].parser(str, {tool.name: tool.schema for tool in TOOLS})


def stopped(
    family: str, text: str, stops: list[str], chunk: int = 1, include: bool = False
) -> tuple[str, str | None]:
    """The output, and the stop string that ended it."""
    matcher = ContentStops(ToolContentScan(parser(family)), stops, include)
    out = ""
    for start in range(0, len(text), chunk):
        out += matcher.push(text[start : start + chunk])
        if matcher.matched:
            return out, matcher.matched
    return out + matcher.flush(), matcher.matched


def parsed(family: str, text: str) -> tuple[str, list[object]]:
    """Content and arguments."""
    one = parser(family)
    events: list[ToolEvent] = [*one.push(text), *one.flush(False)]
    content = "".join(event.text for event in events if isinstance(event, ContentText))
    arguments: dict[int, str] = {}
    for event in events:
        if isinstance(event, ToolCallArguments):
            arguments[event.index] = arguments.get(event.index, "") + event.text
    return content, [json.loads(each) for each in arguments.values()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_a_stop_string_in_a_call_ends_nothing(family, chunk):
    text = written(family, [("weather", {"city": "a stop b"}), ("get.time", {"city": "stop"})])
    assert stopped(family, text, [STOP, "we", ":", '"', "]", ">", "}"], chunk)[0] == text


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_in_content_ends_it_before_a_call(family, chunk, include):
    text = written(family, [("weather", {"city": "stop"})], "Now stop here.")
    out, matched = stopped(family, text, [STOP], chunk, include)
    assert matched == STOP
    assert parsed(family, out) == ("Now stop" if include else "Now ", [])


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_content_behind_a_call_ends_where_it_stops(chunk):
    call = written("hermes", [("weather", {"city": "stop"})])
    text = f"st{call}op\n and stop it"
    out, matched = stopped("hermes", text, [STOP], chunk)
    assert (out, matched) == (f"st{call}op\n and ", STOP), "no stop string spans a call"


def test_content_is_not_held_back_for_long():
    matcher = ContentStops(ToolContentScan(parser("hermes")), [STOP])
    assert matcher.push("the s") == "the "
    assert matcher.push("ea. ") == "sea."
    call = '<tool_call>{"name": "weather", "arguments": {"city": "' + "R" * MAX_HELD_CHARS
    assert matcher.push(call) == " "
    assert matcher.push("o").startswith("<tool_call>")
    assert matcher.push("me") == "o"
    assert matcher.matched is None


def test_what_is_skipped_has_no_stop_string():
    matcher = ContentStops(ToolContentScan(parser("hermes")), [STOP])
    assert matcher.skip("st") == "st"
    assert matcher.push("op it stop") + matcher.flush() == "op it "
    assert matcher.matched == STOP


CITIES = st.text(st.sampled_from("stop é<>{}[]\"'\\\n"), max_size=12)
CALLS = st.lists(
    st.tuples(st.sampled_from(["weather", "get.time"]), st.fixed_dictionaries({"city": CITIES})),
    max_size=2,
)


@given(
    family=st.sampled_from(FAMILIES),
    calls=CALLS,
    content=st.text(st.sampled_from("stop é\n"), max_size=16).map(str.strip),
    stops=st.lists(st.sampled_from(["stop", "op", "p s", "\n", "\n\n", "é"]), max_size=3),
    chunk=st.integers(1, 9),
)
@settings(max_examples=times(50, 5000))
def test_content_ends_at_its_first_stop_string(family, calls, content, stops, chunk):
    text = written(family, calls, content)
    whole, _ = parsed(family, text)
    found = [end for end in range(len(whole) + 1) for each in stops if whole[:end].endswith(each)]
    out, matched = stopped(family, text, stops, chunk)
    assert text.startswith(out)
    if not found:
        assert (out, matched) == (text, None)
        return
    assert matched is not None
    longest = max((each for each in stops if whole[: found[0]].endswith(each)), key=len)
    assert matched == longest
    assert parsed(family, out)[0].rstrip() == whole[: found[0] - len(longest)].rstrip()
