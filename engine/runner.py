"""Runs one batch on one device: tokens in, sampled tokens out.

Turns the scheduler's batch into tensors; knows nothing of why these sequences were chosen.
Rows are in the batch's order: decodes, then chunks.
"""

from __future__ import annotations

import torch

from engine.attention.base import AttentionBackend, Segment
from engine.model import DecoderModel
from engine.sampler import InvalidLogits, SampledToken, Sampler, SampleRow
from engine.scheduler import Batch
from engine.sequence import Sequence


class ModelRunner:
    """A model with its attention backend and sampler; used by one thread."""

    def __init__(self, model: DecoderModel, attention: AttentionBackend, sampler: Sampler) -> None:
        self._model = model
        self._attention = attention
        self._sampler = sampler

    def run(self, batch: Batch) -> list[SampledToken | None]:
        """Compute the batch's tokens; one sampled token for each of `batch.sampled`, in order.

        None where the model gave no finite logits: that fails its sequence, not its neighbours.
        """
        segments: list[Segment] = []
        tokens: list[int] = []
        positions: list[int] = []
        logits_rows: list[int] = []
        for sequence, start, size, sampled in _spans(batch):
            segments.append(Segment(size, start + size, sequence.block_table))
            tokens += sequence.tokens[start : start + size]
            positions += range(start, start + size)
            if sampled:
                logits_rows.append(len(tokens) - 1)
        self._attention.plan(segments)
        device = self._model.device
        logits = self._model.forward(
            torch.tensor(tokens, device=device),
            torch.tensor(positions, device=device),
            self._attention,
            torch.tensor(logits_rows, dtype=torch.long, device=device),
        )
        if not logits_rows:
            return []
        return self._sample(logits, [_sample_row(s) for s in batch.sampled])

    def _sample(self, logits: torch.Tensor, rows: list[SampleRow]) -> list[SampledToken | None]:
        """A token per row of `logits` [R, vocab_size], fp32; None for rows that have none."""
        try:
            return [*self._sampler.sample(logits, rows)]
        except InvalidLogits as error:
            invalid = set(error.rows)
        valid = [row for row in range(len(rows)) if row not in invalid]
        where = torch.tensor(valid, dtype=torch.long, device=logits.device)
        tokens = self._sampler.sample(logits[where], [rows[row] for row in valid])
        by_row = dict(zip(valid, tokens, strict=True))
        return [by_row.get(row) for row in range(len(rows))]


def _spans(batch: Batch) -> list[tuple[Sequence, int, int, bool]]:
    """(sequence, first position, tokens, whether its last row is sampled), in row order."""
    decodes = [(s, s.num_computed, 1, True) for s in batch.decodes]
    return decodes + [(c.sequence, c.start, c.num_tokens, c.completes) for c in batch.chunks]


def _sample_row(sequence: Sequence) -> SampleRow:
    params = sequence.sampling
    if not params.penalizes:
        return SampleRow(params, sequence.num_output, (), ())
    prompt, output = (
        sequence.tokens[: sequence.num_prompt],
        sequence.tokens[sequence.num_prompt :],
    )
    return SampleRow(params, sequence.num_output, prompt, output)
