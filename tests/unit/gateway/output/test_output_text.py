"""From tokens to the text a client sees, with its log-probabilities."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.output.output_text import OutputText, StopRules, TextDelta
from gateway.text.reasoning_end import ThoughtMarkers
from protocol.messages import FinishReason
from router.requests.interface import TokenDelta
from tests.unit.gateway.api_harness import fake_logprobs

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
END = 1


def play(
    tokenizer, ids, stop=None, finish=LENGTH, chunk=1, thoughts=None, **options
) -> list[TextDelta]:
    """Pushes ids in deltas of `chunk` tokens until the output is finished."""
    output = OutputText(tokenizer.detokenizer(**options), stop or StopRules(), thoughts)
    out: list[TextDelta] = []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        is_last = start + chunk >= len(ids)
        logprobs = [fake_logprobs(id_, 0) for id_ in part]
        out.append(output.push(TokenDelta(part, logprobs, finish if is_last else None)))
        if out[-1].finish:
            break
    return out


def text_of(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def reported(deltas: list[TextDelta]) -> list[int]:
    return [token.token_id for delta in deltas for token in delta.tokens]


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_a_stop_string_across_tokens_ends_text_and_tokens(tokenizer, chunk):
    ids = tokenizer.encode("one two three", add_special_tokens=False)
    deltas = play(tokenizer, ids, StopRules(strings=("e tw",)), chunk=chunk)
    assert text_of(deltas) == "on"
    assert deltas[-1].finish is STOP
    counted = sum(len(delta.token_ids) for delta in deltas)
    assert reported(deltas) == ids[:counted], "one entry for each token, also behind the stop"
    assert "e tw" in tokenizer.decode(ids[:counted])
    assert "e tw" not in tokenizer.decode(ids[: counted - 1])


@pytest.mark.parametrize(
    ("stop", "finish", "reason"),
    [
        (StopRules(strings=("tw", "zz")), LENGTH, "tw"),
        (StopRules(token_ids=frozenset([END, 5]), named=frozenset([END])), STOP, END),
        (StopRules(token_ids=frozenset([END, 5]), named=frozenset([5])), STOP, None),
        (StopRules(named=frozenset([END])), LENGTH, None),
        (StopRules(("tw",), frozenset([END]), frozenset([END])), STOP, "tw"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 100])
def test_what_ended_a_text_is_known_if_somebody_named_it(tokenizer, stop, finish, reason, chunk):
    ids = [*tokenizer.encode("one two", add_special_tokens=False), END]
    output = OutputText(tokenizer.detokenizer(), stop)
    parts = [ids[start : start + chunk] for start in range(0, len(ids), chunk)]
    for place, part in enumerate(parts, 1):
        assert output.stop_reason is None
        if output.push(TokenDelta(part, None, finish if place == len(parts) else None)).finish:
            break
    assert output.stop_reason == reason


THOUGHTS = ThoughtMarkers("<think>", "</think>", is_open=False)
OPEN = ThoughtMarkers("<think>", "</think>", is_open=True)


@given(
    text=st.text(st.sampled_from("abé "), min_size=1, max_size=12),
    stop=st.sampled_from([(), ("b",), ("ab", "é "), ("never",)]),
    thoughts=st.sampled_from([None, THOUGHTS, OPEN]),
    chunk=st.integers(1, 4),
    ending=st.sampled_from([(STOP, False), (STOP, True), (LENGTH, False)]),
)
def test_token_ids_and_log_probabilities_have_equal_length(
    tokenizer, text, stop, thoughts, chunk, ending
):
    finish, shows_end = ending
    ids = [*tokenizer.encode(text, add_special_tokens=False), *([END] if finish is STOP else [])]
    rules = StopRules(stop, frozenset([END]), include_in_output=shows_end)
    deltas = play(tokenizer, ids, rules, finish, chunk, thoughts)
    counted = [id_ for delta in deltas for id_ in delta.token_ids]
    assert counted == ids[: len(counted)]
    assert reported(deltas) == counted
    end = len(text_of(deltas))
    tokens = [token for delta in deltas for token in delta.tokens]
    assert all(token.start <= token.end for token in tokens)
    assert deltas[-1].finish is not LENGTH or all(token.end <= end for token in tokens)


@pytest.mark.parametrize("chunk", [1, 2, 100])
@pytest.mark.parametrize(
    ("thoughts", "before", "num_thoughts"),
    [
        (THOUGHTS, "<think>a stop</think>", 21),
        (THOUGHTS, " <think>a stop</think>", 22),
        (OPEN, "a stop</think>", 14),
        (OPEN, "<think>a stop</think>", 21),
        (THOUGHTS, "", 0),
        (THOUGHTS, "<thi", 0),
        (None, "", None),
    ],
)
def test_stop_strings_count_in_the_answer_alone(tokenizer, thoughts, before, num_thoughts, chunk):
    text = f"{before}a</think> but stop it"
    ids = [each for c in text for each in tokenizer.encode(c, add_special_tokens=False)]
    output = OutputText(tokenizer.detokenizer(), StopRules(("stop",)), thoughts)
    shown = ""
    for start in range(0, len(ids), chunk):
        delta = output.push(TokenDelta(ids[start : start + chunk]))
        shown += delta.text
        if delta.finish:
            break
    assert (shown, output.matched_stop) == (f"{before}a</think> but ", "stop")
    assert output.reasoning_tokens == num_thoughts


@pytest.mark.parametrize("finish", [STOP, LENGTH])
def test_what_may_become_a_marker_is_shown_at_the_end(tokenizer, finish):
    ids = [*tokenizer.encode("<thi", add_special_tokens=False), *([END] if finish is STOP else [])]
    rules = StopRules(("i",), frozenset([END]))
    deltas = play(tokenizer, ids, rules, finish, thoughts=THOUGHTS)
    assert text_of(deltas) == "<th", "which is an answer, and so has stop strings"


@given(data=st.data(), text=st.text(max_size=30), chunk=st.integers(1, 4))
def test_reported_tokens_cover_the_text_exactly(tokenizer, data, text, chunk):
    """Without a stop every token is reported once, in order, never before its text is out."""
    ids = tokenizer.encode("x" + text, add_special_tokens=False)
    never = data.draw(st.sampled_from([(), ("\x00never",), ("xx\x01", "y\x01")]))
    emitted = 0
    deltas = play(tokenizer, ids, StopRules(strings=never), chunk=chunk, skip_special_tokens=False)
    for delta in deltas:
        emitted += len(delta.text)
        assert all(token.end <= emitted for token in delta.tokens)
    if deltas[-1].finish is LENGTH:
        assert reported(deltas) == ids
        assert text_of(deltas) == "x" + text


def test_the_ending_token_has_no_text_but_counts(tokenizer):
    ids = [*tokenizer.encode("one", add_special_tokens=False), END]
    deltas = play(
        tokenizer, ids, StopRules(token_ids=frozenset([END])), STOP, skip_special_tokens=False
    )
    assert text_of(deltas) == "one"
    assert reported(deltas) == ids
    assert [id_ for delta in deltas for id_ in delta.token_ids] == ids


def test_the_ending_token_is_shown_if_asked_for(tokenizer):
    ids = [*tokenizer.encode("one", add_special_tokens=False), END]
    stop = StopRules(token_ids=frozenset([END]), include_in_output=True)
    assert text_of(play(tokenizer, ids, stop, STOP, skip_special_tokens=False)) == "one<|end|>"


def test_a_token_at_the_limit_that_could_have_ended_keeps_its_text(tokenizer):
    ids = tokenizer.encode("one", add_special_tokens=False)
    stop = StopRules(token_ids=frozenset(ids))
    assert text_of(play(tokenizer, ids, stop, LENGTH)) == "one"


def test_stop_strings_wait_for_the_least_number_of_tokens(tokenizer):
    ids = [tokenizer.encode(each, add_special_tokens=False)[0] for each in "abab"]
    assert text_of(play(tokenizer, ids, StopRules(strings=("b",), min_tokens=2))) == "a"
    assert text_of(play(tokenizer, ids, StopRules(strings=("b",), min_tokens=3))) == "aba"


def test_what_was_held_back_comes_at_the_end(tokenizer):
    ids = tokenizer.encode("one tw", add_special_tokens=False)
    deltas = play(tokenizer, ids, StopRules(strings=("two",)))
    assert text_of(deltas) == "one tw"
    assert deltas[-1].finish is LENGTH


def test_half_a_character_at_the_end_is_one_replacement(tokenizer):
    ids = tokenizer.encode("ab\u0416", add_special_tokens=False)
    assert tokenizer.token_bytes(ids[-1]) == "\u0416".encode()[1:]
    assert text_of(play(tokenizer, ids[:-1])) == "ab\ufffd"


def test_an_end_without_tokens_is_an_end(tokenizer):
    output = OutputText(tokenizer.detokenizer(), StopRules(strings=("zz",)))
    first = output.push(TokenDelta(tokenizer.encode("z", add_special_tokens=False)))
    last = output.push(TokenDelta([], finish=LENGTH))
    assert (first.text, last.text, last.finish) == ("", "z", LENGTH)
