"""Grammars from requests: what they allow, and what is said of those that cannot be compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from protocol.errors import InvalidRequest
from protocol.sampling import MAX_GRAMMAR_CHARS
from router.text.grammar import (
    GrammarChecker,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    json_schema_part,
    lark_grammar,
    regex_grammar,
    text_part,
)
from router.text.tokenizer import Tokenizer
from tests.paths import DEMO_MODEL

VOCABULARY = LLTokenizer(str(DEMO_MODEL / "tokenizer.json"))
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_allowed(grammar: str, text: str) -> bool:
    """Whether `text` is a whole text of the grammar."""
    matcher = LLMatcher(VOCABULARY, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(VOCABULARY.tokenize_str(text)) and matcher.is_accepting()


def test_json_is_that_of_the_schema_and_compact():
    grammar = json_schema_grammar(PERSON)
    assert is_allowed(grammar, '{"name":"Ada","age":36}')
    assert not is_allowed(grammar, '{"name": "Ada", "age": 36}')
    assert not is_allowed(grammar, '{"name":"Ada"}')
    assert not is_allowed(grammar, '{"name":"Ada","age":-1}')


def test_a_schema_may_ask_for_whitespace():
    grammar = json_schema_grammar(PERSON | {"x-guidance": {"whitespace_flexible": True}})
    assert is_allowed(grammar, '{"name": "Ada", "age": 36}')


def test_any_json_object():
    assert is_allowed(json_object_grammar(), '{"a":[1,{"b":null}]}')
    assert not is_allowed(json_object_grammar(), "[1]")


def test_parts_make_one_grammar():
    grammar = f"start: {text_part('<call>')} {json_schema_part(PERSON)} {text_part('</call>')}"
    assert is_allowed(grammar, '<call>{"name":"Ada","age":36}</call>')
    assert not is_allowed(grammar, '{"name":"Ada","age":36}')


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"])), min_size=1))
@example(["a\nb", 'q"\\', "é\u2028", "/", "a/b", "%json", "\t\r"])
def test_a_choice_is_exactly_one_of_the_texts(choices):
    grammar = choice_grammar(choices)
    for choice in choices:
        assert is_allowed(grammar, choice)
        assert not is_allowed(grammar, choice + "#") or choice + "#" in choices


def test_a_regular_expression_matches_the_whole_text():
    grammar = regex_grammar(r"\d{3}-(ab|c/d)+")
    assert is_allowed(grammar, "123-abc/d")
    assert not is_allowed(grammar, "123-")


def test_gbnf_is_rewritten_and_lark_is_not():
    assert is_allowed(lark_grammar('root ::= "a" [0-9]+', "grammar"), "a42")
    assert lark_grammar('start: "a"', "grammar") == 'start: "a"'
    with pytest.raises(InvalidRequest, match=r"'structured_outputs.grammar' is not valid GBNF"):
        lark_grammar("root ::= (", "structured_outputs.grammar")


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
