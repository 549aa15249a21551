"""A kind of layer is added as a class and a row: loading, sharding and passes follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.config import load_model_config
from engine.checkpoint.layer_tensors import KindWeights, LayerTensor, Rows, Split
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.shard import Shard
from engine.checkpoint.weights import load_weights
from engine.cpu.backend import CpuBackend
from engine.layers import kinds
from engine.layers.kinds import Kind
from engine.layers.linear import LinearFactory, LinearLayer
from engine.layers.ops import LayerOps
from engine.models.decoder import DecoderModel
from tests.unit.engine.conftest import PagedModel


class PlainFeedForward:
    """`down(up(x))`, in the last layer."""

    def __init__(self, config: ModelConfig, weights: KindWeights, make: LinearFactory) -> None:
        self._up = make.linear(weights.matrices.pop("up"), None)
        self._down = make.output_linear(weights.matrices.pop("down"), None)

    @staticmethod
    def tensors(config: ModelConfig) -> list[LayerTensor]:
        hidden, inner = config.hidden_size, config.intermediate_size
        return [
            LayerTensor("up", [Rows("w1.weight", inner)], hidden, Split.OUTPUTS),
            LayerTensor("down", [Rows("w2.weight", hidden)], inner, Split.INPUTS),
        ]

    @property
    def products(self) -> Sequence[LinearLayer]:
        return self._up, self._down

    def __call__(self, x: torch.Tensor, ops: LayerOps, add: torch.Tensor) -> torch.Tensor:
        return self._down(self._up(x), add=add)


@pytest.fixture
def mixed(make_tiny: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A checkpoint whose last layer is of another kind, and its configuration."""
    monkeypatch.setitem(
        kinds.FEED_FORWARD, "plain", Kind(PlainFeedForward.tensors, PlainFeedForward)
    )
    tiny = make_tiny(num_attention_heads=4, num_key_value_heads=2)
    file = tiny.folder / "model.safetensors"
    tensors = load_file(file)
    for ours, theirs in (("w1", "up_proj"), ("w2", "down_proj")):
        tensors[f"model.layers.2.ffn.{ours}.weight"] = tensors.pop(
            f"model.layers.2.mlp.{theirs}.weight"
        )
    del tensors["model.layers.2.mlp.gate_proj.weight"]
    save_file(tensors, file)
    config = load_model_config(tiny.folder)
    *others, last = config.layer_kinds
    last = replace(last, feed_forward="plain", feed_forward_name="ffn")
    return tiny, replace(config, layer_kinds=(*others, last)), tensors


def test_layers_of_two_kinds_are_loaded_by_their_own_names_and_shared_out(mixed: Any) -> None:
    tiny, config, tensors = mixed
    whole = load_weights(tiny.folder, config)
    last = whole.layers[2].feed_forward.matrices
    assert torch.equal(last["up"], tensors["model.layers.2.ffn.w1.weight"])
    assert whole.layers[1].feed_forward.matrices.keys() == {"gate_up", "down"}
    parts = [load_weights(tiny.folder, config, shard=Shard(rank, 2)) for rank in range(2)]
    ups, downs = (
        [part.layers[2].feed_forward.matrices[name] for part in parts] for name in ("up", "down")
    )
    assert torch.equal(torch.cat(ups), last["up"])
    assert torch.equal(torch.cat(downs, dim=1), last["down"])


def test_a_model_with_layers_of_two_kinds_runs_them_in_order(mixed: Any, text: Any) -> None:
    """As transformers runs it, whose last layer gets the same forward pass."""
    tiny, config, _ = mixed
    mlp = tiny.reference.model.layers[2].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.up_proj(x))
    paged = PagedModel(tiny.folder, 16, config=config)
    tokens = text(20)
    logits = paged.step([(tokens, 0, range(16))])
    torch.testing.assert_close(logits, tiny.expected_logits(tokens), rtol=1e-4, atol=1e-4)


def test_the_fused_pass_refuses_a_kind_that_it_does_not_know(mixed: Any, kernels: Any) -> None:
    if not kernels.baton_has_linear():
        pytest.skip("this CPU has no bf16 products")
    tiny, config, _ = mixed
    weights = load_weights(tiny.folder, config, dtype=torch.bfloat16)
    model = DecoderModel(config, weights, CpuBackend(config, "bfloat16", kernels))
    assert model._fused is None
