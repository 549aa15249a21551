"""Quantized weights as a checkpoint's config.json describes them; imports no torch.

Which modules are quantized is read from the stored tensors, so lists of modules that are not
(`ignore`, `modules_to_not_convert`) need no interpretation. The other settings are checked here, by
name, before a weight is read: methods, bits, and how many weights may share a scale.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from checkpoint.json_keys import JsonKeys
from protocol.errors import ModelLoadError

_KEYS = ("quantization_config", "compression_config")
_MAX_GROUPS = 1 << 18
"""ModelOpt lists each expert of each layer."""
_BLOCK = re.compile(r"[0-9]{1,7}x[0-9]{1,7}")
_INTEGER_BITS = (4, 8)
_FLOAT_BITS = (4, 8)
_COMPRESSED_FORMATS = (
    "pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mxfp8-quantized",
    "mxfp4-pack-quantized", "nvfp4-pack-quantized", "mixed-precision", "dense",
)  # fmt: skip
_STATUSES = ("compressed", "frozen")
"""Older writers leave the status before the last one in the file, whose weights are compressed."""


@dataclass(frozen=True)
class Sharing:
    """How many outputs and inputs share a scale; None: all of them."""

    outputs: int | None
    inputs: int | None

    def __str__(self) -> str:
        if self.outputs is None and self.inputs is None:
            return "a scale per tensor"
        if self.inputs is None:
            return "a scale per output"
        if self.outputs == 1:
            return f"groups of {self.inputs}"
        return f"blocks of {self.outputs} x {self.inputs}"

    def counts(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """How many scales a weight [outputs, inputs] has, along both."""
        outputs, inputs = shape
        return -(-outputs // (self.outputs or outputs)), -(-inputs // (self.inputs or inputs))


PER_TENSOR, PER_OUTPUT = Sharing(None, None), Sharing(1, None)


@dataclass(frozen=True)
class WeightGroup:
    """How some modules are quantized."""

    bits: int
    is_float: bool
    sharing: Sharing
    has_zeros: bool = False
    """Whether its integers have zero points, in a format that may leave them out."""


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint's weights may be quantized: each matrix matches one of `groups`.

    `zero_offset` is added to stored zero points. Without `has_order`, groups are neighbours,
    whatever GPTQ's `g_idx` says. `activations` describes how the checkpoint's authors quantize
    activations; None if they do not.
    """

    method: str
    groups: tuple[WeightGroup, ...]
    zero_offset: int = 0
    has_order: bool = True
    activations: str | None = None

    @property
    def is_fp8_by_rows(self) -> bool:
        """Whether all weights are fp8 with a scale per output or tensor."""
        sharings = (PER_TENSOR, PER_OUTPUT)
        return bool(self.groups) and all(
            (each.bits, each.is_float) == (8, True) and each.sharing in sharings
            for each in self.groups
        )

    def groups_of(self, bits: int, is_float: bool) -> list[WeightGroup]:
        """The groups whose numbers have this many bits."""
        return [each for each in self.groups if (each.bits, each.is_float) == (bits, is_float)]


def parse_quantization(keys: JsonKeys) -> Quantization | None:
    """The quantization that the keys of a config.json describe; None if they describe none. Raises
    ModelLoadError."""
    name = next((each for each in _KEYS if each in keys), None)
    table = None if name is None else keys.table(name)
    if table is None:
        return None
    method = "compressed-tensors" if name == "compression_config" else _method(table)
    parse = _METHODS.get(method)
    if parse is None:
        raise table.wrong("quant_method", f"one of {', '.join(_METHODS)}")
    return parse(table)


def parse_model_optimizer(keys: JsonKeys) -> Quantization:
    """The quantization that ModelOpt's own file, `hf_quant_config.json`, describes; older
    checkpoints have only this file. Raises ModelLoadError."""
    return _modelopt(keys)


def _method(table: JsonKeys) -> str:
    method: str = table.text("quant_method")
    return method


def _fp8(table: JsonKeys) -> Quantization:
    if table.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise table.wrong("fmt", "e4m3")
    block = _pair(table, "weight_block_size")
    sharings = [PER_TENSOR, PER_OUTPUT] if block is None else [block]
    scheme = table.text("activation_scheme", None)
    activations = None if scheme is None else f"fp8, {scheme} scales"
    groups = tuple(WeightGroup(8, True, each) for each in sharings)
    return Quantization("fp8", groups, activations=activations)


def _fbgemm_fp8(table: JsonKeys) -> Quantization:
    return Quantization(
        "fbgemm_fp8", (WeightGroup(8, True, PER_OUTPUT),), activations="fp8, dynamic scales"
    )


def _modelopt(table: JsonKeys) -> Quantization:
    nested = table.table("quantization") or table
    name = nested.text("quant_algo")
    if name != "MIXED_PRECISION":
        groups = [_modelopt_group(nested)]
    elif "quantized_layers" in nested:
        groups = [_modelopt_group(each) for each in _tables(nested, "quantized_layers") if each]
    else:
        groups = _groups_of_weights(nested)
    activations = None if name in _OF_WEIGHTS_ALONE else name.lower()
    return Quantization("modelopt", tuple(dict.fromkeys(groups)), activations=activations)


_MODELOPT = {
    "FP8": WeightGroup(8, True, PER_TENSOR),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightGroup(8, True, PER_OUTPUT),
    "FP8_PB_WO": WeightGroup(8, True, Sharing(128, 128)),
    "MXFP8": WeightGroup(8, True, Sharing(1, 32)),
    "NVFP4": WeightGroup(4, True, Sharing(1, 16)),
    "W4A16_NVFP4": WeightGroup(4, True, Sharing(1, 16)),
}


_OF_WEIGHTS_ALONE = ("FP8_PB_WO", "W4A16_NVFP4")


def _modelopt_group(table: JsonKeys) -> WeightGroup:
    name = table.text("quant_algo")
    if name not in _MODELOPT:
        raise table.wrong("quant_algo", f"one of {', '.join(_MODELOPT)} or MIXED_PRECISION")
    group = _MODELOPT[name]
    size = group.sharing.inputs
    if size is not None and table.integer("group_size", size) != size:
        raise table.wrong("group_size", str(size))
    return group


def _mxfp4(table: JsonKeys) -> Quantization:
    return Quantization("mxfp4", (WeightGroup(4, True, Sharing(1, 32)),))


def _awq(table: JsonKeys) -> Quantization:
    if table.integer("bits", 4) != 4:
        raise table.wrong("bits", "4")
    version: str = table.text("version", "gemm")
    if version.lower() != "gemm":
        raise table.wrong("version", '"gemm"')
    sharing = _group(table, table.integer("group_size", 128, minimum=-1))
    has_zeros = table.flag("zero_point", True)
    return Quantization("awq", (WeightGroup(4, False, sharing, has_zeros),))


def _gptq(table: JsonKeys) -> Quantization:
    layout = "checkpoint_format" if "checkpoint_format" in table else "format"
    name: str = table.text(layout, "gptq")
    if name not in ("gptq", "gptq_v2"):
        raise table.wrong(layout, "gptq or gptq_v2")
    if table.flag("is_marlin_format", False):
        raise table.wrong("is_marlin_format", "false or absent")
    bits = table.integer("bits")
    size = table.integer("group_size", -1, minimum=-1)
    groups = [_gptq_group(table, bits, size)]
    for other in _tables(table, "dynamic"):
        if other is not None:
            bits_there = other.integer("bits", bits)
            size_there = other.integer("group_size", size, minimum=-1)
            groups.append(_gptq_group(other, bits_there, size_there))
    has_order = table.flag("desc_act", False)
    return Quantization("gptq", tuple(groups), 1 if name == "gptq" else 0, has_order)


def _auto_round(table: JsonKeys) -> Quantization:
    """AutoRound's checkpoints, which are packed as GPTQ's or AWQ's. Layers of `extra_config` have
    their own settings; those of 16 bits are plain."""
    if table.text("data_type", "int") != "int":
        raise table.wrong("data_type", '"int"')
    name: str = table.text("packing_format", "auto_round:auto_gptq")
    parse = _AUTO_ROUND.get(name)
    if parse is None:
        raise table.wrong("packing_format", f"one of {', '.join(_AUTO_ROUND)}")
    found = parse(table)
    others = [each for each in _tables(table, "extra_config") if each is not None]
    usual = table.integer("bits")
    groups = [
        parse(JsonKeys({**table.values, **each.values}, each.where)).groups[0]
        for each in others
        if each.integer("bits", usual) < 16
    ]
    return replace(found, groups=tuple(dict.fromkeys((*found.groups, *groups))))


def _gptq_group(table: JsonKeys, bits: int, size: int) -> WeightGroup:
    if bits not in _INTEGER_BITS:
        raise table.wrong("bits", "4 or 8")
    return WeightGroup(bits, False, _group(table, size))


def _compressed(table: JsonKeys) -> Quantization:
    _check_format(table)
    if table.text("quantization_status", "compressed") not in _STATUSES:
        raise table.wrong("quantization_status", " or ".join(_STATUSES))
    sparsity = table.table("sparsity_config")
    if sparsity is not None and sparsity.text("format", "dense") != "dense":
        raise sparsity.wrong("format", '"dense"')
    transforms = table.table("transform_config")
    if transforms is not None and transforms.values.get("config_groups"):
        raise table.wrong("transform_config", "absent (weights are rotated)")
    activations = None
    for scheme in _tables(table, "config_groups"):
        if scheme is not None and "weights" in scheme:
            _check_format(scheme)
            activations = _activations(scheme.table("input_activations")) or activations
    groups = tuple(_groups_of_weights(table))
    return Quantization("compressed-tensors", groups, activations=activations)


def _groups_of_weights(table: JsonKeys) -> list[WeightGroup]:
    """What `config_groups` says of weights."""
    schemes = [each for each in _tables(table, "config_groups") if each is not None]
    found = [scheme.table("weights") for scheme in schemes]
    return [_compressed_group(weights) for weights in found if weights is not None]


def _check_format(table: JsonKeys) -> None:
    if table.text("format", _COMPRESSED_FORMATS[0]) not in _COMPRESSED_FORMATS:
        raise table.wrong("format", f"one of {', '.join(_COMPRESSED_FORMATS)}")


def _compressed_group(weights: JsonKeys) -> WeightGroup:
    kind: str = weights.text("type", "int")
    if kind.lower() not in ("int", "float"):
        raise weights.wrong("type", "int or float")
    is_float = kind.lower() == "float"
    bits = weights.integer("num_bits", 8)
    if bits not in (_FLOAT_BITS if is_float else _INTEGER_BITS):
        raise weights.wrong("num_bits", "4 or 8")
    sharing = _strategy(weights)
    if is_float and bits == 4 and sharing not in (Sharing(1, 16), Sharing(1, 32)):
        raise weights.wrong("group_size", "16 or 32 for floats of 4 bits")
    return WeightGroup(bits, is_float, sharing, not weights.flag("symmetric", True))


def _strategy(weights: JsonKeys) -> Sharing:
    """Which weights share a scale; without a `strategy`, as the group's size implies."""
    size = weights.integer("group_size", None, minimum=-1)
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy: str = weights.text("strategy", implied)
    if strategy == "tensor":
        return PER_TENSOR
    if strategy == "channel":
        return PER_OUTPUT
    if strategy == "block":
        block = _pair(weights, "block_structure")
        if block is not None:
            return block
        raise weights.wrong("block_structure", "a list of two integers")
    if strategy in ("group", "tensor_group") and size is not None:
        return _group(weights, size)
    raise weights.wrong(
        "strategy", "tensor, channel, block, or group or tensor_group with a 'group_size'"
    )


def _activations(table: JsonKeys | None) -> str | None:
    if table is None:
        return None
    kind = "fp" if table.text("type", "int").lower() == "float" else "int"
    scales = "dynamic" if table.raw("dynamic", False) else "static"
    return f"{kind}{table.integer('num_bits', 8)}, {scales} scales"


def _group(table: JsonKeys, size: int) -> Sharing:
    if size == 0:
        raise table.wrong("group_size", "-1 or a positive integer")
    return PER_OUTPUT if size == -1 else Sharing(1, size)


def _pair(table: JsonKeys, key: str) -> Sharing | None:
    """Outputs and inputs of a block, as a list or as text like 128x128."""
    value = table.raw(key, None)
    if value is None:
        return None
    if isinstance(value, str) and _BLOCK.fullmatch(value):
        value = [int(part) for part in value.split("x")]
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(each) is int and 0 < each <= 1 << 20 for each in value):
        raise table.wrong(key, "a list of two positive integers")
    return Sharing(*value)


def _tables(table: JsonKeys, key: str) -> Iterator[JsonKeys | None]:
    """The objects in the object under `key`; None for those that are null or false."""
    every = table.table(key)
    if every is None:
        return
    if len(every.values) > _MAX_GROUPS:
        raise ModelLoadError(f"{table.where}: {key!r} has more than {_MAX_GROUPS} entries")
    for name in every.values:
        yield every.table(name) if every.values[name] else None


_Parser = Callable[[JsonKeys], Quantization]
_AUTO_ROUND: dict[str, _Parser] = {"auto_round:auto_gptq": _gptq, "auto_round:auto_awq": _awq}
_METHODS: dict[str, _Parser] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
}
