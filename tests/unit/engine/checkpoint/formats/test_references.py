"""Values are those that the formats' own package restores (see `make_references.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.json_keys import JsonKeys
from engine.checkpoint.formats.quantization import Quantization, parse_quantization
from engine.checkpoint.formats.quantized_tensors import QuantizedTensors
from engine.checkpoint.stored_tensors import FileTensors
from tests.published_formats import compressed

REFERENCES = Path(__file__).with_name("references.safetensors")
_GROUPS: dict[str, dict[str, Any]] = {
    "pack-quantized/int4": {"num_bits": 4, "group_size": 32},
    "pack-quantized/int4-zeros": {"num_bits": 4, "group_size": 32, "symmetric": False},
    "pack-quantized/int8": {"num_bits": 8, "strategy": "channel"},
    "pack-quantized/int8-zeros": {"num_bits": 8, "strategy": "channel", "symmetric": False},
    "int-quantized/channel": {"strategy": "channel"},
    "naive-quantized/zeros": {"strategy": "channel", "symmetric": False},
    "naive-quantized/tensor": {"strategy": "tensor"},
    "float-quantized/channel": {"type": "float", "strategy": "channel"},
    "float-quantized/block": {"type": "float", "strategy": "block", "block_structure": "16x48"},
    "nvfp4-pack-quantized/group": {"num_bits": 4, "type": "float", "group_size": 16},
    "mxfp4-pack-quantized/group": {"num_bits": 4, "type": "float", "group_size": 32},
    "mxfp8-quantized/group": {"type": "float", "group_size": 32},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "awq/": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "GEMM"},
    "fp8/": {"quant_method": "fp8", "weight_block_size": [16, 48]},
} | {name: compressed(name.split("/")[0], weights) for name, weights in _GROUPS.items()}


def quantization(config: dict[str, Any]) -> Quantization:
    found = parse_quantization(JsonKeys({"quantization_config": config}, "config.json"))
    assert found is not None
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_values_are_those_of_the_package(tmp_path, name):
    stored = {
        key.removeprefix(f"{name}."): tensor
        for key, tensor in load_file(REFERENCES).items()
        if key.startswith(f"{name}.")
    }
    values = stored.pop("values")
    save_file({f"m.{key}": each for key, each in stored.items()}, tmp_path / "model.safetensors")
    found = QuantizedTensors(FileTensors(tmp_path), quantization(CONFIGS[name]), ["m.weight"])
    assert set(found.entries) == {"m.weight"}
    ours = found.read("m.weight")
    if name.startswith("nvfp4"):  # which the package rounds
        ours = ours.bfloat16().float()
    assert torch.equal(ours, values)


def test_all_references_are_compared():
    assert {key.rsplit(".", 1)[0] for key in load_file(REFERENCES)} == set(CONFIGS)
