"""Mixtures of experts, latents and layers with windows, token for token as transformers in fp32,
whatever happens to a request: whole, in chunks, from a prefix of every length, preempted, split
over two engines, handed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from engine.engine_config import EngineConfig
from engine.loader import LoadedEngine, load_engine
from protocol.layout import ALL_TOKENS
from scheduling import sequence as sequences
from scheduling.batch import Batch
from scheduling.scheduler import SchedulerConfig
from tests.effort import some
from tests.latent_models import LATENT_MODELS
from tests.sequences import greedy, sequence_of

BLOCK, MAX_TOKENS = 4, 10
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 6}),
    "qwen2": (
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen3": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 16},
    ),
    **{name: LATENT_MODELS[name] for name in ("deepseek v2 lite", "deepseek v3")},
    "gpt-oss": ("GptOssForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {}),
    "gemma3": ("Gemma3ForCausalLM", {}),
}


class Served:
    """A small random checkpoint, engines that serve it, and transformers' tokens."""

    def __init__(self, tiny: Any, kv_windows: str = ALL_TOKENS) -> None:
        self._tiny, self._kv_windows = tiny, kv_windows

    def engine(self, chunk: int = 64, num_blocks: int = 64) -> LoadedEngine:
        scheduler = SchedulerConfig(
            block_size=BLOCK,
            max_batch_size=8,
            chunk_min_tokens=min(chunk, BLOCK),
            chunk_max_tokens=chunk,
        )
        config = EngineConfig(
            self._tiny.folder,
            scheduler,
            dtype="float32",
            device="cpu",
            num_blocks=num_blocks,
            kv_windows=self._kv_windows,
        )
        return load_engine(config, lambda: 0.0)

    def assert_generates(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Each token is transformers' likeliest after those before it."""
        logits = self._tiny.expected_logits([*prompt, *output][:-1])
        assert list(output) == logits[len(prompt) - 1 :].argmax(-1).tolist()
        assert len(output) == MAX_TOKENS


@pytest.fixture(params=MODELS)
def served(make_tiny: Any, request: pytest.FixtureRequest) -> Served:
    architecture, options = MODELS[request.param]
    return Served(make_tiny(architecture, eos_token_id=None, **options))


def run(
    loaded: LoadedEngine, *added: sequences.Sequence, until: Callable[[], bool] = bool
) -> list[Batch]:
    """Steps until nothing is left to do, or until `until`."""
    batches = []
    for sequence in added:
        loaded.engine.scheduler.add(sequence)
    while loaded.engine.scheduler.has_work and not until():
        batches.append(loaded.engine.plan())
        loaded.engine.run(batches[-1])
    return batches


def output(sequence: sequences.Sequence) -> list[int]:
    return sequence.tokens[sequence.num_prompt :]


def asked(prompt: Sequence[int], name: str = "r", **fields: Any) -> sequences.Sequence:
    return sequence_of(prompt, greedy(MAX_TOKENS), BLOCK, request_id=name, **fields)


def test_whole_in_chunks_and_beside_others(served, text):
    prompts = [text(31), text(18)[5:], text(45)[20:]]
    for chunk in some((5, 64), 1):
        together = [asked(prompt, str(number)) for number, prompt in enumerate(prompts)]
        run(served.engine(chunk), *together)
        for prompt, sequence in zip(prompts, together, strict=True):
            served.assert_generates(prompt, output(sequence))


def test_from_a_prefix_of_every_length(served, text):
    loaded = served.engine()
    prompt = text(25)
    run(loaded, asked(prompt))
    for length in some(range(len(prompt) + 1), 5):
        other = [*prompt[:length], *text(60)[40:47]]
        sequence = asked(other, f"after {length}")
        run(loaded, sequence)
        assert sequence.num_cached == length // BLOCK * BLOCK
        served.assert_generates(other, output(sequence))


def test_preempted(served, text):
    prompts = [text(19), text(22)[4:], text(50)[33:]]
    together = [asked(prompt, str(number)) for number, prompt in enumerate(prompts)]
    batches = run(served.engine(num_blocks=18), *together)
    assert any(batch.preempted for batch in batches)
    for prompt, sequence in zip(prompts, together, strict=True):
        served.assert_generates(prompt, output(sequence))


@pytest.mark.parametrize("num_generated", [1, 4])
def test_split_and_handed_over(served, text, num_generated):
    """After the first token, as between prefill and decode; after some, as when a worker drains."""
    first, second, prompt = served.engine(16), served.engine(16), text(37)
    source = asked(prompt)
    run(first, source, until=lambda: len(source.tokens) >= len(prompt) + num_generated)
    known = list(source.tokens)
    params = greedy(MAX_TOKENS - num_generated + 1)
    target = sequence_of(known[:-1], params, BLOCK, remote=True, source_has_begun=True)
    second.engine.scheduler.add(target)
    assert second.engine.plan().received == [target]
    blocks = source.block_table[: len(target.block_table)]
    second.pool.tensor.fill_(torch.nan)
    second.pool.tensor[target.block_table] = first.pool.tensor[blocks]
    second.engine.scheduler.arrived(target, known[-1], 0.0)
    run(second)
    served.assert_generates(prompt, target.tokens[len(prompt) :])
