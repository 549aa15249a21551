"""The 8-bit floating-point format of weights and KV on a card: e4m3."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_LIMIT = 448.0
"""The largest finite value of e4m3."""
