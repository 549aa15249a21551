"""The search for better settings: how it climbs, what a gain is worth, and what it advises."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import log2
from pathlib import Path

import pytest

from cli.main import main
from simulator.planning.tuning import Knob, Served, Tried, Values, best_of, climb, gain
from simulator.report.tune import advice

KNOBS = [Knob("width", 2.0, 1, 64), Knob("depth", 2.0, 1, 8)]
MEANINGS = {"width": "width", "depth": "depth"}


def served(*good: int) -> Served:
    return Served([10] * len(good), list(good))


def hill(width: float, depth: float) -> Served:
    """Best at a width of 32 and a depth of 4; each doubling costs a request."""
    good = 9 - abs(round(log2(width / 32))) - abs(round(log2(depth / 4)))
    return served(*[good] * 4)


class Trace:
    """Serves settings by a function of them, and remembers which were asked for."""

    def __init__(self) -> None:
        self.asked: list[Values] = []

    def __call__(self, group: Sequence[Values]) -> list[Served]:
        assert group, "a search without new settings has ended"
        self.asked += group
        return [hill(each["width"], each["depth"]) for each in group]


def test_the_search_climbs_to_the_best_and_tries_nothing_twice() -> None:
    trace = Trace()
    tried = climb({"width": 4.0, "depth": 8.0}, KNOBS, trace, rounds=9)
    assert best_of(tried).values == {"width": 32.0, "depth": 4.0}
    assert tried[0].values == {"width": 4.0, "depth": 8.0}
    assert len(trace.asked) == len({tuple(each.items()) for each in trace.asked}) == len(tried)
    assert all(each["depth"] <= 8 for each in trace.asked)


def test_the_search_ends_with_its_rounds() -> None:
    trace = Trace()
    climb({"width": 4.0, "depth": 8.0}, KNOBS, trace, rounds=1)
    assert len(trace.asked) == 4


def test_parts_that_choose_do_not_say_what_is_gained() -> None:
    base, lucky = served(5, 5, 5, 5, 5, 5), served(9, 5, 9, 5, 9, 5)
    assert lucky.choosing > base.choosing
    found = gain(base, lucky)
    assert (found.share, found.low, found.high) == (0.0, 0.0, 0.0)
    assert not found.is_sure
    unseen = served(5, 9, 5, 9, 5, 9)
    first = Tried({"width": 1.0}, base)
    assert best_of([first, Tried({"width": 2.0}, unseen)]) is first


def test_one_part_says_a_gain_but_not_how_sure_it_is() -> None:
    found = gain(served(5, 5), served(5, 9))
    assert (found.share, found.low, found.high) == (0.4, -1.0, 1.0)
    assert not found.is_sure


def test_a_knob_stays_within_its_bounds() -> None:
    depth = Knob("depth", 2.0, 1, 8)
    assert [depth.beside(value) for value in (1.0, 2.0, 8.0)] == [[2.0], [1.0, 4.0], [4.0]]


def test_a_gain_has_the_interval_of_students_t() -> None:
    base = served(*[5] * 20)
    found = gain(base, served(*[5, 6, 5, 8] * 5))
    assert found.share == pytest.approx(0.2)
    assert found.high - found.share == pytest.approx(2.262 * 0.1054 / 10**0.5, rel=0.01)
    assert found.low == pytest.approx(2 * found.share - found.high)
    assert found.is_sure


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (served(*[7] * 8), "Set width 8 instead of 4: 50.0% of the requests were good"),
        (served(*[4] * 8), "Change nothing: 50.0%"),
        (served(9, 5, 9, 6, 9, 5, 9, 4), "that may be chance: +0.0 points"),
    ],
)
def test_the_advice(other: Served, words: str) -> None:
    tried = [Tried({"width": 4.0}, served(*[5] * 8)), Tried({"width": 8.0}, other)]
    assert words in advice(tried, MEANINGS)


TUNE = [
    "tune", "--model", "Llama-3-8B", "--decode", "1",
    "--trace", "poisson:requests=40,prompt=4000,output=8,rate=1,spread=0.1",
    "--decode-chunk-tokens", "128", "--ttft-ms", "160", "--tpot-ms", "40",
    "--itl-target-ms", "40", "--rounds", "1", "--parts", "10", "--jobs", "1", "--json",
]  # fmt: skip


def test_chunks_that_are_too_small_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trials"
    assert main([*TUNE, "--resume", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["advice"].startswith("Set chunk_max_tokens of decode workers: 256 instead of 128")
    lines = path.read_text()
    assert main([*TUNE, "--resume", str(path)]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert path.read_text() == lines, "nothing is simulated again"


def test_a_trace_with_fewer_requests_than_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TUNE, "--parts", "41"]) == 2
    assert capsys.readouterr().err == "baton tune: --parts 41: the trace has 40 requests\n"
