"""How evenly a model's mixtures have used their experts; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertLoads:
    """Totals over all layers and steps so far: pairs of a token with one of its experts, those of
    each step's busiest expert of a layer, and experts that had a token in a step (whose weights
    were read)."""

    pairs: int
    busiest_pairs: int
    used_experts: int
