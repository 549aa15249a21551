"""A call that cannot be read is content, unchanged, and the calls around it are read. One that is
so long that its beginning has been streamed is marked as broken."""

from __future__ import annotations

import pytest

from gateway.chat.message_events import ToolCallBroken, joined_calls
from gateway.chat.tool_parser import MAX_HELD_CHARS
from tests.unit.gateway.chat.families import written
from tests.unit.gateway.chat.test_code_and_prose import BARE, FAMILIES, PARIS, parse, read

OBJECTS = [
    '{"city" "Paris"}',
    '{"city": "Paris" "Lyon"}',
    '{"city": "Paris"+"Lyon"}',
    "{\"city\": f'Paris'}",
    '{"city": print("x")}',
    '{"city": "Paris", "days" 2}',
]
KEYWORDS = [
    'city="Paris"+"Lyon"',
    "city=f'Paris'",
    'city="Paris" "Lyon"',
    "city=paris",
    'city="Paris", 2',
    'city="Paris", **more',
    "city=",
]
TAGS = ["<city>Paris</city>\n", "Paris\n"]


def unreadable(family: str, values: str) -> str:
    """A call of the family with these arguments, which cannot be read."""
    if family == "pythonic":
        return f"[weather({values})]"
    end = CALL_ENDS.get(family)
    if end is not None:
        return written(family, [("weather", {})]).replace(end, f"{values}{end}")
    return written(family, [("weather", {})]).replace("{}", values)


CALL_ENDS = {
    "deepseek_v32": "</｜DSML｜invoke>",
    "deepseek_v4": "</｜DSML｜invoke>",
    "glm": "</tool_call>",
    "minimax_m2": "</invoke>",
    "qwen3_coder": "</function>",
    "seed_oss": "</function>",
}
VALUES = {"pythonic": KEYWORDS} | dict.fromkeys(CALL_ENDS, TAGS)
CASES = [(family, values) for family in FAMILIES for values in VALUES.get(family, OBJECTS)]


@pytest.mark.parametrize(("family", "values"), CASES)
def test_an_unreadable_call_is_content_and_those_around_it_are_read(
    family: str, values: str
) -> None:
    text = unreadable(family, values)
    other = written(family, [PARIS])
    assert read(family, text) == (text, [])
    assert read(family, f"I ask.\n\n{text}\n") == (f"I ask.\n\n{text}\n", [])
    assert read(family, f"{text}\n{other}") == (text, [PARIS])
    content, calls = read(family, f"{other}\n{text}")
    assert (content.strip(), calls) == (text, [PARIS])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_call_that_goes_wrong_is_marked_as_broken(family: str) -> None:
    city = "P" * MAX_HELD_CHARS
    text = written(family, [("weather", {"city": city})])
    text = {
        "pythonic": text.replace(")]", " + 1)]"),
        **{each: text.replace(end, f"so{end}") for each, end in CALL_ENDS.items()},
    }.get(family, text.replace('"}', '" "x"}'))
    for cuts in ((), range(1, len(text))):
        message = parse(family, text, *cuts)
        (call,) = joined_calls(message.events)
        assert call.arguments.replace(": ", ":").startswith(f'{{"city":"{city}')
        assert (message.content, message.finish) == ("", "stop"), "no client takes it for whole"
        assert message.events[-1] == ToolCallBroken(0)
    if family not in BARE:  # where all that follows is skipped
        both = parse(family, f"{text}\n{written(family, [PARIS])}")
        assert (len(joined_calls(both.events)), both.finish) == (2, "stop")
        if family != "mistral":  # whose calls have no end marker
            assert parse(family, f"{text}\nDone.").content == "Done."
