"""Grammars that cannot be compiled or followed are refused, and the error says why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway.grammars.grammar import (
    choice_grammar,
    json_schema_grammar,
    regex_grammar,
)
from gateway.grammars.grammar_checker import MAX_OPTIONAL_PROPERTIES, GrammarChecker
from gateway.grammars.structural_tags import structural_tag_grammar
from gateway.text.tokenizer import Tokenizer
from protocol.errors import InvalidRequest
from protocol.sampling import MAX_GRAMMAR_CHARS
from tests.paths import DEMO_MODEL

VOCABULARY = LLTokenizer(str(DEMO_MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = Tokenizer(DEMO_MODEL)
    yield tokenizer
    tokenizer.close()


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (json_schema_grammar({"type": "nothing"}), "Invalid type: nothing"),
        (json_schema_grammar({"$ref": "#/x"}), "'/x' does not exist"),
        (json_schema_grammar({"if": {}}), 'Unimplemented keys: .*"if"'),
        (json_schema_grammar({"type": "string", "x-guidance": 3}), "JsonCompileOptions"),
        (regex_grammar("(a"), "invalid regex"),
        ("start: <|no_such_token|>", "unknown special token"),
        ("begin: 'a'", "."),
        ("", "Empty grammar"),
        ('{"grammars": 3}', "expected a sequence"),
        ("start: " + "x" * MAX_GRAMMAR_CHARS, "characters; the limit is"),
        (json_schema_grammar(json.loads('{"items":' * 900 + "{}" + "}" * 900)), "."),
    ],
)
async def test_what_cannot_be_compiled_is_refused_by_name(tokenizer, grammar, message):
    checker = GrammarChecker(DEMO_MODEL, tokenizer)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=message) as caught:
            await checker.check(grammar, "response_format")
        assert caught.value.param == "response_format"
        assert "\n" not in caught.value.message


class CountedThreads:
    """In place of a tokenizer, whose threads are all that is wanted of it."""

    def __init__(self) -> None:
        self.num_works = 0

    async def in_thread(self, work):
        self.num_works += 1
        return work()


async def test_the_last_good_grammars_are_not_compiled_again():
    threads = CountedThreads()
    checker = GrammarChecker(DEMO_MODEL, threads)
    compiled = []
    for number in (*range(300), 299, 100, 0):
        await checker.check(choice_grammar([str(number)]), "choice")
        compiled.append(threads.num_works)
    assert compiled == [*range(1, 301), 300, 300, 301]


async def test_without_a_vocabulary_every_grammar_is_refused(tokenizer, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    checker = GrammarChecker(tmp_path, tokenizer)
    with pytest.raises(InvalidRequest, match="allows no structured output"):
        await checker.check('start: "a"', "grammar")


async def test_a_grammar_that_is_too_long_is_refused_before_it_is_looked_up():
    class Long(str):
        def __hash__(self) -> int:
            raise AssertionError("a long grammar is hashed")

    checker = GrammarChecker(DEMO_MODEL, CountedThreads())
    with pytest.raises(InvalidRequest, match="the limit is"):
        await checker.check(Long("x" * (MAX_GRAMMAR_CHARS + 1)), "grammar")


def with_properties(count: int, required: Sequence[int] = ()) -> dict[str, object]:
    """A schema of an object, some of whose properties are required."""
    return {
        "type": "object",
        "properties": {f"p{place}": {"type": "string"} for place in range(count)},
        "required": [f"p{place}" for place in required],
        "additionalProperties": False,
    }


MANY = with_properties(3000)
CALL = f'start: call\ncall: "x" %json {json.dumps(MANY)}'


@pytest.mark.parametrize(
    "grammar",
    [
        json_schema_grammar(MANY),
        json_schema_grammar(with_properties(MAX_OPTIONAL_PROPERTIES + 1)),
        json_schema_grammar({"type": "array", "items": MANY}),
        json_schema_grammar({"$defs": {"a": MANY}, "$ref": "#/$defs/a"}),
        json_schema_grammar({"properties": {"enum": MANY}}),
        json.dumps({"grammars": [{"json_schema": MANY}]}),
        CALL,
    ],
)
async def test_too_many_optional_properties_are_refused_before_compiling(
    tokenizer, monkeypatch, grammar
):
    monkeypatch.setattr("gateway.grammars.grammar_checker.LLMatcher", None)
    checker = GrammarChecker(DEMO_MODEL, tokenizer)
    with pytest.raises(InvalidRequest, match="optional properties in a row; the limit is"):
        await checker.check(grammar, "response_format")


@pytest.mark.parametrize(
    "schema",
    [
        with_properties(MAX_OPTIONAL_PROPERTIES),
        with_properties(3000, range(3000)),
        with_properties(2000, range(0, 2000, 2)),
        {"enum": [MANY]},
    ],
)
async def test_what_passes_can_be_followed_past_its_first_brace(tokenizer, schema):
    grammar = json_schema_grammar(schema)
    await GrammarChecker(DEMO_MODEL, tokenizer).check(grammar, "response_format")
    matcher = LLMatcher(VOCABULARY, grammar, log_level=0)
    matcher.try_consume_tokens(VOCABULARY.tokenize_str("{"))
    assert not matcher.is_error()


async def test_a_limit_that_shows_in_the_first_tokens_is_the_caller_s_fault(tokenizer):
    objects = [
        {
            "type": "object",
            "properties": {f"{letter}{place}": {} for place in range(100)},
            "additionalProperties": False,
        }
        for letter in "abcdefghij"
    ]
    checker = GrammarChecker(DEMO_MODEL, tokenizer)
    with pytest.raises(InvalidRequest, match="items; max is") as caught:
        await checker.check(json_schema_grammar({"anyOf": objects}), "response_format")
    assert caught.value.status == 400


FAR = {
    "$defs": {f"d{place}": {"items": {"$ref": f"#/$defs/d{place + 1}"}} for place in range(2000)},
    "$ref": "#/$defs/d0",
}


@pytest.mark.parametrize(
    "grammar",
    [
        json_schema_grammar(FAR),
        f'start: "a" | call\ncall: "x" %json {json.dumps(FAR)} "y"',
        structural_tag_grammar(
            {"structures": [{"begin": "<a>", "schema": FAR, "end": "</a>"}], "triggers": ["<a"]},
            "response_format",
            lambda text: None,
        ),
    ],
    ids=["alone", "call", "tag"],
)
async def test_a_schema_that_leads_too_far_is_refused_before_compiling(
    tokenizer, monkeypatch, grammar
):
    monkeypatch.setattr("gateway.grammars.grammar_checker.LLMatcher", None)
    checker = GrammarChecker(DEMO_MODEL, tokenizer)
    with pytest.raises(InvalidRequest, match="nests too deeply: more than 500 levels"):
        await checker.check(grammar, "response_format")


CLASH = {
    "type": "object",
    "properties": {"foo": {"type": "string"}},
    "patternProperties": {"^foo$": {"type": "integer"}},
    "additionalProperties": False,
    "minProperties": 1,
}


def behind(schema: dict[str, object], depth: int) -> dict[str, object]:
    """An object that has a schema several properties deep."""
    for number in range(depth):
        name = f"a_property_with_a_long_name_{number}"
        schema = {"type": "object", "properties": {name: schema}, "required": [name]}
    return schema


@pytest.mark.parametrize("depth", [0, 1, 3])
async def test_a_dead_end_is_found_when_a_grammar_is_compiled(tokenizer, depth, monkeypatch):
    monkeypatch.setattr("gateway.grammars.grammar_checker._WALK_S", 60.0)  # the machine may be full
    checker = GrammarChecker(DEMO_MODEL, tokenizer)
    with pytest.raises(InvalidRequest, match="dead end") as caught:
        await checker.check(json_schema_grammar(behind(CLASH, depth)), "schema")
    assert "NoExtensionBias" not in caught.value.message
    await checker.check(json_schema_grammar(behind({"type": "string"}, depth)), "schema")
