"""Gemma 3 from a real GGUF file: transformers' logits in fp32, beyond the window, and its tokens
from a split fleet."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from checkpoint.model_source import resolve_model
from engine.attention.base import Segment
from engine.checkpoint.config import load_model_config
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.model_weights import Weights
from engine.checkpoint.weights import load_weights
from engine.cpu.backend import CpuBackend
from engine.kv_pool import KvPool
from engine.models.decoder import DecoderModel
from tests.gguf_files import gemma3
from tests.integration.fleets import complete, running_fleet

BLOCK, NUM_TOKENS, NUM_ANSWERED = 16, 640, 12

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model(gemma3(tmp_path_factory.mktemp("gemma")))


@pytest.fixture(scope="module")
def prompt(folder: Path) -> list[int]:
    """More than a window of text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(pydoc_data.topics.topics["with"] * 2).ids
    return ids[:NUM_TOKENS]


def transformers_model(config: ModelConfig, weights: Weights) -> Any:
    """transformers' model with these weights, fp32."""
    rope = {"rope_type": "default"}
    assert config.local_rope is not None
    given = transformers.Gemma3TextConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        sliding_window=config.sliding_windows[0],
        rope_parameters={
            "full_attention": {**rope, "rope_theta": config.rope.theta},
            "sliding_attention": {**rope, "rope_theta": config.local_rope.theta},
        },
        attn_implementation="eager",
    )
    state = {"model.embed_tokens.weight": weights.embed, "lm_head.weight": weights.embed}
    state["model.norm.weight"] = weights.final_norm - 1
    sizes = [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
    for index, layer in enumerate(weights.layers):
        at, attention, half = f"model.layers.{index}", layer.attention, layer.feed_forward
        parts = attention.matrices["qkv"].split(sizes)
        state |= {f"{at}.self_attn.{n}_proj.weight": p for n, p in zip("qkv", parts, strict=True)}
        gate, up = half.matrices["gate_up"].chunk(2)
        state |= {
            f"{at}.self_attn.o_proj.weight": attention.matrices["o"],
            f"{at}.mlp.gate_proj.weight": gate,
            f"{at}.mlp.up_proj.weight": up,
            f"{at}.mlp.down_proj.weight": half.matrices["down"],
            f"{at}.self_attn.q_norm.weight": attention.vectors["q_norm"] - 1,
            f"{at}.self_attn.k_norm.weight": attention.vectors["k_norm"] - 1,
            f"{at}.input_layernorm.weight": layer.input_norm - 1,
            f"{at}.post_attention_layernorm.weight": layer.attention_out_norm - 1,
            f"{at}.pre_feedforward_layernorm.weight": layer.post_norm - 1,
            f"{at}.post_feedforward_layernorm.weight": layer.feed_forward_out_norm - 1,
        }
    model = transformers.Gemma3ForCausalLM(given).eval()
    model.load_state_dict(state, strict=True)
    return model


def expected_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    config = load_model_config(folder)
    model = transformers_model(config, load_weights(folder, config, dtype=torch.float32))
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def test_logits_are_transformers(folder: Path, prompt: list[int]) -> None:
    config = load_model_config(folder)
    weights = load_weights(folder, config, dtype=torch.float32)
    backend = CpuBackend(config, "float32")
    ours = DecoderModel(config, weights, backend)
    pool = KvPool(config.kv_layout("gemma3", BLOCK, "float32"), NUM_TOKENS // BLOCK)
    attention = backend.attention(pool)
    attention.plan([Segment(NUM_TOKENS, NUM_TOKENS, range(NUM_TOKENS // BLOCK))])
    logits = ours.forward(torch.tensor(prompt), torch.arange(NUM_TOKENS), attention)
    theirs = expected_logits(folder, prompt)
    assert (logits - theirs).abs().max() < 2e-3
    top = theirs.topk(2, dim=-1).values
    is_clear = top[:, 0] - top[:, 1] > 4e-3
    assert torch.equal(logits.argmax(-1)[is_clear], theirs.argmax(-1)[is_clear])


def test_a_split_fleet_answers_as_transformers(folder: Path, prompt: list[int]) -> None:
    with running_fleet(
        model=str(folder),
        served_model_name="gemma3",
        dtype="float32",
        local_prefill_threshold_tokens=0,
    ) as fleet:
        found = complete(fleet, prompt, model="gemma3", max_tokens=NUM_ANSWERED)
    output = found["choices"][0]["token_ids"]
    theirs = expected_logits(folder, [*prompt, *output])[len(prompt) - 1 : -1]
    best = theirs.max(-1).values
    chosen = theirs.gather(1, torch.tensor(output)[:, None])[:, 0]
    assert (best - chosen).max() < 4e-3
