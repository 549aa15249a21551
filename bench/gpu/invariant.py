"""The batch-invariant mode on a card: whether a sequence's logits have the same bits in every step,
and what the mode costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bench.gpu.checks import BLOCK_SIZE, Card, Passes, Row, chunk_s, decode_s
from engine.attention.base import Segment

DECODES = (1, 8, 32)
COST_CONTEXT = 1024
CHUNKS = (512, 2048)


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
        """The same, of decodes by graphs, in changing places of a batch."""
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
