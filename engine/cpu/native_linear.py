"""A linear layer by our own kernel: weights in panels that a core streams once.

Inputs are bf16, weights bf16, the same in 12 bits (see native/narrow.h), or integers of 8 or 4
bits. An output is one chain of products in a fixed order: neither the other rows nor the
number of threads changes a row's result, bit for bit. Owns the packed weight; `native/linear.h`
multiplies.
"""

from __future__ import annotations

import ctypes

import torch
from torch.nn.functional import pad

from engine.cpu.huge_pages import HugePages
from engine.cpu.quantization import GROUP_INPUTS, QuantizedWeight, quantize

PANEL_OUTPUTS = 64
_LANES = 16
_WORD_BYTES = {16: 256, 12: 192}
"""Of 64 outputs by two inputs, by the bits of a weight."""
_MOST_PLAIN = 1 / 8
"""Of all words: with more that stay in 16 bits twelve are not worth it."""
_SLICE_PANELS = 32
"""Rounded to integers at a time: on the way a weight takes some twenty bytes, and those of the
logits may be a third of all."""


class Weight(ctypes.Structure):
    """Mirrors LinearWeight in native/panels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "scales", "bias")),
        *((name, ctypes.c_void_p) for name in ("lowest", "begins", "plain")),
        *((name, ctypes.c_int32) for name in ("inputs", "outputs", "bits")),
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


def can_pack(kernels: ctypes.CDLL | None, weight: torch.Tensor) -> bool:
    """Whether the kernel takes this `weight` [outputs, inputs]: bf16 on a CPU whose kernels
    multiply pairs of it, an even number of inputs."""
    return (
        kernels is not None
        and bool(kernels.baton_has_linear())
        and weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.shape[1] % 2 == 0
    )


class NativeLinear:
    """`x @ weight.T + bias`; `weight` [outputs, inputs], `bias` [outputs] or None, bf16.

    Keeps a packed copy of `weight`, in `bits` (16, 12, 8 or 4) a weight: 8 and 4 where its inputs
    are whole groups, 12 where its exponents lie close together, else 16. Drop your reference to
    free the original. The copy lies in `memory`, which layers of a model share.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kernels: ctypes.CDLL,
        bits: int = 16,
        memory: HugePages | None = None,
    ) -> None:
        assert can_pack(kernels, weight)
        memory = memory or HugePages()
        outputs, inputs = weight.shape
        self._multiply = kernels.baton_linear
        self._bias = None if bias is None else bias.contiguous()
        self._scales: torch.Tensor | None = None
        self._narrow: _Narrow | None = None
        if bits < 12 and inputs % GROUP_INPUTS == 0:
            self._panels, self._scales = _quantized_panels(weight, bits, memory)
        else:
            weight = weight.contiguous()
            self._narrow = _Narrow.of(weight, kernels) if bits == 12 else None
            bits = 16 if self._narrow is None else 12
            num_bytes = -(-outputs // PANEL_OUTPUTS) * (inputs // 2) * _WORD_BYTES[bits]
            num_bytes += 0 if self._narrow is None else self._narrow.more_bytes
            self._panels = memory.empty((num_bytes // 2,), torch.int16)
        self.weight = Weight(
            panels=self._panels.data_ptr(),
            scales=None if self._scales is None else self._scales.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            inputs=inputs,
            outputs=outputs,
            bits=bits,
        )
        if self._narrow is not None:
            self._narrow.pack(weight, self.weight, kernels)
        elif bits == 16:
            _pack(weight, self._panels, kernels)

    @property
    def num_bytes(self) -> int:
        """What a product reads of the weight."""
        scales = 0 if self._scales is None else self._scales.nbytes
        narrow = 0 if self._narrow is None else self._narrow.num_bytes
        return self._panels.nbytes + scales + narrow

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """`x` [N, inputs] to [N, outputs], plus `add` [N, outputs] where given; N may be 0."""
        out = x.new_empty((len(x), self.weight.outputs))
        self._run(x, add, out=out.data_ptr())
        return out

    def in_float32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The same, not rounded to bf16; written to `out`, contiguous, where given."""
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


def _pack(weight: torch.Tensor, panels: torch.Tensor, kernels: ctypes.CDLL) -> None:
    """bf16 `panels`: [panels, inputs / 2, 64] words of two inputs."""
    outputs, inputs = weight.shape
    kernels.baton_pack(
        ctypes.c_void_p(weight.data_ptr()),
        ctypes.c_int32(inputs),
        ctypes.c_int32(outputs),
        ctypes.c_void_p(panels.data_ptr()),
    )


class _Narrow:
    """How twelve bits say a weight: which exponents each panel has, and which words stay plain."""

    def __init__(self, lowest: torch.Tensor, begins: torch.Tensor) -> None:
        self._lowest = lowest  # [panels] int32
        self._begins = begins  # [panels + 1] int32
        self._plain = torch.empty(self.num_plain + len(lowest), dtype=torch.int32)

    @classmethod
    def of(cls, weight: torch.Tensor, kernels: ctypes.CDLL) -> _Narrow | None:
        """Of `weight` [outputs, inputs]; None if too many of its exponents are far apart."""
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
        """Words of 16 bits a number."""
        return int(self._begins[-1])

    @property
    def more_bytes(self) -> int:
        """What those take over the others."""
        return self.num_plain * (_WORD_BYTES[16] - _WORD_BYTES[12])

    @property
    def num_bytes(self) -> int:
        """What is read beside the panels."""
        return self._lowest.nbytes + self._begins.nbytes + self._plain.nbytes

    def pack(self, weight: torch.Tensor, to: Weight, kernels: ctypes.CDLL) -> None:
        """Write the panels of `weight`; `to` refers to the plan from here on."""
        to.lowest, to.begins = self._lowest.data_ptr(), self._begins.data_ptr()
        to.plain = self._plain.data_ptr()
        kernels.baton_pack_narrow(ctypes.c_void_p(weight.data_ptr()), ctypes.byref(to))


def _quantized_panels(
    weight: torch.Tensor, bits: int, memory: HugePages
) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` [outputs, inputs] as `_pack_integers` has it, and scales [panels, groups, 64]."""
    outputs, inputs = weight.shape
    count = -(-outputs // PANEL_OUTPUTS)
    width, dtype = {8: (128, torch.int8), 4: (32, torch.int16)}[bits]
    panels = memory.empty((count, inputs // 2, width), dtype)
    scales = memory.empty((count, inputs // GROUP_INPUTS, PANEL_OUTPUTS), torch.float32)
    for first in range(0, count, _SLICE_PANELS):
        part = slice(first, first + _SLICE_PANELS)
        rows = slice(first * PANEL_OUTPUTS, (first + _SLICE_PANELS) * PANEL_OUTPUTS)
        quantized = quantize(weight[rows], bits)
        panels[part] = _pack_integers(quantized)
        scales[part] = _by_panel(quantized.scales).transpose(1, 2)
    return panels, scales


def _pack_integers(weight: QuantizedWeight) -> torch.Tensor:
    """Panels of 8 bits [panels, inputs / 2, 128], or of 4 [panels, inputs / 2, 32] with four
    vectors' values in each 16-bit lane (see LinearWeight in native/panels.h)."""
    values = _by_panel(weight.values)  # [panels, 64, inputs]
    words = values.unflatten(2, (-1, 2)).transpose(1, 2).flatten(2)  # [panels, inputs / 2, 128]
    if weight.bits == 8:
        return words
    vectors = words.unflatten(2, (-1, 2 * _LANES)).to(torch.int32) + 8  # [.., 4, 32]
    lanes = sum(vectors[:, :, j] << 4 * j for j in range(4))
    assert isinstance(lanes, torch.Tensor)
    return lanes.to(torch.int16)


def _by_panel(rows: torch.Tensor) -> torch.Tensor:
    """`rows` [outputs, n] as [panels, 64, n], zeros at the end."""
    missing = -len(rows) % PANEL_OUTPUTS
    return pad(rows, (0, 0, 0, missing)).unflatten(0, (-1, PANEL_OUTPUTS))
