"""The tiers below workers' KV pools, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from process.number_text import count, size

_NAMES = {"host": "host memory", "disk": "disk"}


def tiers_text(worker: Mapping[str, Any]) -> str:
    """How full the tiers of a worker are, as `GET /fleet` shows it; "" if it has none."""
    return ", ".join(
        f"{name} {size(worker[f'{key}_tier_used_bytes'])} of {size(total)}"
        for key, name in _NAMES.items()
        if (total := worker.get(f"{key}_tier_bytes", 0))
    )


def failing_tier(tier: Mapping[str, Any]) -> str:
    """A failing tier, one of the fleet's `tiers`, in words."""
    blocks = count(tier["failures"], "block")
    return f"{tier['worker_id']}: {blocks} failed in its {tier['tier']} tier; it serves on."
