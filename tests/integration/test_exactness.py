"""The same tokens, whatever path they take: apart over NIXL, apart over shared memory, alone.

fp32, greedy against transformers, at concurrency 16 and several chunk sizes; seeded sampling
against the other paths.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cli.fleet import Fleet
from tests.effort import NIGHTLY, some
from tests.integration.fleets import (
    assert_as_expected,
    complete,
    complete_all,
    counters,
    running_fleet,
)
from tests.integration.reference import NUM_TOKENS, Reference

CONCURRENCY = 16
EVERYDAY_LENGTHS = {*range(301), 512, 2000}
APART = {"prefill": 1, "decode": 1, "local_prefill_threshold_tokens": 0}
PATHS = {
    "nixl": {**APART, "transport": "nixl"},
    "shm": {**APART, "transport": "shm"},
    "local": {"prefill": 0, "decode": 1},
}
SAMPLED: dict[int, list[str]] = {}


@pytest.fixture(
    scope="module",
    params=some(
        [("nixl", 16), ("nixl", 64), ("shm", 64), ("nixl", 512), ("local", 16), ("local", 512)], 3
    ),
    ids=lambda param: f"{param[0]}-chunk{param[1]}",
)
def fleet(request: pytest.FixtureRequest) -> Iterator[tuple[Fleet, str]]:
    path, chunk = request.param
    with running_fleet(chunk_max_tokens=chunk, dtype="float32", **PATHS[path]) as fleet:
        yield fleet, path


@pytest.fixture(scope="module")
def prompts(references: list[Reference]) -> list[Reference]:
    """Everyday few of the long ones."""
    return [each for each in references if NIGHTLY or len(each.prompt) in EVERYDAY_LENGTHS]


def test_greedy_tokens_are_those_of_transformers(
    fleet: tuple[Fleet, str], prompts: list[Reference]
) -> None:
    running, path = fleet
    assert_as_expected(prompts, complete_all(running, prompts, NUM_TOKENS, CONCURRENCY))
    handoffs = counters(running, "decode-1")["handoffs"]
    assert handoffs == (0 if path == "local" else len(prompts)), "the path that was meant"


def test_seeded_sampling_is_the_same_on_every_path(
    fleet: tuple[Fleet, str], prompts: list[Reference]
) -> None:
    running, _path = fleet

    def run(numbered: tuple[int, Reference]) -> str:
        seed, reference = numbered
        fields = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "presence_penalty": 0.3}
        answer = complete(running, list(reference.prompt), max_tokens=16, seed=seed, **fields)
        return answer["choices"][0]["text"]

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        texts = list(pool.map(run, enumerate(prompts[::4])))
    assert len(set(texts)) > len(texts) // 2, "sampling should vary with prompt and seed"
    assert SAMPLED.setdefault(0, texts) == texts
