"""How evenly a model's mixtures have used their experts; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertLoads:
    """Totals over all layers and steps so far: the pairs of a token with one of its experts, the
    pairs of the busiest expert of each layer and step, and the experts that had a token in a step
    (whose weights were read)."""

    pairs: int
    busiest_pairs: int
    used_experts: int
