"""What bench.turns is to show, and whether it holds."""

from __future__ import annotations

from bench.turns.accounts import Account, Computed
from bench.turns.contestants import Contestant
from bench.turns.verdicts import verdicts

CONTESTANTS = [
    Contestant("colocated"),
    Contestant("by affinity, no fetching"),
    Contestant("by affinity, fetching", without="by affinity, no fetching"),
    Contestant("by load, no fetching"),
    Contestant("by load, fetching", without="by load, no fetching"),
]


def taking(ttft_ms: float, computed: Computed | None = None) -> Account:
    return Account(computed or Computed(new=100), 100, {("talk", turn): ttft_ms for turn in (1, 2)})


def failing(**accounts: Account) -> list[str]:
    """The sentences that do not hold."""
    named = {name.replace("_", " ").replace("  ", ", "): each for name, each in accounts.items()}
    return [each.text for each in verdicts(named, CONTESTANTS) if not each.holds]


def test_fetching_gains_by_load_and_loses_nothing_by_affinity() -> None:
    good = {
        "by_affinity__no_fetching": taking(100),
        "by_affinity__fetching": taking(104),
        "by_load__no_fetching": taking(300),
        "by_load__fetching": taking(200),
    }
    assert failing(**good) == []
    assert failing(**good, vLLM=taking(201)) == []
    assert failing(**good, vLLM=taking(150)) == [
        "by load, fetching: 1.33 of vLLM's TTFT, less than 1"
    ]
    assert failing(**good | {"by_load__fetching": taking(201)}) == [
        "by load, fetching: 0.67 of the TTFT without fetching, at most 0.67"
    ]
    assert failing(**good | {"by_affinity__fetching": taking(106)}) == [
        "by affinity, fetching: 1.06 of the TTFT without fetching, at most 1.05"
    ]


def test_tokens_that_were_chosen_or_rendered_anew_are_not_counted() -> None:
    many = Computed(new=100, block=5, rendering=50, chosen=50)
    assert failing(by_load__fetching=taking(1, many)) == []
    assert failing(by_load__fetching=taking(1, Computed(new=100, block=6))) == [
        "by load, fetching: 1.06 computed tokens for each new one, at most 1.05"
    ]
