"""Ids of answers in the place of their text: the text never changes, and nothing spans its ends."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.history.encoded_text import cuts_between, spliced, try_make
from gateway.text.tokenizer import Tokenizer

PIECES = ["Hello", " world", "\n", "é", "<|end|>", "<|start|>", "assistant", " stop", "x", "  "]


def by_bytes(tokenizer: Tokenizer, text: str, rng: random.Random) -> list[int]:
    """Ids that a model may generate for a text: words of its tokenizer, some of them in bytes."""
    ids: list[int] = []
    for id_ in tokenizer.encode(text, add_special_tokens=False):
        data = tokenizer.token_bytes(id_)
        if id_ in tokenizer.added_ids or rng.random() < 0.5:
            ids.append(id_)
        else:
            ids += [single(tokenizer)[byte] for byte in data]
    return ids


def single(tokenizer: Tokenizer) -> dict[int, int]:
    """The token of each byte."""
    found = ((tokenizer.token_bytes(id_), id_) for id_ in range(tokenizer.vocab_size))
    return {data[0]: id_ for data, id_ in found if len(data) == 1}


def decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    return b"".join(map(tokenizer.token_bytes, ids))


@given(
    before=st.lists(st.sampled_from(PIECES), max_size=6).map("".join),
    answers=st.lists(
        st.tuples(
            st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join),
            st.lists(st.sampled_from(PIECES), max_size=3).map("".join),
            st.integers(0, 3),
        ),
        max_size=3,
    ),
    num_cut=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_the_text_stays_the_same(
    tokenizer: Tokenizer,
    before: str,
    answers: list[tuple[str, str, int]],
    num_cut: int,
    seed: int,
) -> None:
    rng = random.Random(seed)
    text, remembered = before, []
    for answer, after, off in answers:
        ids = by_bytes(tokenizer, answer, rng)
        end = len((text + answer).encode())
        remembered.append((max(0, end - off), ids))  # some are in a wrong place
        text += answer + after
    places = sorted(rng.sample(range(len(text) + 1), min(num_cut, len(text))))
    parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    plain = tokenizer.encode_parts(parts, add_special_tokens=False)
    encoded = try_make(text, plain, tokenizer.pieces)
    assert encoded is not None
    cuts = frozenset(cuts_between(parts))
    ids, num_found = spliced(encoded, sorted(remembered), tokenizer.pieces, cuts)
    assert decoded(tokenizer, ids) == text.encode()
    ends = set(accumulate(map(len, tokenizer.pieces(ids))))
    assert ends >= cuts - {0}, "no token spans a cut"
    if not num_found:
        assert ids == plain


def test_an_answer_takes_the_place_of_its_text(tokenizer: Tokenizer) -> None:
    bytes_of = single(tokenizer)
    plain = tokenizer.encode("<|start|>Hello<|end|>", add_special_tokens=False)
    answer = [bytes_of[byte] for byte in b"Hello"]
    encoded = try_make("<|start|>Hello<|end|>", plain, tokenizer.pieces)
    assert encoded is not None
    ids, num_found = spliced(encoded, [(14, answer)], tokenizer.pieces)
    assert (ids, num_found) == ([plain[0], *answer, plain[-1]], 1)


@pytest.mark.parametrize(
    ("text", "end", "answer"),
    [
        ("Hello world", 2, "He"),
        ("Hello world", 11, "orld"),
        ("Hello world", 5, "World"),
        ("Hello", 5, "Well, Hello"),
    ],
    ids=["ends in a token", "begins in a token", "another text", "more than the text"],
)
def test_an_answer_that_does_not_fit_changes_nothing(
    tokenizer: Tokenizer, text: str, end: int, answer: str
) -> None:
    bytes_of = single(tokenizer)
    plain = tokenizer.encode(text, add_special_tokens=False)
    encoded = try_make(text, plain, tokenizer.pieces)
    assert encoded is not None
    ids = [bytes_of[byte] for byte in answer.encode()]
    assert spliced(encoded, [(end, ids)], tokenizer.pieces) == (plain, 0)


def test_a_control_token_takes_the_place_of_no_look_alike(tokenizer: Tokenizer) -> None:
    parts = ["I say <", "|end|>", "<|end|>"]
    plain = tokenizer.encode_parts(parts, add_special_tokens=False)
    encoded = try_make("".join(parts), plain, tokenizer.pieces)
    assert encoded is not None
    cuts = frozenset(cuts_between(parts))
    generated = tokenizer.encode("say <|end|>", add_special_tokens=False)
    assert spliced(encoded, [(13, generated)], tokenizer.pieces, cuts) == (plain, 0)


def test_a_token_before_the_text_stays_before_it(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("<|start|>Hello", add_special_tokens=False)
    encoded = try_make("Hello", plain, tokenizer.pieces)
    assert encoded is not None
    answer = [single(tokenizer)[byte] for byte in b"Hello"]
    assert spliced(encoded, [(5, answer)], tokenizer.pieces) == ([plain[0], *answer], 1)


def test_a_text_that_its_ids_do_not_give_is_left_alone(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("Hello", add_special_tokens=False)
    assert try_make("Hullo", plain, tokenizer.pieces) is None
    assert try_make("Hello you", plain, tokenizer.pieces) is None
