"""Measures two ways of computing on a card beside plain bf16. For fp8: the loss of accuracy and the
gain of time. For the batch-invariant mode: whether a sequence's logits have the same bits in every
step, and the cost of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bench.accuracy import Kind, compare, held_text
from bench.gpu.card import BLOCK_SIZE, Card, Passes, Row, chunk_s, decode_s, seconds
from bench.gpu.models import LogitsError
from engine.attention.base import Segment
from engine.gpu.fp8_linear import scaled_rows
from protocol.layout import FP8

_NUM_TOKENS = 8192
Scaled = tuple[torch.Tensor, torch.Tensor]
SHAPES = ((32, 4096, 28_672), (2048, 4096, 28_672), (2048, 14_336, 4096))
KINDS = (("weights", 8, "bfloat16"), ("KV", 16, FP8), ("weights and KV", 8, FP8))
"""The parts in fp8, bits of weights, and the KV pool's dtype."""
DECODES = (1, 8, 32)
COST_CONTEXT = 1024
CHUNKS = (512, 2048)


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


@dataclass(frozen=True)
class Bits:
    """A text of `length` random tokens, whose last `num_compared` logits are compared: all at once,
    in `chunks`, and in decodes, alone and beside others. The default crosses parts of contexts."""

    length: int = 1300
    num_compared: int = 48
    chunks: tuple[int, ...] = (16, 100, 512)
    batches: tuple[int, ...] = DECODES

    @property
    def num_blocks(self) -> int:
        """Blocks of the text, and of as many others as it is ever beside."""
        return self.num_text_blocks * max(self.batches)

    @property
    def num_text_blocks(self) -> int:
        """Blocks of the text, and of each other."""
        return -(-self.length // BLOCK_SIZE)


def check_bits(card: Card, passes: Passes, bits: Bits) -> Iterator[Row]:
    """How many of the text's logits differ from those of the whole text alone, for each way."""
    text = _Text(card, passes, bits)
    whole = text.by_chunks(bits.length, others=0)
    for chunk in bits.chunks:
        for others in (0, max(bits.batches) - 1):
            beside = f"beside {others}" if others else "alone"
            yield _differing(f"chunks of {chunk}, {beside}", whole, text.by_chunks(chunk, others))
    for batch in bits.batches:
        yield _differing(f"decodes, batch {batch}", whole, text.by_decodes(batch - 1))


def check_cost(
    card: Card,
    plain: Passes,
    invariant: Passes,
    decodes: Sequence[int] = DECODES,
    chunks: Sequence[int] = CHUNKS,
) -> Iterator[Row]:
    """Time of a step in the mode over that of a step without."""
    for batch in decodes:
        steps_s = [decode_s(card, passes, batch, COST_CONTEXT) for passes in (invariant, plain)]
        yield _cost(f"decode, batch {batch} at {COST_CONTEXT}", batch, *steps_s)
    for chunk in chunks:
        steps_s = [chunk_s(card, passes, chunk) for passes in (invariant, plain)]
        yield _cost(f"chunk of {chunk}", chunk, *steps_s)


class _Text:
    """The text in the pool's first blocks, and others, of random keys and values, behind it."""

    def __init__(self, card: Card, passes: Passes, bits: Bits) -> None:
        self._device = card.device
        self._passes = passes
        self._bits = bits
        vocab_size = passes.model.config.vocab_size
        generator = torch.Generator().manual_seed(0)
        self._tokens: list[int] = torch.randint(
            10, vocab_size, (bits.length,), generator=generator
        ).tolist()
        self._table = range(bits.num_text_blocks)

    def by_chunks(self, chunk: int, others: int) -> torch.Tensor:
        """The compared logits [num_compared, vocab], of chunks behind `others` decodes."""
        self._forget()
        length = self._bits.length
        steps = [(start, min(start + chunk, length)) for start in range(0, length, chunk)]
        return torch.cat([self._step(start, end, others) for start, end in steps])

    def by_decodes(self, others: int) -> torch.Tensor:
        """The compared logits of decodes by graphs, in changing places of a batch."""
        self._forget()
        first = self._bits.length - self._bits.num_compared
        self._step(0, first, 0)
        found = []
        for position in range(first, self._bits.length):
            place = position % (others + 1)
            batch = [*self._others(others)]
            segment = Segment(1, position + 1, self._table)
            batch.insert(place, (self._tokens[position], position, segment))
            tokens, positions, segments = (list(each) for each in zip(*batch, strict=True))
            logits = self._passes.decode(tokens, positions, segments)
            found.append(logits[place].clone())
        return torch.stack(found)

    def _step(self, start: int, end: int, others: int) -> torch.Tensor:
        """The logits [n, vocab] of one chunk of the text that are compared."""
        batch = self._others(others)
        tokens = [token for token, _, _ in batch] + self._tokens[start:end]
        positions = [position for _, position, _ in batch] + list(range(start, end))
        passes = self._passes
        passes.attention.plan(
            [*(segment for _, _, segment in batch), Segment(end - start, end, self._table)]
        )
        not_compared = max(0, self._bits.length - self._bits.num_compared - start)
        hidden = passes.model.hidden(self._on(tokens), self._on(positions), passes.attention)
        return passes.model.logits(hidden[len(batch) + not_compared :])

    def _others(self, count: int) -> list[tuple[int, int, Segment]]:
        """Tokens, positions and segments of decodes of different lengths."""
        size, found = self._bits.num_text_blocks, []
        for number in range(1, count + 1):
            context = 1 + (37 * number) % (size * BLOCK_SIZE)
            table = range(number * size, (number + 1) * size)
            found.append((10 + number, context - 1, Segment(1, context, table)))
        return found

    def _forget(self) -> None:
        self._passes.pool.tensor[: len(self._table)] = torch.nan

    def _on(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, device=self._device)


def _differing(what: str, whole: torch.Tensor, found: torch.Tensor) -> Row:
    count = int((whole != found).any(dim=1).sum())  # a NaN differs from itself
    return Row("invariant", f"{what}: logits that differ", count, f"of {len(whole)}", "= 0")


def _cost(what: str, num_tokens: int, invariant_s: float, plain_s: float) -> Row:
    rates = f"{num_tokens / invariant_s:.0f} against {num_tokens / plain_s:.0f} tokens/s"
    name = f"{what}: time over that without the mode"
    return Row("invariant", name, invariant_s / plain_s, "x", note=rates)
