"""Parsers of remote input hold against a short seeded run, and at night a million inputs."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.effort import times
from tests.fuzz import fuzzing
from tests.fuzz.inputs import JSON, Mutator
from tests.fuzz.parsers import Parser, parsers
from tests.paths import ROOT

SEED = 3


@pytest.fixture
def known() -> Iterator[list[Parser]]:
    loop = asyncio.new_event_loop()
    yield parsers(loop)
    loop.close()


def test_only_declared_errors_come_out(
    known: list[Parser], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fuzzing, "NUM_PARTS", 1
    )  # memory is measured after each, which takes a while
    run = fuzzing.Fuzzing(SEED)
    outcomes = [run.run(parser, times(100, 300)) for parser in known]
    assert run.findings == []
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
    monkeypatch.setattr(fuzzing, "parsers", lambda loop: [broken])
    assert fuzzing.main(["--inputs", "20", "--seed", "1"]) == 1
    assert "KeyError('bug')" in capsys.readouterr().out


def test_one_step_is_no_growth_but_many_are() -> None:
    step = fuzzing.Outcome("loads code", memory=[1000] * 6 + [1040] * 4)
    leak = fuzzing.Outcome("leaks", memory=[1000 + 4 * part for part in range(10)])
    assert (step.is_clean, leak.is_clean) == (True, False)


def test_the_same_seed_gives_the_same_inputs() -> None:
    first, second = (Mutator(random.Random(SEED), JSON, [b'{"a": [1, "b"]}']) for _ in range(2))
    inputs = [first.next() for _ in range(200)]
    assert inputs == [second.next() for _ in range(200)]
    assert len(set(inputs)) > 150


@pytest.mark.nightly
def test_a_million_inputs_and_no_growth() -> None:
    """In a process of its own, whose memory is watched."""
    command = [sys.executable, "-m", "tests.fuzz", "--inputs", "1000000", "--seed", str(SEED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
