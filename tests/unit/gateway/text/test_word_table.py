"""Ids put together from words equal the tokenizer's own."""

from __future__ import annotations

import json
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

import gateway.text.word_table as word_table
from gateway.text.word_table import MAX_NEW_WORDS, PATTERNS, WordTable, make_word_table
from tests.effort import times
from tests.paths import DEMO_MODEL

DEMO = DEMO_MODEL / "tokenizer.json"
ADDED = ("<|im_start|>", "<|im_end|>", "<think>", "<think", "ab")
PIECES = st.one_of(
    st.text(st.characters(max_codepoint=127), max_size=12),
    st.sampled_from((*ADDED, "'s", "'LL", "'", "I've", "\r\n", "  ", " \n ", "1234567", "don't")),
    st.text(st.characters(max_codepoint=0x3000), max_size=3),
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)


def demo(pattern: str | None = None) -> HfTokenizer:
    """The demo model's tokenizer, which finds words as GPT-2's, or by another pattern."""
    tokenizer = HfTokenizer.from_file(str(DEMO))
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, by_bytes])
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in ADDED[2:]])
    return tokenizer


TOKENIZERS = {pattern: demo(pattern) for pattern in sorted(PATTERNS)} | {"own": demo()}


def table_of(tokenizer: HfTokenizer) -> WordTable:
    table = make_word_table(tokenizer)
    assert table is not None
    return table


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=times(20, 150))
@given(text=TEXTS)
def test_every_text_has_the_tokenizer_s_ids(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    encoding = tokenizer.encode(text, add_special_tokens=False)
    one_by_one, by_watching = table_of(tokenizer), table_of(tokenizer)
    found = one_by_one.try_encode(text)
    assert found in (None, encoding.ids)
    if one_by_one.can_encode(text):
        assert by_watching.learn(text, encoding)
        assert by_watching.try_encode(text) == encoding.ids
    else:
        assert found is None


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=times(20, 150))
@given(parts=st.lists(st.one_of(PIECES, st.just("word word")), max_size=12))
def test_a_text_that_is_cut_at_a_seam_has_the_same_ids(name: str, parts: list[str]) -> None:
    tokenizer, text = TOKENIZERS[name], "".join(parts)
    seam = table_of(tokenizer).seam(text, len(text) // 3)
    assert seam is not None or "word word" not in text[len(text) // 3 :]
    if seam is not None:
        assert seam > len(text) // 3
        whole, before, behind = (
            tokenizer.encode(each, add_special_tokens=False).ids
            for each in (text, text[:seam], text[seam:])
        )
        assert before + behind == whole


@pytest.mark.parametrize("place", range(8, 16))
def test_a_seam_is_found_wherever_a_long_search_is_parted(
    monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    monkeypatch.setattr(word_table, "_SEARCH_CHARS", 4)
    text = f"{'.' * place}a b{'.' * 9}"
    assert table_of(demo()).seam(text, 3) == place + 1
    assert table_of(demo()).seam(text, place + 1) is None


def test_with_spaces_in_added_tokens_no_seam_is_certain() -> None:
    tokenizer = demo()
    tokenizer.add_tokens([AddedToken("of the", normalized=False)])
    assert table_of(tokenizer).seam("word word", 0) is None


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_character_that_is_taken_is_classed_as_the_tokenizer_does(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    table = table_of(tokenizer)
    step = times(8, 1)
    tried = map(chr, [*range(0x400), *range(0x400, 0x20000, step)])
    taken = [c for c in tried if table.can_encode(c)]
    assert len(taken) > 45_000 / step
    for start in range(0, len(taken), 500):
        text = "".join(f"e{c}e{c}1{c} {c}. '{c}\n{c}" for c in taken[start : start + 500])
        words = table._words(text)
        spans = tokenizer.pre_tokenizer.pre_tokenize_str(text)
        ends = [end for _, (_, end) in spans]
        assert list(accumulate(map(len, words))) == ends


def test_many_new_words_are_left_to_the_tokenizer_and_then_known() -> None:
    tokenizer = TOKENIZERS["own"]
    table = table_of(tokenizer)
    text = " ".join(f"word{'x' * count}" for count in range(MAX_NEW_WORDS + 1))
    assert table.try_encode(text) is None
    encoding = tokenizer.encode(text)
    assert table.learn(text, encoding)
    assert table.try_encode(text) == encoding.ids


def test_long_words_and_long_texts_are_left_to_the_tokenizer() -> None:
    tokenizer = TOKENIZERS["own"]
    table = table_of(tokenizer)
    for text in ("x" * (word_table.MAX_WORD_CHARS + 1), "a " * word_table.MAX_TEXT_CHARS):
        assert table.try_encode(text) is None
    text = "x" * (word_table.MAX_WORD_CHARS + 1)
    assert table.learn(text, tokenizer.encode(text))
    assert table.try_encode(text) is None


def test_the_number_of_words_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_table, "MAX_WORDS", 50)
    tokenizer = TOKENIZERS["own"]
    table = table_of(tokenizer)
    for number in range(200):
        text = f"n{number}x and more"
        assert table.try_encode(text) == tokenizer.encode(text).ids
        assert len(table._ids) <= 50
        assert number < 60 or len(table._ids) > 40, "the oldest go, not all"
        assert str(number) in table._ids


def test_ids_around_a_text_are_not_taken_for_words() -> None:
    tokenizer = demo()
    spec = json.loads(tokenizer.to_str())
    spec["post_processor"]["single"].insert(
        0, {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    )
    spec["post_processor"]["special_tokens"] = {
        "<|im_start|>": {"id": "<|im_start|>", "ids": [2046], "tokens": ["<|im_start|>"]}
    }
    tokenizer = HfTokenizer.from_str(json.dumps(spec))
    table = table_of(tokenizer)
    encoding = tokenizer.encode("one two", add_special_tokens=True)
    assert encoding.ids[0] == 2046
    assert table.learn("one two", encoding)
    assert table.try_encode("one two") == encoding.ids[1:]


def unknown_pattern() -> HfTokenizer:
    return demo(r"\w+|\W+")


def prefix_space() -> HfTokenizer:
    tokenizer = demo()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def lower_case() -> HfTokenizer:
    tokenizer = demo()
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def greedy_token() -> HfTokenizer:
    tokenizer = demo()
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    return tokenizer


def tokens_of_two_phases() -> HfTokenizer:
    tokenizer = demo()
    tokenizer.add_tokens([AddedToken("tool", normalized=True)])
    return tokenizer


def chance() -> HfTokenizer:
    tokenizer = demo()
    tokenizer.model.dropout = 0.5
    return tokenizer


@pytest.mark.parametrize(
    "make",
    [unknown_pattern, prefix_space, lower_case, greedy_token, tokens_of_two_phases, chance],
)
def test_what_is_not_certain_has_no_table(make) -> None:
    assert make_word_table(make()) is None
