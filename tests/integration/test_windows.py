"""Models whose layers keep windows, served by prefill and decode apart: transformers' tokens,
whatever is cached, and the formula's blocks on the way."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from cli.fleet import Fleet
from protocol import layout
from protocol.layout import first_covering
from tests.effort import NIGHTLY, some
from tests.integration import random_checkpoints
from tests.integration.fleets import (
    all_counters,
    assert_as_expected,
    complete_all,
    counters,
    rank_settings,
    running_fleet,
    wait_for,
)
from tests.integration.random_checkpoints import NUM_TOKENS, Expected, random_checkpoint
from tests.integration.reference import BLOCK, Reference

WINDOW = 40
LENGTHS = (1, 17, 64, 150)
SIZES = random_checkpoints.SIZES | {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": WINDOW,
}


def mistral() -> torch.nn.Module:
    """Every layer keeps a window."""
    return MistralForCausalLM(MistralConfig(**SIZES))


def qwen3() -> torch.nn.Module:
    """Two of three layers keep a window."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Qwen3Config(**SIZES, use_sliding_window=True, layer_types=kinds)
    return Qwen3ForCausalLM(config)


def gpt_oss() -> torch.nn.Module:
    """Every other layer keeps a window; heads have sinks."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "truncate": False}
    rope["original_max_position_embeddings"] = 128
    sizes = SIZES | experts | {"intermediate_size": 64}
    return GptOssForCausalLM(GptOssConfig(**sizes, rope_parameters=rope))


def gemma3() -> torch.nn.Module:
    """Two of three layers keep a window."""
    pattern = {"sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **pattern))


KINDS = [pytest.param(mistral, id="all layers"), pytest.param(qwen3, id="some layers")]


def of(kinds: Iterable[Any]) -> pytest.MarkDecorator:
    """The models that a test sees."""
    return pytest.mark.parametrize("folder", kinds, indirect=True, scope="module")


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint, and the demo's tokenizer."""
    return random_checkpoint(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Expected:
    return Expected(folder)


def fleet_of(folder: Path, environment: dict[str, str] | None = None, **settings: object):
    return running_fleet(
        environment,
        model=str(folder),
        local_prefill_threshold_tokens=0,
        chunk_max_tokens=32,
        dtype="float32",
        kv_windows=layout.WINDOW,
        **settings,
    )


def run(fleet: Fleet, references: list[Reference]) -> None:
    assert_as_expected(references, complete_all(fleet, references, NUM_TOKENS, 2))


@pytest.fixture(scope="module", params=some(["nixl", "shm"], 1))
def fleet(request: pytest.FixtureRequest, folder: Path) -> Iterator[Fleet]:
    with fleet_of(folder, prefill=2, decode=1, transport=request.param) as fleet:
        yield fleet


def on_prefill_workers(fleet: Fleet, *names: str) -> int:
    """The sum of these counters."""
    of_each = [each for name, each in all_counters(fleet).items() if name.startswith("prefill")]
    return sum(each.get(name, 0) for each in of_each for name in names)


@of(KINDS)
def test_apart_they_give_the_tokens_of_transformers(
    fleet: Fleet, folder: Path, expected: Expected
) -> None:
    prompts = [expected.after((), length) for length in LENGTHS]
    handoffs = counters(fleet, "decode-1")["handoffs"]
    sent = on_prefill_workers(fleet, "blocks_sent")
    run(fleet, prompts)
    assert counters(fleet, "decode-1")["handoffs"] - handoffs == len(prompts)
    ends = [(-(-length // BLOCK), length // BLOCK) for length in LENGTHS]
    windows = sum(end - first_covering(last, BLOCK, WINDOW) for end, last in ends)
    full = sum(end for end, _ in ends) if "qwen3" in (folder / "config.json").read_text() else 0
    assert on_prefill_workers(fleet, "blocks_sent") - sent == windows + full


ONE, TWO_RANKS, TWO_STAGES = (1, 1), (2, 1), (1, 2)
EVERYDAY = [
    pytest.param(gpt_oss, TWO_RANKS, ONE, "shm", id="gpt-oss, prefill on two ranks"),
    pytest.param(gemma3, ONE, TWO_STAGES, "nixl", id="gemma 3, decode in two stages"),
]
ALL = [
    pytest.param(make, *pair, transport)
    for make in (gpt_oss, gemma3, mistral, qwen3)
    for pair in itertools.product((ONE, TWO_RANKS, TWO_STAGES), repeat=2)
    for transport in ("nixl", "shm")
]


@pytest.mark.parametrize(
    ("folder", "prefill", "decode", "transport"),
    ALL if NIGHTLY else EVERYDAY,
    indirect=["folder"],
    scope="module",
)
def test_apart_they_give_the_tokens_of_transformers_on_any_ranks(
    folder: Path,
    expected: Expected,
    prefill: tuple[int, int],
    decode: tuple[int, int],
    transport: str,
) -> None:
    prompts = [expected.after((), length) for length in LENGTHS]
    ranks = rank_settings(prefill, decode)
    environment = {"BATON_KV_CHECKSUM": "on"}
    with fleet_of(folder, environment, prefill=1, decode=1, transport=transport, **ranks) as fleet:
        run(fleet, prompts)
        assert counters(fleet, "decode-1")["handoffs"] == len(prompts)
        ends = [(-(-length // BLOCK), length // BLOCK) for length in LENGTHS]
        windows = sum(end - first_covering(last, BLOCK, WINDOW) for end, last in ends)
        has_full = "full_attention" in (folder / "config.json").read_text()
        full = sum(end for end, _ in ends) if has_full else 0
        assert counters(fleet, "prefill-1")["blocks_sent"] == windows + full


@of(some(KINDS, 1))
def test_turns_that_go_on_or_turn_aside_near_the_end_stay_right(
    fleet: Fleet, expected: Expected
) -> None:
    first = expected.after((), 150)
    conversation = (*first.prompt, *first.output)
    run(fleet, [first])
    cuts = [len(conversation) - back for back in (0, 1, 15, 16, 17, 33, 60)]
    before = on_prefill_workers(fleet, "cached_tokens", "fetched_tokens")
    run(fleet, [expected.after(conversation[:cut], 9) for cut in cuts])
    found = on_prefill_workers(fleet, "cached_tokens", "fetched_tokens") - before
    assert found >= len(cuts) // 2 * (150 - 3 * BLOCK)


@of(some(reversed(KINDS), 1))
def test_a_conversation_that_moves_among_workers_stays_right(
    fleet: Fleet, expected: Expected
) -> None:
    """Blocks come from the worker's own cache, from a peer's, or are computed."""
    first = expected.after((), 200)
    conversation = (*first.prompt, *first.output)
    before = on_prefill_workers(fleet, "cached_tokens", "fetched_tokens")
    run(fleet, [first])
    for back in (0, 20):
        turn = expected.after(conversation[: len(conversation) - back], 9)
        run(fleet, [turn] * 4)
    found = on_prefill_workers(fleet, "cached_tokens", "fetched_tokens") - before
    assert found >= 100, "else every turn was computed whole"


@of(KINDS)
@pytest.mark.nightly
def test_what_small_pools_evict_comes_back_from_host_memory_and_disk(
    folder: Path, expected: Expected, tmp_path: Path
) -> None:
    """Prompts that a pool does not hold together are answered twice, then turned aside, also by
    workers that find the blocks on disk."""
    prompts = [expected.after((), length) for length in (200, 150, 170, 90, 160)]
    cuts = [each.prompt[:-back] for each, back in zip(prompts, (1, 40), strict=False)]
    turns = [expected.after(cut, 9) for cut in cuts]
    environment = {
        "BATON_HOST_TIER_BYTES": str(1 << 18),
        "BATON_DISK_TIER_DIR": str(tmp_path),
        "BATON_DISK_TIER_BYTES": str(1 << 24),
    }
    fields = {"prefill": 0, "decode": 1, "num_blocks": 14, "cluster_secret": "a secret of ours"}
    with fleet_of(folder, environment, **fields) as fleet:
        run(fleet, prompts)
        assert counters(fleet, "decode-1")["loaded_tokens"] == 0
        run(fleet, prompts)
        assert counters(fleet, "decode-1")["loaded_tokens"] > 0
        enough = 1 << 18
        wait_for(
            "blocks on disk",
            lambda: counters(fleet, "decode-1")["disk_tier_stored_bytes"] > enough,
        )
    with fleet_of(folder, environment, **fields) as fleet:
        run(fleet, [*prompts, *turns])
        counted = counters(fleet, "decode-1")
        assert counted["disk_tier_loaded_bytes"] > 0
        assert counted["loaded_tokens"] > 0
        assert counted["disk_tier_failures"] + counted["host_tier_failures"] == 0
