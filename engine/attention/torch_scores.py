"""Attention of gathered keys and values, by torch: by its own function, or score by score where
scores are more than products times a scale."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.checkpoint.attention_config import Scoring


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
) -> torch.Tensor:
    """`q` [..., n, head_dim] attends to `k` and `v` [..., m, head_dim]; returns the shape of `q`.

    `mask` [..., n, m] is added to the scores; None: the query n sees the keys up to n, and n is m.
    """
    if scoring.cap is None:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scoring.scale
        )
    scores = q.float() @ k.float().transpose(-1, -2) * scoring.scale
    scores = (scores / scoring.cap).tanh() * scoring.cap
    if mask is None:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    else:
        scores = scores + mask
    return scores.softmax(-1).to(v.dtype) @ v
