"""Grammars of tool choices: they admit what the family's parser reads as the calls, and no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as HfTokenizer

from gateway.chat.conversation import Conversation, Message, Tool, ToolChoice, ToolMode
from gateway.chat.formats import glm, invoke_tags, section_calls
from gateway.chat.markup import REASONING_MARKERS, TOOL_MARKUPS, ChatMarkup
from gateway.chat.message_events import joined_calls
from gateway.grammars.grammar import (
    choice_grammar,
    json_schema_grammar,
    json_schema_part,
    only_rule,
    regex_grammar,
)
from gateway.output.output_text import TextDelta
from protocol.errors import InvalidRequest
from protocol.messages import FinishReason
from protocol.sampling import MAX_GRAMMAR_CHARS
from tests.paths import DEMO_MODEL
from tests.unit.gateway.chat import families
from tests.unit.gateway.chat.families import FAMILIES

DEMO = DEMO_MODEL / "tokenizer.json"
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", "Köln"]}},
}
TOOLS = (Tool("weather", parameters=CITY, strict=True), Tool("now"))
MARKERS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>"),
    *section_calls.DEEPSEEK_MARKERS,
    *section_calls.KIMI_MARKERS,
    *glm.MARKERS,
    invoke_tags.DSML,
    invoke_tags.MINIMAX_BEGIN,
    invoke_tags.MINIMAX_END,
]
TAG_FAMILIES = ("deepseek_v32", "deepseek_v4", "glm", "minimax_m2", "qwen3_coder", "seed_oss")


class Vocabulary:
    """The demo model's tokens, and perhaps the markers as tokens of their own."""

    def __init__(self, path: Path, with_markers: bool) -> None:
        self.tokenizer = HfTokenizer.from_file(str(DEMO))
        if with_markers:
            self.tokenizer.add_special_tokens(MARKERS)
        self.tokenizer.save(str(path))
        self._guide = LLTokenizer(str(path), slices=[])
        vocab = self.tokenizer.get_vocab()
        self.ids = {marker: vocab[marker] for marker in MARKERS if marker in vocab}

    def admits(self, grammar: str | None, text: str) -> bool:
        matcher = LLMatcher(self._guide, grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokenizer.encode(text).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "tokens"])
def vocabulary(request, tmp_path_factory) -> Vocabulary:
    return Vocabulary(tmp_path_factory.mktemp("vocabulary") / "tokenizer.json", request.param)


def asked(mode: str, **fields: object) -> Conversation:
    name = "now" if mode == "named" else None
    return Conversation((Message("user", "?"),), TOOLS, ToolChoice(ToolMode(mode), name), **fields)


def markup(family: str, vocabulary: Vocabulary, reasons: bool = False) -> ChatMarkup:
    reasoning = REASONING_MARKERS["think"] if reasons else None
    return ChatMarkup(TOOL_MARKUPS[family], reasoning, vocabulary.ids, vocabulary.ids)


def keywords(arguments: str) -> str:
    return ", ".join(
        f"{key}={json.dumps(value, ensure_ascii=False)}"
        for key, value in json.loads(arguments).items()
    )


def written(family: str, vocabulary: Vocabulary, *calls: tuple[str, str]) -> str:
    """The calls as the family writes them."""
    if family == "hermes":
        objects = [f'{{"name":"{name}","arguments":{value}}}' for name, value in calls]
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    if family == "llama3":
        return "; ".join(f'{{"name":"{name}","parameters":{value}}}' for name, value in calls)
    if family == "pythonic":
        return f"[{', '.join(f'{name}({keywords(value)})' for name, value in calls)}]"
    if family == "mistral" and vocabulary.ids:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{value}" for name, value in calls)
    if family == "function_tag":
        return "".join(f"<function={name}>{value}</function>" for name, value in calls)
    if family == "functionary":
        return ">>>".join(f"{name}\n{value}" for name, value in calls)
    if family in TAG_FAMILIES:
        return families.written(family, [(name, json.loads(value)) for name, value in calls])
    if family in ("deepseek_v3", "deepseek_v31", "kimi_k2"):
        return in_section(family, *calls)
    objects = [f'{{"name":"{name}","arguments":{value}}}' for name, value in calls]
    before, after = {
        "mistral": ("[TOOL_CALLS] [", "]"),
        "nemotron": ("<TOOLCALL>[", "]</TOOLCALL>"),
        "xlam": ("[", "]"),
    }[family]
    return f"{before}{', '.join(objects)}{after}"


def in_section(family: str, *calls: tuple[str, str]) -> str:
    if family == "kimi_k2":
        parts = [
            f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>{value}"
            "<|tool_call_end|>"
            for place, (name, value) in enumerate(calls)
        ]
        return f"<|tool_calls_section_begin|>{''.join(parts)}<|tool_calls_section_end|>"
    lead, middle, end, separator = "", "<｜tool▁sep｜>", "", ""
    if family == "deepseek_v3":
        lead, middle, end, separator = "function<｜tool▁sep｜>", "\n```json\n", "\n```", "\n"
    parts = [
        f"<｜tool▁call▁begin｜>{lead}{name}{middle}{value}{end}<｜tool▁call▁end｜>"
        for name, value in calls
    ]
    return f"<｜tool▁calls▁begin｜>{separator.join(parts)}<｜tool▁calls▁end｜>"


WEATHER = ("weather", '{"city":"Köln"}')
NOW = ("now", "{}")


@pytest.mark.parametrize("family", FAMILIES)
def test_required_calls(family, vocabulary):
    form = markup(family, vocabulary)
    grammar = form.grammar(asked("required"), "")
    for calls in ([WEATHER], [NOW], *([] if family == "llama3" else [[NOW, WEATHER, NOW]])):
        text = written(family, vocabulary, *calls)
        assert vocabulary.admits(grammar, text)
        parser = form.parser(asked("required"), "", "seed")
        message = parser.push(TextDelta(text, [], finish=FinishReason.STOP))
        read = [
            (call.begin.name, call.arguments.replace(": ", ":"))
            for call in joined_calls(message.events)
        ]
        assert (read, message.content, message.finish) == (calls, "", "tool_calls")
    for wrong in (("weather", '{"city":"Paris"}'), ("weather", "{}"), ("other", "{}")):
        assert not vocabulary.admits(grammar, written(family, vocabulary, wrong))
    assert not vocabulary.admits(grammar, "Hello")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_named_call_and_one_call_at_most(family, vocabulary):
    named = markup(family, vocabulary).grammar(asked("named"), "")
    assert vocabulary.admits(named, written(family, vocabulary, NOW))
    assert not vocabulary.admits(named, written(family, vocabulary, WEATHER))
    one = markup(family, vocabulary).grammar(asked("required", parallel_tool_calls=False), "")
    assert vocabulary.admits(one, written(family, vocabulary, NOW))
    assert not vocabulary.admits(one, written(family, vocabulary, NOW, NOW))


@pytest.mark.parametrize(
    "family",
    [
        *("hermes", "mistral", "nemotron", "function_tag", "qwen3_coder", "seed_oss"),
        *("deepseek_v3", "deepseek_v31", "kimi_k2"),
        *("deepseek_v32", "deepseek_v4", "glm", "minimax_m2"),
    ],
)
def test_strict_tools_hold_the_calls_of_a_free_answer(family, vocabulary):
    grammar = markup(family, vocabulary).grammar(asked("auto"), "")
    call = written(family, vocabulary, WEATHER)
    for text in ("Hello", "", call, f"Well.\n{call}"):
        assert vocabulary.admits(grammar, text), text
    assert not vocabulary.admits(
        grammar, "Well " + written(family, vocabulary, ("weather", '{"city":"Paris"}'))
    )
    loose = ("now", '{"any":1}')
    if family not in TAG_FAMILIES:  # which write what the schema lists
        assert vocabulary.admits(grammar, written(family, vocabulary, loose)), "is not strict"
    single = markup(family, vocabulary).grammar(asked("auto", parallel_tool_calls=False), "")
    assert vocabulary.admits(single, call)
    assert not vocabulary.admits(single, written(family, vocabulary, NOW, NOW))


@pytest.mark.parametrize("family", ["llama3", "pythonic", "xlam", "functionary"])
def test_a_family_without_a_marker_cannot_be_strict_of_itself(family, vocabulary):
    with pytest.raises(InvalidRequest, match="'strict' needs 'tool_choice'"):
        markup(family, vocabulary).grammar(asked("auto"), "")


ANSWER = json_schema_grammar({"enum": [{"city": "Oslo"}]})


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_of_its_form_or_calls(family, vocabulary):
    form = markup(family, vocabulary)
    free = asked("auto")
    grammar = form.grammar(free, "", only_rule(ANSWER))
    several = [[NOW, WEATHER]] if family != "llama3" else []
    for calls in ([WEATHER], [NOW], *several):
        assert vocabulary.admits(grammar, written(family, vocabulary, *calls))
    assert vocabulary.admits(grammar, '{"city":"Oslo"}')
    message = form.parser(free, "", "seed").push(
        TextDelta('{"city":"Oslo"}', [], finish=FinishReason.STOP)
    )
    assert (message.content, message.finish) == ('{"city":"Oslo"}', "stop")
    call = written(family, vocabulary, NOW)
    wrong = written(family, vocabulary, ("weather", '{"city":"Paris"}'))
    for text in ("Hello", "", '{"city":"Rome"}', wrong, '{"city":"Oslo"}' + call):
        assert not vocabulary.admits(grammar, text), text
    choices = form.grammar(free, "", only_rule(choice_grammar(["yes", "no"])))
    assert vocabulary.admits(choices, "no")
    assert vocabulary.admits(choices, call)


def test_thoughts_may_come_before_either(vocabulary):
    form = markup("hermes", vocabulary, reasons=True)
    grammar = form.grammar(asked("auto"), "...<think>\n", only_rule(ANSWER))
    for text in ('{"city":"Oslo"}', written("hermes", vocabulary, NOW)):
        assert vocabulary.admits(grammar, f"So.\n</think>\n\n{text}")
        assert not vocabulary.admits(grammar, text)


@pytest.mark.parametrize(
    ("grammar", "rule"),
    [
        (json_schema_grammar(True), "%json true"),
        (choice_grammar(["a", "b"]), '"a" | "b"'),
        (regex_grammar("a+"), None),
        ('start: x\nx: "a"', None),
        ('%ignore " "', None),
    ],
)
def test_of_grammars_with_one_rule_others_are_made(grammar, rule):
    assert only_rule(grammar) == rule


def test_reasoning_may_come_first(vocabulary):
    form = markup("hermes", vocabulary, reasons=True)
    call = written("hermes", vocabulary, NOW)
    opened = form.grammar(asked("named"), "...<think>\n")
    assert vocabulary.admits(opened, f"So.\n</think>\n\n{call}")
    assert not vocabulary.admits(opened, call)
    free = form.grammar(asked("named"), "...")
    assert vocabulary.admits(free, call)
    assert vocabulary.admits(free, f"<think>So.</think>\n{call}") == bool(vocabulary.ids)


def test_without_need_there_is_no_grammar(vocabulary):
    loose = Conversation((Message("user", "?"),), TOOLS[1:])
    assert markup("hermes", vocabulary).grammar(loose, "") is None
    assert markup("hermes", vocabulary).grammar(asked("none"), "") is None


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (json_schema_grammar({"enum": [{"city": "Oslo"}]}), '{"city":"Oslo"}', "Oslo"),
        (choice_grammar(["start", "no"]), "start", "starts"),
        (regex_grammar(r"start/[ab]+"), "start/ab", "start/"),
        ('%llguidance {}\nstart: "start" X // start\nX: /[a-c]/+', "startabc", "abc"),
        ('start: "a" | "(" start ")"', "((a))", "((a)"),
        (json_schema_grammar({"enum": ["start: // x", 1.5]}), '"start: // x"', "start"),
        ('start[capture="start"]: restart\nrestart: "a"', "a", "b"),
    ],
)
def test_the_form_of_an_answer_applies_behind_its_reasoning(vocabulary, grammar, good, bad):
    form, plain = markup("hermes", vocabulary, reasons=True), Conversation((Message("user", "?"),))
    opened = form.after_thoughts(plain, "...<think>\n", grammar)
    assert vocabulary.admits(opened, f'So "start".\n</think>\n\n{good}')
    for text in (good, f"So.</think>{bad}", f"<think>So.</think>{bad}", "So."):
        assert not vocabulary.admits(opened, text), text
    free = form.after_thoughts(plain, "...", grammar)
    if vocabulary.ids:
        for text in (good, f"<think>So.</think>{good}"):
            assert vocabulary.admits(free, text), text
        assert not vocabulary.admits(free, f"<think>So.</think>{bad}")
    else:
        assert free is None, "nothing shows that it would reason"
    assert form.after_thoughts(plain, "...<think>\n</think>\n\n", grammar) is None
    assert markup("hermes", vocabulary).after_thoughts(plain, "<think>", grammar) is None


def test_a_prefill_opens_the_reasoning_that_a_form_waits_for(vocabulary):
    form = markup("hermes", vocabulary, reasons=True)
    for prefill, waits in (("<think>So", True), ("<think>So</think>", False), ("{", False)):
        messages = (Message("user", "?"), Message("assistant", prefill))
        goes_on = Conversation(messages, continue_final_message=True)
        grammar = form.after_thoughts(goes_on, f"...{prefill}", ANSWER)
        assert (grammar is not None) == waits


OPTIONAL = {
    "properties": {"a": {"enum": [1]}, "b": {"$ref": "#/$defs/b"}, "c": {"enum": [None]}},
    "required": ["b", "d"],
    "$defs": {"b": {"enum": ["x"]}},
}


@pytest.mark.parametrize(
    ("arguments", "is_good"),
    [
        ('b="x", d=[1]', True),
        ('a=1, b="x", c=null, d={}', True),
        ('b="x", c=null, d="y"', True),
        ('a=1, b="x"', False),
        ("a=1, d=1", False),
        (', b="x", d=1', False),
        ('b="x", a=1, d=1', False),
        ('b="z", d=1', False),
        ("", False),
    ],
)
def test_named_arguments_come_in_order_and_the_required_ones_always(arguments, is_good, vocabulary):
    tools = (Tool("f", parameters=OPTIONAL), Tool("g", parameters={"properties": {"q": True}}))
    asked = Conversation((Message("user", "?"),), tools, ToolChoice(ToolMode.REQUIRED))
    grammar = markup("pythonic", vocabulary).grammar(asked, "")
    assert vocabulary.admits(grammar, f"[f({arguments})]") == is_good
    assert vocabulary.admits(grammar, "[g()]")
    assert vocabulary.admits(grammar, "[g(q=[2])]")


def test_an_argument_that_has_no_name_in_python_is_refused(vocabulary):
    tools = (Tool("f", parameters={"properties": {"a b": {}}}),)
    asked = Conversation((Message("user", "?"),), tools, ToolChoice(ToolMode.REQUIRED))
    with pytest.raises(InvalidRequest, match="'a b'"):
        markup("pythonic", vocabulary).grammar(asked, "")


@pytest.mark.parametrize("family", ["pythonic", "hermes"])
def test_rules_of_calls_stop_at_the_limit_of_a_grammar(monkeypatch, family):
    """Keyword calls repeat a schema's definitions for every argument."""
    parts: list[object] = []

    def part(schema: dict[str, object] | bool) -> str:
        parts.append(schema)
        return json_schema_part(schema)

    for module in ("formats.keyword_grammar", "tool_grammar"):
        monkeypatch.setattr(f"gateway.chat.{module}.json_schema_part", part)
    text = "x" * (MAX_GRAMMAR_CHARS // 10)
    properties = {f"key{place}": {"type": "string"} for place in range(100)}
    schema = {"type": "object", "properties": properties, "$defs": {"a": {"description": text}}}
    tools = tuple(Tool(f"tool{place}", parameters=schema, strict=True) for place in range(100))
    asks = Conversation((Message("user", "?"),), tools, ToolChoice(ToolMode.REQUIRED))
    with pytest.raises(InvalidRequest, match="the limit is") as caught:
        ChatMarkup(TOOL_MARKUPS[family]).grammar(asks, "")
    assert caught.value.param == "tools"
    assert len(parts) <= 11
