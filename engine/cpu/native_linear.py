"""A linear layer with our own kernel: weights are packed in panels that a core streams once.

Inputs are bf16. Weights are bf16, the same values in 12 bits (see native/narrow.h), integers of 8
bits, or quantized blocks: a GGUF file's, or those that weights in 4 or 5 bits are rounded to. Each
output adds its products in a fixed order, so neither the other rows nor the number of threads
changes a single bit of a row's result. Owns the packed weight; `native/linear.h` multiplies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch.nn.functional import pad

from engine.checkpoint.quantized_blocks import PANEL_OUTPUTS, BlockMatrix, fit_panels
from engine.cpu.block_panels import BlockPanels
from engine.cpu.huge_pages import HugePages
from engine.cpu.integer_weights import GROUP_INPUTS, quantize
from engine.cpu.rounded_rows import KINDS, RoundedRows, can_round
from engine.layers.linear import LinearLayer

_WORD_BYTES = {16: 256, 12: 192}
"""Bytes of a word (64 outputs by two inputs), by the bits of a weight."""
_MOST_PLAIN = 1 / 8
"""Largest share of words that stay in 16 bits; above it, packing in 12 bits does not pay off."""
_SLICE_PANELS = 32
"""Panels that are rounded to integers at a time: each weight takes about twenty bytes meanwhile,
and lm_head may hold a third of all weights."""


class Weight(ctypes.Structure):
    """Mirrors LinearWeight in native/panels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "scales", "bias")),
        *((name, ctypes.c_void_p) for name in ("lowest", "begins", "plain", "parts")),
        *((name, ctypes.c_int32) for name in ("inputs", "outputs", "bits", "num_parts")),
        ("has_int8_inputs", ctypes.c_int32),
    )


class _Call(ctypes.Structure):
    """Mirrors LinearCall in native/linear_call.h."""

    _fields_ = (
        ("weight", Weight),
        *((name, ctypes.c_void_p) for name in ("x", "add", "out", "wide")),
        ("rows", ctypes.c_int64),
        ("num_threads", ctypes.c_int32),
        ("largest", ctypes.c_void_p),
    )


def can_pack(kernels: ctypes.CDLL | None, weight: torch.Tensor | BlockMatrix) -> bool:
    """Whether the kernel supports this `weight` [outputs, inputs]: bf16 on a CPU, with an even
    number of inputs, or blocks; and kernels that multiply bf16 pairs."""
    if isinstance(weight, BlockMatrix):
        return kernels is not None and fit_panels(weight.parts)
    return (
        kernels is not None
        and bool(kernels.baton_has_linear())
        and weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.shape[1] % 2 == 0
    )


class NativeLinear:
    """`x @ weight.T + bias`; `weight` [outputs, inputs], `bias` [outputs] or None, bf16.

    Keeps a packed copy of `weight` with `bits` (16, 12, 8, 5 or 4) per weight; blocks keep their
    own. Uses 16 instead of 8, 5 or 4 if the inputs are not whole groups or blocks, and instead of
    12 if the exponents are too far apart. Drop your reference to free the original. The copy is in
    `memory`, which a model's layers share.

    With `int8_inputs` the inputs are rounded to integers of 8 bits if the weights are integers and
    the CPU multiplies such fast (see native/int8_linear.h).
    """

    def __init__(
        self,
        weight: torch.Tensor | BlockMatrix,
        bias: torch.Tensor | None,
        kernels: ctypes.CDLL,
        bits: int = 16,
        memory: HugePages | None = None,
        int8_inputs: bool = False,
    ) -> None:
        assert can_pack(kernels, weight)
        memory = memory or HugePages()
        self._multiply = kernels.baton_linear
        self._bias = None if bias is None else bias.contiguous()
        self._scales: torch.Tensor | None = None
        self._narrow: _Narrow | None = None
        self._blocks: BlockPanels | None = None
        if bits in KINDS and isinstance(weight, torch.Tensor) and can_round(weight):
            weight = BlockMatrix([RoundedRows(weight, KINDS[bits], kernels)])
        if isinstance(weight, BlockMatrix):
            self._blocks = BlockPanels(weight, kernels, memory)
            parts = self._blocks.parts
            self.weight = Weight(parts=ctypes.addressof(parts), num_parts=len(parts))
        else:
            self.weight = self._packed(weight, bits, kernels, memory)
        self.weight.outputs, self.weight.inputs = weight.shape
        self.weight.bias = None if self._bias is None else self._bias.data_ptr()
        if int8_inputs:
            takes_int8 = kernels.baton_takes_int8(ctypes.byref(self.weight))
            self.weight.has_int8_inputs = takes_int8

    def _packed(
        self, weight: torch.Tensor, bits: int, kernels: ctypes.CDLL, memory: HugePages
    ) -> Weight:
        """Pack `weight` [outputs, inputs] and return where its parts are."""
        outputs, inputs = weight.shape
        if bits == 8 and inputs % GROUP_INPUTS == 0:
            self._panels, self._scales = _integer_panels(weight, memory)
        else:
            weight = weight.contiguous()
            self._narrow = _Narrow.of(weight, kernels) if bits == 12 else None
            bits = 16 if self._narrow is None else 12
            num_bytes = -(-outputs // PANEL_OUTPUTS) * (inputs // 2) * _WORD_BYTES[bits]
            num_bytes += 0 if self._narrow is None else self._narrow.more_bytes
            self._panels = memory.empty((num_bytes // 2,), torch.int16)
        packed = Weight(
            panels=self._panels.data_ptr(),
            scales=None if self._scales is None else self._scales.data_ptr(),
            inputs=inputs,
            outputs=outputs,
            bits=bits,
        )
        if self._narrow is not None:
            self._narrow.pack(weight, packed, kernels)
        elif bits == 16:
            _pack(weight, self._panels, kernels)
        return packed

    @property
    def count(self) -> int:
        """The number of weights."""
        return int(self.weight.inputs) * int(self.weight.outputs)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight that a product reads."""
        if self._blocks is not None:
            return self._blocks.num_bytes
        scales = 0 if self._scales is None else self._scales.nbytes
        narrow = 0 if self._narrow is None else self._narrow.num_bytes
        return self._panels.nbytes + scales + narrow

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """`x` [N, inputs] to [N, outputs], plus `add` [N, outputs] where given; N may be 0."""
        out = x.new_empty((len(x), self.weight.outputs))
        self._run(x, add, out=out.data_ptr())
        return out

    def in_float32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The product without `add`, not rounded to bf16; written to `out`, contiguous, where
        given."""
        if out is None:
            out = torch.empty((len(x), self.weight.outputs))
        self._run(x, None, wide=out.data_ptr())
        return out

    def _run(
        self,
        x: torch.Tensor,
        add: torch.Tensor | None,
        out: int | None = None,
        wide: int | None = None,
    ) -> None:
        assert x.dtype == torch.bfloat16
        assert x.shape[1] == self.weight.inputs
        x = x.contiguous()
        call = _Call(self.weight, x.data_ptr(), None, out, wide, len(x), torch.get_num_threads())
        if add is not None:
            assert add.shape == (len(x), self.weight.outputs)
            assert add.dtype == torch.bfloat16
            add = add.contiguous()
            call.add = add.data_ptr()
        self._multiply(ctypes.byref(call))


def packed_bits(layers: Iterable[LinearLayer]) -> float | None:
    """The average bits per weight that our kernels read, scales included; None if torch multiplies
    some of the weights."""
    num_bytes = count = 0
    for layer in layers:
        if not isinstance(layer, NativeLinear):
            return None
        num_bytes, count = num_bytes + layer.num_bytes, count + layer.count
    return 8 * num_bytes / count


def _pack(weight: torch.Tensor, panels: torch.Tensor, kernels: ctypes.CDLL) -> None:
    """Write the bf16 `panels`: [panels, inputs / 2, 64] words of two inputs."""
    outputs, inputs = weight.shape
    kernels.baton_pack(
        ctypes.c_void_p(weight.data_ptr()),
        ctypes.c_int32(inputs),
        ctypes.c_int32(outputs),
        ctypes.c_void_p(panels.data_ptr()),
    )


class _Narrow:
    """The encoding of a weight in 12 bits: each panel's lowest exponent, and the words that stay in
    16 bits ("plain")."""

    def __init__(self, lowest: torch.Tensor, begins: torch.Tensor) -> None:
        self._lowest = lowest  # [panels] int32
        self._begins = begins  # [panels + 1] int32
        self._plain = torch.empty(self.num_plain + len(lowest), dtype=torch.int32)

    @classmethod
    def of(cls, weight: torch.Tensor, kernels: ctypes.CDLL) -> _Narrow | None:
        """The encoding of `weight` [outputs, inputs]; None if too many exponents are far apart."""
        outputs, inputs = weight.shape
        num_panels = -(-outputs // PANEL_OUTPUTS)
        lowest = torch.empty(num_panels, dtype=torch.int32)
        begins = torch.empty(num_panels + 1, dtype=torch.int32)
        kernels.baton_plan_narrow(
            ctypes.c_void_p(weight.data_ptr()),
            ctypes.c_int32(inputs),
            ctypes.c_int32(outputs),
            ctypes.c_void_p(lowest.data_ptr()),
            ctypes.c_void_p(begins.data_ptr()),
        )
        if int(begins[-1]) > num_panels * (inputs // 2) * _MOST_PLAIN:
            return None
        return cls(lowest, begins)

    @property
    def num_plain(self) -> int:
        """The number of words with 16 bits per weight."""
        return int(self._begins[-1])

    @property
    def more_bytes(self) -> int:
        """Bytes that the plain words take beyond the size of packed words."""
        return self.num_plain * (_WORD_BYTES[16] - _WORD_BYTES[12])

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads besides the panels."""
        return self._lowest.nbytes + self._begins.nbytes + self._plain.nbytes

    def pack(self, weight: torch.Tensor, to: Weight, kernels: ctypes.CDLL) -> None:
        """Write the panels of `weight` to `to`, and set its pointers to this encoding."""
        to.lowest, to.begins = self._lowest.data_ptr(), self._begins.data_ptr()
        to.plain = self._plain.data_ptr()
        kernels.baton_pack_narrow(ctypes.c_void_p(weight.data_ptr()), ctypes.byref(to))


def _integer_panels(weight: torch.Tensor, memory: HugePages) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` [outputs, inputs] as panels [panels, inputs / 2, 128] of int8 (see LinearWeight in
    native/panels.h), and scales [panels, groups, 64]."""
    outputs, inputs = weight.shape
    count = -(-outputs // PANEL_OUTPUTS)
    panels = memory.empty((count, inputs // 2, 2 * PANEL_OUTPUTS), torch.int8)
    scales = memory.empty((count, inputs // GROUP_INPUTS, PANEL_OUTPUTS), torch.float32)
    for first in range(0, count, _SLICE_PANELS):
        part = slice(first, first + _SLICE_PANELS)
        rows = slice(first * PANEL_OUTPUTS, (first + _SLICE_PANELS) * PANEL_OUTPUTS)
        quantized = quantize(weight[rows])
        values = _by_panel(quantized.values)  # [panels, 64, inputs]
        panels[part] = values.unflatten(2, (-1, 2)).transpose(1, 2).flatten(2)
        scales[part] = _by_panel(quantized.scales).transpose(1, 2)
    return panels, scales


def _by_panel(rows: torch.Tensor) -> torch.Tensor:
    """`rows` [outputs, n] as [panels, 64, n], padded with zeros at the end."""
    missing = -len(rows) % PANEL_OUTPUTS
    return pad(rows, (0, 0, 0, missing)).unflatten(0, (-1, PANEL_OUTPUTS))
