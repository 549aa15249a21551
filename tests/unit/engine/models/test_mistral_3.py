"""Mistral's checkpoints for images and text, as published: Mistral Small 3.1 and Ministral 3."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.checkpoint.config import load_model_config
from protocol.errors import ModelLoadError
from tests.unit.engine.conftest import VOCAB_SIZE
from tests.unit.engine.models.test_decoder import CLOSE, TABLE

ROPE_OF_MINISTRAL_3 = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 16.0,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1_000_000.0,
    "rope_type": "yarn",
    "type": "yarn",
}
TEXTS: dict[str, dict[str, Any]] = {
    "mistral": {"rope_theta": 1_000_000_000.0},
    "ministral3": {"rope_parameters": ROPE_OF_MINISTRAL_3},
}
VISION = {
    "model_type": "pixtral", "head_dim": 8, "hidden_act": "silu", "hidden_size": 16,
    "image_size": 28, "intermediate_size": 24, "num_attention_heads": 2, "num_channels": 3,
    "num_hidden_layers": 1, "patch_size": 14, "rope_theta": 10_000.0,
}  # fmt: skip


def make(folder: Any, model_type: str, **changes: Any) -> transformers.PreTrainedModel:
    """A checkpoint with the tensors' names as published, and the model that it was saved from."""
    text = {
        "model_type": model_type, "attention_dropout": 0.0, "head_dim": 16, "hidden_act": "silu",
        "hidden_size": 48, "intermediate_size": 72, "max_position_embeddings": 256,
        "num_attention_heads": 6, "num_hidden_layers": 3, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05, "sliding_window": None, "use_cache": True,
        "vocab_size": VOCAB_SIZE, **TEXTS[model_type], **changes,
    }  # fmt: skip
    config: dict[str, Any] = {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
        "image_token_index": 10, "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu", "spatial_merge_size": 2, "vision_feature_layer": -1,
        "text_config": text, "vision_config": VISION, "eos_token_id": 1,
    }  # fmt: skip
    torch.manual_seed(1234)
    model_config = transformers.Mistral3Config.from_dict(config | {"tie_word_embeddings": False})
    model = transformers.Mistral3ForConditionalGeneration(model_config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            middle = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(middle + 0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    return model


def expected_logits(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize("model_type", TEXTS)
def test_the_language_model_is_served(tmp_path, paged_model, text, model_type):
    model = make(tmp_path, model_type)
    stored = load_file(tmp_path / "model.safetensors")
    for name in ("language_model.lm_head.weight", "multi_modal_projector.norm.weight"):
        assert name in stored
    assert any(name.startswith("vision_tower.transformer.layers.0.") for name in stored)
    tokens = text(45)
    paged = paged_model(tmp_path)
    assert (paged.config.rope.query_scaling_beta is None) == (model_type == "mistral")
    for chunk in (45, 7):
        logits = paged.in_chunks(tokens, chunk, TABLE)
        torch.testing.assert_close(logits, expected_logits(model, tokens), **CLOSE)


def test_fp8_with_static_scales_is_served(tmp_path, paged_model, text, caplog):
    """As Ministral 3 is published: a scale per tensor, in bf16 and of no dimension, beside one of
    the activations; the parts for images and the logits are plain."""
    model = make(tmp_path, "ministral3")
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for name in [each for each in stored if each.endswith("_proj.weight")]:
        if not name.startswith("language_model."):
            continue
        module = name.removesuffix(".weight")
        scale = (stored[name].abs().max() / 448).to(torch.bfloat16)
        stored[name] = (stored[name] / scale).to(torch.float8_e4m3fn)
        stored[f"{module}.weight_scale_inv"] = scale
        stored[f"{module}.activation_scale"] = torch.tensor(0.03, dtype=torch.bfloat16)
        parameter = model.get_parameter(
            name.replace("language_model.model", "model.language_model", 1)
        )
        parameter.data.copy_(stored[name].float() * scale.float())
    save_file(stored, file)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "static",
        "dequantize": False,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = text(30)
    with caplog.at_level("INFO"):
        logits = paged_model(tmp_path).in_chunks(tokens, 8, TABLE)
    lines = [record.message for record in caplog.records]
    assert any(
        "activations are not quantized (the checkpoint's scheme: fp8, stati" in line
        for line in lines
    )
    assert not any("activation_scale" in line for line in lines)
    torch.testing.assert_close(logits, expected_logits(model, tokens), **CLOSE)


def test_another_language_model_is_named(tmp_path):
    make(tmp_path, "mistral")
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["model_type"] = "mistral4"
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = "'model_type' must be one of mistral, ministral3, not \"mistral4\""
    with pytest.raises(ModelLoadError, match=expected):
        load_model_config(tmp_path)
