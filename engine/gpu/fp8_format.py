"""The 8-bit floating-point format of weights and KV on a card: e4m3."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_LIMIT = 448.0
"""The largest finite value of e4m3."""

MIN_CAPABILITY = (8, 9)
"""The first cards that convert to e4m3 and multiply it."""


def needs_capability(capability: tuple[int, int]) -> str:
    """The end of an error message about a card whose compute capability is too low."""
    least, found = (".".join(map(str, each)) for each in (MIN_CAPABILITY, capability))
    return f"needs a card of compute capability {least} or more, not {found}"
