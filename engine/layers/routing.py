"""The choice of experts for each token, by torch; `engine/native/routing.h` makes the same choice.

Owns no weights. See `ExpertsConfig` for the rules.
"""

from __future__ import annotations

import torch

from engine.checkpoint.experts_config import ExpertsConfig

_SMALLEST_SUM = 1e-20


def choose(
    config: ExpertsConfig, logits: torch.Tensor, choice_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chosen experts [N, per_token], int64, and their weights [N, per_token], fp32, for the
    router's `logits` [N, experts] and the bias [experts] or None, both fp32."""
    scores = logits.softmax(-1) if config.scoring == "softmax" else logits.sigmoid()
    ranked = scores if choice_bias is None else scores + choice_bias
    if config.groups > 1:
        ranked = _in_best_groups(config, ranked)
    chosen = ranked.topk(config.per_token, dim=-1).indices
    weights = scores.gather(1, chosen)
    if config.normalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + _SMALLEST_SUM)
    return chosen, weights * config.scale


def _in_best_groups(config: ExpertsConfig, ranked: torch.Tensor) -> torch.Tensor:
    """`ranked` [N, experts], with -inf outside the chosen groups."""
    by_group = ranked.unflatten(1, (config.groups, -1))  # [N, groups, experts of a group]
    num_counted = 2 if config.sums_two else 1
    of_group = by_group.topk(num_counted, dim=-1).values.sum(-1)
    best = of_group.topk(config.chosen_groups, dim=-1).indices
    is_out = torch.ones_like(of_group, dtype=torch.bool).scatter_(1, best, False)
    return by_group.masked_fill(is_out.unsqueeze(-1), -torch.inf).flatten(1)
