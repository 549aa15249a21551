"""What the ranks of the last stage compute together of a vocabulary that is split over them."""

from __future__ import annotations

import math

import torch

from engine.checkpoint.model_config import vocab_bounds
from engine.layers.summed import Sums
from engine.models.runnable import Likeliest, RunnableModel


def gather_logits(
    model: RunnableModel,
    x: torch.Tensor,
    sums: Sums,
    size: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Logits [R, vocab], fp32, of the first rank's hidden states [R, hidden], on that rank; written
    to `out` there where given."""
    vocab_size = model.config.vocab_size
    whole = None
    if sums.rank == 0:
        whole = x.new_empty((len(x), vocab_size), dtype=torch.float32) if out is None else out
    sums.share(x)
    gather_parts(model, x, sums, size, whole)
    return whole


def gather_parts(
    model: RunnableModel, x: torch.Tensor, sums: Sums, size: int, whole: torch.Tensor | None
) -> None:
    """Like `gather_logits`, where all ranks have `x` already; the first rank's go to `whole`."""
    sums.gather(model.logits(x), vocab_bounds(model.config.vocab_size, size), whole)


def gather_likeliest(own: Likeliest, sums: Sums, size: int) -> Likeliest | None:
    """The likeliest of all tokens, on the first rank, from the likeliest of each rank's `own`."""
    part = torch.tensor([own.logits, own.ids], dtype=torch.float64).t().contiguous()  # [R, 2]
    if not len(part):
        sums.meet()
        return own
    whole = part.new_empty((len(part), 2 * size)) if sums.rank == 0 else None
    sums.gather(part, range(0, 2 * size + 1, 2), whole)
    if whole is None:
        return None
    best = [_best(row) for row in whole.view(-1, size, 2).tolist()]
    return Likeliest([logit for logit, _ in best], [int(token) for _, token in best])


def _best(row: list[list[float]]) -> list[float]:
    """The largest of the ranks' logits and its token: the first of equal ones, or the first NaN."""
    found = row[0]
    for each in row[1:]:
        if not math.isnan(found[0]) and (math.isnan(each[0]) or each[0] > found[0]):
            found = each
    return found
