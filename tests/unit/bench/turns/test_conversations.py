"""Conversations of a benchmark: they fit into the context, and repeat."""

from __future__ import annotations

import json

import pytest

from bench.turns.conversations import (
    ANSWER_TOKENS,
    HISTORY_TOKENS,
    NEW_TOKENS,
    WRAP_TOKENS,
    Conversation,
    agent_sessions,
    six_turns,
)


def longest(conversation: Conversation) -> int:
    """The most tokens that a prompt has with its answer."""
    most = history = 0
    for turn in conversation.turns:
        kept = history if turn.kept_tokens is None else min(history, turn.kept_tokens)
        history = kept + turn.new_tokens + turn.answer_tokens
        most = max(most, history)
    return most


def test_six_turns_have_the_lengths_that_they_should() -> None:
    for each in six_turns(20, 1 << 20, seed=1):
        first, *later = each.turns
        assert HISTORY_TOKENS[0] <= first.new_tokens <= HISTORY_TOKENS[1]
        assert len(later) == 5
        assert all(NEW_TOKENS[0] <= turn.new_tokens <= NEW_TOKENS[1] for turn in later)
        answers = [turn.answer_tokens for turn in each.turns]
        assert all(ANSWER_TOKENS[0] <= length <= ANSWER_TOKENS[1] for length in answers)


def test_conversations_are_shortened_to_the_context() -> None:
    for each in six_turns(20, 2048, seed=1):
        assert longest(each) <= 2048 - 6 * WRAP_TOKENS
    assert six_turns(3, 2048, seed=1) == six_turns(3, 2048, seed=1)


def test_the_text_has_as_many_words_as_the_turn_needs() -> None:
    (each,) = six_turns(1, 1 << 20, seed=1)
    text = each.text(0, words_per_token=0.5)
    assert len(text.split()) == round(0.5 * each.turns[0].new_tokens)
    assert text == each.text(0, words_per_token=0.5)
    assert text != each.text(1, words_per_token=0.5)


def session(*requests: tuple[int, int, list[list[int]]]) -> str:
    listed = [{"in": size, "out": out, "blocks": blocks} for size, out, blocks in requests]
    return json.dumps({"id": "s", "requests": listed})


def test_a_session_grows_by_what_each_request_adds() -> None:
    line = session((640, 30, [[1, 10]]), (1000, 64, [[1, 15]]), (2000, 8, [[1, 31]]))
    (each,) = agent_sessions([session((64, 1, [[1, 1]])), line], 1, 1 << 20, seed=0)
    assert [turn.new_tokens for turn in each.turns] == [640, 330, 936]
    assert [turn.answer_tokens for turn in each.turns] == [30, 64, 8]
    assert [turn.kept_tokens for turn in each.turns] == [None, None, None]


def test_a_prompt_without_blocks_repeats_all_if_it_grew() -> None:
    sizes = [(640, 30), (None, None), (1000, 10), (300, 10)]  # the second one failed
    requests = [{"in": size, "out": out} for size, out in sizes]
    (each,) = agent_sessions([json.dumps({"requests": requests})], 1, 1 << 20, seed=0)
    assert [turn.kept_tokens for turn in each.turns] == [None, None, 0]
    assert [turn.new_tokens for turn in each.turns] == [640, 330, 300]


def test_a_compacted_history_keeps_what_both_prompts_share() -> None:
    line = session((6400, 100, [[1, 100]]), (1280, 10, [[1, 10], [200, 10]]))
    (each,) = agent_sessions([line], 1, 1 << 20, seed=0)
    assert each.turns[1].kept_tokens == 650
    assert each.turns[1].new_tokens == 630
    (scaled,) = agent_sessions([line], 1, 1024, seed=0)
    assert longest(scaled) <= 1024
    first, second = scaled.turns
    assert second.kept_tokens is not None
    assert second.kept_tokens / first.new_tokens == pytest.approx(0.1, abs=0.02)
