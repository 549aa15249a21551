"""Attention of gathered keys and values, by torch. Torch's own function is used unless scores are
capped or there are sinks; then they are computed here."""

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
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`q` [..., n, head_dim] attends to `k` and `v` [..., m, head_dim]; returns the shape of `q`.

    `mask` [..., n, m] is added to the scores; None: the query n sees the keys up to n, and n is m.
    `sinks` [..., n or 1, 1], fp32, are one more score of each query, without a value.
    """
    if scoring.cap is None and sinks is None:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scoring.scale
        )
    scores = q.float() @ k.float().transpose(-1, -2) * scoring.scale
    if scoring.cap is not None:
        scores = (scores / scoring.cap).tanh() * scoring.cap
    if mask is None:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    else:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[-2]]
    return weights.to(v.dtype) @ v
