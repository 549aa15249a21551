"""The 8-bit floating point that weights and KV are stored in on a card: e4m3."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_LIMIT = 448.0
"""The largest finite value of e4m3."""
