"""Gemma's checkpoints as they are published: parts of several models, and sparse configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.config import load_model_config
from engine.checkpoint.weights import load_weights
from protocol.errors import ModelLoadError
from tests.unit.engine.models.test_decoder import CLOSE, TABLE

OF_TEXT = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")


def rewrite_config(folder: Path, change: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(change(config)))


def rename_tensors(folder: Path, prefix: str) -> None:
    """As in a checkpoint for images, too, whose tensors nothing here uses."""
    file = folder / "model.safetensors"
    tensors = {
        name.replace("model.", prefix, 1): tensor for name, tensor in load_file(file).items()
    }
    image = {"vision_tower.vision_model.post_layernorm.weight": torch.zeros(4)}
    save_file(tensors | image, file)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("names_it", [True, False])
def test_the_language_model_of_a_checkpoint_for_images(
    make_tiny, paged_model, text, prefix, names_it
):
    tiny = make_tiny("Gemma3ForCausalLM")
    names = ["Gemma3ForConditionalGeneration"] if names_it else None

    def nested(config: dict[str, Any]) -> dict[str, Any]:
        return {
            "architectures": names,
            "model_type": "gemma3",
            "vision_config": {"hidden_size": 8},
            "eos_token_id": [1, 7],
            "torch_dtype": "float32",
            "text_config": config | {"model_type": "gemma3_text", "dtype": None},
        }

    rewrite_config(tiny.folder, nested)
    (tiny.folder / "generation_config.json").unlink()
    rename_tensors(tiny.folder, prefix)
    tokens = text(30)
    paged = paged_model(tiny.folder)
    assert paged.config.architecture == "Gemma3ForConditionalGeneration"
    assert paged.config.eos_token_ids == (1, 7)
    torch.testing.assert_close(
        paged.in_chunks(tokens, 8, TABLE), tiny.expected_logits(tokens), **CLOSE
    )


def test_a_configuration_of_transformers_4_says_the_same(make_tiny):
    tiny = make_tiny("Gemma3ForCausalLM", sliding_window_pattern=6, num_hidden_layers=12)
    expected = load_model_config(tiny.folder)

    def older(config: dict[str, Any]) -> dict[str, Any]:
        for key in ("rope_parameters", "layer_types"):
            del config[key]
        return config | {
            "rope_theta": 500.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "sliding_window_pattern": 6,
        }

    rewrite_config(tiny.folder, older)
    assert load_model_config(tiny.folder) == expected


def test_what_a_published_configuration_leaves_out(tmp_path):
    """Those of 4 B and more say hardly more than the sizes that are not transformers' defaults."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_model_config(tmp_path)
    assert (found.vocab_size, found.num_heads, found.num_kv_heads) == (262_208, 8, 4)
    assert (found.head_dim, found.max_position_embeddings) == (256, 131_072)
    assert found.hidden_act == "gelu_pytorch_tanh"
    assert found.sliding_windows[:7] == (1024,) * 5 + (None, 1024)
    assert found.scoring.scale == 1 / 16
    assert found.local_rope is not None
    assert (found.rope.theta, found.rope.factor, found.local_rope.theta) == (1e6, 8.0, 1e4)
    assert found.tie_word_embeddings
    assert found.embedding_scale == 2560**0.5


def test_gemma_2_has_caps_unless_a_null_says_otherwise(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3}
    config: dict[str, Any] = {"architectures": ["Gemma2ForCausalLM"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_model_config(tmp_path)
    assert (found.scoring.cap, found.logits_cap) == (50.0, 30.0)
    assert found.sliding_windows == (4096, None, 4096)
    config |= {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_model_config(tmp_path)
    assert (found.scoring.cap, found.logits_cap) == (None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": True}, "'use_bidirectional_attention' must be false or"),
        ({"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' must be absent or null"),
        ({"final_logit_softcapping": 0}, "'final_logit_softcapping' must be a finite number"),
        ({"query_pre_attn_scalar": "1"}, "'query_pre_attn_scalar' must be a number greater than 0"),
        ({"hidden_activation": "relu"}, "'hidden_activation' must be one of silu"),
        ({"sliding_window": None}, "'layer_types' must be all 'full_attention' while 'sliding_wi"),
        ({"layer_types": ["full_attention"]}, "'layer_types' must be a list of num_hidden_layers"),
        ({"rope_parameters": {"full_attention": {"rope_type": "x"}}}, "rope type 'x' is not supp"),
    ],
)
def test_wrong_keys_are_named(make_tiny, changes, message):
    tiny = make_tiny("Gemma3ForCausalLM")
    rewrite_config(tiny.folder, lambda config: config | changes)
    with pytest.raises(ModelLoadError, match=message):
        load_model_config(tiny.folder)


@pytest.mark.parametrize("norm", ["pre_feedforward", "post_feedforward", "post_attention"])
def test_a_missing_norm_is_named(make_tiny, norm):
    tiny = make_tiny("Gemma3ForCausalLM")
    file = tiny.folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"model.layers.1.{norm}_layernorm.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=rf"layers\.1\.{norm}_layernorm\.weight.*is missing"):
        load_weights(tiny.folder, load_model_config(tiny.folder))
