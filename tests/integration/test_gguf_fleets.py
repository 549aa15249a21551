"""GGUF files of every family, served by prefill and decode apart, by workers of one rank and of
several: the tokens of one engine, whatever is cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from checkpoint.model_source import resolve_model
from tests.effort import some
from tests.gguf_families import FAMILIES, write_family
from tests.integration.fleets import (
    assert_as_expected,
    complete_all,
    counters,
    rank_settings,
    running_fleet,
)
from tests.integration.one_engine import tokens_of_one_engine
from tests.integration.reference import Reference
from tests.paths import DEMO_MODEL

NUM_TOKENS = 12
PROMPTS = [[3 + (7 * i + n) % 11 for i in range(n)] for n in (1, 17, 64, 150)]
"""Of tokens that the vocabulary of these files has; the others are padding."""
HYBRIDS = ("qwen35", "qwen3next", "qwen35moe", "nemotron_h", "nemotron_h_moe")
LAYOUTS = [((2, 1), (1, 2)), ((1, 2), (2, 2)), ((2, 2), (2, 1))]
"""Ranks of each layer, and stages, of a prefill and a decode worker."""


@pytest.fixture
def make_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """`make_folder(family, kind)`: the folder that stands for a file, in a cache of the test's own.
    The fleet uses the usual cache, which has compiled kernels."""

    def make(family: str, kind: str) -> Path:
        with monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
            return resolve_model(write_family(tmp_path, family, kind))

    return make


def assert_tokens_of_one_engine(folder: Path, **settings: Any) -> None:
    """Every prompt is served twice, the second time with what is cached."""
    settings["dtype"] = "float32"
    together = tokens_of_one_engine(folder, PROMPTS, NUM_TOKENS, dtype="float32", num_blocks=512)
    prompts = [
        Reference(tuple(prompt), tuple(tokens))
        for prompt, tokens in zip(PROMPTS, together, strict=True)
    ]
    assert are_different(together), "else the weights say nothing"
    with running_fleet(
        {"BATON_KV_CHECKSUM": "on"},
        model=str(folder),
        served_model_name=(DEMO_MODEL.name,),  # as all requests of these tests say
        local_prefill_threshold_tokens=0,
        chunk_max_tokens=32,
        **settings,
    ) as fleet:
        for _ in range(2):
            assert_as_expected(prompts, complete_all(fleet, prompts, NUM_TOKENS, at_once=2))
        assert counters(fleet, "decode-1")["handoffs"] == 2 * len(prompts)
        assert counters(fleet, "prefill-1")["cached_tokens"] > 0


def are_different(answers: Sequence[Sequence[int]]) -> bool:
    """Whether the answers, and the tokens of each, differ."""
    return len(set(map(tuple, answers))) == len(answers) and len(set(answers[0])) > 1


@pytest.mark.parametrize("kind", some(["Q8_0", "F32"], 1))
@pytest.mark.parametrize("family", some(FAMILIES, 1))
def test_each_family_served_apart_gives_the_tokens_of_one_engine(
    make_folder: Callable[[str, str], Path], family: str, kind: str
) -> None:
    assert_tokens_of_one_engine(make_folder(family, kind))


@pytest.mark.nightly
@pytest.mark.parametrize(("prefill", "decode"), LAYOUTS, ids=str)
@pytest.mark.parametrize("family", HYBRIDS)
def test_ranks_of_hybrids_hand_states_over(
    make_folder: Callable[[str, str], Path],
    family: str,
    prefill: tuple[int, int],
    decode: tuple[int, int],
) -> None:
    folder = make_folder(family, "Q8_0")
    assert_tokens_of_one_engine(folder, **rank_settings(prefill, decode))
