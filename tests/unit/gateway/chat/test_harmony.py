"""gpt-oss's format, Harmony: reasoning, answers and calls by channels, however text is split."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as HfTokenizer

from gateway.chat.conversation import Conversation, Message, Tool, ToolChoice, ToolMode
from gateway.chat.formats.harmony import MARKERS
from gateway.chat.markup import REASONING_MARKERS, TOOL_MARKUPS, ChatMarkup, find_markup
from gateway.chat.message_events import MessageDelta, ToolCallBroken, joined_calls
from gateway.output.output_text import TextDelta
from gateway.text.stop_strings import ContentStops
from gateway.text.tokenizer import Tokenizer
from protocol.messages import FinishReason
from tests.paths import DEMO_MODEL

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Köln"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (Tool("weather", parameters=CITY), Tool("now"))
ASKED = Conversation((Message("user", "?"),), TOOLS)
PLAIN = Conversation((Message("user", "?"),))
MARKUP = ChatMarkup(TOOL_MARKUPS["harmony"], REASONING_MARKERS["harmony"])

THOUGHT = "<|channel|>analysis<|message|>Hm, so.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
ROME = '{"city":"Rome"}'
ANSWERS: dict[str, tuple[str, tuple[str, str, list[tuple[str, object]], str]]] = {
    "answer": ("<|channel|>final<|message|>Yes.", ("Yes.", "", [], "stop")),
    "thought": (f"{THOUGHT}<|channel|>final<|message|>Yes.", ("Yes.", "Hm, so.", [], "stop")),
    "call": (
        f"{THOUGHT}{CALL}{ROME}",
        ("", "Hm, so.", [("weather", {"city": "Rome"})], "tool_calls"),
    ),
    "words before a call": (
        "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
        f"{THOUGHT}{CALL}{ROME}<|call|>",
        ("Let me see.", "Hm, so.", [("weather", {"city": "Rome"})], "tool_calls"),
    ),
    "a call that the role names": (
        f" to=functions.weather<|channel|>commentary json<|message|>{ROME}",
        ("", "", [("weather", {"city": "Rome"})], "tool_calls"),
    ),
    "a call without arguments": (
        "<|channel|>commentary to=functions.now<|message|>",
        ("", "", [("now", {})], "tool_calls"),
    ),
    "a tool that is not there": (
        f"<|channel|>commentary to=browser.open code<|message|>{ROME}<|call|>",
        ("", ROME, [], "stop"),
    ),
    "no header": ("Just text.", ("Just text.", "", [], "stop")),
    "an end that is forgotten": (
        "<|channel|>analysis<|message|>Hm<|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        ("Yes.", "Hm", [], "stop"),
    ),
    "a header without a body": (
        "<|channel|>analysis<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        ("Yes.", "", [], "stop"),
    ),
    "a call without a body": (
        "<|channel|>commentary to=functions.weather<|call|><|start|>assistant"
        "<|channel|>final<|message|>Yes.",
        ("Yes.", "", [], "stop"),
    ),
    "thoughts alone": ("<|channel|>analysis<|message|>Hm", ("", "Hm", [], "stop")),
}


def parse(
    pieces: list[str],
    conversation: Conversation = ASKED,
    finish: FinishReason = FinishReason.STOP,
    markup: ChatMarkup = MARKUP,
) -> MessageDelta:
    parser = markup.parser(conversation, "<|start|>assistant", "seed")
    deltas = [parser.push(TextDelta(piece, [])) for piece in pieces]
    deltas.append(parser.push(TextDelta("", [], finish=finish)))
    return MessageDelta([event for delta in deltas for event in delta.events], deltas[-1].finish)


def said(message: MessageDelta) -> tuple[str, str, list[tuple[str, object]], str | None]:
    calls = joined_calls(message.events)
    read = [(call.begin.name, json.loads(call.arguments)) for call in calls if call.begin]
    return message.content, message.reasoning, read, message.finish


@pytest.mark.parametrize("name", ANSWERS)
def test_channels_say_what_text_is(name):
    text, expected = ANSWERS[name]
    assert said(parse([text])) == expected
    assert said(parse(list(text))) == expected


@given(st.sampled_from(sorted(ANSWERS)), st.lists(st.integers(0, 200), max_size=4))
def test_any_split_says_the_same(name, cuts):
    text, expected = ANSWERS[name]
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    pieces = [text[a:b] for a, b in pairwise(places)]
    assert said(parse(pieces)) == expected


def test_text_arrives_before_its_message_ends():
    parser = MARKUP.parser(ASKED, "", "seed")
    assert parser.push(TextDelta("<|channel|>analysis<|message|>Hm", [])).reasoning == "Hm"
    assert parser.push(TextDelta(" yes<|en", [])).reasoning == " yes"
    parser.push(TextDelta(f"d|><|start|>assistant{CALL}", []))
    [call] = joined_calls(parser.push(TextDelta('{"city": "Ro', [])).events)
    assert call.arguments == '{"city": "Ro'


def test_an_answer_without_tools_is_parsed_too():
    text, expected = ANSWERS["thought"]
    assert said(parse([text], PLAIN)) == expected
    only_reasoning = ChatMarkup(None, REASONING_MARKERS["harmony"])
    assert said(parse([text], ASKED, markup=only_reasoning)) == expected


def test_an_answer_that_is_continued_begins_in_its_body():
    conversation = Conversation(
        (Message("user", "?"), Message("assistant", "Ye")), continue_final_message=True
    )
    assert said(parse(["s."], conversation)) == ("s.", "", [], "stop")


def test_what_the_token_limit_cuts_is_no_text():
    cut = FinishReason.LENGTH
    assert said(parse(["<|channel|>final<|message|>Yes.<|ret"], finish=cut))[0] == "Yes."
    assert said(parse(["<|channel|>fin"], finish=cut)) == ("", "", [], "length")
    message = parse([CALL + '{"city": "Ro'], finish=cut)
    assert isinstance(message.events[-1], ToolCallBroken)


def test_stop_strings_count_in_content_alone():
    text = f"{THOUGHT}<|channel|>final<|message|>so, assistant."
    scan = MARKUP.content_scan(PLAIN)
    assert scan is not None
    matcher = ContentStops(scan, ["so", "assistant"])
    end = text.rindex("so")
    assert "".join(map(matcher.push, text[: end + 2])) == text[:end]
    assert matcher.matched == "so"


TEMPLATE = """
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
<|start|>functions.x to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>
{%- elif m.tool_calls -%}
{%- if m.thinking -%}
<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>
{%- endif -%}
{%- set call = m.tool_calls[0].function -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' -%}
<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- else -%}
<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if tools -%}{%- endif -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""


@pytest.fixture
def tokenizer(checkpoint, tmp_path):
    tokenizer = HfTokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.add_special_tokens(list(MARKERS))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    loaded = Tokenizer(tmp_path)
    yield loaded
    loaded.close()


def test_a_template_of_this_format_is_recognised(tokenizer):
    markup = find_markup(tokenizer)
    assert markup.tools is TOOL_MARKUPS["harmony"]
    assert markup.reasoning is REASONING_MARKERS["harmony"]
    assert markup.kept_ids(PLAIN) == {tokenizer.added_token_id(each) for each in MARKERS}
    assert markup.control_text is not None
    assert markup.control_text.from_assistant.are_in("<|start|>system")


class Vocabulary:
    """The demo model's tokens, and the markers as tokens of their own."""

    def __init__(self, path):
        self.tokenizer = HfTokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
        self.tokenizer.add_special_tokens(list(MARKERS))
        self.tokenizer.save(str(path))
        self._guide = LLTokenizer(str(path), slices=[])
        vocab = self.tokenizer.get_vocab()
        ids = {marker: vocab[marker] for marker in MARKERS}
        self.markup = ChatMarkup(TOOL_MARKUPS["harmony"], REASONING_MARKERS["harmony"], ids, ids)

    def admits(self, grammar, text):
        matcher = LLMatcher(self._guide, grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokenizer.encode(text).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return Vocabulary(tmp_path_factory.mktemp("vocabulary") / "tokenizer.json")


def asked(mode: str, strict: bool = False) -> Conversation:
    tools = (Tool("weather", parameters=CITY, strict=strict), Tool("now"))
    name = "now" if mode == "named" else None
    return Conversation((Message("user", "?"),), tools, ToolChoice(ToolMode(mode), name))


def test_grammars_of_calls(vocabulary):
    answer, wrong = "<|channel|>final<|message|>Yes.", f'{CALL}{{"city":"Paris"}}'
    required = vocabulary.markup.grammar(asked("required"), "<|start|>assistant")
    strict = vocabulary.markup.grammar(asked("auto", strict=True), "<|start|>assistant")
    for before in ("", THOUGHT):
        for grammar in (required, strict):
            assert vocabulary.admits(grammar, f"{before}{CALL}{ROME}")
            assert not vocabulary.admits(grammar, before + wrong)
        assert not vocabulary.admits(required, before + answer)
        assert vocabulary.admits(strict, before + answer)
    named = vocabulary.markup.grammar(asked("named"), "")
    assert not vocabulary.admits(named, f"{CALL}{ROME}")
    assert vocabulary.admits(named, CALL.replace("weather", "now") + "{}")
    assert vocabulary.markup.grammar(asked("auto"), "") is None


def test_an_answer_of_a_given_form_has_its_header(vocabulary):
    grammar = vocabulary.markup.after_thoughts(PLAIN, "<|start|>assistant", "start: /[0-9]+/")
    assert grammar is not None
    for before in ("", THOUGHT):
        assert vocabulary.admits(grammar, f"{before}<|channel|>final<|message|>12")
        assert not vocabulary.admits(grammar, f"{before}<|channel|>final<|message|>no")
    assert not vocabulary.admits(grammar, "12")
