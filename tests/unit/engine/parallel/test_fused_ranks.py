"""Ranks whose kernels run all layers in one call: the same bits as layer by layer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoint.model_source import resolve_model
from engine.loader import load_engine
from tests.effort import some
from tests.gguf_files import write_gguf
from tests.rank_group import RankGroup
from tests.unit.engine.parallel.sharded_engine import (
    DEADLINE_S,
    MAX_TOKENS,
    Job,
    engine_config,
    generate,
    rank_main,
)

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "hidden_size": 96}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "experts": ("Qwen2MoeForCausalLM", EXPERTS),
    "norms of what is added": ("Gemma2ForCausalLM", {"final_logit_softcapping": None}),
    "tied": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankGroup]:
    group = RankGroup(rank_main, tmp_path_factory.mktemp("ranks") / "store", 4)
    yield group
    group.end(DEADLINE_S)


@pytest.fixture(autouse=True)
def has_products(kernels: ctypes.CDLL) -> None:
    if not kernels.baton_has_linear():
        pytest.skip("this CPU has no bf16 products")


def prompts_of(text: Any) -> tuple[tuple[int, ...], ...]:
    words = text(45)
    return tuple(words[:21]), tuple(words[21:40]), tuple(words[40:])


@pytest.mark.parametrize("ranks", [(2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("kind", some(KINDS, 2))
def test_whole_steps_give_the_bits_of_single_layers(
    group: RankGroup, make_tiny: Any, text: Any, kind: str, ranks: tuple[int, int]
) -> None:
    architecture, options = KINDS[kind]
    tiny = make_tiny(architecture, **SIZES, **options)
    job = Job(tiny.folder, ranks[0], prompts_of(text), ranks[1], attention="auto", dtype="bfloat16")
    assert_same_bits(group, job)


@pytest.mark.parametrize("ranks", some([(2, 1), (4, 1), (2, 2), (4, 2)], 1))
def test_blocks_of_a_file_are_shared_out(
    group: RankGroup, make_tiny: Any, text: Any, tmp_path: Path, ranks: tuple[int, int]
) -> None:
    tiny = make_tiny("LlamaForCausalLM", **SIZES, intermediate_size=128)
    write_gguf(tmp_path / "tiny.gguf", tiny.folder, "llama", kind="Q8_0")
    folder = resolve_model(tmp_path / "tiny.gguf")
    prompts = prompts_of(text)[:1]
    job = Job(folder, ranks[0], prompts, ranks[1], attention="auto", dtype="bfloat16")
    answers = assert_same_bits(group, job)
    whole = load_engine(engine_config(folder, "auto", "bfloat16"), lambda: 0.0)
    generate(whole.engine, job.prompts)
    for layout, pool, _ in answers[: ranks[0]]:
        assert layout.model_fingerprint.endswith("-blocks")
        layers, heads = layout.layers, layout.heads
        own = whole.pool.tensor[:, layers.start : layers.stop, :, heads.start : heads.stop]
        own = own.float().numpy()
        if layers.start == 0:
            np.testing.assert_allclose(pool[:, 0], own[:, 0], rtol=0.0, atol=0.0)
        prompt_blocks = len(job.prompts[0]) // layout.block_size
        difference = np.abs(pool[:prompt_blocks] - own[:prompt_blocks])
        assert difference.mean() < 0.02 * np.abs(own[:prompt_blocks]).mean()


def test_log_probabilities_of_prompts_are_those_of_one_rank(
    group: RankGroup, make_tiny: Any, text: Any
) -> None:
    tiny = make_tiny("LlamaForCausalLM", **SIZES)
    prompts = prompts_of(text)
    whole = load_engine(engine_config(tiny.folder), lambda: 0.0)
    expected = generate(whole.engine, prompts, prompt_logprobs=3)
    job = Job(tiny.folder, 4, prompts, num_stages=2, prompt_logprobs=3)
    assert group.do(job, DEADLINE_S)[0][2] == expected
    assert len(expected) == len(prompts) + 2


def assert_same_bits(group: RankGroup, job: Job) -> list[Any]:
    """The answers of whole steps, after comparing them with those of single layers."""
    whole = group.do(job, DEADLINE_S)
    single = group.do(replace(job, whole_steps=False), DEADLINE_S)
    assert whole[0][2] == single[0][2]
    assert [len(tokens) for tokens in whole[0][2]] == [MAX_TOKENS] * len(job.prompts)
    for one, other in zip(whole[: job.size], single[: job.size], strict=True):
        assert one[1].any()
        assert np.array_equal(one[1], other[1])
    return whole
