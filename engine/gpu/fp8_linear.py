"""A linear layer in fp8: e4m3 weights with a scale per output, inputs with a scale per row.

The tensor cores multiply the scaled values and sum in fp32. The scales are applied to the sums,
which are rounded once, to bf16. Rows are scaled dynamically, so no calibration is needed. On a CPU,
torch multiplies the same values in fp32: for tests, not for serving.
"""

from __future__ import annotations

import torch

from engine.gpu.fp8_format import FP8, FP8_LIMIT, MIN_CAPABILITY, needs_capability

_ADA = (8, 9)
_ADA_TORCH = (2, 12)
_STEP = 16  # inputs and outputs must be multiples of this
_SMALLEST_ROW = 1e-12


def can_scale(weight: torch.Tensor) -> bool:
    """Whether the card's fp8 product supports `weight` [outputs, inputs]."""
    outputs, inputs = weight.shape
    return outputs % _STEP == 0 and inputs % _STEP == 0


def why_not_fp8(capability: tuple[int, int], torch_version: str) -> str:
    """Why a card of this compute capability cannot multiply in fp8 with this torch; "" if it can.

    Before 2.12 torch launches products with scales for rows on cards of 8.9 on the default stream,
    whichever stream is current.
    """
    if capability < MIN_CAPABILITY:
        return needs_capability(capability)
    numbers = tuple(int(part) for part in torch_version.split("+")[0].split(".")[:2])
    if capability == _ADA and numbers < _ADA_TORCH:
        least = ".".join(map(str, _ADA_TORCH))
        found = ".".join(map(str, capability))
        return f"on a card of compute capability {found} needs torch {least}, not {torch_version}"
    return ""


class Fp8Linear:
    """`x @ weight.T + bias`; `weight` [outputs, inputs], `bias` [outputs] or None, bf16. Rounds
    `weight` to an fp8 copy, which it keeps."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        assert can_scale(weight), weight.shape
        self._keep(*scaled_rows(weight), bias)

    @classmethod
    def of_codes(
        cls, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> Fp8Linear:
        """The layer of a weight that is in fp8: `values` [outputs, inputs], e4m3, times `scales`
        [outputs, 1], fp32."""
        assert can_scale(values), values.shape
        layer = cls.__new__(cls)
        layer._keep(values, scales, bias)
        return layer

    def _keep(self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = values.t()  # [inputs, outputs], column-major as the product requires
        self._scales = scales.t().contiguous()  # [1, outputs]
        self._bias = bias

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """`x` [N, inputs], bf16, to [N, outputs], plus `add` [N, outputs] where given; N may be 0.

        The sum overwrites `add`.
        """
        if len(x) == 0:
            return x.new_empty((0, self._scales.shape[1]))
        if x.device.type == "cuda":
            y = self._product(*_scaled_rows_on_card(x))
        else:
            y = self._emulated(*scaled_rows(x))
        return y if add is None else add.add_(y)

    def in_float32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The product, rounded to bf16, in fp32; written to `out` where given."""
        y = self(x)
        return y.to(torch.float32) if out is None else out.copy_(y)

    def _product(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(
            values,
            self._weight,
            scale_a=scales,
            scale_b=self._scales,
            bias=self._bias,
            out_dtype=torch.bfloat16,
        )

    def _emulated(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        y = values.float() @ self._weight.float() * scales * self._scales
        return (y if self._bias is None else y + self._bias.float()).bfloat16()


def scaled_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [N, size] as values [N, size], e4m3, times scales [N, 1], fp32.

    A row's largest value becomes e4m3's largest value; a NaN makes its whole row NaN.
    """
    wide = x.float()
    scales = wide.abs().amax(dim=1, keepdim=True).clamp(min=_SMALLEST_ROW) / FP8_LIMIT
    return (wide / scales).clamp(-FP8_LIMIT, FP8_LIMIT).to(FP8), scales


def _scaled_rows_on_card(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `scaled_rows`, in one Triton kernel."""
    from engine.gpu.ops import scale_rows  # needs Triton

    return scale_rows(x)
