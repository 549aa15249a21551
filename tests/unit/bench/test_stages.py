"""The prompts' lengths of the stages' benchmark."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.stages import LENGTHS, LONGEST, mixed_lengths, recorded
from protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("divisor", "expected"),
    [
        (1, [[300, LONGEST], [LONGEST, 40], [40, 600]]),
        (10, [[30, 500], [500, 4], [4, 60]]),
    ],
)
def test_a_trace_gives_neighbouring_prompts(
    tmp_path: Path, divisor: int, expected: list[list[int]]
) -> None:
    trace = tmp_path / "trace.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for second, tokens in enumerate((300, 5000, 40, 600)):
        lines.append(f"2023-11-16 18:00:{second:02}.0000000,{tokens},10")
    trace.write_text("\n".join(lines) + "\n")
    draw = recorded(str(trace), divisor)
    drawn = [draw(2, random.Random(seed)) for seed in range(20)]
    assert {tuple(each) for each in drawn} == {tuple(each) for each in expected}
    assert draw(9, random.Random(0))[:3] == [expected[0][0], expected[0][1], expected[1][1]]


def test_an_unreadable_trace_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--trace nowhere\.csv"):
        recorded("nowhere.csv", 1)


def test_mixed_lengths_are_short_and_long() -> None:
    assert set(mixed_lengths(200, random.Random(0))) == set(LENGTHS)
