"""Accuracy lost and time gained with fp8 on a card, each relative to bf16."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from bench.accuracy import Kind, compare, held_text
from bench.gpu.checks import Card, Passes, Row, chunk_s, decode_s, seconds
from bench.gpu.models import LogitsError
from engine.gpu.fp8_linear import scaled_rows
from protocol.layout import FP8

_NUM_TOKENS = 8192
Scaled = tuple[torch.Tensor, torch.Tensor]
SHAPES = ((32, 4096, 28_672), (2048, 4096, 28_672), (2048, 14_336, 4096))
KINDS = (("weights", 8, "bfloat16"), ("KV", 16, FP8), ("weights and KV", 8, FP8))
"""The parts in fp8, bits of weights, and the KV pool's dtype."""


def check_accuracy(
    folder: Path, num_tokens: int = _NUM_TOKENS, weights: str = "fp8"
) -> Iterator[Row]:
    """Change of a trained model's probabilities with rounded weights, over a text that the model
    has not seen."""
    plain, rounded = Kind(), Kind(weights)
    sums = compare(folder, [plain, rounded], held_text(), num_tokens)
    first, other = sums[plain], sums[rounded]
    note = f"{other.tokens} tokens of documentation, the bundled model"
    ratio = math.exp((other.loss - first.loss) / other.tokens)
    yield Row("fp8", f"weights {weights}: perplexity over bf16's", ratio, "x", note=note)
    divergence = other.divergence / other.tokens
    yield Row("fp8", f"weights {weights}: divergence from bf16's odds", divergence, "nats")
    agreeing = 100 * other.agreeing / other.tokens
    yield Row("fp8", f"weights {weights}: same best token", agreeing, "%")


def check_error(
    card: Card,
    folder: Path,
    name: str,
    length: int = 400,
    kinds: Sequence[tuple[str, int, str]] = KINDS,
) -> Iterator[Row]:
    """Error of logits against fp32, divided by that of ours in bf16."""
    error = LogitsError(card, folder, length)
    plain = error.ours()
    for label, bits, kv_dtype in kinds:
        rounded = error.ours(bits, kv_dtype)
        note = f"rms {rounded:.4g} against {plain:.4g}"
        yield Row("fp8", f"{name}: {label}: error over bf16's", rounded / plain, "x", note=note)


def check_gain(
    card: Card,
    plain: Passes,
    narrow: Passes,
    decodes: Sequence[tuple[int, int]] = ((1, 1024), (32, 8192)),
    chunk: int = 2048,
) -> Iterator[Row]:
    """Time of a step in bf16 divided by that with weights and KV in fp8; `decodes` are (batch,
    context) pairs."""
    for batch, context in decodes:
        step_s = [decode_s(card, passes, batch, context) for passes in (plain, narrow)]
        yield _gain(f"batch {batch} at {context}", *step_s)
    step_s = [chunk_s(card, passes, chunk) for passes in (plain, narrow)]
    yield _gain(f"chunk of {chunk}", *step_s)


def check_fast_accum(card: Card, shapes: Sequence[tuple[int, int, int]] = SHAPES) -> Iterator[Row]:
    """The fp8 product with `use_fast_accum`, which Baton leaves off: time and error of a product
    without it, divided by those with it; `shapes` are (rows, inputs, outputs)."""
    for rows, inputs, outputs in shapes:
        x, weight = (
            torch.randn((size, inputs), device=card.device).bfloat16() for size in (rows, outputs)
        )
        product, exact = _Product(scaled_rows(x), scaled_rows(weight)), x.float() @ weight.float().T
        spans = [seconds(partial(product, fast), card.device) for fast in (False, True)]
        errors = [float((product(fast).float() - exact).norm()) for fast in (False, True)]
        what = f"{rows} x {inputs} x {outputs}, without fast accumulation over with"
        note = f"{1e6 * spans[0]:.0f} against {1e6 * spans[1]:.0f} us"
        yield Row("fp8", f"{what}: time", spans[0] / spans[1], "x", note=note)
        yield Row("fp8", f"{what}: error", errors[0] / errors[1], "x")


class _Product:
    """Rows times weights in fp8, each as values and scales."""

    def __init__(self, rows: Scaled, weights: Scaled) -> None:
        self._rows, self._scales = rows
        self._weights, self._weight_scales = weights[0].t(), weights[1].t().contiguous()

    def __call__(self, use_fast_accum: bool) -> torch.Tensor:
        return torch._scaled_mm(
            self._rows,
            self._weights,
            scale_a=self._scales,
            scale_b=self._weight_scales,
            out_dtype=torch.bfloat16,
            use_fast_accum=use_fast_accum,
        )


def _gain(what: str, plain_s: float, narrow_s: float) -> Row:
    note = f"{1e3 * plain_s:.2f} against {1e3 * narrow_s:.2f} ms"
    return Row("fp8", f"{what}: bf16's time over fp8's", plain_s / narrow_s, "x", note=note)
