"""Log-probabilities of a prompt's tokens, from the hidden states of one of its chunks.

The logits of a whole chunk may take hundreds of megabytes, so they are computed in slices; of each
slice only the few reported numbers are kept. Uses raw logits, as the sampler does.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.device import to_device
from engine.models.runnable import RunnableModel
from engine.sampling.chosen_tokens import LogTotals
from scheduling.batch import Chunk
from scheduling.prompt_record import PromptRecord, PromptRows

MAX_SLICE_ELEMENTS = 1 << 24
"""The most logits in memory at a time, unless one row has more: 64 MiB in fp32."""


@torch.inference_mode()
def record_chunk(
    model: RunnableModel,
    hidden: torch.Tensor,
    chunk: Chunk,
    max_slice_elements: int = MAX_SLICE_ELEMENTS,
    log_totals: LogTotals | None = None,
) -> None:
    """Record the log-probability of each token that follows a position of the chunk.

    `hidden` [num_tokens, hidden_size] are the chunk's hidden states. The prompt's last position
    has no following prompt token, so it adds nothing to the record.
    """
    sequence = chunk.sequence
    vocab_size = model.config.vocab_size
    assert sequence.sampling.prompt_logprobs is not None, "only what was asked for is recorded"
    num_top = min(sequence.sampling.prompt_logprobs, vocab_size)
    if sequence.prompt_record is None:
        sequence.prompt_record = PromptRecord(num_top)
    followers = sequence.tokens[chunk.start + 1 : chunk.start + 1 + chunk.num_tokens]
    size = max(1, max_slice_elements // vocab_size)
    for first in range(0, len(followers), size):
        ids = to_device(torch.tensor(followers[first : first + size]), hidden.device)
        logits = model.logits(hidden[first : first + len(ids)])
        rows = prompt_rows(logits, ids, num_top, log_totals)
        sequence.prompt_record.put(chunk.start + first, rows)


def prompt_rows(
    logits: torch.Tensor, ids: torch.Tensor, num_top: int, log_totals: LogTotals | None = None
) -> PromptRows:
    """Log-probabilities and ranks of the tokens `ids` [R], int64, in `logits` [R, vocab], fp32, and
    each row's `num_top` likeliest tokens."""
    chosen = logits.gather(-1, ids[:, None])  # [R, 1]
    total = logits.logsumexp(dim=-1, keepdim=True) if log_totals is None else log_totals(logits)
    best = logits.topk(num_top, dim=-1)
    return PromptRows(
        _packed(chosen - total, "<f4"),
        _packed((logits > chosen).sum(dim=-1) + 1, "<i4"),
        _packed(best.indices, "<i4"),
        _packed(best.values - total, "<f4"),
    )


def _packed(values: torch.Tensor, dtype: str) -> bytes:
    return values.cpu().numpy().astype(np.dtype(dtype)).tobytes()
