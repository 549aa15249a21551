"""Examples of calls in code and prose are content. Text around calls is unchanged, or gone whole
where it is a fence that holds nothing but calls."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.chat.markup import REASONING_MARKERS, TOOL_MARKUPS, ChatMarkup
from gateway.chat.message_events import MessageDelta, joined_calls
from gateway.output.output_text import TextDelta
from protocol.messages import FinishReason
from tests.effort import in_turn, times
from tests.unit.gateway.chat.families import ASKED, Call, written

BARE = ["llama3", "pythonic", "xlam"]
MARKED = sorted({*TOOL_MARKUPS} - {*BARE, "functionary", "harmony"})
FAMILIES = [*BARE, *MARKED]
PARIS: Call = ("weather", {"city": "Paris"})
NOON: Call = ("get.time", {"days": 1})


def parse(family: str, text: str, *cuts: int, is_cut: bool = False) -> MessageDelta:
    """The message in which the text is read, in pieces that end at the cuts."""
    markup = ChatMarkup(TOOL_MARKUPS[family], REASONING_MARKERS["think"])
    parser = markup.parser(ASKED, "", "seed")
    pieces = [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]
    deltas = [parser.push(TextDelta(piece, [])) for piece in pieces]
    finish = FinishReason.LENGTH if is_cut else FinishReason.STOP
    deltas.append(parser.push(TextDelta("", [], finish=finish)))
    return MessageDelta([event for delta in deltas for event in delta.events], deltas[-1].finish)


def read(family: str, text: str) -> tuple[str, list[Call]]:
    """The content and the calls, which must be the same read at once or by characters."""
    found = []
    for cuts in ((), range(1, len(text))):
        message = parse(family, text, *cuts)
        calls = [
            (call.begin.name, json.loads(call.arguments))
            for call in joined_calls(message.events)
            if call.begin is not None
        ]
        assert message.finish == ("tool_calls" if calls else "stop")
        found.append((message.content, calls))
    assert found[0] == found[1]
    return found[0]


FENCES = ["```\n{}\n```", "```json\n{}\n```", "~~~ python\n{}\n~~~", "  ````\n{}\n  ````"]


@pytest.mark.parametrize(("family", "fence"), in_turn(FAMILIES, FENCES))
def test_a_call_in_a_fence_of_an_explanation_is_content(family: str, fence: str) -> None:
    example = fence.replace("{}", written(family, [PARIS]))
    for text in (
        f"You write:\n{example}\nand wait for the result.",
        f"{example}\nThis asks for the weather.",
        f"First {example[:3]} code, then\n\n{example}\n\n{example}\n or both.",
        f"So:\n{fence.replace('{}', 'answer = ' + written(family, [PARIS]))}",
        f"So:\n{fence.replace('{}', written(family, [PARIS]) + ' # Paris')}",
        f"So:\n{fence.replace('{}', 'x')}\n{example}\nDone.",
    ):
        assert read(family, text) == (text, [])


@pytest.mark.parametrize(("family", "fence"), in_turn(FAMILIES, FENCES))
def test_a_fence_that_is_a_call_is_gone_whole(family: str, fence: str) -> None:
    call, both = written(family, [PARIS]), written(family, [PARIS, NOON])
    assert read(family, fence.replace("{}", call)) == ("", [PARIS])
    assert read(family, "\n" + fence.replace("{}", both) + "\n") == ("", [PARIS, NOON])
    assert read(family, fence.replace("{}", call).rstrip("`~ ")) == ("", [PARIS])
    fences = [fence.replace("{}", written(family, [each])) for each in (PARIS, NOON)]
    assert read(family, "\n\n".join(fences)) == ("", [PARIS, NOON])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fence_behind_a_sentence_is_a_call_only_without_markers(family: str) -> None:
    """Models that have markers for calls put no fence around them."""
    text = f"I look.\n```json\n{written(family, [PARIS])}\n```"
    assert read(family, text) == (("I look.", [PARIS]) if family in BARE else (text, []))
    line = f"```json {written(family, [PARIS])} ```"
    if "\n" not in line:
        assert read(family, line) == ("", [PARIS])
        assert read(family, f"{line}, you see") == (f"{line}, you see", [])


@pytest.mark.parametrize("family", FAMILIES)
def test_inline_code_is_content(family: str) -> None:
    call = written(family, [PARIS]).replace("\n", "")
    for text in (f"Write `{call}` to ask.", f"``x = {call} ` `` is code", f"`{call}`"):
        assert read(family, text) == (text, [])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_beside_code_is_a_call(family: str) -> None:
    call = written(family, [PARIS])
    example = f"```\n{written(family, [NOON])}\n```"
    assert read(family, f"As `this` or\n{example}\nsays:\n{call}") == (
        f"As `this` or\n{example}\nsays:",
        [PARIS],
    )
    assert read(family, f"The ` key.\n{call}") == ("The ` key.", [PARIS])
    assert read(family, f"{call}\nThen\n{example}\nfollows.") == (
        f"Then\n{example}\nfollows.",
        [PARIS],
    )


@pytest.mark.parametrize("family", MARKED)
def test_a_backtick_far_behind_a_call_quotes_nothing(family: str) -> None:
    call = written(family, [PARIS]).replace("\n", "")
    far = "y" * 1100
    content, calls = read(family, f"The ` key: {call} {far}`")
    assert (content.split(), calls) == (["The", "`", "key:", f"{far}`"], [PARIS])
    near = f"The ` key: {call} {far[:800]}`"
    assert read(family, near) == (near, [])
    open_fence = f"```{far}\n{call}"
    assert read(family, open_fence) == (f"```{far}", [PARIS])


@pytest.mark.parametrize("family", FAMILIES)
def test_text_between_calls_is_unchanged(family: str) -> None:
    first, second = written(family, [PARIS]), written(family, [NOON])
    text = f"One:\n{first}\nand two:\n{second}\nDone."
    content, calls = read(family, text)
    assert (content.split(), calls) == (["One:", "and", "two:", "Done."], [PARIS, NOON])


@pytest.mark.parametrize("family", BARE)
@pytest.mark.parametrize(
    "text",
    [
        "x = {}\nprint(x)",
        "print({})",
        "    return {}",
        "The call {} asks for it.",
        "{}.sort()",
        'In "{}" there is a city.',
        '{"plan": {}}',
        "calls = [\n{},\n]\nrun(calls)",
        "def f():\n    {}\n    return 1",
        ">>> {}\n[1]",
        "> {}",
    ],
)
def test_prose_and_code_without_fences_are_content(family: str, text: str) -> None:
    text = text.replace("{}", written(family, [PARIS]))
    assert read(family, text) == (text, [])


@pytest.mark.parametrize("family", MARKED)
@pytest.mark.parametrize("text", ['"{}" is a call.', "A call ({}) so", "> {}", "“{}”", "It's '{}'"])
def test_a_quoted_call_is_content(family: str, text: str) -> None:
    text = text.replace("{}", written(family, [PARIS]))
    assert read(family, text) == (text, [])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "<tool_call>\n```json\n{}\n```\n</tool_call>\nDone."),
        ("hermes", "<tool_call>```\n{}```</tool_call>\nDone."),
        ("nemotron", "<TOOLCALL>\n```json\n[{}]\n```\n</TOOLCALL>\nDone."),
        ("mistral", "[TOOL_CALLS] ```json\n[{}]\n```\nDone."),
        ("llama3", "<|python_tag|>```json\n{}\n```\nDone."),
    ],
)
def test_a_fence_between_marker_and_call_is_gone(family: str, text: str) -> None:
    call = '{"name": "weather", "arguments": {"city": "Paris"}}'
    assert read(family, text.replace("{}", call)) == ("Done.", [PARIS])


@pytest.mark.parametrize("family", BARE)
@pytest.mark.parametrize(
    "before", ["I look.", "Let me see:", "1.", "- ", "**Call:** ", "Sure 😊", "好。"]
)
def test_a_call_behind_a_sentence_is_a_call(family: str, before: str) -> None:
    assert read(family, f"{before} {written(family, [PARIS])}") == (before.strip(), [PARIS])


def test_a_list_of_which_a_part_is_no_call_is_content() -> None:
    for text in ("[weather(), other(b=2)]", "[weather(), 1]", "[weather(); x]"):
        assert read("pythonic", text) == (text, [])
    text = '[{"name": "weather", "arguments": {}}, {"answer": 1}]'
    assert read("llama3", text) == (text, [])
    assert read("xlam", text) == (text, [])


def test_functionary_s_examples_are_content() -> None:
    example = '```\n>>>weather\n{"city": "Paris"}\n```'
    text = f"all\nYou write\n{example}\nto ask."
    assert read("functionary", text) == (text.removeprefix("all\n"), [])
    assert read("functionary", "") == ("", [])
    real = '\n>>>weather\n{"city": "Paris"}'
    assert read("functionary", text + real) == (text.removeprefix("all\n"), [PARIS])


@pytest.mark.parametrize("family", MARKED)
@pytest.mark.parametrize("behind", [" in quotes", "`", "\n```", "\n</x>"])
def test_an_example_in_reasoning_that_is_never_closed_is_reasoning(
    family: str, behind: str
) -> None:
    thought = f"I could write {written(family, [PARIS])}{behind}"
    message = parse(family, f"<think>{thought}")
    assert (message.reasoning.strip(), message.content) == (thought, "")
    assert not joined_calls(message.events)
    marker = TOOL_MARKUPS[family].parser.certain_markers[0]
    message = parse(family, f"<think>No {marker} yet. Now:\n{written(family, [PARIS])}")
    assert message.reasoning.rstrip() == f"No {marker} yet. Now:"
    assert len(joined_calls(message.events)) == 1


PROSE = st.sampled_from(["Well.", "a < b", "`x` or ``y``", "```", "~~~", "The ` key", "- one", ""])
CODE = st.sampled_from(["```\n{}\n```\nSo.", "~~~py\nx = {}\n~~~", "Use `{}` here.", "x `{} y` z"])


@given(
    family=st.sampled_from(FAMILIES),
    segments=st.lists(st.one_of(PROSE, CODE, st.just("{}")), max_size=6),
    data=st.data(),
)
@settings(max_examples=times(40, 4000))
def test_text_around_calls_is_unchanged_or_gone_whole(
    family: str, segments: list[str], data: st.DataObject
) -> None:
    call = written(family, [PARIS])
    inline = call.replace("\n", "")
    lines = [each.replace("{}", inline if "`{" in each else call) for each in segments]
    text = "\n".join(lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    message, whole = parse(family, text, *cuts), parse(family, text)
    assert (message.content, message.finish) == (whole.content, whole.finish)
    calls = joined_calls(whole.events)
    assert joined_calls(message.events) == calls
    assert all(json.loads(each.arguments) == PARIS[1] for each in calls)
    if not calls:
        assert whole.content == text
        return
    kept = "".join(whole.content.split())
    every = "".join(text.split())
    assert _is_without(every, kept, "".join(call.split()), len(calls))


def _is_without(text: str, kept: str, call: str, num_calls: int) -> bool:
    """Whether `kept` is the text without so many calls, and fences that hold them."""
    ways = {(text, kept, num_calls)}
    while ways:
        text, kept, num = ways.pop()
        if not text and not kept and not num:
            return True
        for begin, end in (("", ""), ("```", "```"), ("~~~", "~~~"), ("```", ""), ("~~~", "")):
            for several in range(1, num + 1):
                gone = begin + call * several + end
                if text.startswith(gone):
                    ways.add((text[len(gone) :], kept, num - several))
        if text and kept and text[0] == kept[0]:
            ways.add((text[1:], kept[1:], num))
    return False
