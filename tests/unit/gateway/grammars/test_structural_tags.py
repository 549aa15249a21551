"""Structural tags: what the grammars allow behind triggers of text and of single tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as HfTokenizer

from gateway.grammars.structural_tags import structural_tag_grammar
from tests.paths import DEMO_MODEL

SPECIAL = ("[CALL]", "<|call|>")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize("trigger", ["<f=", *SPECIAL])
def test_a_trigger_begins_json_of_the_schema(tmp_path: Path, trigger: str) -> None:
    raw = HfTokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    raw.add_special_tokens(list(SPECIAL))
    raw.save(str(tmp_path / "tokenizer.json"))
    vocabulary = LLTokenizer(str(tmp_path / "tokenizer.json"), slices=[])
    tag = {"begin": f"{trigger}x>", "schema": SCHEMA, "end": "</f>"}
    wanted = {"structures": [tag], "triggers": [trigger]}
    special = {each: raw.token_to_id(each) for each in SPECIAL}
    grammar = structural_tag_grammar(wanted, "response_format", special.get)

    def is_allowed(text: str) -> bool:
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = raw.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert is_allowed("no tag")
    assert is_allowed(f'text {trigger}x>{{"a":1}}</f> and {trigger}x>{{"a":2}}</f>')
    assert not is_allowed(f'{trigger}x>{{"a":"1"}}</f>')
    assert not is_allowed(f"{trigger}y>")
