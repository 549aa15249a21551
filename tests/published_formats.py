"""Writes checkpoints in published formats of quantized weights, and says what their values are.

Codes, scales and zero points are random; packing follows the formats' definitions, number by
number, so that it shares nothing with the code under test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Stored = dict[str, torch.Tensor]
"""A module's tensors by their suffix."""
Encode = Callable[[int, int, torch.Generator], tuple[Stored, torch.Tensor]]
"""From outputs, inputs and chance to the stored tensors and the values, [outputs, inputs]."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Format:
    """A format: its entry in config.json, and how a module is stored."""

    config: Mapping[str, Any]
    encode: Encode
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)


def spread(shared: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    """What blocks share, for each weight of `shape`."""
    wide = shared.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: shape[0], : shape[1]]


def scales_of(counts: tuple[int, int], chance: torch.Generator, size: float) -> torch.Tensor:
    """Positive scales around `size`."""
    return size * (0.5 + torch.rand(counts, generator=chance))


def integers(low: int, high: int, shape: tuple[int, ...], chance: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=chance)


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of codes from 0 on in rows of 32-bit words, lower bits first."""
    per_word = 32 // bits
    rows = []
    for row in codes.tolist():
        words = []
        for first in range(0, len(row), per_word):
            some = row[first : first + per_word]
            words.append(sum(code << bits * place for place, code in enumerate(some)))
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def in_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits, two in a byte, the first in the lower bits."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)


def fp8(suffix: str, block: tuple[int | None, int | None], dtype: torch.dtype, **config: Any):
    """fp8 with scales of `block`; None: of all outputs or inputs."""

    def encode(outputs: int, inputs: int, chance: torch.Generator):
        size = (block[0] or outputs, block[1] or inputs)
        counts = (-(-outputs // size[0]), -(-inputs // size[1]))
        codes = (40 * torch.randn(outputs, inputs, generator=chance)).to(torch.float8_e4m3fn)
        scales = scales_of(counts, chance, 0.005).to(dtype)
        stored = scales.flatten()[:1] if block == (None, None) else scales
        values = codes.float() * spread(scales.float(), size, (outputs, inputs))
        return {"weight": codes, suffix: stored}, values

    return Format({"quant_method": "fp8", "fmt": "e4m3", **config}, encode)


def int8(has_zeros: bool, **config: Any) -> Format:
    """compressed-tensors' integers of 8 bits in bytes, a scale for each output."""

    def encode(outputs: int, inputs: int, chance: torch.Generator):
        codes = integers(-128, 128, (outputs, inputs), chance)
        scales = scales_of((outputs, 1), chance, 0.003).bfloat16()
        stored = {"weight": codes.to(torch.int8), "weight_scale": scales}
        if has_zeros:
            zeros = integers(-20, 20, (outputs, 1), chance)
            stored["weight_zero_point"] = zeros.to(torch.int8)
            codes = codes - zeros
        return stored, codes.float() * scales.float()

    return Format(config, encode)


def pack_quantized(bits: int, group: int, has_zeros: bool = False, is_ordered: bool = False):
    """compressed-tensors' packed integers; a group of -1 is all inputs."""
    weights = {
        "num_bits": bits, "type": "int", "symmetric": not has_zeros, "group_size": group,
        "strategy": "channel" if group == -1 else "group",
        "actorder": "group" if is_ordered else None,
    }  # fmt: skip

    def encode(outputs: int, inputs: int, chance: torch.Generator):
        size = inputs if group == -1 else group
        counts, middle = (outputs, -(-inputs // size)), 1 << bits - 1
        codes = integers(0, 2 * middle, (outputs, inputs), chance)
        scales = scales_of(counts, chance, 0.4 / middle).half()
        stored = {
            "weight_packed": packed(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        zeros = torch.full(counts, middle)
        if has_zeros:
            zeros = integers(0, 2 * middle, counts, chance)
            stored["weight_zero_point"] = packed(zeros.t(), bits).t().contiguous()
        groups = torch.arange(inputs) // size
        if is_ordered:
            groups = groups[torch.randperm(inputs, generator=chance)]
            stored["weight_g_idx"] = groups.int()
        return stored, (codes - zeros[:, groups]).float() * scales.float()[:, groups]

    return Format(compressed("pack-quantized", weights), encode)


def gptq(bits: int, group: int, desc_act: bool = False, sym: bool = True, version: int = 1):
    """GPTQ's own checkpoints."""
    names = {1: "gptq", 2: "gptq_v2"}
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": desc_act,
        "sym": sym, "checkpoint_format": names[version],
    }  # fmt: skip

    def encode(outputs: int, inputs: int, chance: torch.Generator):
        size = inputs if group == -1 else group
        counts, middle = (-(-inputs // size), outputs), 1 << bits - 1
        codes = integers(0, 2 * middle, (inputs, outputs), chance)
        scales = scales_of(counts, chance, 0.4 / middle).half()
        zeros = torch.full(counts, middle) if sym else integers(1, 2 * middle, counts, chance)
        groups = torch.arange(inputs) // size
        if desc_act:
            groups = groups[torch.randperm(inputs, generator=chance)]
        stored = {
            "qweight": packed(codes.t(), bits).t().contiguous(),
            "qzeros": packed(zeros - (1 if version == 1 else 0), bits),
            "scales": scales,
            "g_idx": groups.int(),
        }
        return stored, ((codes - zeros[groups]).float() * scales.float()[groups]).t().contiguous()

    return Format(config, encode)


def auto_round(packing: str, packed_as: Format, **others: Any) -> Format:
    """AutoRound's checkpoints, which say by a key how they are packed, and have no `g_idx`."""
    usual = {key: packed_as.config[key] for key in ("bits", "group_size")}
    config = {"quant_method": "auto-round", "packing_format": f"auto_round:{packing}", **usual}

    def encode(outputs: int, inputs: int, chance: torch.Generator):
        stored, values = packed_as.encode(outputs, inputs, chance)
        return {suffix: each for suffix, each in stored.items() if suffix != "g_idx"}, values

    return Format({**config, "data_type": "int", "sym": True, **others}, encode)


def awq(group: int) -> Format:
    """AWQ's checkpoints in the order "gemm"."""
    places = (0, 2, 4, 6, 1, 3, 5, 7)

    def mixed(codes: torch.Tensor) -> torch.Tensor:
        return codes.unflatten(1, (-1, 8))[:, :, places].flatten(1)

    def encode(outputs: int, inputs: int, chance: torch.Generator):
        size = inputs if group == -1 else group
        counts = (-(-inputs // size), outputs)
        codes, zeros = integers(0, 16, (inputs, outputs), chance), integers(0, 16, counts, chance)
        scales = scales_of(counts, chance, 0.05).half()
        stored = {
            "qweight": packed(mixed(codes), 4),
            "qzeros": packed(mixed(zeros), 4),
            "scales": scales,
        }
        groups = torch.arange(inputs) // size
        return stored, ((codes - zeros[groups]).float() * scales.float()[groups]).t().contiguous()

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    return Format({**config, "zero_point": True, "modules_to_not_convert": None}, encode)


def float4(group: int, is_modelopt: bool = False) -> Format:
    """MXFP4 (groups of 32) or NVFP4 (of 16)."""

    def encode(outputs: int, inputs: int, chance: torch.Generator):
        codes = integers(0, 16, (outputs, inputs), chance)
        counts = (outputs, inputs // group)
        name = "weight" if is_modelopt else "weight_packed"
        stored = {name: in_bytes(codes)}
        if group == 32:
            exponents = integers(121, 126, counts, chance)
            stored["weight_scale"] = exponents.to(torch.uint8)
            scales = torch.pow(2.0, exponents - 127.0)
        else:
            small = scales_of(counts, chance, 100.0).to(torch.float8_e4m3fn)
            stored["weight_scale"] = small
            whole = torch.tensor([0.001 if is_modelopt else 1000.0])
            stored["weight_scale_2" if is_modelopt else "weight_global_scale"] = whole
            scales = small.float() * whole if is_modelopt else small.float() / whole
        levels = torch.tensor(E2M1)[codes]
        return stored, levels * spread(scales, (1, group), (outputs, inputs))

    if is_modelopt:
        return Format({"quant_method": "modelopt", "quant_algo": "NVFP4"}, encode)
    weights = {"num_bits": 4, "type": "float", "group_size": group}
    weights["strategy"] = "group" if group == 32 else "tensor_group"
    return Format(compressed(f"{'mx' if group == 32 else 'nv'}fp4-pack-quantized", weights), encode)


def mixed_modelopt() -> Format:
    """ModelOpt's MIXED_PRECISION: NVFP4 for wide matrices, fp8 for others, in blocks if square."""
    wide = float4(16, is_modelopt=True)
    blocks = fp8("weight_scale", (128, 128), torch.float32)
    usual = fp8("weight_scale", (None, None), torch.float32)

    def encode(outputs: int, inputs: int, chance: torch.Generator):
        if inputs > outputs:
            return wide.encode(outputs, inputs, chance)
        if inputs < outputs:
            return usual.encode(outputs, inputs, chance)
        stored, values = blocks.encode(outputs, inputs, chance)
        return stored | {"weight_scale": stored["weight_scale"][:, None, :, None]}, values

    algorithms = ("W4A16_NVFP4", "FP8", "FP8_PB_WO", "FP8")
    layers = {f"model.layers.{i}": {"quant_algo": name} for i, name in enumerate(algorithms)}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    return Format({**config, "quantized_layers": layers}, encode)


def compressed(name: str, weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """compressed-tensors' configuration."""
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], **more,
    }  # fmt: skip


def _bytes(kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": strategy, **more}


FORMATS: dict[str, Format] = {
    "fp8 in blocks": fp8("weight_scale_inv", (16, 16), torch.float32, weight_block_size=[16, 16]),
    "fp8 in blocks that do not divide": fp8(
        "weight_scale_inv", (32, 20), torch.bfloat16, weight_block_size=[32, 20]
    ),
    "fp8 per tensor": fp8("weight_scale", (None, None), torch.float32, activation_scheme="static"),
    "fp8 per output": fp8(
        "weight_scale", (1, None), torch.bfloat16,
        **compressed("float-quantized", _bytes("float", "channel")),
    ),
    "fp8 in compressed blocks": fp8(
        "weight_scale", (16, 16), torch.float32,
        **compressed("float-quantized", _bytes("float", "block", block_structure=[16, 16])),
    ),
    "int8": int8(False, **compressed("int-quantized", _bytes("int", "channel"))),
    "int8 with zero points": int8(
        True, **compressed("naive-quantized", _bytes("int", "channel", symmetric=False))
    ),
    "packed int4": pack_quantized(4, 16),
    "packed int4, one group": pack_quantized(4, -1),
    "packed int4 with zero points": pack_quantized(4, 24, has_zeros=True),
    "packed int4 in another order": pack_quantized(4, 8, is_ordered=True),
    "packed int8": pack_quantized(8, 24),
    "packed int8 with zero points": pack_quantized(8, -1, has_zeros=True),
    "gptq": gptq(4, 24),
    "gptq, desc_act": gptq(4, 8, desc_act=True, sym=False),
    "gptq, one group": gptq(4, -1, sym=False),
    "gptq, version 2": gptq(4, 24, sym=False, version=2),
    "gptq, 8 bits": gptq(8, 24),
    "gptq, 8 bits, desc_act": gptq(8, 8, desc_act=True, sym=False, version=2),
    "awq": awq(24),
    "awq, one group": awq(-1),
    "auto-round": auto_round(
        "auto_gptq", gptq(4, 24), extra_config={"lm_head": {"bits": 16, "data_type": "float"}}
    ),
    "auto-round, 8 bits": auto_round(
        "auto_gptq", gptq(8, 24), bits=4, extra_config={"model.layers": {"bits": 8}}
    ),
    "auto-round as awq": auto_round("auto_awq", awq(24)),
    "mxfp4": float4(32),
    "nvfp4": float4(16),
    "nvfp4 of ModelOpt": float4(16, is_modelopt=True),
    "ModelOpt's mixed precision": mixed_modelopt(),
}  # fmt: skip


FORMATS_IN_PANELS: dict[str, Format] = {
    "fp8 in blocks": fp8("weight_scale_inv", (64, 128), torch.float32, weight_block_size=[64, 128]),
    "fp8 per output": fp8("weight_scale", (1, None), torch.bfloat16),
    "int8": FORMATS["int8 with zero points"],
    "packed int4": pack_quantized(4, 32, has_zeros=True),
    "packed int8": pack_quantized(8, -1),
    "gptq": gptq(4, 64, sym=False),
    "gptq, 8 bits": gptq(8, 64),
    "awq": awq(128),
    "mxfp4": float4(32),
    "nvfp4": float4(16),
}
"""Those that our kernels multiply as they are, if sizes are multiples of 64."""


def is_linear(name: str) -> bool:
    """Whether a plain checkpoint's tensor is one that formats quantize by default."""
    return name.endswith("_proj.weight")


def publish(
    folder: Path,
    form: Format,
    chosen: Callable[[str], bool] = is_linear,
    config_key: str = "quantization_config",
) -> dict[str, torch.Tensor]:
    """Rewrite the plain checkpoint in `folder`: its `chosen` weights become random ones in `form`.
    Returns their values by the plain names, fp32."""
    chance = torch.Generator().manual_seed(11)
    values = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = {}
        for name, tensor in load_file(file).items():
            if not chosen(name):
                tensors[name] = tensor
                continue
            stored, values[name] = form.encode(*tensor.shape, chance)
            for suffix, each in stored.items():
                tensors[f"{name.removesuffix('.weight')}.{suffix}"] = each.contiguous()
        save_file(tensors, file)
    change_config(folder, **{config_key: dict(form.config)})
    return values


def change_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite the single file of weights after `change` has changed its tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
