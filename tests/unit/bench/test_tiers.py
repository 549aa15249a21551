"""The load of bench.tiers, and the sizes of its contestants."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from bench.tiers import _WATCHED, BLOCK, NEW_TOKENS, Contestant, Sizes, complaints, rounds

SETTINGS = argparse.Namespace(pool_blocks=100, prefix_tokens=160, requests=200, rounds=2, seed=1)


def test_documents_fill_the_pool_as_often_as_asked_and_few_are_asked_for_often() -> None:
    first, *others = rounds(SETTINGS, vocab_size=50, working_set=4.0)
    assert len(first) * SETTINGS.prefix_tokens == 4 * SETTINGS.pool_blocks * BLOCK
    assert len(others) == SETTINGS.rounds
    known = {tuple(each[: SETTINGS.prefix_tokens]) for each in first}
    asked = Counter(tuple(each[: SETTINGS.prefix_tokens]) for each in others[0])
    assert asked.keys() <= known
    assert asked.most_common(1)[0][1] > 3 * SETTINGS.requests / len(known)
    assert {len(each) for each in others[0]} == {SETTINGS.prefix_tokens + NEW_TOKENS}


def test_tiers_are_as_large_as_so_many_pools() -> None:
    sizes = Sizes(pool_blocks=10, block_bytes=5000)
    assert sizes.flags(0, 0, Path("x")) == ("--num-blocks=10",)
    assert sizes.flags(2, 0, Path("x"))[1:] == ("--host-tier-bytes=100000",)
    assert sizes.flags(1, 3, Path("x"))[2:] == (
        f"--disk-tier-bytes={30 * 12288 + 4096}", "--disk-tier-dir=x",
    )  # fmt: skip


def contestant(name: str, seconds: list[float], answer: str = "yes", failures: int = 0):
    grown = [dict.fromkeys(_WATCHED, 0) | {"host_tier_failures": failures} for _ in seconds]
    made = Contestant(name, None, seconds, grown)  # type: ignore[arg-type]
    made.answers = [[answer] for _ in seconds]
    return made


def test_what_is_wrong_is_named() -> None:
    plain = contestant("no tiers", [9.0, 1.0, 1.0, 1.0])
    good = contestant("good", [99.0, 1.0, 9.0, 0.9])
    assert complaints([plain, good], 0.5) == []
    slow = contestant("slow", [1.0, 1.1, 1.05, 1.0])
    assert complaints([plain, slow], 4.0) == []
    assert complaints([plain, slow], 0.5) == [
        "slow: 4.8\N{NO-BREAK SPACE}% slower although documents fit"
    ]
    wrong = contestant("wrong", [1.0, 1.0, 1.0, 1.0], answer="no", failures=1)
    assert complaints([plain, wrong], 4.0) == [
        "wrong: other answers than without tiers",
        "wrong: 4 blocks failed",
    ]
