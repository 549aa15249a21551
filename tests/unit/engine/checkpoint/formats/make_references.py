"""Makes `references.safetensors`: small matrices that the formats' own package has quantized and
restored, with scales in fp32.

Needs compressed-tensors, which nothing else does: run it in an environment of its own.
"""

from __future__ import annotations

from pathlib import Path

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import (
    FP8BlockDequantizer,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file

OUTPUTS, INPUTS = 24, 64
SCHEMES = {
    "pack-quantized": {
        "int4": {"num_bits": 4, "strategy": "group", "group_size": 32},
        "int4-zeros": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        "int8": {"num_bits": 8, "strategy": "channel"},
        "int8-zeros": {"num_bits": 8, "strategy": "channel", "symmetric": False},
    },
    "int-quantized": {"channel": {"num_bits": 8, "strategy": "channel"}},
    "naive-quantized": {
        "zeros": {"num_bits": 8, "strategy": "channel", "symmetric": False},
        "tensor": {"num_bits": 8, "strategy": "tensor"},
    },
    "float-quantized": {
        "channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 48]},
    },
    "nvfp4-pack-quantized": {
        "group": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    },
    "mxfp4-pack-quantized": {
        "group": {
            "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32,
            "scale_dtype": torch.uint8,
        }
    },
    "mxfp8-quantized": {
        "group": {
            "num_bits": 8, "type": "float", "strategy": "group", "group_size": 32,
            "scale_dtype": torch.uint8,
        }
    },
}  # fmt: skip


def scale_shape(weights: QuantizationArgs) -> tuple[int, ...]:
    if weights.strategy == "tensor":
        return (1,)
    if weights.strategy == "channel":
        return (OUTPUTS, 1)
    if weights.strategy == "block":
        rows, columns = weights.block_structure
        return (-(-OUTPUTS // rows), -(-INPUTS // columns))
    return (OUTPUTS, INPUTS // weights.group_size)


def compressed(name: str, weights: QuantizationArgs) -> dict[str, torch.Tensor]:
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(name)
    shape = scale_shape(weights)
    scales = torch.rand(shape) * 0.02 + 0.01
    module = {"weight": torch.randn(OUTPUTS, INPUTS) * 0.1, "weight_scale": scales}
    if "mxfp" in name:
        module["weight_scale"] = torch.pow(2.0, torch.randint(-8, -4, shape).float())
    if "nvfp4" in name:
        module["weight_scale"] = (torch.rand(shape) * 200 + 100).to(torch.float8_e4m3fn).float()
        module["weight_global_scale"] = torch.tensor([5000.0])
    if not weights.symmetric:
        module["weight_zero_point"] = torch.randint(-5, 5, shape).to(torch.int8)
    stored = compressor.compress(module, scheme)
    values = compressor.decompress(dict(stored), scheme)["weight"]
    return stored | {"values": values.float()}


def awq() -> dict[str, torch.Tensor]:
    shape = (INPUTS, OUTPUTS // 8)
    words = torch.iinfo(torch.int32)
    stored = {
        "qweight": torch.randint(words.min, words.max, shape).int(),
        "qzeros": torch.randint(words.min, words.max, (INPUTS // 32, OUTPUTS // 8)).int(),
        "scales": (torch.rand(INPUTS // 32, OUTPUTS) * 0.02).half(),
    }
    codes, scales, zeros = AutoAWQConverter(group_size=32)._convert_gemm_module(
        stored["qweight"], stored["scales"], stored["qzeros"]
    )
    values = (codes.float() - zeros.repeat_interleave(32, 1).float()) * (
        scales.float().repeat_interleave(32, 1)
    )
    return stored | {"values": values}


def fp8_blocks() -> dict[str, torch.Tensor]:
    stored = {
        "weight": torch.randn(OUTPUTS, INPUTS).to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.rand(-(-OUTPUTS // 16), -(-INPUTS // 48)),
    }
    dequantizer = FP8BlockDequantizer(
        targets=["re:.*"], weight_block_size=(16, 48), dtype=torch.float32
    )
    values = dequantizer._create_dequantized_weight(*stored.values())
    return stored | {"values": values}


def main() -> None:
    torch.manual_seed(0)
    modules = {"awq/": awq(), "fp8/": fp8_blocks()}
    for name, every in SCHEMES.items():
        for kind, arguments in every.items():
            modules[f"{name}/{kind}"] = compressed(name, QuantizationArgs(**arguments))
    tensors = {
        f"{module}.{name}": tensor.data.contiguous()
        for module, stored in modules.items()
        for name, tensor in stored.items()
    }
    save_file(tensors, Path(__file__).with_name("references.safetensors"))


if __name__ == "__main__":
    main()
