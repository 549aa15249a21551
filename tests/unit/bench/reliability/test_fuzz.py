"""The parsers of remote input hold against a short seeded run of the fuzzing bench."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from bench import fuzz
from bench.reliability.fuzz_inputs import JSON, Mutator
from bench.reliability.fuzz_parsers import Parser, parsers
from tests.effort import times

SEED = 3


@pytest.fixture
def known() -> Iterator[list[Parser]]:
    loop = asyncio.new_event_loop()
    yield parsers(loop)
    loop.close()


def test_only_declared_errors_come_out(
    known: list[Parser], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "NUM_PARTS", 1)  # memory is measured after each, which takes a while
    fuzzing = fuzz.Fuzzing(SEED)
    outcomes = [fuzzing.run(parser, times(100, 300)) for parser in known]
    assert fuzzing.findings == []
    assert all(each.accepted and each.refused for each in outcomes), outcomes


def test_every_seed_is_valid(known: list[Parser]) -> None:
    refused = []
    for parser in known:
        for seed in parser.seeds:
            try:
                parser.parse(seed)
            except parser.errors as error:
                refused.append((parser.name, seed, error))
    assert refused == []


def test_an_unexpected_error_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(data: bytes) -> None:
        raise KeyError("bug")

    broken = Parser("broken", [b"{}"], JSON, fail, (ValueError,))
    monkeypatch.setattr(fuzz, "parsers", lambda loop: [broken])
    assert fuzz.main(["--inputs", "20", "--seed", "1"]) == 1
    assert "KeyError('bug')" in capsys.readouterr().out


def test_one_step_is_no_growth_but_many_are() -> None:
    step = fuzz.Outcome("loads code", memory=[1000] * 6 + [1040] * 4)
    leak = fuzz.Outcome("leaks", memory=[1000 + 4 * part for part in range(10)])
    assert (step.is_clean, leak.is_clean) == (True, False)


def test_the_same_seed_gives_the_same_inputs() -> None:
    first, second = (Mutator(random.Random(SEED), JSON, [b'{"a": [1, "b"]}']) for _ in range(2))
    inputs = [first.next() for _ in range(200)]
    assert inputs == [second.next() for _ in range(200)]
    assert len(set(inputs)) > 150
