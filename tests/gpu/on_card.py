"""What all tests for cards have in common: they take long, and are skipped where there is none."""

from __future__ import annotations

import pytest
import torch

CARD = torch.device("cuda:0")
ON_CARD = [
    pytest.mark.gpu,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA card"),
]
