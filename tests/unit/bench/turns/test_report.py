"""The table that a benchmark prints."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from bench.turns.__main__ import Load, report
from bench.turns.accounts import Account, Computed
from bench.turns.contestants import Contestant
from bench.turns.conversations import six_turns


def account(ttft_ms: float, chosen: int) -> Account:
    turns = {("chat 0", number): ttft_ms * number for number in range(1, 6)}
    return Account(Computed(new=1000, block=10, chosen=chosen), 1000, turns)


def test_each_contestant_has_a_row_with_its_ratios() -> None:
    load = Load("six turns", six_turns(2, 4096, seed=1), clients=2)
    accounts = {"one": account(10, 0), "plain": account(20, 190), "fast": account(5, 0)}
    contestants = [
        Contestant("one"),
        Contestant("plain"),
        Contestant("fast", without="plain"),
        Contestant("none", missing="not here"),
    ]
    text = StringIO()
    Console(file=text, width=200).print(report(load, accounts, contestants))
    rows = [
        [cell.strip() for cell in line.strip("│ ").split("│")]
        for line in text.getvalue().splitlines()
        if line.startswith("│")
    ]
    shown = {row[0]: row[1:] for row in rows}
    assert shown["plain"][:5] == ["1.20", "1,000", "10", "0", "190"]
    assert shown["plain"][5:8] == ["60 ms", "80 ms", "2.00"]
    assert shown["fast"][7:] == ["0.50", "0.25"]
    assert shown["none"][0] == "not here"


def test_groups_hold_every_conversation_once() -> None:
    load = Load("six turns", six_turns(5, 4096, seed=1), clients=2)
    groups = list(load.groups)
    assert [len(each) for each in groups] == [2, 2, 1]
    assert [each for group in groups for each in group] == list(load.conversations)
