"""The choice of a linear layer on a CPU: our own kernels where they multiply, else torch."""

from __future__ import annotations

import ctypes

import torch

from engine.checkpoint.quantized_blocks import Matrix, MatrixStack
from engine.cpu.huge_pages import HugePages
from engine.cpu.native_linear import NativeLinear, can_pack
from engine.layers.linear import LinearLayer, StackedLinear, torch_linear


def cpu_linear(
    weight: Matrix,
    bias: torch.Tensor | None = None,
    kernels: ctypes.CDLL | None = None,
    bits: int = 16,
    memory: HugePages | None = None,
    int8_inputs: bool = False,
) -> LinearLayer:
    """The fastest layer for `weight` [outputs, inputs] and `bias` [outputs] or None.

    Blocks need kernels. Parts that one layer cannot hold together become a layer each. With 12
    `bits` the kernels store the same values in fewer bits (see engine.cpu.native_linear); with 8
    they round the weight to integers (see engine.cpu.integer_weights), with 5 and 4 to blocks (see
    engine.cpu.rounded_rows). With `int8_inputs` they multiply integers by inputs of 8 bits where
    they can (see NativeLinear).

    Some layers pack the weight: drop your reference to `weight` to free the original. The kernels
    put their copy into `memory`.
    """
    if isinstance(weight, MatrixStack):
        biases = [None] * len(weight.parts) if bias is None else bias.split(weight.counts)
        pairs = zip(weight.parts, biases, strict=True)
        return StackedLinear(
            [cpu_linear(*pair, kernels, bits, memory, int8_inputs) for pair in pairs]
        )
    if kernels is not None and can_pack(kernels, weight):
        return NativeLinear(weight, bias, kernels, bits, memory, int8_inputs)
    assert isinstance(weight, torch.Tensor)
    return torch_linear(weight, bias)
