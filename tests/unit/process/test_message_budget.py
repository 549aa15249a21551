"""Messages go out at once while they are rare, and evenly spread while they are many."""

from __future__ import annotations

from itertools import pairwise

import pytest

from process.sockets.message_budget import MessageBudget


def times_of(num_messages: int, gap_s: float, budget: MessageBudget) -> list[float]:
    """When messages are sent that are there every `gap_s`, each as soon as it may be."""
    sent, allowed = [], 0.0
    for number in range(num_messages):
        now = max(number * gap_s, allowed)
        sent.append(now)
        allowed = budget.spend(now)
    return sent


def test_rare_messages_do_not_wait() -> None:
    sent = times_of(50, 0.03, MessageBudget(0.02, 10))
    assert sent == [number * 0.03 for number in range(50)]


def test_a_burst_goes_out_at_once_and_the_rest_evenly() -> None:
    sent = times_of(40, 0.0, MessageBudget(0.02, 10))
    assert sent[:10] == [0.0] * 10
    gaps = [later - former for former, later in pairwise(sent[9:])]
    assert gaps == pytest.approx([0.02] * 30)


def test_a_pause_earns_a_new_burst() -> None:
    budget = MessageBudget(0.02, 10)
    times_of(40, 0.0, budget)
    allowed = [budget.spend(100.0) for _ in range(10)]
    assert allowed[:9] == pytest.approx([100.0] * 9)
    assert allowed[9] == pytest.approx(100.02)
