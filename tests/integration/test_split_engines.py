"""What one engine prefilled, an engine of another number of ranks goes on with."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from engine.loader import load_engine
from tests.integration.split_engines import (
    DEADLINE_S,
    MAX_TOKENS,
    Split,
    asked,
    engine_config,
    rank_main,
    run_out,
)
from tests.rank_group import RankGroup

PROMPT = tuple(range(40, 77))  # the last of its five blocks is not full


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    group = RankGroup(rank_main, tmp_path_factory.mktemp("gloo") / "store", 3)
    yield group
    group.end(DEADLINE_S)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """The output of one engine on one rank."""
    engine = load_engine(engine_config(), time.monotonic).engine
    sequence = asked(PROMPT)
    engine.scheduler.add(sequence)
    run_out(engine)
    assert len(sequence.tokens) == len(PROMPT) + MAX_TOKENS
    return sequence.tokens[len(PROMPT) :]


@pytest.mark.parametrize(
    ("transport", "prefill", "decode"),
    [("nixl", 2, 1), ("nixl", 1, 2), ("shm", 2, 1), ("nixl", 1, 1)],
)
def test_the_output_is_that_of_one_rank(
    group: RankGroup, expected: list[int], transport: str, prefill: int, decode: int
) -> None:
    answers = group.do(Split(transport, prefill, decode, PROMPT), DEADLINE_S)
    assert answers[prefill] == expected
