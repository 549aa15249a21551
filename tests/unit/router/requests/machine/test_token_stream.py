"""Tokens in order, whatever comes twice, late or early."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ProtocolError
from protocol.messages import FinishReason
from protocol.sampling import PromptLogprobs, TokenLogprobs
from router.requests.machine.token_stream import Piece, TokenPiece, TokenStream
from tests.effort import times


def piece(index: int, *token_ids: int, finish: FinishReason | None = None) -> Piece:
    return TokenPiece(index, list(token_ids), None, finish)


def taken(stream: TokenStream, given: Piece) -> list[int]:
    return [token for each in stream.take(given) for token in each.token_ids]


def started(is_remote: bool = False) -> TokenStream:
    stream = TokenStream()
    stream.start_attempt(is_remote)
    return stream


def test_what_is_known_is_dropped_and_counted() -> None:
    stream = started()
    assert taken(stream, piece(0, 10, 11)) == [10, 11]
    assert taken(stream, piece(0, 10)) == []
    assert taken(stream, piece(1, 11, 12)) == [12]
    assert stream.duplicates == 2
    assert stream.token_ids == [10, 11, 12]


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_hole_is_an_error(is_remote: bool) -> None:
    stream = started(is_remote)
    taken(stream, piece(0, 10))
    with pytest.raises(ProtocolError, match="index 2 arrived where 1 was expected"):
        stream.take(piece(2, 12))


def test_only_the_first_token_of_a_remote_attempt_may_be_overtaken() -> None:
    stream = started(is_remote=True)
    assert taken(stream, piece(1, 11)) == []
    assert taken(stream, piece(2, 12)) == []
    assert stream.held
    with pytest.raises(ProtocolError, match="index 5 arrived where 3 was expected"):
        stream.take(piece(5, 15))
    assert taken(stream, piece(0, 10)) == [10, 11, 12]
    assert not stream.held
    local = started(is_remote=False)
    with pytest.raises(ProtocolError):
        local.take(piece(1, 11))
    early = started(is_remote=True)
    with pytest.raises(ProtocolError, match="index 2 arrived where 1 was expected"):
        early.take(piece(2, 12))


def test_a_new_attempt_forgets_what_the_former_left_waiting() -> None:
    stream = started(is_remote=True)
    taken(stream, piece(1, 11))
    stream.start_attempt(is_remote=False)
    assert not stream.held
    assert taken(stream, piece(0, 10)) == [10]


def test_nothing_comes_after_the_end() -> None:
    stream = started(is_remote=True)
    taken(stream, piece(1, 11, finish=FinishReason.STOP))
    assert stream.finish is None
    fresh = stream.take(piece(0, 10))
    assert [each.finish for each in fresh] == [None, FinishReason.STOP]
    assert stream.finish is FinishReason.STOP
    assert stream.take(piece(2, 12)) == []


def test_an_end_may_come_without_tokens() -> None:
    stream = started()
    taken(stream, piece(0, 10))
    (last,) = stream.take(piece(1, finish=FinishReason.LENGTH))
    assert (last.token_ids, last.finish) == ([], FinishReason.LENGTH)


def test_logprobs_must_fit_their_tokens() -> None:
    with pytest.raises(ProtocolError, match="2 tokens came with 1 log-probabilities"):
        started().take(TokenPiece(0, [1, 2], [TokenLogprobs(logprob=-1.0)], None))


@settings(max_examples=times(80, 200), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=40), st.booleans())
def test_the_output_is_always_a_prefix_of_the_truth(script, is_remote: bool) -> None:
    """Whatever pieces of one true output arrive, in whatever order and however often."""
    truth = list(range(100, 140))
    stream = started(is_remote)
    delivered: list[int] = []
    for index, length in script:
        try:
            delivered += taken(stream, piece(index, *truth[index : index + length]))
        except ProtocolError:
            assert index > len(delivered)
    assert delivered == stream.token_ids == truth[: len(delivered)]


def scored(index: int, *token_ids: int, told: PromptLogprobs | None) -> Piece:
    return TokenPiece(index, list(token_ids), None, None, told)


TOLD = PromptLogprobs(0, bytes(8), bytes(8), b"", b"")


def test_what_is_told_of_the_prompt_comes_once_with_the_first_token() -> None:
    stream = TokenStream(scored_prompt=3)
    stream.start_attempt(is_remote=True)
    assert stream.take(scored(1, 11, told=None)) == []
    given = [*stream.take(scored(0, 10, told=TOLD)), *stream.take(scored(0, 10, told=TOLD))]
    stream.start_attempt(is_remote=False)
    given += stream.take(scored(1, 11, 12, told=None))
    assert [each.token_ids for each in given] == [[10], [11], [12]]
    assert [each.prompt_logprobs for each in given] == [TOLD, None, None]


@pytest.mark.parametrize("told", [None, PromptLogprobs(0, bytes(4), bytes(4), b"", b"")])
def test_a_first_token_without_what_was_asked_of_the_prompt_is_an_error(
    told: PromptLogprobs | None,
) -> None:
    stream = TokenStream(scored_prompt=3)
    stream.start_attempt(is_remote=False)
    with pytest.raises(ProtocolError, match="the prompt's log-probabilities"):
        stream.take(scored(0, 10, told=told))
    assert stream.token_ids == []


@pytest.mark.parametrize("index", [0, 2])
def test_more_tokens_than_were_asked_for_are_an_error(index: int) -> None:
    stream = TokenStream(max_tokens=3)
    stream.start_attempt(is_remote=False)
    taken(stream, piece(0, 10, 11))
    with pytest.raises(ProtocolError, match="more tokens came than the 3"):
        stream.take(piece(index, 10, 11, 12, 13))
