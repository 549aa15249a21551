"""Scales of keys and values in checkpoints: a pool of fp8 holds what is divided by them, and any
other pool is the same with and without them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from engine.checkpoint.config import load_model_config
from engine.checkpoint.formats.kv_scales import add_kv_scales
from engine.checkpoint.shard import Shard
from engine.checkpoint.stored_tensors import FileTensors
from engine.checkpoint.weights import load_weights
from engine.engine_config import EngineConfig
from engine.loader import LoadedEngine, load_engine
from protocol.errors import ModelLoadError
from scheduling.scheduler import SchedulerConfig
from tests.effort import some
from tests.hybrid_models import HYBRIDS
from tests.published_formats import FORMATS, change_tensors, publish
from tests.unit.engine.test_served_tokens import asked, output
from worker.moved_blocks import moved_blocks

BLOCK = 4
SIZES = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 16}
NAMES = ["self_attn.{}_scale", "self_attn.{}_proj.{}_scale", "self_attn.attn.{}_scale"]
K_SCALES, V_SCALES = (9.0, 0.05), (31.0, 0.05)
"""Of two layers: by layer, of keys and of values."""


class Rounded(DynamicCache):
    """Keeps keys and values as fp8 does, divided by the layers' scales."""

    def __init__(self, scales: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._scales = scales

    def update(self, keys: Any, values: Any, layer: int, *others: Any, **more: Any) -> Any:
        k, v = self._scales[layer]
        return super().update(_stored(keys, k), _stored(values, v), layer, *others, **more)


def _stored(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`values` are [batch, heads, tokens, head_dim], `scale` is [heads]."""
    scale = scale[:, None, None]
    return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32) * scale


@pytest.fixture
def scaled(make_tiny: Any) -> Any:
    """`scaled(name, per_head)`: a checkpoint with large keys, and its scales by these names."""

    def make(
        name: str, per_head: bool = False, architecture: str = "LlamaForCausalLM", quantized=False
    ) -> Any:
        tiny = make_tiny(architecture, **SIZES, eos_token_id=None)
        if quantized:
            values = publish(tiny.folder, FORMATS["fp8 per tensor"])
            tiny.reference.load_state_dict(values, strict=False)
        heads = torch.tensor([1.0, 0.5]) if per_head else torch.ones(1)
        tiny.scales = [
            ((heads * k).expand(2), (heads * v).expand(2))
            for k, v in zip(K_SCALES, V_SCALES, strict=True)
        ]

        def change(tensors: dict[str, torch.Tensor]) -> None:
            for layer, pair in enumerate(zip(K_SCALES, V_SCALES, strict=True)):
                for letter, scale in zip("kv", pair, strict=True):
                    at = f"model.layers.{layer}.{name.format(letter, letter)}"
                    tensors[at] = (heads * scale).clone()

        change_tensors(tiny.folder, change)
        return tiny

    return make


def engine(
    folder: Path, kv_dtype: str, dtype: str = "float32", num_blocks: int = 32
) -> LoadedEngine:
    scheduler = SchedulerConfig(BLOCK, 8, BLOCK, 16)
    config = EngineConfig(
        folder, scheduler, dtype=dtype, kv_dtype=kv_dtype, device="cpu", num_blocks=num_blocks
    )
    return load_engine(config, lambda: 0.0)


def tokens(loaded: LoadedEngine, prompt: list[int]) -> list[int]:
    sequence = asked(prompt)
    loaded.engine.scheduler.add(sequence)
    while loaded.engine.scheduler.has_work:
        loaded.engine.run(loaded.engine.plan())
    return output(sequence)


def expected_tokens(tiny: Any, prompt: list[int], count: int) -> list[int]:
    """transformers' greedy tokens over a cache of rounded keys and values."""
    found: list[int] = []
    for _ in range(count):
        ids = torch.tensor([[*prompt, *found]])
        with torch.no_grad():
            logits = tiny.reference(ids, past_key_values=Rounded(tiny.scales)).logits
        found.append(int(logits[0, -1].argmax()))
    return found


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("name", some(NAMES, 2))
def test_a_pool_of_fp8_holds_what_is_divided_by_the_scales(
    scaled: Any, text: Any, kernels: Any, name: str, per_head: bool
) -> None:
    tiny = scaled(name, per_head, "Qwen3ForCausalLM", quantized=not per_head)
    prompt = text(23)
    loaded = engine(tiny.folder, "fp8")
    found = tokens(loaded, prompt)
    assert found == expected_tokens(tiny, prompt, len(found))
    plain = engine(tiny.folder, "auto")
    held = loaded.pool.tensor.to(torch.float32).unbind(1)
    exact = plain.pool
    tokens(plain, prompt)
    for plane, scale in enumerate(tiny.scales[0]):  # later layers get other inputs
        restored = held[0][:5, plane] * scale[:, None, None]
        wanted = exact.layer(0)[:5, plane]
        torch.testing.assert_close(restored, wanted, rtol=0.08, atol=float(scale.max()) / 100)


@pytest.mark.parametrize(
    ("model", "names", "scales"),
    [
        ("qwen3.5", ["model.layers.1.self_attn.kv_scale"], (0.05, 0.05)),
        (
            "nemotron-h",
            [f"backbone.layers.3.mixer.{letter}_proj.{letter}_scale" for letter in "kv"],
            (0.05, 0.02),
        ),  # block 3 is in the third layer
    ],
)
def test_attention_beside_states_has_scales(
    make_tiny: Any,
    text: Any,
    kernels: Any,
    model: str,
    names: list[str],
    scales: tuple[float, float],
) -> None:
    architecture, options = HYBRIDS[model]
    tiny = make_tiny(architecture, eos_token_id=None, **options)
    new = {name: torch.tensor([scale]) for name, scale in zip(names, scales, strict=False)}
    change_tensors(tiny.folder, lambda all_tensors: all_tensors.update(new))
    wanted, held = (_first_blocks(tiny.folder, kv_dtype, text(23)) for kv_dtype in ("auto", "fp8"))
    restored = held * torch.tensor(scales)[:, None, None, None]
    torch.testing.assert_close(restored, wanted, rtol=0.08, atol=min(scales) / 100)


def _first_blocks(folder: Path, kv_dtype: str, prompt: list[int]) -> torch.Tensor:
    """Of the only layer with keys and values: [blocks, 2, heads, tokens, head_dim]."""
    loaded, sequence = engine(folder, kv_dtype, num_blocks=400), asked(prompt)
    loaded.engine.scheduler.add(sequence)
    while len(sequence.tokens) == len(prompt):
        loaded.engine.run(loaded.engine.plan())
    blocks = moved_blocks(sequence, 0, len(prompt) // BLOCK * BLOCK).block_ids
    return loaded.pool.groups[0].layer(0)[list(blocks)].to(torch.float32)


@pytest.mark.parametrize("quantized", [False, True])
def test_they_change_nothing_in_other_pools(
    scaled: Any, text: Any, caplog: pytest.LogCaptureFixture, quantized: bool
) -> None:
    tiny = scaled(NAMES[0], quantized=quantized)
    with caplog.at_level(logging.INFO):
        loaded = engine(tiny.folder, "auto")
    assert "(model.layers.0.self_attn.k_scale) are for KV in fp8 and change nothing" in caplog.text
    assert "WARNING" not in caplog.text
    found = tokens(loaded, text(23))
    change_tensors(tiny.folder, _without_scales)
    assert found == tokens(engine(tiny.folder, "auto"), text(23))


def test_workers_without_the_scales_have_another_fingerprint(scaled: Any, kernels: Any) -> None:
    """A checkpoint's fingerprint covers its tensors, too; a worker that ignored them would not."""
    tiny = scaled(NAMES[0])
    assert "-scaled" in engine(tiny.folder, "fp8").engine.layout.model_fingerprint
    assert "-scaled" not in engine(tiny.folder, "auto").engine.layout.model_fingerprint


def test_scales_of_one_cost_nothing(scaled: Any, kernels: Any) -> None:
    """The layers stay in one call of the kernels."""
    tiny = scaled(NAMES[0])
    change_tensors(tiny.folder, lambda all_tensors: _set(all_tensors, torch.ones(1)))
    loaded = engine(tiny.folder, "fp8", "bfloat16")
    assert loaded.engine._runner._step is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize("per_head", [False, True])
def test_ranks_have_the_scales_of_their_heads(scaled: Any, per_head: bool) -> None:
    tiny = scaled(NAMES[0], per_head)
    config = load_model_config(tiny.folder)
    for rank, size, stage in [(0, 2, 0), (1, 2, 1), (2, 6, 0), (4, 6, 1)]:
        shard = Shard(rank, size, stage, 2)
        part = config.part_of(shard)
        weights = load_weights(tiny.folder, config, shard=shard)
        assert add_kv_scales(weights, FileTensors(tiny.folder), part, shard)
        (layer,) = weights.layers
        head = rank * 2 // size
        k, v = tiny.scales[stage]
        assert layer.attention.vectors["k_scale"].tolist() == [k[head]]
        assert layer.attention.vectors["v_scale"].tolist() == [v[head]]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(3), "has 3 scales; expected is one, or one for each KV head"),
        (torch.zeros(1), "must have numbers above 0"),
        (torch.full((1,), float("nan")), "must have numbers above 0"),
        (torch.ones(1, dtype=torch.int32), "is stored as I32"),
        (torch.ones(0), "has 0 scales"),
    ],
)
def test_bad_scales_are_named(scaled: Any, kernels: Any, value: torch.Tensor, words: str) -> None:
    tiny = scaled(NAMES[0])
    change_tensors(tiny.folder, lambda all_tensors: _set(all_tensors, value))
    with pytest.raises(ModelLoadError, match=f"safetensors: tensor 'model.*_scale' {words}"):
        engine(tiny.folder, "fp8")


def _set(tensors: dict[str, torch.Tensor], value: torch.Tensor) -> None:
    for name in list(tensors):
        if name.endswith(("k_scale", "v_scale")):
            tensors[name] = value.clone()


def _without_scales(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        if name.endswith(("k_scale", "v_scale")):
            del tensors[name]
