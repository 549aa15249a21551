"""Wrong quantized checkpoints: one line that names the file and the key or tensor."""

from __future__ import annotations

import math

import pytest
import torch

from checkpoint.json_keys import JsonKeys
from engine.checkpoint.config import load_model_config
from engine.checkpoint.formats.quantization import parse_quantization
from engine.checkpoint.weights import load_weights
from protocol.errors import ModelLoadError
from tests.published_formats import FORMATS, change_config, change_tensors, compressed, publish

Q = "model.layers.1.self_attn.q_proj"
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
_MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128}
_INT4 = {"num_bits": 4, "type": "int", "group_size": 128}


@pytest.mark.parametrize(
    ("config", "needles"),
    [
        ({"bits": 4}, ["'quant_method'", "missing"]),
        ({"quant_method": "bitsandbytes"}, ["'quant_method'", "fp8", "awq", "bitsandbytes"]),
        ({"quant_method": ["fp8"]}, ["'quant_method'", "string"]),
        ({"quant_method": "fp8", "fmt": "e5m2"}, ["'fmt'", "e4m3"]),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ["'weight_block_size'", "[128]"]),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, ["'weight_block_size'"]),
        (_GPTQ | {"bits": 3}, ["'bits'", "4 or 8", "3"]),
        (_GPTQ | {"bits": "4"}, ["'bits'", '"4"']),
        (_GPTQ | {"group_size": 0}, ["'group_size'", "0"]),
        (_GPTQ | {"checkpoint_format": "marlin"}, ["'checkpoint_format'", "gptq_v2", "marlin"]),
        (_GPTQ | {"dynamic": {"+:.*": {"bits": 2}}}, ["dynamic", "'bits'", "2"]),
        ({"quant_method": "awq", "bits": 8}, ["'bits'", "8"]),
        ({"quant_method": "awq", "version": "gemv"}, ["'version'", "gemm", "gemv"]),
        ({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}, ["'quant_algo'", "NVFP4"]),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, ["'group_size'"]),
        (_MIXED | {"quantized_layers": {"q": {"quant_algo": "W4A8"}}}, ["q: 'quant_algo'", "W4A8"]),
        (_ROUND | {"packing_format": "auto_round"}, ["'packing_format'", "auto_gptq"]),
        (_ROUND | {"data_type": "mx_fp"}, ["'data_type'", "mx_fp"]),
        (_ROUND | {"extra_config": {"q": {"bits": 2}}}, ["q: 'bits'", "4 or 8", "2"]),
        (compressed("marlin-24", _INT4), ["'format'", "pack-quantized", "marlin-24"]),
        (compressed("pack-quantized", _INT4 | {"num_bits": 3}), ["group_0", "'num_bits'", "3"]),
        (compressed("pack-quantized", _INT4 | {"strategy": "token"}), ["'strategy'", "token"]),
        (compressed("pack-quantized", _INT4 | {"group_size": -2}), ["'group_size'", "-2"]),
        (compressed("pack-quantized", _INT4 | {"type": "fp"}), ["'type'", "int or float"]),
        (compressed("pack-quantized", _INT4, quantization_status="calibration"), ["calibration"]),
        (
            compressed("pack-quantized", _INT4, sparsity_config={"format": "sparse-24-bitmask"}),
            ["sparsity_config", "sparse-24-bitmask"],
        ),
        (
            compressed("pack-quantized", _INT4, transform_config={"config_groups": {"R1": {}}}),
            ["'transform_config'", "rotated"],
        ),
    ],
)
def test_unknown_quantizations_are_refused_by_name(config, needles):
    with pytest.raises(ModelLoadError) as error:
        parse_quantization(JsonKeys({"quantization_config": config}, "config.json"))
    message = str(error.value)
    assert message.startswith("config.json: quantization_config")
    assert "\n" not in message
    for needle in needles:
        assert needle in message


@pytest.mark.parametrize(
    "config",
    [
        compressed("int-quantized", {"num_bits": 8, "strategy": "channel", "actorder": "static"}),
        compressed("dense", {}, config_groups={"kv": {"targets": ["re:.*attn"], "weights": None}}),
        _GPTQ | {"group_size": -1, "meta": {"quantizer": ["gptqmodel:4"]}, "lm_head": False},
        _GPTQ | {"dynamic": {"-:.*mtp.*": {}, "+:.*down.*": {"bits": 8, "group_size": 32}}},
        {"quant_method": "awq", "bits": 4, "group_size": -1, "version": "GEMM", "zero_point": True},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "exclude_modules": []}},
        _MIXED | {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}},
        _ROUND | {"sym": True, "autoround_version": "0.12.0", "iters": 200},
    ],
)
def test_what_writers_add_is_accepted(config):
    assert parse_quantization(JsonKeys({"quantization_config": config}, "config.json")) is not None


def drop(suffix: str):
    def change(tensors):
        del tensors[f"{Q}.{suffix}"]

    return change


def put(suffix: str, tensor: torch.Tensor):
    def change(tensors):
        tensors[f"{Q}.{suffix}"] = tensor

    return change


@pytest.mark.parametrize(
    ("name", "change", "needles"),
    [
        ("fp8 in blocks", drop("weight_scale_inv"), ["weight_scale_inv", "missing"]),
        ("fp8 in blocks", drop("weight"), [f"{Q}.weight'", "missing"]),
        ("fp8 in blocks", put("weight_scale_inv", torch.ones(6, 5)), ["[6, 5]", "[6, 6]"]),
        ("fp8 in blocks", put("weight_scale_inv", torch.ones(6, 6).int()), ["I32", "F32"]),
        ("fp8 per tensor", put("weight_scale", torch.ones(2)), ["[2]", "[1] or [96, 1]"]),
        ("fp8 per tensor", put("weight", torch.ones(96, 96).int()), ["I32", "BF16"]),
        ("fp8 per tensor", put("weight", torch.ones(96).to(torch.float8_e4m3fn)), ["[96]", "two"]),
        ("int8 with zero points", drop("weight_zero_point"), ["weight_zero_point", "missing"]),
        ("packed int4", drop("weight_packed"), ["weight_packed", "missing"]),
        ("packed int4", drop("weight_shape"), ["weight_shape", "missing"]),
        ("packed int4", drop("weight_scale"), ["weight_scale", "missing"]),
        ("packed int4", put("weight_shape", torch.tensor([96, 960])), ["_packed", "[96, 960]"]),
        ("packed int4", put("weight_shape", torch.tensor([-1, 96])), ["weight_packed", "[-1, 96]"]),
        ("packed int4", put("weight_scale", torch.ones(96, 3)), ["[96, 3]", "[96, 6]"]),
        ("packed int8", put("weight_packed", torch.ones(96, 12).int()), ["8 bits"]),
        ("packed int4 with zero points", drop("weight_zero_point"), ["weight_zero_point"]),
        (
            "packed int4 in another order",
            put("weight_g_idx", torch.full((96,), 12).int()),
            ["weight_g_idx", "0 to 11"],
        ),
        ("gptq", drop("qweight"), ["qweight", "missing"]),
        ("gptq", drop("qzeros"), ["qzeros", "missing"]),
        ("gptq", drop("scales"), ["scales", "missing"]),
        ("gptq", put("scales", torch.ones(5, 96)), ["scales", "[5, 96]", "[4, 96]"]),
        ("gptq", put("qzeros", torch.ones(4, 11).int()), ["qzeros", "[4, 11]", "[4, 12]"]),
        ("gptq", put("g_idx", torch.zeros(95).int()), ["g_idx", "[95]", "[96]"]),
        ("gptq", put("qweight", torch.ones(11, 96).int()), ["[88]"]),
        ("awq", put("qweight", torch.ones(96, 11).int()), ["scales", "[4, 88]"]),
        ("awq", drop("qzeros"), ["qzeros", "missing"]),
        ("mxfp4", put("weight_scale", torch.ones(96, 2).byte()), ["[96, 2]", "[96, 3]"]),
        ("nvfp4", drop("weight_global_scale"), ["weight_global_scale", "missing"]),
        ("nvfp4", put("weight_global_scale", torch.zeros(1)), ["weight_global_scale' is 0;"]),
        ("nvfp4 of ModelOpt", drop("weight_scale_2"), ["weight_scale_2", "missing"]),
        ("nvfp4 of ModelOpt", put("weight_scale_2", torch.full((1,), math.nan)), ["is nan;"]),
        ("fp8 per tensor", put("weight_scale", torch.full((), math.inf)), ["scale' is inf;"]),
        ("nvfp4", put("weight_scale", torch.ones(96, 6)), ["weight_scale", "F32", "F8_E4M3"]),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named(make_tiny, name, change, needles):
    tiny = make_tiny(hidden_size=96, intermediate_size=160, num_hidden_layers=2)
    publish(tiny.folder, FORMATS[name])
    change_tensors(tiny.folder, change)
    with pytest.raises(ModelLoadError) as error:
        load_weights(tiny.folder, load_model_config(tiny.folder))
    message = str(error.value)
    assert message.startswith(str(tiny.folder))
    assert "\n" not in message
    for needle in (Q, *needles):
        assert needle in message


def test_tensors_of_another_method_are_refused(make_tiny):
    tiny = make_tiny(hidden_size=96, intermediate_size=160)
    publish(tiny.folder, FORMATS["gptq, 8 bits"])
    change_config(tiny.folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ModelLoadError, match=r"q_proj\.qweight' is GPTQ's or AWQ's, .* 'fp8'"):
        load_weights(tiny.folder, load_model_config(tiny.folder))


def test_codes_without_a_configuration_are_refused(make_tiny):
    tiny = make_tiny(hidden_size=96, intermediate_size=160)
    publish(tiny.folder, FORMATS["fp8 per tensor"], config_key="not_quantized")
    with pytest.raises(ModelLoadError, match="stored as F8_E4M3"):
        load_weights(tiny.folder, load_model_config(tiny.folder))
