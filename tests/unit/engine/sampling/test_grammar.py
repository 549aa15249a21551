"""Matchers follow an output, can be rebuilt from it, and fail alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence as Seq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from engine.sampling.grammar import Grammars
from engine.sampling.grammar_matcher import GrammarLimits, GrammarMatcher, TokenMask
from protocol.messages import FinishReason
from protocol.sampling import SamplingParams
from scheduling.sequence import Sequence
from tests.paths import DEMO_MODEL
from tests.sequences import sequence_of

TOKENIZER = DEMO_MODEL / "tokenizer.json"
VOCAB, END = 2048, 2047
TOKENS = LLTokenizer(str(TOKENIZER))
PATIENT = GrammarLimits(step_s=60.0)
GRAMMARS = Grammars(TOKENIZER, VOCAB, (END,), PATIENT)
OBJECT = """start: %json {"type": "object", "properties": {"a": {"type": "string"},
"b": {"type": "array", "items": {"type": "integer"}}}, "x-guidance": {"whitespace_flexible": false},
"required": ["a"], "additionalProperties": false}"""


def allowed_ids(mask: TokenMask | None) -> set[int]:
    assert mask is not None
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def allowed_by(matcher: GrammarMatcher) -> set[int]:
    return allowed_ids(mask_of(matcher))


def mask_of(matcher: GrammarMatcher) -> TokenMask | None:
    matcher.wait()
    matcher.follower.wait_for_masks([matcher])
    return matcher.mask


def ids(text: str) -> list[int]:
    return TOKENS.tokenize_str(text)


def sequence(grammar: str, output: Seq[int] = (), **params: object) -> Sequence:
    fields = {"max_tokens": 50, "seed": 0, "stop_token_ids": (END,), "grammar": grammar} | params
    matcher = GRAMMARS.matcher(grammar, output)
    tokens = [1, 2, 3, *output]
    return sequence_of(tokens, SamplingParams(**fields), 4, num_prompt=3, grammar=matcher)


def test_a_mask_allows_exactly_what_may_follow_and_the_end_only_where_it_is_complete():
    matcher = GRAMMARS.matcher("start: /[ab]{2,3}/", [])
    assert allowed_by(matcher) >= set(ids("a") + ids("b"))
    assert END not in allowed_by(matcher)
    assert not matcher.advance(ids("a")[0])
    assert END not in allowed_by(matcher)
    assert not matcher.advance(ids("b")[0])
    assert allowed_by(matcher) == {*ids("a"), *ids("b"), END}


@given(st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_any_worker_that_knows_the_output_is_in_the_same_state(seed: int):
    rng = random.Random(seed)
    matcher = GRAMMARS.matcher(OBJECT, [])
    output: list[int] = []
    for _ in range(12):
        allowed = allowed_by(matcher)
        assert allowed_by(GRAMMARS.matcher(OBJECT, output)) == allowed
        output.append(rng.choice(sorted(allowed)))
        if matcher.advance(output[-1]):
            break


def test_a_sequence_stops_where_nothing_can_follow_even_before_its_shortest_length():
    assert sequence('start: "a"', min_tokens=9).append(ids("a")[0]) is FinishReason.STOP
    longer = sequence("start: /a+/", max_tokens=2)
    assert longer.append(ids("a")[0]) is None
    assert ids("a")[0] in allowed_by(longer.grammar)
    assert longer.append(ids("a")[0]) is FinishReason.LENGTH


def test_the_end_of_text_ends_a_complete_grammar_though_it_is_no_stop_token():
    endless = sequence("start: /a*/", stop_token_ids=())
    assert endless.append(END) is FinishReason.STOP


def test_after_a_complete_output_only_the_end_may_come():
    assert allowed_by(GRAMMARS.matcher('start: "a"', ids("a"))) == {END}


@pytest.mark.parametrize(
    ("grammar", "output", "message"),
    [
        ("start: <|nothing|>", [], "unknown special token"),
        ('start: "a"', ids("b"), "doesn't satisfy the grammar"),
    ],
)
def test_a_matcher_that_fails_has_no_mask_and_says_why(grammar, output, message):
    good, bad = GRAMMARS.matcher('start: "a"', []), GRAMMARS.matcher(grammar, output)
    assert mask_of(bad) is None
    assert message in bad.error
    assert "\n" not in bad.error
    assert allowed_by(good) == set(ids("a"))
    assert good.error == ""


@pytest.mark.parametrize("vocab_size", [2040, 2048, 2100])
def test_the_models_vocabulary_may_differ_from_the_tokenizers(vocab_size: int):
    grammars = Grammars(TOKENIZER, vocab_size, (END,))
    mask = mask_of(grammars.matcher("start: /(.|\\n)*/", []))
    assert mask is not None
    assert len(mask) == -(-vocab_size // 32)
    assert max(allowed_ids(mask)) < 2048


def test_who_waits_is_woken_when_a_grammar_is_ready_and_no_more_after_the_end():
    grammars = Grammars(TOKENIZER, VOCAB, (END,))
    ready: list[bool] = []
    woken = threading.Event()
    grammars.wake = woken.set
    matcher = grammars.matcher(OBJECT, [])
    assert woken.wait(60)
    ready.append(matcher.is_ready)
    grammars.close()
    assert ready == [True]
    with pytest.raises(RuntimeError):
        grammars.matcher(OBJECT, [])


def test_more_grammars_than_are_kept():
    for number in range(300):
        matcher = GRAMMARS.matcher(f'start: "{number}"', ids(str(number)))
        matcher.wait()
        assert matcher.error == ""
