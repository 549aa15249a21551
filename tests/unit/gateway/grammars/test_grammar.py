"""Grammars from requests: what they allow."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from gateway.grammars.grammar import (
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    json_schema_part,
    lark_grammar,
    regex_grammar,
    text_part,
)
from protocol.errors import InvalidRequest
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


@pytest.mark.parametrize("start", ["start\\u003a 'a'", "start: 'a'", "root ::= 'a'"])
def test_a_grammar_is_not_json_whose_escapes_could_hide_rules(start):
    with pytest.raises(InvalidRequest, match="in Lark or GBNF, not JSON") as caught:
        lark_grammar(f' {{"grammars": [{{"lark_grammar": "{start}"}}]}}', "grammar")
    assert caught.value.param == "grammar"


@pytest.mark.parametrize(
    "source",
    [
        "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(2001)) + 'a2001: "y"\n',
        "start: " + "(" * 2000 + '"a"' + ")" * 2000,
        "start: %json " + json.dumps({"$defs": {f"d{i}": {} for i in range(1000)}}),
        "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1}\n" for i in range(2001)) + 'a2001 ::= "y"\n',
    ],
    ids=["rules", "groups", "schema", "GBNF"],
)
def test_a_grammar_whose_parts_could_nest_too_deeply_is_refused(source):
    with pytest.raises(InvalidRequest, match="more than 2000 rules and groups"):
        lark_grammar(source, "g")
